"""Random cases of context parallelism, the same on every rank, and what one process computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flashtile
from flashtile import BlockMask, Spans, Statistics
from flashtile.distributed import ContextParallel, Layout, Mask, context
from flashtile.dropout import draw_rng_state
from flashtile.testing.tolerance import assert_close

WAYS = ("contiguous", "zigzag", "documents")
SCORES = ("bias", "attn_mask")  # added to the scores, with a row for each query or for all
CAPTURED = ("of_heads", "of_queries", "of_keys")  # by a score function
WEIGHTS = ("sink", "alibi_slopes", "relative_bias", *CAPTURED)  # every rank has all of them
# Whose gradients the Triton backend does not have over parts of sequences.
ONLY_ON_CPU = ("alibi_slopes", "relative_bias")


class Case:
    """Random inputs and options, and the call of one process.

    Args:
        wanted: the name of an option to use; None draws all of them.
        lengths: of packed documents; None are short ones.
    """

    def __init__(
        self,
        seed: int,
        ranks: int | None = None,
        wanted: str | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        rng = random.Random(seed)

        def has(name: str, probability: float) -> bool:
            return rng.random() < probability if wanted is None else name == wanted

        def drawn(name: str, unused: Any, *used: Any) -> Any:
            choices = [unused, *used] if wanted is None else used
            return rng.choice(choices) if wanted in (None, name) else unused

        self.g = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.ranks = rng.choice([1, 2, 2, 3, 4, 4, 6]) if ranks is None else ranks
        self.ulysses = rng.choice([u for u in range(1, self.ranks + 1) if self.ranks % u == 0])
        self.stages = rng.randint(1, self.ranks // self.ulysses)
        Hk, group, D, Dv = rng.choice([(1, 7, 8, 8), (2, 1, 16, 16), (2, 3, 8, 12), (4, 2, 8, 8)])
        dense = wanted in ("attn_mask", "key_padding_mask")
        self.batch = rng.choice([1, 2] if dense else [0, 0, 1, 2])
        Hq = Hk * group
        self.options: dict[str, Any] = {
            "causal": has("causal", 0.6),
            "window_size": drawn("window_size", (-1, -1), (20, -1), (9, 4)),
            "attention_chunk": drawn("attention_chunk", 0, 16),
            "softcap": drawn("softcap", 0.0, 3.0),
            "dropout_p": drawn("dropout_p", 0.0, 0.3),
        }
        self.leaves: dict[str, Tensor] = {}
        self.constants: tuple[str, ...] = ()  # the leaves without a gradient
        self.masks: dict[str, Tensor] = {}  # without gradients
        if self.batch:
            M = rng.choice([1, 17, 64, 130])
            N = rng.choice([M, M, 40])
            self.layout_options: dict[str, Any] = {
                "batch": self.batch,
                "seq_len": M,
                "seq_len_k": N,
            }
            q_shape, k_shape, documents = (self.batch, M), (self.batch, N), self.batch
            sizes = (self.batch, Hq, M, N)
            for name in ("bias", "attn_mask"):
                if has(name, 0.3):
                    self.leaves[name] = self.draw(*(rng.choice([1, n]) for n in sizes))
            if has("attn_mask", 0.2) and rng.random() < 0.5:
                self.leaves.pop("attn_mask", None)
                shape = [rng.choice([1, n]) for n in sizes]
                self.masks["attn_mask"] = self.draw(*shape) > -0.5
            if has("key_padding_mask", 0.2):
                self.masks["key_padding_mask"] = self.draw(self.batch, N) > -0.5
            counts = ([M] * self.batch, [N] * self.batch)
        else:
            some = lengths or (0, 1, 7, 33, 64, 129)
            lengths = [rng.choice(some) for _ in range(rng.randint(1, 4))]
            keys = lengths if rng.random() < 0.7 else [rng.choice([0, 5, 40]) for _ in lengths]
            self.cu = [torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, keys)]
            self.longest = [max(lengths), max(keys)]
            self.layout_options = {"cu_seqlens": self.cu[0], "cu_seqlens_k": self.cu[1]}
            q_shape, k_shape, documents = (sum(lengths),), (sum(keys),), len(lengths)
            counts = (lengths, keys)
            if has("bias", 0.3):  # a row for each token, or one for each document or for all
                some = (1, sum(lengths)) if rng.random() < 0.6 else (rng.choice([1, documents]), 1)
                sizes = (some[0], rng.choice([1, Hq]), some[1], rng.choice([1, max(keys)]))
                self.leaves["bias"] = self.draw(*sizes)
        self.layout_options |= {"way": rng.choice(WAYS), "grain": rng.choice([4, 16, 128])}
        self.leaves |= {
            "q": self.draw(*q_shape, Hq, D),
            "k": self.draw(*k_shape, Hk, D),
            "v": self.draw(*k_shape, Hk, Dv),
        }
        if has("qv", 0.2):
            self.leaves["qv"] = self.draw(*q_shape, Hq, Dv)
        if has("sink", 0.3):
            self.leaves["sink"] = self.draw(Hq)
        if has("alibi_slopes", 0.3):
            rows = () if rng.random() < 0.5 else (documents,)
            self.leaves["alibi_slopes"] = self.draw(*rows, Hq).abs()
        if has("relative_bias", 0.3):
            self.leaves["relative_bias"] = self.draw(Hq, 2 * rng.choice([0, 3, 50]) + 1)
        if has("score_mod", 0.3):
            sizes = (Hq,), (documents, max(1, *counts[0])), (max(1, *counts[1]),)
            self.leaves |= {n: self.draw(*x) for n, x in zip(CAPTURED, sizes, strict=True)}
        self.block_mask: BlockMask | None = None
        if has("block_mask", 0.25):
            shape = (rng.choice([1, documents]), rng.choice([1, Hq]), *map(max, counts))
            self.block_mask = self.draw_block_mask(shape, rng.choice([(16, 16), (8, 16), (24, 8)]))
            causal = self.options["causal"]
            self.layout_options["masks"] = [Mask(causal=causal, block_mask=self.block_mask)]
        for name, limits in zip(("seqused_q", "seqused_k"), counts, strict=True):
            if has(name, 0.25):
                used = [rng.randint(0, limit) for limit in limits]
                self.masks[name] = torch.tensor(used, dtype=torch.int32)
        self.spans: Spans | None = None
        if has("mask", 0.3):
            shape = (rng.choice([1, max(self.batch, 1)]), rng.choice([1, Hq]), q_shape[-1])
            starts = (self.draw(*shape, rng.randint(1, 3)) * 40).int()
            self.spans = Spans(starts, starts + (self.draw(*starts.shape) * 40).int())
        self.dout = self.draw(*q_shape, Hq, Dv)
        heads_first = (self.batch, Hq, q_shape[-1]) if self.batch else (Hq, q_shape[-1])
        self.dlse = self.draw(*heads_first)
        self.dentropy = self.draw(*heads_first) if has("return_stats", 0.3) else None

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def draw_block_mask(self, shape: tuple[int, ...], tile: tuple[int, int]) -> BlockMask:
        """A mask of mostly empty and full tiles; of a few, some scores are visible."""
        *outer, M, N = shape
        tiles = torch.rand(*outer, -(-M // tile[0]), -(-N // tile[1]), generator=self.g)
        each = tiles.repeat_interleave(tile[0], 2).repeat_interleave(tile[1], 3)[:, :, :M, :N]
        visible = torch.rand(*shape, generator=self.g) < torch.where(each < 0.5, 0.0, 1.0)
        return BlockMask.from_dense(visible & ((each < 0.8) | (self.draw(*shape) > 0)), tile)

    def whole(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """out, lse and gradients of one process, computed in `dtype`."""
        leaves = {name: x.to(dtype, copy=True) for name, x in self.leaves.items()}
        leaves = {n: x.requires_grad_(n not in self.constants) for n, x in leaves.items()}
        torch.manual_seed(self.seed)
        options = {**self.options, **self.masks, "mask": self.spans, "block_mask": self.block_mask}
        options |= arguments(leaves)
        if not self.batch and "bias" in leaves and leaves["bias"].shape[2] > 1:
            rows = leaves["bias"][0].split(self.cu[0].diff().tolist(), dim=1)
            padded = (pad(x, (0, 0, 0, self.longest[0] - x.shape[1])) for x in rows)
            options["bias"] = torch.stack(list(padded))
        options |= self.wanted_results
        if self.batch:
            results = flashtile.attention(**options)
        else:
            q, k, v = (options.pop(name) for name in "qkv")
            results = flashtile.attention_varlen(q, k, v, *self.cu, *self.longest, **options)
        loss(results, self.dout, self.dlse, self.dentropy).backward()
        gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
        out, lse, *found = results
        return {"out": out, "lse": lse, **(found[0]._asdict() if found else {}), **gradients}

    @property
    def wanted_results(self) -> dict[str, Any]:
        """The options of a call that say what it returns."""
        names = None if self.dentropy is None else Statistics._fields
        return {"return_lse": True, "return_stats": names}

    def described(self) -> str:
        """The case in a line."""
        used = {n: x for n, x in self.options.items() if x not in (False, 0, 0.0, (-1, -1))}
        tensors = {n: tuple(x.shape) for n, x in (self.leaves | self.masks).items()}
        given = [n for n in ("spans", "block_mask") if getattr(self, n) is not None]
        layout = {n: x for n, x in self.layout_options.items() if not isinstance(x, list)}
        layout = {n: x.tolist() if isinstance(x, Tensor) else x for n, x in layout.items()}
        return f"{layout}, {used}, {given}, {tensors}"

    def is_shared(self, name: str) -> bool:
        """Whether the gradient of a tensor is the sum over the ranks, as that of a weight."""
        return name in WEIGHTS or (name in SCORES and self.leaves[name].shape[2] == 1)

    def rounded(self, dtype: torch.dtype) -> Case:
        """The case with numbers that `dtype` has, and the gradients that GPUs compute."""
        self.constants = ONLY_ON_CPU
        self.leaves = {name: x.to(dtype).double() for name, x in self.leaves.items()}
        self.dout = self.dout.to(dtype).double()
        return self

    def on_rank(
        self,
        parallel: ContextParallel,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> dict[str, Tensor]:
        """What a rank computes in `dtype`, put together again where it is of tokens."""
        comm = parallel.comm
        layout = parallel.layout(**self.layout_options)
        keys = Layout(
            parallel, comm, layout.keys, layout.keys, layout.sequences, (layout.local_keys,) * 2
        )
        layouts = {"q": layout, "k": keys, "v": keys, "qv": layout}
        leaves = {}
        for name, x in self.leaves.items():
            shard = layouts[name].shard(x) if name in layouts else x
            if name in SCORES and x.shape[2] > 1:
                shard = layout.shard(x, dim=2)
            shard = shard.to(device, dtype, copy=True)
            leaves[name] = shard.requires_grad_(name not in self.constants)
        # A generator of its own: threads share the default one.
        parallel.generator = torch.Generator().manual_seed(self.seed)
        masks = dict(self.masks)
        if "attn_mask" in masks and masks["attn_mask"].shape[2] > 1:
            masks["attn_mask"] = layout.shard(masks["attn_mask"], dim=2)
        options: dict[str, Any] = {**self.options, **masks}
        options = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}
        options |= self.wanted_results
        if self.block_mask is not None:
            options["block_mask"] = self.block_mask.to(device)
        if self.spans is not None:
            options["mask"] = Spans(*(layout.shard(x, dim=2).to(device) for x in self.spans))
        results = parallel.attention(**arguments(leaves), layout=layout, **options)
        out, lse, *found = results
        tokens = self.dlse.dim() - 1
        rows = (x if x is None else layout.shard(x, tokens) for x in (self.dlse, self.dentropy))
        loss(results, layout.shard(self.dout), *rows).backward()
        got = {"out": layout.unshard(out), "lse": layout.unshard(lse, tokens)}
        if found:
            largest, entropy, sums = found[0]
            got |= {"max_logit": largest, "entropy": layout.unshard(entropy, tokens)}
            got["column_sum"] = keys.unshard(sums, tokens)
        for name, x in leaves.items():
            gradient = x.grad if x.grad is not None else torch.zeros_like(x)
            got[name] = layouts[name].unshard(gradient) if name in layouts else gradient
            if name in SCORES and self.leaves[name].shape[2] > 1:
                got[name] = layout.unshard(gradient, dim=2)
        return {name: x.cpu() for name, x in got.items()}


def arguments(leaves: dict[str, Tensor]) -> dict[str, Any]:
    """The arguments of a call: a function of scores instead of what it captures."""
    given: dict[str, Any] = {name: x for name, x in leaves.items() if name not in CAPTURED}
    if CAPTURED[0] not in leaves:
        return given
    heads, queries, keys = (leaves[name] for name in CAPTURED)
    numbers = torch.arange(keys.shape[0], device=keys.device) // 5

    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.where((i - j).abs() < 9, s * heads[h], s)
        return near + queries[b, i] * keys[j] + (numbers[j] == i // 5)

    return {**given, "score_mod": score_mod}


def on_one_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the seeds of dropout on the CPU, as one process on a CPU does."""

    def draw(device: torch.device, generator: torch.Generator | None) -> Tensor:
        return draw_rng_state(torch.device("cpu"), generator).to(device)

    monkeypatch.setattr(context, "draw_rng_state", draw)


def loss(results: tuple[Any, ...], dout: Tensor, dlse: Tensor, dentropy: Tensor | None) -> Tensor:
    out, lse, *found = results
    total = (out * dout.to(out)).sum()
    total = total + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse.to(lse)).sum()
    return total if dentropy is None else total + (found[0].entropy * dentropy.to(lse)).sum()


def compare(case: Case, results: list[dict[str, Tensor]]) -> None:
    """Compare what the ranks have computed with one process."""
    for name, want in case.whole().items():
        got = [result[name] for result in results]
        total = torch.stack(got).sum(0) if case.is_shared(name) else got[0]
        torch.testing.assert_close(
            total, want, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


def compare_rounded(case: Case, results: list[dict[str, Tensor]], dtype: torch.dtype) -> None:
    """Compare what the ranks have computed in `dtype` with one process in float64."""
    plain = case.whole(dtype)
    for name, truth in case.whole().items():
        parts = torch.stack([result[name] for result in results])
        if not case.is_shared(name):
            assert_close(name, parts[0], truth, plain[name], dtype=dtype, seed=case.seed)
            continue
        # Every rank rounds its part of a sum whose parts may cancel.
        parts = parts.double()
        floor = torch.finfo(dtype).eps / 2 * parts.abs().sum(0)
        total = parts.sum(0)
        assert_close(name, total, truth, plain[name], floor=floor, dtype=dtype, seed=case.seed)
