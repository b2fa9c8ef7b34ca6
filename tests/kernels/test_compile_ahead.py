"""Every kernel compiled for every architecture, with the compiler's report read. No GPU is needed.

`make test-triton` runs a sample of this with the newest Triton, `make test-triton-full` all of it
with the oldest and the newest.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from configurations import FULL, one_kind_each, sample
from float8_numbers import descales

pytest.importorskip("triton", reason="the package triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interprets instead of compiling (TRITON_INTERPRET=1)", allow_module_level=True)

from compiled_kernels import DEVICES, key, report
from triton.runtime.jit import JITFunction

from flashtile import ops
from flashtile.backends import triton as backend
from flashtile.backends.triton import plan
from flashtile.call.layouts import Dense, Packed
from flashtile.call.prepare import describe
from flashtile.gpu import hardware
from flashtile.gpu.launch import Launch
from flashtile.masks import BlockMask
from flashtile.quantize import quantize_qkv
from flashtile.score_mod import derivative
from flashtile.testing import alibi_slopes, cu_seqlens, generator, normal, packed_qkv, qkv

from .cases import (
    Call,
    bias,
    by_distance,
    dense,
    dropped,
    lengths,
    make_call,
    scored,
    spanned,
    table_of_near_distances,
)
from .decoding import make_decoding, make_packed
from .launches import (
    append_launches,
    gather_launches,
    launches,
    launches_of_tangents,
    measuring_launches,
    probabilities_launches,
    rotary_launches,
    step_launches,
)
from .parts import make_parts
from .spills import ALLOWED, ALLOWED_IN_DECODING
from .test_compile_quantize import launch_of as quantize_launch
from .unusual_layouts import LAYOUTS, SIZES, dense_call

# Large calls of 16 bits come through tensor descriptors where the device has them; small ones and
# float32 come through pointers everywhere.
HAS_DESCRIPTORS = ("sm_90", "sm_100", "sm_120")
HEAD_DIMS = (64, 128, 256, 512)
LATENT_CASES = ("latent keys", "latent keys, pages of 16")
DEFAULTS = [
    *((d, "large", torch.bfloat16, D, "causal") for d in DEVICES for D in HEAD_DIMS),
    *((d, "large", torch.bfloat16, D, "full") for d in DEVICES for D in (64, 128)),
    *((d, "small", torch.bfloat16, D, "causal") for d in HAS_DESCRIPTORS for D in HEAD_DIMS),
    *((d, "large", torch.float32, D, "causal") for d in DEVICES for D in HEAD_DIMS[:3]),
]
# The slowest to compile, from the tiles that all devices share: each kind of memory once.
SLOWEST = [(d, "large", torch.float32, 512, "causal") for d in ("sm_80", "sm_120", "gfx942")]


@pytest.fixture(autouse=True)
def _as_on_the_device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Plan like PyTorch for that device, and treat the call as a large or a small one."""
    given = getattr(request.node, "callspec", None)
    params = given.params if given else {}
    monkeypatch.setattr(hardware, "is_rocm", lambda: params.get("device") == "gfx942")
    monkeypatch.setattr(plan, "DESCRIPTOR_WORK", 2**62 if params.get("size") == "small" else 0)
    plan.plan.cache_clear()


@pytest.mark.parametrize(
    ("device", "size", "dtype", "head_dim", "mask"),
    sample(DEFAULTS, 3) + (SLOWEST if FULL else []),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_default_kernels_fit(device: str, size: str, dtype: torch.dtype, head_dim: int, mask: str):
    """Shared memory suffices, and only the kernels of `spills.py` spill registers."""
    q, k, v = qkv(generator(0), B=1, M=256, N=256, Hq=2, Hk=2, D=head_dim, dtype=dtype)
    call = describe((q, k, v), Dense(), {"causal": mask == "causal"})
    too_much = []
    for launch in launches(*call, device):
        found = report(launch, device)
        name = (device, size, str(dtype).removeprefix("torch."), head_dim, pass_of(launch))
        allowed, reason = ALLOWED.get(name, (0, "not in the list"))
        if found.shared > DEVICES[device].shared:
            too_much.append(f"{name}: {found.shared} bytes of shared memory")
        if found.spilled > allowed:
            too_much.append(f"{name}: spills {found.spilled} bytes, not {allowed} ({reason})")
    assert not too_much, "\n".join(too_much)


# Of a thread on sm_90, forward and backward, with either release of Triton. 255 are all there are.
SHORT_REGISTERS = {
    ("full", 32): (128, 192),
    ("full", 64): (80, 144),
    ("full", 128): (136, 240),
    ("grouped heads", 64): (80, 255),
    ("grouped heads", 128): (80, 255),
    ("bias of heads", 32): (152, 255),
    ("bias of heads", 64): (80, 144),
}


@pytest.mark.parametrize(("rule", "head_dim"), SHORT_REGISTERS)
def test_short_sequences_leave_room_for_several_programs(rule: str, head_dim: int):
    """Latency limits their speed; other programs on the multiprocessor hide it."""
    sizes = {"B": 2, "M": 49, "N": 49, "Hq": 4, "Hk": 2 if rule == "grouped heads" else 4}
    options = bias(1, 4, 49, 49) if rule == "bias of heads" else lambda g, t: {}
    made = dense(**sizes, D=head_dim)(options)(generator(0), torch.bfloat16)
    found = [report(launch) for launch in launches(*made, "sm_90")]
    assert len(found) == 2
    for one, most in zip(found, SHORT_REGISTERS[rule, head_dim], strict=True):
        assert one.registers <= most, found
        assert one.spilled <= (96 if most == 255 else 0), found
        assert one.shared <= DEVICES["sm_90"].shared // 3, found


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", ["none", "alibi", "relative bias", "function"])
def test_forward_and_dq_wait_for_groups_of_wgmma(rule: str, head_dim: int):
    """Not for each instruction: the sums of the loop stay in flight until its next step."""
    for launch in launches(*ruled(rule, head_dim), "sm_90"):
        if launch.kernel.__name__ in ("forward_kernel", "query_gradient_kernel"):
            assert not report(launch).is_serialised, launch.kernel.__name__


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", ["none", "full", "window", "grouped heads", "packed", "alibi"])
def test_dk_and_dv_wait_for_groups_of_wgmma(rule: str, head_dim: int):
    """The same, but for score functions and relative biases: Triton 3.9 serialises those."""
    (launch,) = (
        launch
        for launch in launches(*ruled(rule, head_dim), "sm_90")
        if launch.kernel.__name__ == "key_gradient_kernel"
    )
    assert not report(launch).is_serialised


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", ["none", "full", "grouped heads", "packed"])
def test_tangents_wait_for_groups_of_wgmma(rule: str, head_dim: int):
    """And spill nothing, although they hold twice the operands of dQ."""
    (launch,) = launches_of_tangents(*ruled(rule, head_dim), "sm_90")
    found = report(launch)
    assert not found.is_serialised
    assert found.spilled == 0
    assert found.shared <= DEVICES["sm_90"].shared


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rule", ["none", "full", "window", "grouped heads", "packed"])
def test_three_programs_of_column_sums_share_a_multiprocessor(rule: str, head_dim: int):
    """What they spill, they spill where they mask."""
    *_, launch = measuring_launches(*ruled(rule, head_dim), "sm_90")
    found = report(launch)
    assert not found.is_serialised
    assert found.registers <= 168
    assert found.shared + 1024 <= DEVICES["sm_90"].shared // 3
    assert found.spilled <= (96 if head_dim == 128 else 0)


@pytest.mark.parametrize("allows_tf32", [False, True], ids=["bf16x6", "tf32"])
@pytest.mark.parametrize("rule", ["causal", "bias"])
def test_tangents_in_float32_fit(rule: str, allows_tf32: bool):
    """At the largest head dim that float32 has on tensor cores."""
    options = bias(1, 2, 256, 256) if rule == "bias" else lambda g, t: {"causal": True}
    call = dense(B=1, M=256, N=256, Hq=2, Hk=2, D=128)(options)(generator(0), torch.float32)
    (launch,) = launches_of_tangents(*call, "sm_90", allows_tf32=allows_tf32)
    assert report(launch).shared <= DEVICES["sm_90"].shared


def ruled(rule: str, head_dim: int) -> Call:
    """A causal call with a rule for scores, with another mask, or with another layout."""
    heads = {"Hq": 4, "Hk": 1 if rule == "grouped heads" else 4, "D": head_dim}
    options: dict[str, Any] = {
        "full": {},
        "window": {"window_size": (100, 0)},
    }.get(rule, {"causal": True})
    if rule == "packed":
        rows = [130, 100]
        q, k, v = packed_qkv(generator(0), rows, rows, **heads, dtype=torch.bfloat16)
        return describe((q, k, v), Packed(cu_seqlens(rows), cu_seqlens(rows), 130, 130), options)
    make = dense(B=1, M=256, N=256, **heads)(lambda g, dtype: options)
    if rule == "alibi":
        make = by_distance(make, reach=None)
    elif rule == "relative bias":
        make = by_distance(make, slopes=None)
    elif rule == "function":
        make = scored(make, table_of_near_distances)
    return make(generator(0), torch.bfloat16)


def pass_of(launch: Launch) -> str:
    """The kernel of a launch, as `explain` names it."""
    if launch.kernel.__name__ == "key_gradient_kernel":
        made = [name for name in ("dK", "dV") if launch.arguments[f"HAS_{name.upper()}"]]
        return " and ".join(made)
    names = {"forward_kernel": "forward", "delta_kernel": "delta", "query_gradient_kernel": "dQ"}
    return names[launch.kernel.__name__]


@pytest.mark.parametrize(("device", "head_dim"), one_kind_each(DEVICES, HEAD_DIMS))
def test_decoding_kernels_fit(device: str, head_dim: int):
    """Split KV loops over contiguous keys, pages and a float8 cache, and the merge of the parts."""
    for name, float8 in (("one query", False), ("pages of 16", False), ("one query", True)):
        if float8 and device in ("sm_80", "sm_86", "gfx942"):
            continue
        for launch in decoding(device, head_dim, name, float8):
            found = report(launch, device)
            assert found.shared <= DEVICES[device].shared, found
            allowed, reason = ALLOWED_IN_DECODING.get(
                (device, head_dim, name), (0, "not in the list")
            )
            assert found.spilled <= allowed, f"{name}: {found}, allowed {allowed} ({reason})"


@pytest.mark.parametrize(("name", "queries"), [("one query", 1), ("one key head", 8)])
def test_decoding_kernels_of_whole_loops_fit(name: str, queries: int):
    """Their tiles fill the shared memory of sm_90."""
    operands, options = make_decoding(name, torch.bfloat16, D=128, Dv=128, M=queries)
    (launch,) = launches(operands, options._replace(num_splits=1), "sm_90", backward=False)
    found = report(launch, "sm_90")
    assert launch.arguments["cfg"].BLOCK_N == 128
    assert found.shared <= DEVICES["sm_90"].shared, found
    assert found.spilled <= (0 if queries == 1 else 32), found  # 32 with Triton 3.6, 0 with 3.9


@pytest.mark.parametrize(("device", "name"), one_kind_each(DEVICES, LATENT_CASES))
def test_latent_decoding_kernels_fit(device: str, name: str):
    """Few heads, and as many as share the keys in DeepSeek's models."""
    for heads in (8, 128):
        operands, options = make_decoding(name, torch.bfloat16, Hq=heads)
        for launch in launches(operands, options._replace(num_splits=4), device, backward=False):
            found = report(launch, device)
            assert found.shared <= DEVICES[device].shared, found
            allowed, reason = ALLOWED_IN_DECODING.get((device, 576, name), (0, "not in the list"))
            assert found.spilled <= allowed, f"{heads} heads: {found}, allowed {allowed} ({reason})"


# Bytes that a thread spills on sm_90 by head dim: dK and dV, and the pages of a chunked prefill.
INVARIANT_SPILLS = {("key_gradient_kernel", 64): 152, ("key_gradient_kernel", 128): 56}
INVARIANT_SPILLS |= {("forward_kernel", 128): 48}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_batch_invariant_kernels_fit(head_dim: int):
    """Training with keys of one part and of several, decoding in one program and in one for each
    part, from pages, too.
    """
    made = []
    for N in (256, 4096):
        tensors = qkv(generator(0), B=1, M=256, N=N, Hq=2, Hk=2, D=head_dim, dtype=torch.bfloat16)
        call = describe(tensors, Dense(), {"causal": True, "batch_invariant": True})
        made += launches(*call, "sm_90")
    for name, splits in (("one query", 0), ("one query", 1), ("pages of 16", 0)):
        operands, options = make_decoding(name, torch.bfloat16, D=head_dim, Dv=head_dim)
        options = options._replace(batch_invariant=True, max_seqlen_k=4096, num_splits=splits)
        made += launches(operands, options, "sm_90", backward=False)
    assert {launch.kernel.__name__ for launch in made} >= {"merge_in_order_kernel"}
    for launch in made:
        found = report(launch, "sm_90")
        assert found.shared <= DEVICES["sm_90"].shared, found
        allowed = INVARIANT_SPILLS.get((launch.kernel.__name__, head_dim), 0)
        assert found.spilled <= allowed, f"{launch.kernel.__name__}: {found}"
        assert not found.is_serialised, launch.kernel.__name__


@pytest.mark.parametrize("M", [1, 256])
@pytest.mark.parametrize(("head_dim", "scales"), [(64, "block"), (256, "block"), (256, "head")])
def test_float8_kernels_fit(head_dim: int, scales: str, M: int):
    """Float8 queries that Hopper's own float8 kernel does not support: few of them, and a chunk."""
    tensors = qkv(generator(0), B=1, M=M, N=256, Hq=2, Hk=2, D=head_dim)
    made = quantize_qkv(*tensors, scales=scales)
    given = dict(causal=True, attention_chunk=100, **descales(made))
    operands, options = describe((made.q, made.k, made.v), Dense(), given)
    operands = operands._replace(q=operands.q.bfloat16())
    options = options._replace(num_splits=4 if M == 1 else 1)
    for launch in launches(operands, options, "sm_90", backward=False):
        found = report(launch, "sm_90")
        assert found.shared <= DEVICES["sm_90"].shared, found


def decoding(device: str, head_dim: int, name: str, float8: bool = False) -> list[Launch]:
    """The launches of one query for each sequence, its KV loop split into four parts."""
    sizes = {"D": head_dim, "Dv": head_dim, "float8": float8}
    operands, options = make_decoding(name, torch.bfloat16, **sizes)
    return launches(operands, options._replace(num_splits=4), device, backward=False)


def packed_rows(name: str, device: str) -> list[Launch]:
    """The launches over a cache of packed rows, its KV loop split into four parts."""
    operands, _, options = make_packed(name, torch.bfloat16, 0)
    return launches(operands, options._replace(num_splits=4), device, backward=False)


def scores() -> Call:
    """Everything that changes a score, at once: the largest number of registers of a kernel."""
    g = generator(0)
    q, k, v = qkv(g, B=1, M=256, N=256, Hq=2, Hk=2, D=128, dtype=torch.bfloat16)
    bias = normal(g, 1, 2, 256, 256, dtype=torch.bfloat16)
    more = {"alibi_slopes": alibi_slopes(g, 2), "sink": normal(g, 2)}
    given = dict(window_size=(100, 20), softcap=20.0, bias=bias, **more)
    operands, options = describe((q, k, v), Dense(), given)
    rng_state = torch.zeros(2, dtype=torch.int64)
    return operands._replace(rng_state=rng_state), options._replace(dropout_p=0.1)


def tiles() -> Call:
    """A block mask over sequences shorter than the tensors."""
    g = generator(0)
    q, k, v = qkv(g, B=1, M=256, N=256, Hq=2, Hk=2, D=128, dtype=torch.bfloat16)
    mask = BlockMask.from_dense(torch.rand(1, 2, 256, 256, generator=g) < 0.5, (128, 128))
    used = {"seqused_q": lengths(250), "seqused_k": lengths(200)}
    return describe((q, k, v), Dense(), {"block_mask": mask, "causal": True, **used})


def parts() -> Call:
    """Parts of sequences with all that depends on positions."""
    operands, options, *_ = make_parts("alibi", torch.bfloat16, 0)
    operands = operands._replace(rng_state=torch.zeros(2, dtype=torch.int64))
    return operands, options._replace(window_left=40, attention_chunk=50, dropout_p=0.1)


def captured(name: str = "score function of many operations") -> Call:
    """A score function, with gradients of what it captures."""
    operands, options = make_call(name, torch.bfloat16)
    gradient = derivative(options.score_mod, torch.float32, of_captured=True)
    return operands, options._replace(score_mod_gradient=gradient)


def captured_in_parts() -> Call:
    """The same over parts of sequences, whose rows count by their positions."""
    (whole, described), (operands, options) = captured(), parts()
    functions = {name: getattr(described, name) for name in ("score_mod", "score_mod_gradient")}
    tensors = {name: getattr(whole, name) for name in ("captured", "captured_integers")}
    return operands._replace(**tensors), options._replace(**functions)


def own_keys(run: int, head_dim: int) -> Call:
    """A list of 16 runs of keys for each query."""
    g, sizes = generator(0), {"B": 1, "M": 40, "N": 2048, "Hq": 32, "Hk": 2}
    tensors = qkv(g, **sizes, D=head_dim, dtype=torch.bfloat16)
    lists = torch.randint(0, 2048 // run, (1, 40, 2, 16), generator=g, dtype=torch.int32)
    given = {"key_index": lists, "key_run": run, "causal": True, "sink": normal(g, 32)}
    return describe(tensors, Dense(), given)


# One call for each option, or for several options of one kernel.
OPTIONS = {
    "scores": lambda device: launches(*scores(), device),
    "tiles": lambda device: launches(*tiles(), device),
    "spans": lambda device: launches(
        *spanned(lambda g, t: scores(), 2)(generator(0), torch.bfloat16), device
    ),
    "eight spans": lambda device: launches(*make_call("eight spans", torch.bfloat16), device),
    "spans and tiles": lambda device: launches(
        *make_call("spans and a block mask", torch.bfloat16), device
    ),
    "score function": lambda device: launches(*captured(), device),
    "score function of distances": lambda device: launches(
        *captured("score function of near and far keys"), device
    ),
    "score function of parts": lambda device: launches(*captured_in_parts(), device),
    "relative bias": lambda device: launches(*make_call("relative bias", torch.bfloat16), device),
    "packed": lambda device: launches(
        *dropped(lambda g, t: ruled("packed", 64))(generator(0), torch.bfloat16), device
    ),
    "parts": lambda device: launches(*parts(), device),
    "few queries": lambda device: launches(
        *make_call("few queries of grouped heads", torch.bfloat16), device
    ),
    "pages": lambda device: launches(*make_call("pages", torch.bfloat16), device, backward=False),
    "probabilities": lambda device: probabilities_launches(*scores(), device),
    "tangents": lambda device: launches_of_tangents(*scores(), device),
    "tangents of tiles": lambda device: launches_of_tangents(*tiles(), device),
    "append": append_launches,
    "rotary": lambda device: rotary_launches(),
    "gather": lambda device: gather_launches(),
    "split KV loops": lambda device: decoding(device, 64, "pages, packed queries"),
    "pages of 48": lambda device: decoding(device, 64, "pages of 48, left pads"),
    "a decoding step": lambda device: step_launches(
        *make_decoding("one query", torch.bfloat16, M=2, num_splits=4), 16, device
    ),
    "a decoding step in pages": lambda device: step_launches(
        *make_decoding("pages of 16", torch.bfloat16, D=64, Dv=64), 0, device
    ),
    "a decoding step of many heads": lambda device: step_launches(
        *make_decoding("one query", torch.bfloat16, D=64, Dv=64, Hq=32, Hk=1), 64, device
    ),
    "short sequences": lambda device: launches(
        *make_call("packed dropout", torch.bfloat16), device
    ),
    "statistics": lambda device: measuring_launches(*scores(), device),
    "packed rows": lambda device: packed_rows("int8 in blocks, left pads", device),
    "packed rows in pairs": lambda device: packed_rows("int4, pages of 16", device),
    "blocks of keys of each query": lambda device: launches(*own_keys(64, 128), device),
    "keys of each query": lambda device: launches(*own_keys(1, 128), device),
    "keys of each query of wide heads": lambda device: launches(*own_keys(1, 256), device),
}


@pytest.mark.parametrize(("option", "device"), one_kind_each(OPTIONS, DEVICES))
def test_options_compile(device: str, option: str):
    """Options may spill; what they need of shared memory must be there."""
    for launch in OPTIONS[option](device):
        found = report(launch, device)
        assert found.shared <= DEVICES[device].shared, found


def test_no_kernel_is_left_out():
    compiled = {launch.kernel.__name__ for make in OPTIONS.values() for launch in make("sm_80")}
    # It writes float8, which not every device has; a separate module compiles it.
    compiled.add(quantize_launch(64).kernel.__name__)
    compiled.add("merge_in_order_kernel")  # by `test_batch_invariant_kernels_fit`
    names = [f"{backend.__name__}.{m.name}" for m in iter_modules(backend.__path__)]
    names += [f"{ops.__name__}.{m.name}.kernel" for m in iter_modules(ops.__path__)]
    modules = [import_module(name) for name in names]
    functions = {
        f.__name__ for m in modules for f in vars(m).values() if isinstance(f, JITFunction)
    }
    assert compiled == {name for name in functions if name.endswith("_kernel")}


@pytest.mark.parametrize("device", ["sm_80"])
def test_a_new_length_compiles_nothing_new(device: str):
    seen = set()
    for length in (1, 15, 16, 17, 1000, 1024):
        q, k, v = qkv(generator(0), B=1, M=300, N=length, Hq=2, Hk=2, D=64, dtype=torch.bfloat16)
        for launch in launches(*describe((q, k, v), Dense(), {}), device):
            seen.add(key(launch, device))
    assert len(seen) == 4  # forward, delta, dK and dV, dQ


def test_a_longer_cache_or_more_parts_compile_nothing_new():
    seen = set()
    for length, splits in ((16, 1), (100, 1), (1000, 2), (4096, 2), (5000, 7), (5000, 16)):
        q, k, v = qkv(generator(0), B=3, M=1, N=length, Hq=8, Hk=2, D=64, dtype=torch.bfloat16)
        operands, options = describe((q, k, v), Dense(), {})
        options = options._replace(num_splits=splits)
        for launch in launches(operands, options, "sm_80", backward=False):
            seen.add(key(launch, "sm_80"))
    assert len(seen) == 3  # whole KV loops, parts of them, the merge


WIDE_LOAD = r"cp\.async\S*, 0x10|ld\.global\S*\.(?:v4\.b32|v2\.b64)"
WIDE = rf"{WIDE_LOAD}|st\.global\S*\.(?:v4\.b32|v2\.b64)"


def compiled_layout(layout: str, dim: int) -> dict[str, str]:
    """How each kernel accesses the tensors of a call that lie in memory as `layout` says."""
    call = dense_call(LAYOUTS[layout], SIZES["odd lengths"], dim)
    found = {
        launch.kernel.__name__: "\n".join(report(launch).accesses)
        for launch in launches(*call, "sm_90")
    }
    assert len(found) == 4
    return found


def test_aligned_rows_are_loaded_16_bytes_at_a_time():
    for name, text in compiled_layout("moved by 8", 72).items():
        assert re.search(WIDE_LOAD, text), name


@pytest.mark.parametrize("layout", ["padded by 1", "moved by 1"])
def test_no_other_row_is(layout: str):
    """That would be an error on the device. (The kernels of the backward load dO, too.)"""
    assert not re.search(WIDE_LOAD, compiled_layout(layout, 64)["forward_kernel"])


def test_nothing_is_where_rows_are_not_multiples_of_16_bytes():
    for name, text in compiled_layout("contiguous", 36).items():
        assert not re.search(WIDE, text), name
