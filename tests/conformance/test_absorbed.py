"""`qv`, the absorbed form of multi-head latent attention: scores are scale * (q k + qv v)."""

from __future__ import annotations

import pytest
import torch

import flashtile
from flashtile.testing import DTYPES, cu_seqlens, generator, normal, qkv

from .caches import Cache
from .harness import Options, Sizes, check_dense, check_varlen, resolve

pytestmark = pytest.mark.usefixtures("poisoned_buffers")

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t).removeprefix("torch."))
LATENT = Sizes(M=9, N=21, Hq=4, Hk=1, D=12, Dv=40)


def with_qv(names: str, *lead: int) -> Options:
    """The options in `names`, and qv of the leading sizes `lead`; by default those of a batch."""

    def make(g, s, dtype):
        rows = lead or (s.B, s.M)
        return resolve(names, g, s, dtype) | {
            "qv": normal(g, *rows, s.Hq, s.value_dim, dtype=dtype)
        }

    return make


@dtypes
def test_dense(dtype, backend, seed):
    check_dense(LATENT, with_qv("nothing"), dtype, backend, seed)


@pytest.mark.parametrize(
    "options",
    [
        "scale",
        "causal",
        "window + sink",
        "softcap + alibi",
        "bias",
        "dropout",
        "seqused",
        "block mask",
    ],
)
def test_with_other_options(options, backend, seed):
    check_dense(LATENT, with_qv(options), torch.float32, backend, seed)


def test_several_key_heads(backend, seed):
    check_dense(Sizes(D=8, Dv=24), with_qv("causal"), torch.float32, backend, seed)


def test_packed(backend, seed):
    lengths = [5, 0, 9]
    s = Sizes(B=3, M=9, N=21, Hq=4, Hk=1, D=12, Dv=40)
    check_varlen(
        lengths, [3, 7, 21], s, with_qv("causal", sum(lengths)), torch.float32, backend, seed
    )


@dtypes
@pytest.mark.parametrize("page_size", [0, 8])
def test_cache(dtype, page_size, backend, seed):
    """New keys and values are appended first, and the scores read them."""
    c = Cache(seed, dtype, Hk=1, D=12, Dv=40)
    if page_size:
        c.to_pages(page_size)
    qv = normal(c.g, 3, c.M, c.Hq, 40, dtype=dtype)
    c.check(backend, **c.new_tokens(), qv=qv, causal=True)


def test_cache_with_packed_queries(backend, seed):
    c = Cache(seed, Hk=1, D=12, Dv=40)
    c.q = normal(c.g, 6, c.Hq, 12)
    packing = {"cu_seqlens_q": cu_seqlens([3, 1, 2]), "max_seqlen_q": 3}
    c.check(backend, qv=normal(c.g, 6, c.Hq, 40), **packing)


def test_rotation_leaves_qv_as_it_is(backend, seed):
    c = Cache(seed, Hk=1, D=12, Dv=40)
    angles = torch.rand(40, 4, generator=c.g)
    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    qv = normal(c.g, 3, c.M, c.Hq, 40)
    c.check(backend, **c.new_tokens(), **rotary, qv=qv, causal=True)


@pytest.mark.parametrize("values_first", [True, False])
def test_views_of_one_buffer_are_not_copied(values_first, backend, seed, monkeypatch):
    """If keys and values are adjacent in one buffer, the backend reads the buffer."""
    g = generator(seed)
    q, qv = normal(g, 2, 3, 4, 8), normal(g, 2, 3, 4, 24)
    latents = normal(g, 2, 11, 1, 32)
    v, k = latents.split((24, 8), dim=-1) if values_first else latents.split((8, 24), dim=-1)[::-1]
    wanted = flashtile.attention(q, k.clone(), v.clone(), qv=qv, backend=backend)
    copied = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda x, *how, **kw: copied.append(x) or cat(x, *how, **kw))
    out = flashtile.attention(q, k, v, qv=qv, backend=backend)
    torch.testing.assert_close(out, wanted)
    assert len(copied) == 1  # queries


@pytest.mark.parametrize("only", ["k", "v"])
def test_a_view_of_one_buffer_has_its_gradient_where_the_other_one_has_none(only, backend, seed):
    """Read as one buffer, the gradient would be missing: it is no part of the history."""
    g = generator(seed)
    q, qv = normal(g, 2, 3, 4, 8), normal(g, 2, 3, 4, 24)
    latents = normal(g, 2, 11, 1, 32)
    grads = []
    for copy in (lambda x: x, torch.clone):
        given = dict(zip("vk", map(copy, latents.split((24, 8), dim=-1)), strict=True))
        leaf = given[only].requires_grad_()
        flashtile.attention(q, **given, qv=qv, backend=backend).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_views_of_one_buffer_have_gradients(backend, seed):
    g = generator(seed)
    q, qv = normal(g, 2, 3, 4, 8), normal(g, 2, 3, 4, 24)
    latents = normal(g, 2, 11, 1, 32)
    grads = []
    for copy in (lambda x: x, torch.clone):
        leaf = latents.clone().requires_grad_()
        v, k = (copy(x) for x in leaf.split((24, 8), dim=-1))
        flashtile.attention(q, k, v, qv=qv, backend=backend).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_autocast_casts_qv(seed):
    q, k, v = qkv(generator(seed), B=1, M=3, N=5, Hq=2, Hk=1, D=8, Dv=16)
    qv = normal(generator(seed), 1, 3, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = flashtile.attention(q, k, v, qv=qv)
        half = [x.bfloat16() for x in (q, k, v, qv)]
        assert torch.equal(out, flashtile.attention(*half[:3], qv=half[3]))


@pytest.mark.parametrize(
    ("qv", "error", "message"),
    [
        (lambda x: x[..., :-1], ValueError, r"qv: got shape \(2, 9, 4, 39\), want \(2, 9, 4, 40\)"),
        (lambda x: x[:, :1], ValueError, r"qv: got shape \(2, 1, 4, 40\)"),
        (lambda x: x.half(), TypeError, "qv: got dtype torch.float16, want torch.float32"),
        (lambda x: x.tolist(), TypeError, "qv: got list"),
        (lambda x: x.to("meta"), ValueError, "qv: got device meta"),
    ],
)
def test_refused(qv, error, message, seed):
    g = generator(seed)
    q, k, v = qkv(g, B=2, M=9, N=21, Hq=4, Hk=1, D=12, Dv=40)
    given = qv(normal(g, 2, 9, 4, 40))
    with pytest.raises(error, match=message):
        flashtile.attention(q, k, v, qv=given)
    cache = torch.zeros(2, 32, 1, 12), torch.zeros(2, 32, 1, 40)
    new = {"k": torch.ones(2, 9, 1, 12), "v": torch.ones(2, 9, 1, 40)}
    with pytest.raises(error, match=message):
        flashtile.attention_with_kvcache(q, *cache, **new, cache_seqlens=3, qv=given)
    assert not cache[0].any()


def test_float8_is_refused():
    q, k, v = (torch.zeros(1, 3, 1, d).to(torch.float8_e4m3fn) for d in (16, 16, 32))
    qv = torch.zeros(1, 3, 1, 32).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="qv: cannot be combined with float8"):
        flashtile.attention(q, k, v, qv=qv)
    with pytest.raises(NotImplementedError, match="qv: cannot be combined with float8"):
        flashtile.attention_with_kvcache(q.half(), k, v, qv=qv.half())


def test_the_cache_is_not_written_when_no_backend_can(seed):
    """Keys and values of 600 columns together are too many; the error comes before the append."""
    c = Cache(seed, Hk=1, D=100, Dv=500)
    with pytest.raises(NotImplementedError, match="head_dim=600"):
        flashtile.attention_with_kvcache(
            c.q, c.k_cache, c.v_cache, **c.new_tokens(), cache_seqlens=c.seqlens,
            qv=normal(c.g, 3, c.M, c.Hq, 500),
        )  # fmt: skip
    assert c.k_cache[2, 20:].isnan().all()


def test_explain(seed):
    q, k, v = qkv(generator(seed), B=1, M=3, N=5, Hq=2, Hk=1, D=8, Dv=16)
    report = str(flashtile.explain(q, k, v, qv=normal(generator(seed), 1, 3, 2, 16)))
    assert "head dim 24 (values 16)" in report
