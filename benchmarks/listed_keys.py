"""Attention over lists of keys or of blocks of keys, forward and backward, beside other libraries.

    python -m benchmarks.listed_keys --csv FILE                    # on a GPU
    python -m benchmarks.listed_keys --device cpu --tokens 256 --head-dim 32 --dtype float32

A forward keeps what its backward needs. `difference` is the norm of what a result differs by from
that of the first call, over its norm. Other libraries run on a GPU where they are installed.
FlexAttention and flash-attn-4 have the problems `blocks`. flash-msa chooses the blocks of
`queries-128` itself, by scores that leave it one choice, and its time includes that. attention-gym
has one tensor for keys and values, and on Hopper unrolls its loop over the listed keys, which takes
minutes to compile for 64 of them: `one-tensor` lists 16.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor

import flashtile
from flashtile.cli import integer
from flashtile.cli.timing import Call, Timing, interleave, timer_for
from flashtile.masks import BlockMask

from .command import Command
from .prepared import output_alone

SIZES = {"tokens": 6, "heads_q": 7, "heads_kv": 8, "lists": 22, "call": 15, "pass": 8}
COLUMNS = {**SIZES, "median_ms": 10, "of_dense": 8, "difference": 10, "error": 5}
Attend = Callable[..., Tensor]  # of (batch, tokens, heads, head dim)
Prepare = Callable[[], Attend]  # imports the library


class Problem(NamedTuple):
    tokens: int
    heads_q: int
    heads_kv: int
    lists: str
    calls: dict[str, Prepare]  # the first is what others are compared with
    one_tensor: bool = False  # the values are the keys


def ours(**options: Any) -> Prepare:
    def attend(q: Tensor, k: Tensor, v: Tensor | None = None) -> Tensor:
        return output_alone(flashtile.attention(q, k, k if v is None else v, **options))

    return lambda: attend


@cache
def compiled_flex() -> Callable[..., Tensor]:
    module = import_module("torch.nn.attention.flex_attention")
    torch._functorch.config.donated_buffer = False  # the backward is run again and again
    return torch.compile(module.flex_attention, dynamic=False)


def flex(block: int, rows: Sequence[Tensor]) -> Attend:
    """FlexAttention on blocks that are all seen in full."""
    module = import_module("torch.nn.attention.flex_attention")
    none = torch.zeros_like(rows[0])
    mask = module.BlockMask.from_kv_blocks(none, rows[1], *rows, BLOCK_SIZE=block)
    options = {"block_mask": mask, "kernel_options": {"fwd_BLOCK_M": block}}

    def attend(*qkv: Tensor) -> Tensor:
        return compiled_flex()(*(x.transpose(1, 2) for x in qkv), **options).transpose(1, 2)

    return attend


def cute(block: int, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Attend:
    """flash-attn-4 on the same blocks; its backward has the blocks of queries of each of keys."""
    function = import_module("flash_attn.cute").flash_attn_func
    listed = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    forward, backward = (
        listed(torch.zeros_like(counts), order, counts, order, block_size=(block, block))
        for counts, order in (rows, columns)
    )
    options = {"block_sparse_tensors": forward, "block_sparse_tensors_bwd": backward}
    return lambda *qkv: output_alone(function(*qkv, **options))


def msa(scores: Tensor, top: int, head_dim: int) -> Attend:
    """flash-msa with queries and keys of its choice whose products are `scores` of key blocks."""
    function = import_module("flash_msa").flash_msa_func
    # (1, key heads, tokens, head dim): a key is a unit vector, the number of its block
    q_proxy = torch.nn.functional.pad(scores, (0, head_dim - scores.shape[-1])).bfloat16()
    block_of_key = torch.arange(scores.shape[2], device=scores.device) // 128
    k_proxy = torch.eye(head_dim, device=scores.device).bfloat16()[block_of_key]
    k_proxy = k_proxy.expand_as(q_proxy).contiguous()

    def attend(*qkv: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2).contiguous() for x in qkv)
        out, _ = function(q_proxy, k_proxy, *heads_first, top * 128, head_dim**-0.5)
        return out.unflatten(-1, (-1, head_dim))

    return attend


def gather(index: Tensor) -> Attend:
    """attention-gym's attention over listed keys, without its local window."""
    function = import_module("attn_gym.sparse").gather_attn

    def attend(q: Tensor, kv: Tensor) -> Tensor:
        q, kv = q.transpose(1, 2), kv.transpose(1, 2)
        return function(q, kv.detach(), kv, index, sliding_window_size=0).transpose(1, 2)

    return attend


def blocks(args: Namespace, block: int) -> Iterator[Problem]:
    """Random blocks of keys for each block of queries and each head."""
    heads, number = args.heads, -(-args.tokens // block)
    for density in (0.03, 0.125, 0.5):
        scores = torch.rand(1, heads, number, number, device=args.device)
        lists = scores.topk(max(1, round(density * number))).indices.int()
        kinds = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, lists.long(), True)
        rows, columns = (
            (x.sum(-1, dtype=torch.int32), x.int().argsort(descending=True, stable=True).int())
            for x in (kinds, kinds.mT.contiguous())
        )
        size = (block, block)
        calls = {
            "shared mask": ours(block_mask=BlockMask.from_key_blocks(lists, args.tokens, size)),
            "lists made anew": ours(key_blocks=lists, block_size=size),
            "dense": ours(),
        }
        if args.device != "cpu":
            calls["FlexAttention"] = partial(flex, block, rows)
            if find_spec("flash_attn"):
                calls["flash-attn-4"] = partial(cute, block, rows, columns)
        yield Problem(args.tokens, heads, heads, f"{100 * density:g} % of {size}", calls)


def keys(
    args: Namespace, lists: Sequence[tuple[int, int]], one_tensor: bool = False
) -> Iterator[Problem]:
    """Random keys for each query, the same for all heads; `lists` has heads and keys listed."""
    tokens = args.tokens // 2
    for heads, top in lists:
        scores = torch.rand(1, tokens, 1, tokens, device=args.device)
        index = scores.topk(min(top, tokens)).indices.int()
        calls = {"key_index": ours(key_index=index), "dense": ours()}
        if args.device != "cpu" and one_tensor and find_spec("attn_gym"):
            calls["attention-gym"] = partial(gather, index[:, :, 0])
        yield Problem(tokens, heads, 1, f"{index.shape[-1]} keys", calls, one_tensor)


def queries(args: Namespace, block: int) -> Iterator[Problem]:
    """Blocks of keys for each query, its own one and earlier ones."""
    tokens = args.tokens // 2
    number = -(-tokens // block)
    top = min(1024 // block, number)
    # (1, 1, tokens, blocks): a random order, as numbers that bfloat16 has
    scores = torch.rand(1, 1, tokens, number, device=args.device).argsort().float()
    own = torch.arange(tokens, device=args.device)[:, None] // block
    column = torch.arange(number, device=args.device)
    seen = scores.masked_fill(column == own, torch.inf).masked_fill(column > own, -torch.inf)
    chosen = seen.topk(top)
    lists = chosen.indices.int().masked_fill_(chosen.values == -torch.inf, -1)
    options: dict[str, Any] = {"key_blocks": lists, "block_size": (1, block), "causal": True}
    calls = {"key_blocks": ours(**options), "dense": ours(causal=True)}
    if args.device != "cpu" and block == 128 and find_spec("flash_msa"):
        calls["flash-msa"] = partial(msa, scores, top, args.head_dim)
    yield Problem(tokens, 16, 1, f"{top} blocks of {block}", calls)


def passes(prepare: Prepare, leaves: Sequence[Tensor], dout: Tensor) -> Iterator[tuple[str, Call]]:
    attend = prepare()
    yield "forward", partial(attend, *leaves)
    out = attend(*leaves)
    yield "backward", partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def lines(problem: Problem, args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines of a problem."""
    heads = (problem.heads_q, *[problem.heads_kv] * (1 if problem.one_tensor else 2))
    make = partial(torch.randn, dtype=getattr(torch, args.dtype), device=args.device)
    leaves = [make(1, problem.tokens, h, args.head_dim, requires_grad=True) for h in heads]
    dout = make(*leaves[0].shape)
    runs: dict[tuple[str, str], Call] = {}
    wanted: dict[str, Tensor] = {}
    differences, errors = {}, {}
    for name, prepare in problem.calls.items():
        try:
            for part, call in passes(prepare, leaves, dout):
                result: Any = call()
                found = result if isinstance(result, tuple) else (result,)
                flat = torch.cat([x.detach().flatten() for x in found]).float()
                want = wanted.setdefault(part, flat)
                difference = ((flat - want).norm() / want.norm()).item()
                differences[name, part] = "" if name == "dense" else f"{difference:.1e}"
                runs[name, part] = call
        except Exception as error:  # an error of a library costs only its lines, not the run
            errors[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
    samples = interleave(runs, timer_for(args.device), budget_ms=args.budget)
    medians = {key: Timing.of(x).median_ms for key, x in samples.items()}
    for name in problem.calls:
        for part in ("forward", "backward"):
            ms = medians.get((name, part))
            dense = medians.get(("dense", part), math.nan)
            times = ("", "") if ms is None else (f"{ms:.4f}", f"{ms / dense:.3f}")
            rest = differences.get((name, part), ""), "" if ms else errors[name]
            yield *problem[:4], name, part, *times, *rest


PROBLEMS: dict[str, Callable[[Namespace], Iterator[Problem]]] = {
    "blocks-128": partial(blocks, block=128),
    "blocks-64": partial(blocks, block=64),
    "keys": partial(keys, lists=((64, 2048), (64, 512), (16, 1024))),
    "queries-64": partial(queries, block=64),
    "one-tensor": partial(keys, lists=((64, 16),), one_tensor=True),
    "queries-128": partial(queries, block=128),
}


def measure(args: Namespace) -> Iterator[tuple[object, ...]]:
    """The lines."""
    for name in args.problems:
        for problem in PROBLEMS[name](args):
            yield from lines(problem, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Print and write the medians."""
    command = Command("listed_keys", __doc__, budget_ms=300.0)
    integer(command, "--tokens", 16384, "tokens of `blocks`; the others have half as many")
    integer(command, "--heads", 16, "heads of `blocks`")
    integer(command, "--head-dim", 128, "size of a head")
    command.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    command.add_argument("--problems", nargs="+", choices=PROBLEMS, default=[*PROBLEMS])
    return command.run(argv, COLUMNS, measure)


if __name__ == "__main__":
    sys.exit(main())
