"""The layers against plain PyTorch: shapes, results and every gradient, by the tolerance rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain_layers import (
    check_against_plain,
    gelu_mlp,
    plain_attention,
    plain_block,
    plain_mha,
    plain_rotation,
    plain_slopes,
)
from torch import nn

from flashtile.layers.rotary import RotaryEmbedding
from flashtile.modules.alibi import alibi_slopes
from flashtile.modules.block import Block, ParallelBlock, StochasticDepth
from flashtile.modules.embedding import GPT2Embeddings
from flashtile.modules.inference import InferenceParams
from flashtile.modules.mha import (
    MHA,
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flashtile.modules.mlp import GatedMlp, Mlp

LENGTHS = (7, 1, 0, 12)  # of packed sequences
CU_SEQLENS = torch.tensor([0, 7, 8, 8, 20], dtype=torch.int32)

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"num_heads_kv": 2, "causal": True},
    "one key head": {"num_heads_kv": 1},
    "own head_dim": {"head_dim": 6, "softmax_scale": 0.3},
    "no bias": {"qkv_proj_bias": False, "out_proj_bias": False},
    "rotary": {"rotary_emb_dim": 8, "causal": True},
    "part rotated, neighbours": {"rotary_emb_dim": 4, "rotary_emb_interleaved": True},
    "alibi": {"use_alibi": True, "causal": True},
    "window": {"window_size": (3, 2)},
    "causal window": {"window_size": (3, -1), "causal": True},
    "softcap": {"softcap": 2.0},
    "all": {
        "num_heads_kv": 2,
        "causal": True,
        "rotary_emb_dim": 8,
        "rotary_emb_base": 100.0,
        "use_alibi": True,
        "window_size": (5, 0),
        "softcap": 3.0,
    },
}
CACHEABLE = [name for name, options in OPTIONS.items() if options.get("causal")]


def mha(name: str = "plain", **more) -> MHA:
    """A layer whose attention is far from uniform."""
    layer = MHA(32, 4, **{**OPTIONS[name], **more}).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
    return layer


@pytest.mark.parametrize("name", OPTIONS)
def test_self_attention(name, seed):
    check_against_plain(mha(name), plain_mha, (torch.randn(2, 13, 32),))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(5, 11), (11, 5)], ids=["more keys", "fewer keys"])
def test_cross_attention(name, lengths, seed):
    inputs = tuple(torch.randn(2, length, 32) for length in lengths)
    check_against_plain(mha(name, cross_attn=True), plain_mha, inputs)


def one_by_one(layer, x, *x_kv):
    """`plain_mha` of each of the packed sequences."""
    parts = [part.unsqueeze(0).split(LENGTHS, dim=1) for part in (x, *x_kv)]
    return torch.cat([plain_mha(layer, *part).squeeze(0) for part in zip(*parts, strict=True)])


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences(name, seed):
    def packed(layer, x):
        return layer(x, cu_seqlens=CU_SEQLENS, max_seqlen=16)

    check_against_plain(mha(name), one_by_one, (torch.randn(20, 32),), packed)


def test_packed_cross_attention(seed):
    layer = mha("rotary", cross_attn=True).double()
    x, x_kv = torch.randn(20, 32).double(), torch.randn(9, 32).double()
    cu_seqlens_k = torch.tensor([0, 3, 4, 6, 9], dtype=torch.int32)
    got = layer(
        x,
        x_kv,
        cu_seqlens=CU_SEQLENS,
        max_seqlen=12,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=3,
    )
    for b in range(4):
        rows, columns = (slice(cu[b], cu[b + 1]) for cu in (CU_SEQLENS, cu_seqlens_k))
        want = plain_mha(layer, x[None, rows], x_kv[None, columns])
        torch.testing.assert_close(got[rows], want.squeeze(0))


@pytest.mark.parametrize("name", CACHEABLE)
@pytest.mark.parametrize("ragged", [False, True], ids=["offset", "lengths"])
def test_the_cache_equals_the_whole_sequence(name, ragged, seed):
    layer, x = mha(name, layer_idx=0).double(), torch.randn(3, 11, 32).double()
    want = plain_mha(layer, x)
    cache = InferenceParams(max_seqlen=16, max_batch_size=4)
    if ragged:
        cache.lengths_per_sample = torch.zeros(3, dtype=torch.int32)
    for piece in (x[:, :6], x[:, 6:7], x[:, 7:11]):
        start, new = cache.seqlen_offset, piece.shape[1]
        got = layer(piece, inference_params=cache)
        torch.testing.assert_close(got, want[:, start : start + new])
        cache.seqlen_offset += new
        if ragged:
            cache.lengths_per_sample += new


def test_the_cache_knows_each_sequence_s_length(seed):
    layer, x = mha("all", layer_idx=0).double(), torch.randn(3, 9, 32).double()
    lengths = torch.tensor([1, 8, 4], dtype=torch.int32)
    cache = InferenceParams(max_seqlen=9, max_batch_size=3)
    layer(x[:, :8], inference_params=cache)  # of which only the first 8 tokens count
    cache.lengths_per_sample = lengths
    newest = x[torch.arange(3), lengths.long()].unsqueeze(1)
    got = layer(newest, inference_params=cache)
    for b, length in enumerate(lengths.tolist()):
        want = plain_mha(layer, x[b : b + 1, : length + 1])[:, -1]
        torch.testing.assert_close(got[b], want)


CONVOLVED = {
    "together": {},
    "grouped": {"num_heads_kv": 2, "causal": True},
    "cross": {"cross_attn": True},
}


@pytest.mark.parametrize("name", CONVOLVED)
def test_convolved_projections(name, seed):
    layer = MHA(32, 4, dwconv=True, **CONVOLVED[name])
    inputs = tuple(torch.randn(2, length, 32) for length in (9, 6)[: 1 + layer.cross_attn])
    check_against_plain(layer, plain_mha, inputs)


def some_keys(batch, seqlen):
    """A mask that keeps about half of the keys, but always the first."""
    keep = torch.rand(batch, seqlen) < 0.5
    keep[:, 0] = True
    return keep


@pytest.mark.parametrize("name", ["plain", "causal", "grouped", "all"])
def test_padding(name, seed):
    keep = some_keys(2, 13)

    def call(layer, *inputs):
        return layer(*inputs, key_padding_mask=keep)

    def plain(layer, *inputs):
        return plain_mha(layer, *inputs, keep=keep)

    check_against_plain(mha(name), plain, (torch.randn(2, 13, 32),), call)
    if not mha(name).causal:
        inputs = torch.randn(2, 7, 32), torch.randn(2, 13, 32)
        check_against_plain(mha(name, cross_attn=True), plain, inputs, call)


def test_padding_behind_the_keys_of_causal_cross_attention(seed):
    """The last query sees the last key that takes part."""
    lengths = (9, 4, 6)
    keep = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    layer = mha("causal", cross_attn=True).double()
    x, x_kv = torch.randn(3, 4, 32).double(), torch.randn(3, 9, 32).double()
    got = layer(x, x_kv, keep)
    q, kv = torch.randn(3, 4, 4, 8), torch.randn(3, 9, 2, 2, 8)
    without = CrossAttention(causal=True)(q, kv, key_padding_mask=keep)
    for b, length in enumerate(lengths):
        one, keys = slice(b, b + 1), kv[b : b + 1, :length]
        torch.testing.assert_close(got[one], plain_mha(layer, x[one], x_kv[one, :length]))
        want = plain_attention(q[one], *keys.unbind(2), causal=True)
        torch.testing.assert_close(without[one], want)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_padding(causal, seed):
    keep = some_keys(2, 9)

    def plain(layer, *inputs):
        q, k, v = inputs[0].unbind(2) if len(inputs) == 1 else (inputs[0], *inputs[1].unbind(2))
        return plain_attention(q, k, v, causal=causal, softmax_scale=0.7, keep=keep)

    def call(layer, *inputs):
        return layer(*inputs, causal=causal, key_padding_mask=keep)

    layer = SelfAttention(softmax_scale=0.7)
    check_against_plain(layer, plain, (torch.randn(2, 9, 3, 4, 5),), call)
    if not causal:
        inputs = torch.randn(2, 6, 4, 5), torch.randn(2, 9, 2, 2, 5)
        check_against_plain(CrossAttention(softmax_scale=0.7), plain, inputs, call)


def test_a_call_may_be_causal_or_not(seed):
    x, layers = torch.randn(2, 5, 32), (mha("plain"), mha("causal"))
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        for causal in (False, True):
            torch.testing.assert_close(layer(x, causal=causal), layers[causal](x))


def test_the_cache_of_a_later_part_of_the_batch(seed):
    """In memory from `allocate_inference_cache`, which may hold anything, and twice."""
    layer, x = mha("grouped", layer_idx=3).double(), torch.randn(2, 6, 32).double()
    memory = layer.allocate_inference_cache(5, 8).fill_(torch.nan)
    assert (memory.shape, memory.dtype) == ((5, 8, 2, 2, 8), torch.float64)
    assert layer.allocate_inference_cache(1, 8, torch.float16).dtype == torch.float16
    lengths = torch.zeros(2, dtype=torch.int32)
    for lengths_per_sample in (None, lengths):
        cache = InferenceParams(8, 5, 0, 2, {3: memory}, lengths_per_sample)
        for _ in range(2):
            for start, piece in ((0, x[:, :4]), (4, x[:, 4:])):
                got = layer(piece, inference_params=cache)
                want = plain_mha(layer, x)[:, start : start + piece.shape[1]]
                torch.testing.assert_close(got, want)
                cache.seqlen_offset += piece.shape[1]
                lengths += piece.shape[1]
            assert memory[:2].isnan().all()
            assert memory[4:].isnan().all()
            cache.reset(8, 5)
            assert cache.seqlen_offset == 0
            lengths.zero_()


def test_reset_empties_the_cache():
    lengths = torch.ones(2, dtype=torch.int32)
    cache = InferenceParams(8, 2, 5, lengths_per_sample=lengths)
    cache.reset(9, 3)
    assert cache == InferenceParams(9, 3, lengths_per_sample=lengths)
    assert not lengths.any()


@pytest.mark.parametrize("causal", [False, True])
def test_flash_self_attention(causal, seed):
    layer = FlashSelfAttention(
        window_size=(4, 3), alibi_slopes=plain_slopes(3), softmax_scale=0.7, softcap=5.0
    )

    def plain(layer, qkv):
        options = {"window_size": (4, 3), "softmax_scale": 0.7, "softcap": 5.0}
        slopes = plain_slopes(3)
        return plain_attention(*qkv.unbind(2), causal=causal, slopes=slopes, **options)

    def call(layer, qkv):
        return layer(qkv, causal=causal)

    def packed(layer, qkv):
        cu_seqlens = torch.tensor([0, 10, 20], dtype=torch.int32)
        flat = qkv.flatten(0, 1)
        return layer(flat, causal, cu_seqlens=cu_seqlens, max_seqlen=10).view(2, 10, 3, 5)

    for run in (call, packed):
        check_against_plain(layer, plain, (torch.randn(2, 10, 3, 3, 5),), run)


def test_flash_cross_attention(seed):
    layer = FlashCrossAttention(causal=True)

    def plain(layer, q, kv):
        return plain_attention(q, *kv.unbind(2), causal=True)

    inputs = torch.randn(2, 6, 4, 5), torch.randn(2, 9, 2, 2, 5)
    check_against_plain(layer, plain, inputs)


def test_dropout_is_for_training(seed):
    qkv, x = torch.randn(2, 64, 3, 4, 8), torch.randn(2, 64, 32)
    for layer, inputs in ((FlashSelfAttention(attention_dropout=0.4), qkv), (mha(dropout=0.4), x)):
        layer.eval()
        assert torch.equal(layer(inputs), layer(inputs))
        kept = layer(inputs)
        layer.train()
        torch.manual_seed(seed)
        first, second = layer(inputs), layer(inputs)
        torch.manual_seed(seed)
        assert torch.equal(layer(inputs), first)
        assert not torch.equal(first, second)
        assert (first - kept).abs().max() > 0.01


def test_attention_can_be_exchanged(seed):
    seen = {}

    def attend(q, k, v, **options):
        seen.update(options, shapes=[tuple(x.shape) for x in (q, k, v)])
        return torch.zeros_like(q)

    layer = mha("all", attend=attend, dropout=0.1).train()
    assert torch.equal(layer(torch.randn(2, 5, 32)), layer.out_proj.bias.expand(2, 5, 32))
    assert torch.equal(seen.pop("alibi_slopes"), plain_slopes(4))
    assert seen == {
        "shapes": [(2, 5, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8)],
        "causal": True,
        "window_size": (5, 0),
        "softcap": 3.0,
        "softmax_scale": None,
        "dropout_p": 0.1,
        "cu_seqlens": None,
        "max_seqlen": None,
    }
    layer.eval()(torch.randn(20, 32), cu_seqlens=CU_SEQLENS, max_seqlen=12)
    assert seen["cu_seqlens"] is CU_SEQLENS
    assert (seen["max_seqlen"], seen["dropout_p"]) == (12, 0.0)


def test_parameter_names_are_flash_attn_s():
    assert {name: tuple(x.shape) for name, x in mha("all").state_dict().items()} == {
        "Wqkv.weight": (64, 32),
        "Wqkv.bias": (64,),
        "out_proj.weight": (32, 32),
        "out_proj.bias": (32,),
    }
    cross = mha("no bias", cross_attn=True).state_dict()
    assert list(cross) == ["Wq.weight", "Wkv.weight", "out_proj.weight"]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 8, 12, 25])
def test_alibi_slopes(heads):
    torch.testing.assert_close(alibi_slopes(heads), plain_slopes(heads))
    assert get_alibi_slopes(heads) == alibi_slopes(heads).tolist()


def test_xpos_scales_queries_and_keys_apart(seed):
    seen = {}

    def attend(q, k, v, **options):
        seen.update(q=q, k=k, v=v)
        return q

    x = torch.randn(2, 11, 32)
    layer = mha("rotary", rotary_emb_scale_base=4.0, attend=attend)
    layer(x)
    rotated, layer.rotary_emb = dict(seen), None
    layer(x)
    xpos = RotaryEmbedding(8, scale_base=4.0)
    q, kv = xpos(seen["q"].detach().clone(), torch.stack((seen["k"], seen["v"]), dim=2).detach())
    torch.testing.assert_close(rotated["q"], q)
    torch.testing.assert_close(rotated["k"], kv[:, :, 0])
    without = plain_rotation(seen["k"], 8, 10000.0, interleaved=False)
    assert not torch.allclose(rotated["k"], without)


def test_half_precision_rounds_neither_slopes_nor_angles(seed):
    """model.bfloat16() casts buffers too; it must not affect positions."""
    seen = {}

    def attend(q, k, v, **options):
        seen.update(options, q=q)
        return torch.zeros_like(q)

    x = torch.randn(1, 300, 32).bfloat16()
    layer = MHA(32, 16, head_dim=8, rotary_emb_dim=8, use_alibi=True, attend=attend).bfloat16()
    layer(x)
    assert torch.equal(seen["alibi_slopes"], plain_slopes(16))
    rotated, layer.rotary_emb = seen["q"].double(), None
    layer(x)
    want = plain_rotation(seen["q"].double(), 8, 10000.0, interleaved=False)
    assert ((rotated - want).abs() <= 2**-8 * want.abs() + 1e-6).all()  # one rounding


def test_mlps(seed):
    x = torch.randn(3, 5, 12)
    check_against_plain(Mlp(12, 20, 7), gelu_mlp, (x,))

    def swiglu(mlp, x):
        weight, bias = mlp.fc1.weight, mlp.fc1.bias
        y = x @ weight[:16].t() + bias[:16]
        gate = x @ weight[16:].t() + bias[16:]
        return F.linear(y * gate * torch.sigmoid(gate), mlp.fc2.weight, mlp.fc2.bias)

    layer = GatedMlp(12, 11, activation=F.silu, multiple_of=8)
    check_against_plain(layer, swiglu, (x,))


def test_sizes_of_mlps():
    assert Mlp(12).fc1.weight.shape == (48, 12)
    assert Mlp(12).fc2.weight.shape == (12, 48)
    assert GatedMlp(192).fc1.weight.shape == (2 * 512, 192)
    assert GatedMlp(193).fc1.weight.shape == (2 * 640, 193)
    assert Mlp(4, bias1=False, bias2=False).state_dict().keys() == {"fc1.weight", "fc2.weight"}


BLOCKS = {
    "prenorm": lambda **more: Block(32, mixer, mlp, **more),
    "postnorm": lambda **more: Block(32, mixer, mlp, prenorm=False, **more),
    "rms_norm": lambda **more: Block(32, mixer, mlp, nn.RMSNorm, **more),
    "parallel": lambda **more: ParallelBlock(32, mixer, mlp, **more),
    "tied norm": lambda **more: ParallelBlock(32, mixer, mlp, tied_norm=True, **more),
}
STATES = {"postnorm": 1, "parallel": 3, "tied norm": 3}  # tensors that a block takes and returns


class Scaled(nn.Module):
    """In the place of a dropout: multiply by its rate."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return self.p * x


def stacked(block, *state):
    results = block(*state)
    return torch.stack(results) if isinstance(results, tuple) else results


def mixer(dim):
    return MHA(dim, 4, causal=True, rotary_emb_dim=8)


def mlp(dim):
    return Mlp(dim, 48)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, seed):
    rates = {"resid_dropout1": 0.5, "resid_dropout2": 0.7}
    block = BLOCKS[name](dropout_cls=Scaled, **rates)
    if hasattr(block, "drop_path1"):
        block.drop_path1, block.drop_path2 = Scaled(0.9), Scaled(1.1)
    for norm in [child for key, child in block.named_children() if key.startswith("norm")]:
        nn.init.normal_(norm.weight)  # else one norm could stand for the other
    for count in {1, STATES.get(name, 2)}:  # the first layer has only one input
        state = tuple(torch.randn(2, 9, 32) for _ in range(count))
        check_against_plain(block, plain_block, state, stacked)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_drop_both_branches(name, seed):
    state = [torch.randn(1, 400, 32) for _ in range(STATES.get(name, 2))]
    for dropouts in ({"resid_dropout1": 0.5}, {"resid_dropout2": 0.5}):
        block = BLOCKS[name](**dropouts).train()
        assert not torch.equal(stacked(block, *state), stacked(block, *state))
        assert torch.equal(stacked(block.eval(), *state), stacked(block, *state))


def test_stochastic_depth_drops_whole_sequences(seed):
    x, drop = torch.randn(400, 3, 2), StochasticDepth(0.25)
    out = drop(x)
    is_kept = out.flatten(1).any(1)
    torch.testing.assert_close(out[is_kept], x[is_kept] / 0.75)
    assert 0.6 < is_kept.double().mean() < 0.9
    assert torch.equal(drop.eval()(x), x)
    assert not StochasticDepth(1.0)(x).any()
    with pytest.raises(ValueError, match=r"p: got 1\.5"):
        StochasticDepth(1.5)


def test_the_stream_in_float32(seed):
    x, residual = torch.randn(2, 5, 32).bfloat16(), torch.randn(2, 5, 32)
    for block in (
        Block(32, mixer, mlp, residual_in_fp32=True).bfloat16(),
        ParallelBlock(32, mixer, mlp, residual_in_fp32=True).bfloat16(),
    ):
        last = (residual,) if isinstance(block, Block) else (None, residual)
        *branches, stream = block(x, *last)
        assert stream.dtype == torch.float32
        assert all(branch.dtype == torch.bfloat16 for branch in branches)
        want = residual + x
        if isinstance(block, Block):
            want = want + block.mixer(block.norm1(want.bfloat16()))
        assert torch.equal(stream, want)
        assert block(x)[-1].dtype == torch.float32  # the first layer's stream too
    assert Block(32, mixer, mlp).bfloat16()(x)[1].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="residual_in_fp32: want False with prenorm=False"):
        Block(32, mixer, mlp, prenorm=False, residual_in_fp32=True)


def test_a_block_without_an_mlp(seed):
    x, residual = torch.randn(2, 2, 5, 32)
    for prenorm in (True, False):
        block = Block(32, mixer, nn.Identity, prenorm=prenorm)
        assert not any(name.startswith(("mlp", "norm2")) for name in block.state_dict())
        if prenorm:
            branch, stream = block(x, residual)
            assert torch.equal(stream, x + residual)
            torch.testing.assert_close(branch, block.mixer(block.norm1(stream)))
        else:
            torch.testing.assert_close(block(x), block.norm1(x + block.mixer(x)))


def test_layers_that_return_their_input(seed):
    """As flash_attn's fused layers do, in a block without prenorm."""
    x = torch.randn(2, 5, 32)
    rates = {"resid_dropout1": 0.5, "resid_dropout2": 0.7}
    block = Block(32, mixer, mlp, prenorm=False, dropout_cls=Scaled, **rates)
    want = block(x)
    block.return_residual = block.mixer.return_residual = block.mlp.return_residual = True
    assert torch.equal(block(x), want)
    for layer in (block.mixer, block.mlp, GatedMlp(32, return_residual=True)):
        result, same = layer(x)
        assert same is x
        layer.return_residual = False
        assert torch.equal(layer(x), result)


def test_a_subset_of_the_tokens(seed):
    """The last layer of a vision transformer needs only its first token."""
    block = Block(32, lambda dim: MHA(dim, 4, cross_attn=True), mlp)
    x, residual = torch.randn(2, 2, 5, 32)
    whole = block(x, residual)
    first = block(x, residual, mixer_subset=slice(0, 1))
    for got, want in zip(first, whole, strict=True):
        torch.testing.assert_close(got, want[:, :1])
    for name, value in (("mixer_subset", slice(0, 1)), ("residual", x)):
        with pytest.raises(ValueError, match=f"{name}: want None with prenorm=False"):
            BLOCKS["postnorm"]()(x, **{name: value})


def test_marks_for_tensor_parallelism():
    block = Block(32, mixer, mlp, sequence_parallel=True)
    assert block.norm1.weight._sequence_parallel
    assert block.norm2.bias._sequence_parallel
    assert not hasattr(block.norm1.weight, "_shared_params")
    block = ParallelBlock(32, mixer, mlp, mark_shared_params=True)
    assert block.norm2.weight._shared_params
    assert not hasattr(block.mixer.Wqkv.weight, "_shared_params")


def test_blocks_pass_arguments_to_the_mixer(seed):
    block, x = BLOCKS["prenorm"](), torch.randn(20, 32)
    packed = stacked(block, x, None, None, {"cu_seqlens": CU_SEQLENS, "max_seqlen": 12})
    alone = [stacked(block, part[None]).squeeze(1) for part in x.split(LENGTHS) if len(part)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


def test_embeddings(seed):
    ids = torch.randint(0, 50, (2, 6))
    layer = GPT2Embeddings(8, 50, 10, padding_idx=3)
    words, positions = layer.word_embeddings.weight, layer.position_embeddings.weight
    assert torch.equal(layer(ids), words[ids] + positions[:6])
    at = torch.tensor([[9, 0, 3, 3, 1, 2]])
    assert torch.equal(layer(ids, at), words[ids] + positions[at])
    assert not words[3].any()
    narrow = GPT2Embeddings(8, 50, 0, word_embed_proj_dim=4)
    words = narrow.word_embeddings.weight
    torch.testing.assert_close(narrow(ids), words[ids] @ narrow.project_in.weight.t())
    without = GPT2Embeddings(8, 50, 0)
    assert torch.equal(without(ids), without.word_embeddings(ids))
    assert list(without.state_dict()) == ["word_embeddings.weight"]
    with pytest.raises(ValueError, match="11 tokens in a row, but max_position_embeddings is 10"):
        layer(torch.zeros(1, 11, dtype=torch.long))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_heads": 5}, "num_heads: 5 does not divide embed_dim 32"),
        ({"num_heads": 0}, "num_heads: must be positive"),
        ({"num_heads": 4, "num_heads_kv": 3}, "num_heads_kv: 3 does not divide num_heads 4"),
        ({"num_heads": 4, "num_heads_kv": 0}, "num_heads_kv: must be positive"),
        ({"num_heads": 4, "rotary_emb_dim": 10}, "rotary_emb_dim: 10 exceeds head_dim 8"),
    ],
)
def test_bad_sizes(arguments, words):
    with pytest.raises(ValueError, match=words):
        MHA(32, **arguments)


def test_bad_calls():
    x, flat = torch.randn(2, 5, 32), torch.randn(20, 32)
    packed = {"cu_seqlens": CU_SEQLENS, "max_seqlen": 12}
    padding = {"key_padding_mask": torch.ones(2, 5, dtype=torch.bool)}
    calls = [
        (mha(), (x, x), {}, "x_kv: got a value, want None with cross_attn=False"),
        (mha(), (x,), {"mixer_subset": 0}, "mixer_subset: got a value, want None with cross_attn"),
        (mha(dwconv=True), (flat,), packed, "cu_seqlens: got a value, want None with dwconv=True"),
        (mha(), (flat,), packed | padding, "key_padding_mask: got a value, want None with cu_seq"),
        (mha(), (x,), {"causal": True, "inference_params": 0}, "causal: got a value, want None"),
        (
            mha("alibi", cross_attn=True),
            (x,),
            padding,
            "key_padding_mask: .* with ALiBi or a window",
        ),
        (mha(), (flat,), {"cu_seqlens": CU_SEQLENS}, "cu_seqlens, max_seqlen: pass both"),
        (mha(), (flat,), {}, r"x: expected \(batch, seq, embed_dim\) without cu_seqlens"),
        (mha(), (x,), {"cu_seqlens": CU_SEQLENS, "max_seqlen": 5}, r"x: expected \(total"),
        (
            mha(cross_attn=True),
            (flat, flat),
            {"cu_seqlens": CU_SEQLENS, "max_seqlen": 12},
            r"x_kv: expected \(batch, seq, embed_dim\) without cu_seqlens_k",
        ),
    ]
    for layer, inputs, arguments, words in calls:
        with pytest.raises(ValueError, match=words):
            layer(*inputs, **arguments)
    with pytest.raises(ValueError, match="max_seqlen: needed for packed"):
        FlashSelfAttention()(torch.randn(20, 3, 2, 8), cu_seqlens=CU_SEQLENS)
    with pytest.raises(ValueError, match="cu_seqlens: needed for packed"):
        FlashCrossAttention()(x, torch.randn(5, 2, 2, 8), cu_seqlens_k=CU_SEQLENS, max_seqlen_k=3)


def test_bad_caches():
    x, cache = torch.randn(2, 5, 32), InferenceParams(max_seqlen=8, max_batch_size=2)
    for layer in (mha(layer_idx=0), mha("causal")):
        with pytest.raises(ValueError, match="inference_params: the cache is for causal"):
            layer(x, inference_params=cache)
    layer = mha("causal", layer_idx=0)
    packed = {"cu_seqlens": CU_SEQLENS, "max_seqlen": 12}
    for inputs, words in ((x, r"x: expected \(total"), (x[0], "x with 2 dimensions")):
        with pytest.raises(ValueError, match=words):
            layer(inputs, inference_params=cache, **packed)
    with pytest.raises(ValueError, match="max_batch_size is 2, got 3"):
        layer(torch.randn(3, 5, 32), inference_params=cache)
    cache.batch_size_offset = 1
    with pytest.raises(ValueError, match="got 2 sequences from number 1 on"):
        layer(x, inference_params=cache)
    cache.batch_size_offset = 0
    layer(x, inference_params=cache)
    cache.seqlen_offset = 5
    with pytest.raises(ValueError, match="5 tokens in the cache and 5 new ones"):
        layer(x, inference_params=cache)
