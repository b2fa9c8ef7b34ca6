"""One of several processes that share layers and models: each compares its part of the results and
gradients with those of the whole, in float64.

Run by `test_tensor_parallel.py` as ``tensor_parallel_worker.py rank world rendezvous``.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

from flashtile.layers import dense, tensor_parallel
from flashtile.models import shards
from flashtile.models.generation import InferenceParams
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from flashtile.modules import embedding, mha, mlp

DTYPE = torch.float64
WIDTH = 24
SMALL = {"vocab_size": 64, "hidden_size": WIDTH, "num_layers": 2, "num_heads": 6}
CONFIGS = {
    "gpt2": GPTConfig.gpt2(**SMALL, max_position_embeddings=16),
    "llama": GPTConfig.llama(**SMALL, num_kv_heads=2, intermediate_size=40),
    "gptj": GPTConfig.gpt2(
        **SMALL, position="alibi", parallel_block=True, tied_norm=True, norm_head=True
    ),
    "bias of the head": GPTConfig.llama(
        **SMALL, activation="glu", lm_head_bias=True, intermediate_size=30, attention_bias=True
    ),
}


def part(x, group, dim=0):
    return x.chunk(group.size(), dim)[group.rank()]


def close(name, got, want):
    torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}")


def of_layers(prefix, state):
    return {f"transformer.layers.0.{prefix}.{name}": x for name, x in state.items()}


def sharded(prefix, state, config, group):
    """This process's part of the weights, or gradients, of a layer."""
    own = shards.shard_state_dict_tp(of_layers(prefix, state), config, group.size(), group.rank())
    return {name.removeprefix(f"transformer.layers.0.{prefix}."): x for name, x in own.items()}


def gradients(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def draw(module):
    """The same weights everywhere; what is drawn next is the same, too."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.3)


def check_layer(name, whole, own, prefix, config, group, sequence_parallel, **options):
    """`own` shares `whole`; rows are tokens of two sequences."""
    draw(whole)
    own.load_state_dict(sharded(prefix, whole.state_dict(), config, group))
    x = torch.randn(2, 8, WIDTH, dtype=DTYPE, requires_grad=True)
    weight = torch.randn(2, 8, WIDTH, dtype=DTYPE)
    want = whole(x)
    (want * weight).sum().backward()
    rows = x.detach().flatten(0, 1) if options else x.detach()
    given, flat = (part(rows, group) if sequence_parallel else rows).requires_grad_(), weight
    flat, want, dx = (y.flatten(0, 1) if options else y for y in (weight, want, x.grad))
    if sequence_parallel:
        flat, want, dx = (part(y, group) for y in (flat, want, dx))
    got = own(given, **options)
    close(name, got, want)
    (got * flat).sum().backward()
    close(f"dx of {name}", given.grad, dx)
    wanted = sharded(prefix, gradients(whole), config, group)
    found = gradients(own)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        close(f"d{key} of {name}", gradient, wanted[key])


def check_layers(group, sequence_parallel):
    where = {"dtype": DTYPE}
    shares = {"sequence_parallel": sequence_parallel, **where}
    rest = (group, sequence_parallel)
    plain = GPTConfig.gpt2(**SMALL, intermediate_size=33)
    make = mlp.ParallelMLP(WIDTH, 33, process_group=group, **shares)
    check_layer("MLP", mlp.Mlp(WIDTH, 33, **where), make, "mlp", plain, *rest)
    make = mlp.ParallelFusedMLP(WIDTH, 33, activation="sqrelu", process_group=group, **shares)
    whole = mlp.FusedMLP(WIDTH, 33, activation="sqrelu", **where)
    check_layer("fused MLP", whole, make, "mlp", plain, *rest)
    gated = GPTConfig.gpt2(**SMALL, intermediate_size=35, activation="swiglu")
    options = {"activation": F.silu, "multiple_of": 5}
    make = mlp.ParallelGatedMlp(WIDTH, group, 33, **options, **shares)
    check_layer("gated", mlp.GatedMlp(WIDTH, 33, **options, **where), make, "mlp", gated, *rest)
    for heads_kv, options in (
        (6, {"rotary_emb_dim": 2, "causal": True}),
        (2, {"use_alibi": True, "window_size": (3, -1)}),
        (3, {"rotary_emb_dim": 4, "rotary_emb_interleaved": True}),
    ):
        config = GPTConfig.gpt2(**SMALL, num_kv_heads=heads_kv)
        whole = mha.MHA(WIDTH, 6, heads_kv, **options, **where)
        own = mha.ParallelMHA(WIDTH, 6, group, heads_kv, **options, **shares)
        name = f"MHA with {heads_kv} key heads"
        check_layer(name, whole, own, "mixer", config, *rest, seqlen=8)
        if sequence_parallel:  # each process has a sequence
            own.zero_grad(), whole.zero_grad()
            check_layer(f"{name}, sequences", whole, own, "mixer", config, *rest)


def check_embeddings(group, sequence_parallel):
    config = CONFIGS["gpt2"]
    whole = embedding.GPT2Embeddings(WIDTH, 64, 16, dtype=DTYPE)
    shares = {"sequence_parallel": sequence_parallel, "dtype": DTYPE}
    own = embedding.ParallelGPT2Embeddings(WIDTH, 64, 16, group, **shares)
    before = "transformer.embeddings."
    draw(whole)

    def mine(state):
        state = {before + name: x for name, x in state.items()}
        state = shards.shard_state_dict_tp(state, config, group.size(), group.rank())
        return {name.removeprefix(before): x for name, x in state.items()}

    own.load_state_dict(mine(whole.state_dict()))
    ids, at = torch.randint(0, 64, (2, 8)), torch.randint(0, 16, (2, 8))
    for combined, positions in ((True, None), (False, at)):
        whole.zero_grad(), own.zero_grad()
        want, got = whole(ids, positions), own(ids, positions, combined)
        want = want.flatten(0, 1) if combined else want
        weight = torch.randn_like(want)
        (want * weight).sum().backward()
        if sequence_parallel:
            want, weight = part(want, group), part(weight, group)
        close("embeddings", got, want)
        (got * weight).sum().backward()
        wanted = mine(gradients(whole))
        for name, gradient in gradients(own).items():
            close(f"d{name} of embeddings", gradient, wanted[name])


def check_model(name, group, sequence_parallel):
    config = CONFIGS[name]
    values = {field: getattr(config, field) for field in config.__dataclass_fields__}
    config = GPTConfig(**{**values, "sequence_parallel": sequence_parallel})
    whole = GPTLMHeadModel(config, dtype=DTYPE)
    own = GPTLMHeadModel(config, group, dtype=DTYPE)
    draw(whole)
    share = (config, group.size(), group.rank())
    own.load_state_dict(shards.shard_state_dict_tp(dict(whole.state_dict()), *share))
    ids = torch.randint(0, 64, (2, 8))
    want, got = whole(ids).logits, own(ids).logits
    weight = torch.randn_like(want)
    (want * weight).sum().backward()
    mine = part(want, group, -1).reshape(got.shape)
    close(f"logits of {name}", got, mine)
    (got * part(weight, group, -1).reshape(got.shape)).sum().backward()
    tensor_parallel.allreduce_sequence_parallel_grad(own, group)
    wanted = shards.shard_state_dict_tp(gradients(whole), *share)
    found = gradients(own)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        close(f"d{key} of {name}", gradient, wanted[key])
    if not sequence_parallel:
        cache = InferenceParams(8, 2)
        close(f"cached logits of {name}", own(ids, inference_params=cache).logits, want)
        assert cache.key_value_memory_dict[0].shape[3] < config.kv_heads


def check_rest(group):
    rank, world = group.rank(), group.size()
    layer = nn.Linear(4, 4)
    layer.weight._shared_params = True
    torch.nn.init.constant_(layer.weight, float(rank + 1))
    tensor_parallel.sync_shared_params(layer, group)
    assert (layer.weight == 1).all()
    x = torch.full((2, 3), float(rank))
    assert tensor_parallel.all_gather_raw(x, group)[0].shape == (2 * world, 3)
    assert (tensor_parallel.all_reduce_raw(x, group)[0] == sum(range(world))).all()
    assert (x == rank).all()
    with pytest.raises(ValueError, match="got 3 rows, want a multiple of the 2 processes"):
        tensor_parallel.reduce_scatter_raw(torch.ones(3, 2), group)
    column = tensor_parallel.ColumnParallelLinear(6, 9, group, multiple_of=3)
    assert column.weight.shape == ((6, 6), (3, 6))[rank]
    row = tensor_parallel.RowParallelLinear(9, 6, group, multiple_of=3)
    assert row.weight.shape == ((6, 6), (6, 3))[rank] and (row.bias is None) == (rank > 0)
    rows = torch.randn(2, 6) + rank
    total = tensor_parallel.all_gather(rows, group)
    weights = (column.weight, column.bias)
    assert torch.equal(dense.fused_dense_func(rows, *weights, process_group=group), column(rows))
    assert torch.equal(column(rows), F.linear(total, *weights))


def main(rank: int, world: int, rendezvous: str) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
    )
    group = distributed.group.WORLD
    torch.manual_seed(0)  # the same weights and inputs everywhere
    check_rest(group)
    for sequence_parallel in (True, False):
        for check in (check_layers, check_embeddings):
            torch.manual_seed(1)
            check(group, sequence_parallel)
        for name in CONFIGS:
            torch.manual_seed(2)
            check_model(name, group, sequence_parallel)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
