"""PyTorch's features around a call on a GPU: dispatch, streams, graphs, compilation, autocast,
checkpoints, training.

The conformance suite and `test_gpu_kernels.py` check the results of the kernels.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import flashtile
from flashtile.testing import assert_close, attention_reference, generator, normal

pytestmark = pytest.mark.gpu

SHAPES = ((2, 65, 6, 64), (2, 129, 2, 64), (2, 129, 2, 64))


def leaves(dtype, device="cpu"):
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=g).to(torch.bfloat16) for shape in SHAPES]
    return [x.to(device, dtype).requires_grad_() for x in made]


def run(call, inputs):
    """Outputs and gradients of `call(*inputs)`, on the CPU."""
    out, lse = call(*inputs)
    seed = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=seed).to(out)
    grads = torch.autograd.grad(out, inputs, dout)
    return [x.detach().cpu() for x in (out, lse, *grads)]


def plain(call, inputs):
    """The same in bfloat16 by the plain tiles, the precision that the rule compares with."""
    with flashtile.backend("cpu"):
        return run(call, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "softcap": 5.0},
        {"window_size": (20, 10)},
        {"attention_chunk": 32},
    ],
    ids=str,
)
def test_attention(options):
    def call(q, k, v):
        return flashtile.attention(q, k, v, return_lse=True, **options)

    names = ("out", "lse", "dq", "dk", "dv")
    truth = run(call, leaves(torch.float64))
    low = plain(call, leaves(torch.bfloat16))
    got = run(call, leaves(torch.bfloat16, "cuda"))
    for name, x, exact, rough in zip(names, got, truth, low, strict=True):
        assert_close(name, x, exact, rough, dtype=torch.bfloat16)


def test_compiled_call_equals_the_eager_one():
    q, k, v = leaves(torch.bfloat16, "cuda")
    compiled = torch.compile(
        lambda q, k, v: flashtile.attention(q, k, v, causal=True), fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), flashtile.attention(q, k, v, causal=True))


def test_float32_follows_the_switch_for_tf32():
    """Cached and compiled calls, too, in both passes."""
    inputs = leaves(torch.float32, "cuda")

    def results(call):
        out = call(*inputs, causal=True)
        return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]

    compiled = torch.compile(flashtile.attention, fullgraph=True)
    first = {}
    try:
        for allowed in (False, True, False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            for call in (*[flashtile.attention] * 5, compiled):
                found = results(call)
                assert all(map(torch.equal, found, first.setdefault(allowed, found)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert not any(map(torch.equal, first[False], first[True]))


def spans(seed, rows, keys, intervals):
    """Random intervals of keys of both sequences."""
    g = torch.Generator("cuda").manual_seed(seed)
    shape = (2, 1, rows, intervals)
    starts = torch.randint(-5, keys, shape, device="cuda", generator=g, dtype=torch.int32)
    return flashtile.Spans(starts, starts + 30)


def test_a_compiled_call_makes_and_uses_a_mask_without_waiting():
    q, k, v = leaves(torch.bfloat16, "cuda")

    def call(q, k, v, ends):
        starts = ends.clamp(max=100) - 100
        return flashtile.attention(q, k, v, mask=flashtile.Spans(starts, ends))

    ends = torch.arange(q.shape[1], device="cuda", dtype=torch.int32).view(1, 1, -1, 1)
    wanted = call(q, k, v, ends)
    compiled = torch.compile(call, fullgraph=True)
    compiled(q, k, v, ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = compiled(q, k, v, ends)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, wanted)


def test_dropout_draws_the_mask_of_the_cpu():
    q, k, v = (x.detach() for x in leaves(torch.bfloat16, "cuda"))
    torch.manual_seed(3)
    _, _, probs = flashtile.attention(q, k, v, dropout_p=0.3, return_attn_probs=True)
    torch.manual_seed(3)
    state = flashtile.dropout.draw_rng_state(q.device).cpu()
    coordinates = (torch.arange(2), torch.arange(6), torch.arange(65))
    kept = flashtile.dropout.keep_mask(state, 0.3, *coordinates, torch.arange(129))
    assert torch.equal(probs.cpu() > 0, kept)


@pytest.mark.parametrize("page_size", [0, 16])
def test_cache(page_size):
    g = torch.Generator().manual_seed(2)
    q = torch.randn(3, 2, 4, 64, generator=g)
    new = torch.randn(2, 3, 2, 2, 64, generator=g)
    caches = torch.randn(2, 3, 64, 2, 64, generator=g)
    cos, sin = torch.rand(2, 64, 16, generator=g).unbind(0)
    lengths = torch.tensor([3, 40, 0], dtype=torch.int32)
    table = torch.randperm(12, generator=g).view(3, 4).int() if page_size else None

    def call(device):
        stores = [x.clone().to(device) for x in caches]
        if page_size:
            stores = [x.view(12, 16, 2, 64) for x in stores]
        out = flashtile.attention_with_kvcache(
            q.to(device),
            *stores,
            *(x.to(device) for x in new),
            rotary_cos=cos.to(device),
            rotary_sin=sin.to(device),
            cache_seqlens=lengths.to(device),
            page_table=None if table is None else table.to(device),
            causal=True,
        )
        return [x.cpu() for x in (out, *stores)]

    got, want = call("cuda"), call("cpu")
    for name, x, y in zip(("out", "k_cache", "v_cache"), got, want, strict=True):
        torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")


def test_repeated_runs_agree_bit_for_bit():
    inputs = leaves(torch.bfloat16, "cuda")

    def call(q, k, v):
        return flashtile.attention(q, k, v, causal=True, return_lse=True, deterministic=True)

    first = run(call, inputs)
    for _ in range(50):
        assert all(map(torch.equal, run(call, inputs), first))


@pytest.mark.parametrize("given", [False, True], ids=["own memory", "given memory"])
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "paged"])
def test_a_captured_graph_serves_other_lengths(pages, given):
    """Lengths are read on the device: a graph captured once is replayed as the cache grows."""
    g = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16, generator=g)
    k, v = torch.randn(2, 2, 300, 2, 64, device="cuda", dtype=torch.bfloat16, generator=g)
    table = None
    if pages:
        k, v = (x.unflatten(1, (75, 4)).flatten(0, 1) for x in (k, v))
        table = torch.arange(150, device="cuda", dtype=torch.int32).view(2, 75)
    lengths = torch.tensor([3, 5], device="cuda", dtype=torch.int32)

    def call(**memory):
        how = {"cache_seqlens": lengths, "page_table": table}
        return flashtile.attention_with_kvcache(q, k, v, **how, **memory)

    memory = {}
    if given:
        size = flashtile.workspace_size(2, 1, 8, 64)
        memory["workspace"] = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        memory["out"] = torch.full_like(q, torch.nan)
    call(**memory)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(**memory)
    for new in ([1, 300], [0, 77], [128, 129]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, call()), new


@pytest.mark.parametrize("intervals", [0, 1, 2, 8])
def test_training_inside_a_graph(intervals):
    """Spans are read on the device, as all tensors are: a graph serves other masks as well."""
    q, k, v = (x.detach() for x in leaves(torch.bfloat16, "cuda"))
    options = {"causal": True, "deterministic": True}
    if intervals:
        options["mask"] = spans(0, q.shape[1], k.shape[1], intervals)

    def step():
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = flashtile.attention(*inputs, **options)
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    q.detach().copy_(k[:, : q.shape[1]].repeat_interleave(3, dim=2))
    if intervals:
        other = spans(1, q.shape[1], k.shape[1], intervals)
        for x, y in zip(options["mask"], other, strict=True):
            x.copy_(y)
    graph.replay()
    assert all(map(torch.equal, captured, step()))


def test_two_streams_at_once():
    """Each launch goes to the current stream; streams share nothing."""
    inputs = [torch.randn(4, 512, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    triples = inputs[:3], inputs[3:]

    def step(qkv):
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = flashtile.attention(*leaves, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    wanted = [step(qkv) for qkv in triples]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in triples]
    for _ in range(20):
        got = []
        for stream, qkv in zip(streams, triples, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(qkv))
        torch.cuda.synchronize()
        for mine, theirs in zip(got, wanted, strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_more_than_two_to_the_31_elements(backend):
    """Offsets into q, k, v and out exceed 32 bits; the last heads and rows are still correct."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper backend wants compute capability 9.0")
    B, N, H, D = 2, 2**17 + 5, 66, 128  # 2.2e9 elements each
    q, k, v = (torch.zeros(B, N, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g = torch.Generator("cuda").manual_seed(0)
    for x in (q, k, v):
        x[-1, :, -1].normal_(generator=g)
    rows = slice(-70, None)
    out, lse = flashtile.attention(
        q, k, v, causal=True, window_size=(200, 0), return_lse=True, backend=backend
    )
    last = [x[-1:, -300:, -1:].contiguous() for x in (q, k, v)]
    alone, alone_lse = flashtile.attention(*last, window_size=(200, 0), return_lse=True)
    torch.testing.assert_close(out[-1:, rows, -1:], alone[:, rows], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse[-1:, -1:, rows], alone_lse[..., rows])
    assert not out[0].any()


def test_autocast_computes_in_its_dtype():
    q, k, v = leaves(torch.float32, "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = flashtile.attention(q, k, v, causal=True)
    assert out.dtype == torch.bfloat16
    half = [x.detach().bfloat16() for x in (q, k, v)]
    assert torch.equal(out, flashtile.attention(*half, causal=True))
    for x, grad in zip((q, k, v), torch.autograd.grad(out.float().sum(), (q, k, v)), strict=True):
        assert grad.dtype == torch.float32
        assert grad.shape == x.shape


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_checkpointed_gradients_are_the_same(dropout_p):
    inputs = leaves(torch.bfloat16, "cuda")

    def call(q, k, v):
        return flashtile.attention(q, k, v, causal=True, dropout_p=dropout_p, deterministic=True)

    def gradients(forward):
        torch.manual_seed(5)
        return torch.autograd.grad(forward(*inputs).float().square().sum(), inputs)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)

    assert all(map(torch.equal, gradients(call), gradients(checkpointed)))


def losses(attend, dtype, steps=40):
    """Training losses of a small transformer that learns to repeat a text backwards."""
    torch.manual_seed(0)
    width, heads, length = 128, 4, 96
    embedding = torch.nn.Embedding(64, width)
    layers = torch.nn.ModuleList(
        torch.nn.ModuleDict(
            {
                "norm": torch.nn.LayerNorm(width),
                "qkv": torch.nn.Linear(width, 3 * width),
                "proj": torch.nn.Linear(width, width),
                "mlp": torch.nn.Sequential(
                    torch.nn.LayerNorm(width),
                    torch.nn.Linear(width, 4 * width),
                    torch.nn.GELU(),
                    torch.nn.Linear(4 * width, width),
                ),
            }
        )
        for _ in range(2)
    )
    head = torch.nn.Linear(width, 64)
    model = torch.nn.ModuleList([embedding, layers, head]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    half = torch.randint(64, (16, length // 2), generator=torch.Generator().manual_seed(1))
    text = torch.cat((half, half.flip(1)), 1).cuda()
    curve = []
    for _ in range(steps):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype != torch.float32):
            x = embedding(text[:, :-1])
            for layer in layers:
                q, k, v = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, heads, -1)).unbind(2)
                x = x + layer["proj"](attend(q, k, v).flatten(2))
                x = x + layer["mlp"](x)
            logits = head(x)
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), text[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return torch.tensor(curve)


# In bfloat16 one step's rounding grows over the steps that follow; float32 shows the same curve.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)], ids=str
)
def test_training_follows_the_loss_of_sdpa(dtype, tolerance):
    def ours(q, k, v):
        return flashtile.attention(q, k, v, causal=True)

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    wanted = losses(sdpa, dtype)
    assert wanted[-1] < 0.8 * wanted[0]
    torch.testing.assert_close(losses(ours, dtype), wanted, atol=tolerance, rtol=tolerance)


def test_derivatives_of_higher_order(seed):
    """Forward mode and a second derivative, by the rule."""
    g = generator(seed)
    tensors = [normal(g, 2, 90, h, 32).detach() for h in (4, 2, 2, 4)]

    def derivatives(attend, *tensors):
        q, k, v, direction = tensors
        q.requires_grad_()
        (first,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad((first * direction).sum(), q)
        q = q.detach()
        return second, torch.func.jvp(lambda x: attend(x, k, v), (q,), (direction,))[1]

    def reference(dtype):
        def attend(q, k, v):
            return attention_reference(q, k, v, causal=True, compute_dtype=dtype).out

        return derivatives(attend, *(x.to(dtype) for x in tensors))

    got = derivatives(partial(flashtile.attention, causal=True), *(x.cuda() for x in tensors))
    results = zip(got, reference(torch.float64), reference(torch.float32), strict=True)
    for x, exact, plain in results:
        assert_close("derivative", x.cpu(), exact, plain)
