"""The libraries that run a case, one function each.

A peer takes a case with its inputs and returns a `Prepared` call, or raises `Skip` with the reason
why it cannot. Each peer gets the tensors in its preferred layout, prepared beforehand.
"""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashtile import api
from flashtile.api import explain
from flashtile.call import dispatch
from flashtile.masks import BlockMask

from . import float8
from .functions import FUNCTIONS, NO_CACHE_OF_ITS_OWN, OTHER_CACHE_DTYPE
from .prepared import (
    Prepared,
    Skip,
    cuda_package,
    heads_first,
    heads_first_view,
    leaves_of,
    output_alone,
    refuse,
    refuse_quadratic,
)
from .rows import is_ours
from .shapes import BLOCK_TILE, Case, Inputs, visible

Peer = Callable[[Case, Inputs], Prepared]

FAILED = "failed"  # the reason begins with this if flashtile itself failed
FUNCTIONS_ALONE = {
    "relative": "not set up for a relative bias",
    "prefix": "not set up for prefixes that all queries see",
}


def flashtile(
    case: Case,
    inputs: Inputs,
    backend: str | None = None,
    *,
    deterministic: bool = False,
    shares_prefix: bool = True,
) -> Prepared:
    """flashtile through its public functions; it chooses the backend unless one is given."""
    refuse(case, prefix="no option says it; spans do")
    if deterministic:
        refuse(case, cached="a cache has no backward that could differ")
    if not shares_prefix and not case.shared_prefix:
        raise Skip("no prefix is shared")
    tiles = inputs.tiles
    options = {
        "softcap": case.softcap,
        "window_size": case.window,
        "attention_chunk": case.chunk,
        "alibi_slopes": inputs.alibi_slopes,
        "block_mask": BlockMask.from_tiles(tiles, (BLOCK_TILE,) * 2) if tiles is not None else None,
        "backend": backend,
    }
    if deterministic:
        options["deterministic"] = True
    asked = dict(options)
    if case.shared_prefix and shares_prefix:
        options["shared_prefix_len"] = case.shared_prefix
    prepared = _length_first(
        case,
        inputs,
        options,
        dense=api.attention,
        packed=api.attention_varlen,
        cached=api.attention_with_kvcache,
    )
    return replace(prepared, backend=_chosen(case, inputs, prepared.leaves, asked))


def _chosen(
    case: Case, inputs: Inputs, leaves: dict[str, Tensor], options: dict[str, Any]
) -> str | None:
    """The backend that flashtile takes; a cache is asked for as the same keys without pages, in the
    queries' dtype."""
    asked = {**options, "bias": inputs.bias, "sink": inputs.sink, "dropout_p": case.dropout}
    asked["relative_bias"] = inputs.relative_bias
    if inputs.cu_seqlens is not None:
        asked |= _packed_layout(inputs.cu_seqlens)
    q = leaves["q"]
    k, v = (torch.empty_like(leaves[name], dtype=q.dtype) for name in "kv")
    return explain(q, k, v, causal=case.causal, **asked).chosen


def standard(case: Case, inputs: Inputs) -> Prepared:
    """Textbook attention: every score in memory, softmax in float32."""
    refuse(case, page_size="gathers no pages", **FUNCTIONS_ALONE, **NO_CACHE_OF_ITS_OWN)
    refuse_quadratic(case, inputs.q.device)
    leaves = leaves_of(inputs, heads_first if inputs.cu_seqlens is None else Tensor.detach)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    rest = {"bias": leaves.get("bias"), "sink": leaves.get("sink")}
    if inputs.cu_seqlens is None:
        M, N = case.seqlen_q, case.seqlen_k
        mask, alibi = visible(case, inputs, M, N), _alibi(inputs, M, N)
        call = partial(_textbook, case, q, k, v, mask, alibi, **rest)
        return Prepared(call, leaves, heads_first(inputs.dout), heads_first=True)
    lengths = inputs.cu_seqlens.diff().tolist()
    masks = [visible(case, inputs, n, n) for n in lengths]

    def forward() -> Tensor:
        split = [x.transpose(0, 1).split(lengths, dim=1) for x in (q, k, v)]
        outs = [
            _textbook(case, qs, ks, vs, mask, None)
            for qs, ks, vs, mask in zip(*split, masks, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)

    return Prepared(forward, leaves, inputs.dout)


def _textbook(
    case: Case,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    alibi: Tensor | None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T) v for q (..., Hq, M, D), k and v (..., Hk, N, D); a row sees some key."""
    group = case.heads_q // case.heads_kv
    if group > 1:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    scores = q @ k.transpose(-2, -1) * case.head_dim**-0.5
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    for added in (alibi, bias):
        scores = scores if added is None else scores + added
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        column = sink[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    probs = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(probs[..., : k.shape[-2]], case.dropout) @ v


def sdpa(
    case: Case, inputs: Inputs, backend: SDPBackend | None = None, *, as_views: bool = False
) -> Prepared:
    """PyTorch's `scaled_dot_product_attention`; it chooses the backend unless one is given.

    `as_views`: on flashtile's own tensors, transposed, instead of copies with the heads first.
    """
    device, M, N = inputs.q.device, case.seqlen_q, case.seqlen_k
    if device.type == "cpu" and backend in (
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ):
        raise Skip("PyTorch has it only for CUDA")
    refuse(
        case,
        documents="takes no packed sequences",
        softcap="has no softcap",
        sink="has no sink",
        page_size="takes no pages",
        **FUNCTIONS_ALONE,
        **NO_CACHE_OF_ITS_OWN,
    )
    if backend == SDPBackend.MATH:
        refuse_quadratic(case, device)
    layout = heads_first_view if as_views else heads_first
    leaves = leaves_of(inputs, layout)
    q, k, v, bias = leaves["q"], leaves["k"], leaves["v"], leaves.get("bias")
    only_causal = case.causal and case.window == (-1, -1) and not case.chunk and M == N
    is_causal = only_causal and not (case.block_sparse or case.alibi or case.bias)
    mask = None if is_causal else visible(case, inputs, M, N)
    alibi = _alibi(inputs, M, N)
    fixed = mask if alibi is None else _hide(alibi.to(q.dtype)[None], mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=fixed if bias is None else _hide(bias, mask),
                dropout_p=case.dropout,
                is_causal=is_causal,
                enable_gqa=case.heads_q != case.heads_kv,
            )

    call = partial(attend, q, k, v)
    return Prepared(call, leaves, layout(inputs.dout), heads_first=True, attend=attend)


def fa2(case: Case, inputs: Inputs) -> Prepared:
    """FlashAttention-2 as part of PyTorch: SDPA with its flash backend, on a GPU."""
    if inputs.q.device.type != "cuda":
        raise Skip("runs only on CUDA")
    return sdpa(case, inputs, SDPBackend.FLASH_ATTENTION)


def fa2_package(case: Case, inputs: Inputs) -> Prepared:
    """FlashAttention-2 from its authors, the package `flash_attn`."""
    lacks = {
        "bias": "has no bias",
        "sink": "has no sink",
        "chunk": "has no chunks",
        "block_sparse": "has no block mask",
        "value_dim": "wants one head dim",
        "cache_dtype": OTHER_CACHE_DTYPE,
    }
    options = {"window_size": case.window, "alibi_slopes": inputs.alibi_slopes}
    return _library("flash_attn", case, inputs, lacks, options, "block_table")


def fa3(case: Case, inputs: Inputs) -> Prepared:
    """FlashAttention-3, the module `flash_attn_interface`."""
    lacks = {
        "bias": "has no bias",
        "sink": "has no sink",
        "alibi": "has no ALiBi",
        "dropout": "has no dropout",
        "block_sparse": "has no block mask",
        "cache_dtype": OTHER_CACHE_DTYPE,
    }
    options = {"window_size": case.window, "attention_chunk": case.chunk}
    return _library("flash_attn_interface", case, inputs, lacks, options)


def fa4(case: Case, inputs: Inputs) -> Prepared:
    """FlashAttention-4 (CuTe DSL), the module `flash_attn.cute`."""
    lacks = {
        "bias": "has no bias",
        "sink": "not set up for its sink",
        "alibi": "has no ALiBi",
        "chunk": "has no chunks",
        "dropout": "has no dropout",
        "block_sparse": "not set up for its block masks",
        "cached": "has no cache function",
    }
    window = tuple(None if side < 0 else side for side in case.window)
    return _library("flash_attn.cute", case, inputs, lacks, {"window_size": window})


def _library(
    name: str,
    case: Case,
    inputs: Inputs,
    lacks: dict[str, str],
    options: dict[str, Any],
    page_argument: str = "page_table",
) -> Prepared:
    """One of FlashAttention's own modules, except for what it lacks."""
    module = cuda_package(name, inputs)
    refuse(case, **lacks, **FUNCTIONS_ALONE)
    return _length_first(
        case,
        inputs,
        {**options, "softcap": case.softcap},
        dense=module.flash_attn_func,
        packed=module.flash_attn_varlen_func,
        cached=getattr(module, "flash_attn_with_kvcache", None),
        page_argument=page_argument,
    )


PEERS: dict[str, Peer] = {
    "flashtile": flashtile,
    **{f"flashtile-{name}": partial(flashtile, backend=name) for name in dispatch.ORDER},
    "flashtile-deterministic": partial(flashtile, deterministic=True),
    "flashtile-unshared": partial(flashtile, shares_prefix=False),
    "flashtile-float8": partial(float8.flashtile, scales="block"),
    "flashtile-float8-head": partial(float8.flashtile, scales="head"),
    "sdpa": sdpa,
    "sdpa-flash": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa-math": partial(sdpa, backend=SDPBackend.MATH),
    "standard": standard,
    **FUNCTIONS,
    "cudnn": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "fa2": fa2,
    "fa2-package": fa2_package,
    "fa3": fa3,
    "fa3-float8": float8.fa3,
    "fa4": fa4,
    **float8.QUANTIZERS,
}


@contextmanager
def failures_of(name: str) -> Iterator[None]:
    """Whatever the peer `name` raises becomes a `Skip` with the reason in one line.

    Of flashtile's own errors only NotImplementedError ("no backend can") is such a reason. Any
    other error is a failure: the line begins with `FAILED`, and the traceback is printed.
    """
    ours = is_ours(name)
    with warnings.catch_warnings(record=not ours) as warned:
        try:
            yield
        except Skip:
            raise
        except Exception as error:  # an error of a peer costs only its line, not the run
            if ours and not isinstance(error, NotImplementedError):
                traceback.print_exc()
                raise Skip(f"{FAILED}: {_reason(error, [])}") from None
            raise Skip(_reason(error, warned or [])) from None


def _reason(error: Exception, warned: list[warnings.WarningMessage]) -> str:
    """An error as one line; SDPA gives its reasons as warnings, not in the error."""
    if isinstance(error, torch.OutOfMemoryError):
        wanted = re.search(r"allocate ([\d.]+ \w+)", str(error))
        return "out of memory" + (f": {wanted[1]} wanted at once" if wanted else "")
    reasons = [str(warning.message).partition(" (Triggered")[0] for warning in warned]
    reasons = [text for text in reasons if not text.endswith(("because:", "runtime disabled."))]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    said = " ".join(lines) if isinstance(error, NotImplementedError) else lines[0]
    return "; ".join([said, *dict.fromkeys(reasons)])


def _length_first(
    case: Case,
    inputs: Inputs,
    options: dict[str, Any],
    *,
    dense: Callable[..., Any],
    packed: Callable[..., Any],
    cached: Callable[..., Any] | None,
    page_argument: str = "page_table",
) -> Prepared:
    """A call of one of the three functions of a library with FlashAttention's layout."""
    leaves = leaves_of(inputs, Tensor.detach)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    options = {**options, "causal": case.causal}
    options |= {name: leaves[name] for name in ("bias", "sink", "relative_bias") if name in leaves}
    if case.dropout:
        options["dropout_p"] = case.dropout
    attend = None
    if case.cached:
        assert cached is not None
        before = case.seqlen_k - (case.seqlen_q if case.appends else 0)
        used = torch.full((case.batch,), before, dtype=torch.int32, device=q.device)
        options["cache_seqlens"] = used
        if case.appends:
            options |= {"k": inputs.k_new, "v": inputs.v_new}
        if inputs.rotary_cos is not None:
            options |= {"rotary_cos": inputs.rotary_cos, "rotary_sin": inputs.rotary_sin}
        if inputs.page_table is None:
            call = partial(cached, q, k, v, **options)
        else:
            options[page_argument] = inputs.page_table
            call = partial(cached, q, inputs.k_pages, inputs.v_pages, **options)
    elif inputs.cu_seqlens is not None:
        call = partial(packed, q, k, v, **_packed_layout(inputs.cu_seqlens), **options)
    else:
        call = partial(dense, q, k, v, **options)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return output_alone(dense(q, k, v, **options))

    return Prepared(lambda: output_alone(call()), leaves, inputs.dout, attend=attend)


def _packed_layout(cu_seqlens: Tensor) -> dict[str, Any]:
    longest = int(cu_seqlens.diff().max())
    sides = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    return {**sides, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _alibi(inputs: Inputs, M: int, N: int) -> Tensor | None:
    """ALiBi as a term of the scores, float32 (Hq, M, N)."""
    if inputs.alibi_slopes is None:
        return None
    rows, keys = (torch.arange(n, device=inputs.q.device) for n in (M, N))
    return -inputs.alibi_slopes[:, None, None] * (rows[:, None] + N - M - keys).abs()


def _hide(term: Tensor, mask: Tensor | None) -> Tensor:
    """A term of the scores with -inf where the mask hides."""
    return term if mask is None else term.masked_fill(~mask, -torch.inf)
