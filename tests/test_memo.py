"""A call that equals an earlier one skips the checks; its key must hold all that they look at."""

import pytest
import torch

import flashtile
from flashtile import autograd
from flashtile.call import memo, prepare
from flashtile.call.layouts import Dense


def qkv(**changes):
    sizes = {"dtype": torch.float32, "heads": 4} | changes
    heads, kind = sizes["heads"], {"dtype": sizes["dtype"]}
    return (
        torch.randn(2, 5, heads, 8, **kind),
        torch.randn(2, 7, 2, 8, **kind),
        torch.randn(2, 7, 2, 8, **kind),
    )


@pytest.fixture
def checked(monkeypatch):
    """A list with an entry for each call that was checked, of none known before."""
    flashtile.clear_caches()
    seen = []
    describe = prepare.describe

    def counted(*call):
        seen.append(call)
        return describe(*call)

    monkeypatch.setattr(prepare, "describe", counted)
    return seen


def test_a_repeated_call_is_not_checked_again(checked):
    flashtile.attention(*qkv(), causal=True, softcap=11.0)
    first = len(checked)
    again = qkv()
    out = flashtile.attention(*again, causal=True, softcap=11.0)
    assert len(checked) == first
    flashtile.clear_caches()
    fresh = flashtile.attention(*again, causal=True, softcap=11.0)
    assert len(checked) == first + 1
    assert torch.equal(out, fresh)


def test_a_tensor_to_write_to_is_checked_each_time(checked):
    q, k, v = qkv()
    want = flashtile.attention(q, k, v)
    first = len(checked)
    out = torch.empty_like(q)
    assert flashtile.attention(q, k, v, out=out) is out
    assert torch.equal(out, want)
    with pytest.raises(ValueError, match="out: got shape"):
        flashtile.attention(q, k, v, out=torch.empty(2, 5, 4, 7))
    assert len(checked) == first


def test_a_repeated_packed_call_is_not_checked_again_and_uses_the_new_lengths(checked):
    q, k, v = (x.flatten(0, 1) for x in qkv())
    lengths = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14]).int()
    others = torch.tensor([0, 3, 10], dtype=torch.int32), torch.tensor([0, 9, 14]).int()
    first = flashtile.attention_varlen(q, k, v, *lengths, 10, 14)
    count = len(checked)
    second = flashtile.attention_varlen(q, k, v, *others, 10, 14)
    assert len(checked) == count
    assert not torch.equal(first, second)
    alone = flashtile.attention(q[None, :3], k[None, :9], v[None, :9])
    torch.testing.assert_close(second[:3], alone[0])


def cache_call(length, **changes):
    q, new = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    cache = {name: torch.randn(6, 4, 2, 8) for name in ("k_cache", "v_cache")}
    pages = torch.randperm(6).int().view(2, 3)
    lengths = torch.tensor([length, 5], dtype=torch.int32)
    call = {"q": q, **cache, "k": new, "v": new, "cache_seqlens": lengths, "page_table": pages}
    return call | changes


def test_a_repeated_cache_call_is_not_checked_again_and_uses_the_new_tensors(checked, monkeypatch):
    for length in (3, 0, 11):
        call = cache_call(length)
        copy = {name: x.clone() for name, x in call.items()}
        out = flashtile.attention_with_kvcache(**call)
        assert len(checked) == 1
        with monkeypatch.context() as patch:
            patch.setattr(memo, "decisions", {})
            fresh = flashtile.attention_with_kvcache(**copy)
        assert len(checked) == 2
        assert torch.equal(out, fresh)
        assert torch.equal(call["k_cache"], copy["k_cache"])
        page, slot = call["page_table"][0, length // 4], length % 4
        assert torch.equal(call["k_cache"][page, slot], call["k"][0, 0])
        del checked[1:]


def test_the_next_token_of_a_cache_is_not_checked_again(checked):
    """Whether its length is a tensor or a number, of which every token has another."""
    for number in (False, True):
        del checked[:]
        for length in (3, 4, 5):
            call = cache_call(length, cache_seqlens=length) if number else cache_call(length)
            flashtile.attention_with_kvcache(**call)
        assert len(checked) == 1


@pytest.mark.parametrize("length", [12, -1, True, 3.0, 2**40])
def test_a_number_of_tokens_is_checked_each_time(length, checked):
    flashtile.attention_with_kvcache(**cache_call(3, cache_seqlens=11))
    bad = cache_call(3, cache_seqlens=length)
    before = bad["k_cache"].clone()
    with pytest.raises((TypeError, ValueError), match="cache_seqlens: got"):
        flashtile.attention_with_kvcache(**bad)
    assert torch.equal(bad["k_cache"], before)


def test_a_number_of_tokens_is_not_taken_for_the_whole_cache(checked):
    call = cache_call(3, page_table=None, k=None, v=None, cache_seqlens=2)
    call["q"] = torch.randn(6, 1, 4, 8)
    whole = flashtile.attention_with_kvcache(**call | {"cache_seqlens": None})
    short = flashtile.attention_with_kvcache(**call)
    assert not torch.equal(short, whole)
    assert torch.equal(flashtile.attention_with_kvcache(**call | {"cache_seqlens": None}), whole)


def tril_mask(M=5, N=7, batch=1):
    pattern = torch.ones(batch, 1, M, N, dtype=torch.bool).tril(N - M)
    return flashtile.BlockMask.from_dense(pattern, (4, 4))


def test_a_repeated_call_with_a_block_mask_is_not_checked_again(checked):
    for _ in range(3):
        flashtile.attention(*qkv(), block_mask=tril_mask())
    assert len(checked) == 1


def test_the_tiles_are_those_of_the_new_block_mask(checked):
    """Masks of equal shapes share an entry; another mask, or new values in one, counts."""
    q, k, v = qkv()
    for seed in range(3):
        pattern = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.6
        mask = flashtile.BlockMask.from_tiles(pattern, (1, 1))
        out = flashtile.attention(q, k, v, block_mask=mask)
        bias = torch.zeros(5, 7).masked_fill(~pattern, float("-inf"))
        torch.testing.assert_close(out, flashtile.attention(q, k, v, bias=bias))
        mask.kinds.fill_(1)
        out = flashtile.attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out, flashtile.attention(q, k, v))
    assert len(checked) == 3  # one of each kind: with a mask, with a bias, with neither


@pytest.mark.parametrize(
    ("lengths", "batch", "message"),
    [((5, 6), 1, "got a mask for 5 queries and 6 keys"), ((5, 7), 3, "got a mask for batch 3")],
)
def test_a_bad_block_mask_after_a_good_one_is_refused(lengths, batch, message):
    """Masks for 6 and for 7 keys have equal tiles; only their lengths differ."""
    flashtile.attention(*qkv(), block_mask=tril_mask())
    with pytest.raises(ValueError, match=f"block_mask: {message}"):
        flashtile.attention(*qkv(), block_mask=tril_mask(*lengths, batch))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cache_seqlens", torch.zeros(3, dtype=torch.int32)),
        ("page_table", torch.zeros(2, 3)),
        ("k", torch.zeros(2, 1, 3, 8)),
        ("out", torch.zeros(2, 1, 4, 7)),
        ("v_cache", torch.zeros(6, 4, 2, 8, dtype=torch.float16)),
    ],
)
def test_a_bad_cache_call_after_a_good_one_is_refused(name, change):
    good = cache_call(3, out=torch.zeros(2, 1, 4, 8))
    for _ in range(2):
        flashtile.attention_with_kvcache(**good)
    bad = cache_call(3, **{name: change})
    before = bad["k_cache"].clone()
    with pytest.raises((ValueError, TypeError), match=name):
        flashtile.attention_with_kvcache(**bad)
    assert torch.equal(bad["k_cache"], before)


def test_cache_values_are_checked_after_a_call_without(monkeypatch):
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    flashtile.attention_with_kvcache(**cache_call(3))
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    with pytest.raises(RuntimeError, match="cache_seqlens"):
        flashtile.attention_with_kvcache(**cache_call(12))


def test_optional_tensors_are_the_new_ones():
    q, k, v = qkv()
    first = flashtile.attention(q, k, v, bias=torch.zeros(5, 7))
    bias = torch.randn(5, 7)
    second = flashtile.attention(q, k, v, bias=bias)
    want = flashtile.attention(q, k, v, bias=bias.expand(2, 4, 5, 7))
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, want)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"softmax_scale": True}, TypeError),
        ({"softcap": -1.0}, ValueError),
        ({"window_size": (True, 0)}, TypeError),
        ({"sink": torch.zeros(5)}, ValueError),
        ({"alibi_slopes": torch.zeros(4, dtype=torch.int32)}, TypeError),
        ({"backend": "abacus"}, ValueError),
    ],
)
def test_a_bad_call_after_a_good_one_is_refused(changes, error):
    good = {
        "softmax_scale": 1.0,
        "softcap": 1.0,
        "window_size": (1, 0),
        "sink": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "backend": "cpu",
    }
    name = next(iter(changes))
    flashtile.attention(*qkv(), **{name: good[name]})
    with pytest.raises(error, match=name):
        flashtile.attention(*qkv(), **changes)


@pytest.mark.parametrize("names", [("sink", "alibi_slopes"), ("seqused_q", "seqused_k")])
def test_the_same_tensor_as_another_argument_is_another_call(names, monkeypatch):
    q, k, v = qkv()
    x = torch.ones(4) if "sink" in names else torch.tensor([2, 3], dtype=torch.int32)
    for name in (*names, *names):  # the first time makes an entry, the second time uses it
        with monkeypatch.context() as patch:
            patch.setattr(memo, "decisions", {})
            want = flashtile.attention(q, k, v, **{name: x})
        assert torch.equal(flashtile.attention(q, k, v, **{name: x}), want)


def _dense_with_one_tensor():
    x, (q, k, v) = torch.randn(2, 5, 2, 8), torch.randn(3, 2, 5, 2, 8)
    return flashtile.attention, {"q": x, "k": x, "v": x}, {"q": q, "k": k, "v": v}


def _packed_with_one_tensor():
    q, k, v = torch.randn(3, 9, 2, 8)
    given = {"q": q, "k": k, "v": v, "max_seqlen_q": 9, "max_seqlen_k": 9}
    first, second = (torch.tensor([0, n, 9], dtype=torch.int32) for n in (4, 7))
    names = "cu_seqlens_q", "cu_seqlens_k"
    same = given | dict.fromkeys(names, first)
    return flashtile.attention_varlen, same, same | {"cu_seqlens_k": second}


def _cached_with_one_tensor():
    q, k, v = torch.randn(3, 2, 1, 2, 8)
    caches, (cos, sin) = torch.randn(2, 2, 9, 2, 8), torch.randn(2, 9, 4)
    first, second = (torch.tensor(x, dtype=torch.int32) for x in ([3, 5], [6, 2]))
    same = {"q": q, "k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "causal": True}
    same |= dict.fromkeys(("rotary_seqlens", "cache_seqlens"), first)

    def attend(**given):
        return flashtile.attention_with_kvcache(
            k_cache=caches[0].clone(), v_cache=caches[1].clone(), **given
        )

    return attend, same, same | {"cache_seqlens": second}


@pytest.mark.parametrize(
    "make", [_dense_with_one_tensor, _packed_with_one_tensor, _cached_with_one_tensor]
)
def test_a_tensor_that_is_given_twice_may_be_two_later(make, checked):
    function, same, other = make()
    got = [function(**given) for given in (same, other, same, other)]
    assert len(checked) == 1
    for given, out in zip((same, other) * 2, got, strict=True):
        flashtile.clear_caches()
        assert torch.equal(out, function(**given))


def test_other_tensors_are_checked():
    q, k, v = qkv()
    flashtile.attention(q, k, v)
    with pytest.raises(TypeError, match="k: got dtype"):
        flashtile.attention(q, k.double(), v)
    with pytest.raises(ValueError, match="k: got 2 heads"):
        flashtile.attention(*qkv(heads=3))
    with pytest.raises(TypeError, match="q: got list"):
        flashtile.attention([1.0], k, v)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("cached", [False, True])
def test_a_tensor_of_another_layout_or_device_is_refused_after_a_good_call(
    on_gpu, cached, monkeypatch
):
    """Such a tensor has no address, and perhaps neither a shape nor strides."""
    monkeypatch.setattr(memo, "_has_launches", lambda x: on_gpu)
    q, k, v = qkv()
    function = flashtile.attention_with_kvcache if cached else flashtile.attention
    function(q, k, v)
    nested = torch.nested.nested_tensor(list(k))
    others = [k.to_sparse(), k.to_sparse(1), k.to_mkldnn(), nested]
    if not on_gpu:  # where meta tensors have another index than those on the GPU
        others.append(k.to("meta"))
    for other in others:
        with pytest.raises((TypeError, ValueError), match=r"^k(_cache)?: got"):
            function(q, other, v)


def test_gradients_are_recorded_after_a_call_without():
    q, k, v = qkv()
    flashtile.attention(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        assert not flashtile.attention(q, k, v).requires_grad
    out = flashtile.attention(q, k, v)
    assert "DirectAttention" in type(out.grad_fn).__name__  # not the backend's own operations


def test_a_forced_backend_is_noticed():
    flashtile.attention(*qkv())
    with flashtile.backend("triton"), pytest.raises(NotImplementedError, match="triton"):
        flashtile.attention(*qkv())


def test_deterministic_mode_is_noticed():
    q, k, v = qkv()
    before = prepare.prepare((q, k, v), Dense(), {}).problem
    torch.use_deterministic_algorithms(True)
    try:
        after = prepare.prepare((q, k, v), Dense(), {}).problem
    finally:
        torch.use_deterministic_algorithms(False)
    assert (before.options.deterministic, after.options.deterministic) == (False, True)


def test_autocast_is_noticed():
    flashtile.attention(*qkv())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flashtile.attention(*qkv()).dtype == torch.bfloat16


def test_values_are_checked_when_asked_for(monkeypatch):
    q, k, v = (x.flatten(0, 1) for x in qkv())
    good = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14]).int()
    bad = good[0], torch.tensor([0, 9, 7], dtype=torch.int32)
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    flashtile.attention_varlen(q, k, v, *good, 5, 14)
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        flashtile.attention_varlen(q, k, v, *bad, 5, 14)


def test_dispatch_modes_and_profilers_see_the_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    q, k, v = qkv()
    flashtile.attention(q, k, v)
    with Recorder():
        flashtile.attention(q, k, v)
    assert "flashtile.attention_forward.default" in seen
    with torch.profiler.profile() as profile:
        flashtile.attention(q, k, v)
    assert any(event.key == "flashtile::attention_forward" for event in profile.key_averages())


def test_without_a_dispatch_mode_the_call_skips_the_op(monkeypatch):
    def refuse(*args):
        raise AssertionError("the op was called")

    monkeypatch.setattr(autograd.torch.ops.flashtile, "attention_forward", refuse)
    flashtile.attention(*qkv())


KINDS = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": torch.zeros(5, 7)},
    "attn_mask": {"attn_mask": torch.ones(5, 7, dtype=torch.bool)},
    "key_padding_mask": {"key_padding_mask": torch.ones(2, 7, dtype=torch.bool)},
    "lengths": {"seqused_k": torch.tensor([3, 7], dtype=torch.int32)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grads", [False, True])
def test_each_kind_of_call_is_checked_once(kind, grads, checked):
    for _ in range(3):
        leaves = [x.requires_grad_(grads) for x in qkv()]
        out = flashtile.attention(*leaves, **KINDS[kind])
        assert out.requires_grad == grads
    assert len(checked) == 1


def test_other_strides_share_an_entry_and_are_read_as_they_are(checked):
    """Whole, sliced and transposed tensors; the backend sees the new strides each time."""
    q, k, v = qkv()
    want = flashtile.attention(q, k, v)
    for number in range(4):
        others = [
            x if number % 2 else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)
        ]
        if number > 1:
            others = [torch.stack((x, x), dim=-1)[..., 0] for x in others]
        torch.testing.assert_close(flashtile.attention(*others), want)
    assert len(checked) == 1


def test_another_dtype_or_another_tensor_with_a_gradient_is_another_call(checked):
    q, k, v = qkv()
    assert flashtile.attention(q, k, v).dtype == torch.float32
    for dtype in (torch.float64, torch.bfloat16):
        assert flashtile.attention(q.to(dtype), k.to(dtype), v.to(dtype)).dtype == dtype
    for name in range(3):
        leaves = [x.clone().requires_grad_(name == index) for index, x in enumerate((q, k, v))]
        out = flashtile.attention(*leaves)
        out.sum().backward()
        assert [x.grad is not None for x in leaves] == [name == index for index in range(3)]
    assert len(checked) == 6


def test_inference_tensors_after_plain_ones_and_before():
    q, k, v = qkv()
    with torch.inference_mode():
        inside = [x.clone() for x in (q, k, v)]
    want = flashtile.attention(q, k, v)
    for _ in range(2):
        assert torch.equal(flashtile.attention(*inside), want)
        with torch.inference_mode():
            assert flashtile.attention(*inside).is_inference()
            assert torch.equal(flashtile.attention(q, k, v), want)
        leaf = q.clone().requires_grad_()
        assert flashtile.attention(leaf, k, v).requires_grad


def test_a_subclass_is_checked_each_time_and_sees_the_op(checked):
    class Named(torch.Tensor):
        pass

    q, k, v = qkv()
    want = flashtile.attention(q, k, v)
    for count in (2, 3):
        out = flashtile.attention(q.as_subclass(Named), k, v)
        assert type(out) is Named
        assert torch.equal(out.as_subclass(torch.Tensor), want)
        assert len(checked) == count


def test_threads_share_what_was_checked_but_not_the_forced_backend(checked):
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = qkv()
    want = flashtile.attention(q, k, v)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(2) as pool:
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                torch.testing.assert_close(pool.submit(flashtile.attention, q, k, v).result(), want)
        finally:
            torch.set_num_threads(before)
        assert len(checked) == 1
        with flashtile.backend("triton"):
            assert torch.equal(pool.submit(flashtile.attention, q, k, v).result(), want)
    assert len(checked) == 1


def test_strides_and_alignment_decide_only_what_is_launched(checked, monkeypatch):
    q, k, v = qkv()
    others = (q.transpose(1, 2).contiguous().transpose(1, 2), torch.empty(281)[1:].view(2, 5, 4, 7))
    others[1].copy_(q[..., :7])
    calls = [(q, k, v), (others[0], k, v), (q[..., :7], k[..., :7], v)]
    calls.append((others[1], k[..., :7], v))
    for call in calls:
        flashtile.attention(*call)
    assert len(checked) == 2  # head dims 8 and 7
    flashtile.clear_caches()
    monkeypatch.setattr(memo, "_has_launches", lambda x: True)
    checked.clear()
    for call in 2 * calls:
        flashtile.attention(*call)
    assert len(checked) == 4


def test_a_view_of_the_keys_decides_only_what_is_launched(checked, monkeypatch):
    """Kernels read the values of latents from their tiles of keys."""
    q, latents = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 1, 8)
    calls = [(q, latents, x[..., :6]) for x in (latents, torch.randn_like(latents))]
    for call in calls:
        flashtile.attention(*call)
    assert len(checked) == 1
    flashtile.clear_caches()
    monkeypatch.setattr(memo, "_has_launches", lambda x: True)
    checked.clear()
    for call in 2 * calls:
        flashtile.attention(*call)
    assert len(checked) == 2


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_call_under_a_transform_has_no_launches():
    x = torch.empty(2).as_subclass(OnGPU)
    seen = []

    def look(y):
        seen.append(memo._has_launches(x))
        return y

    look(0)
    torch.func.vmap(look)(torch.empty(3))
    look(0)
    assert seen == [True, False, True]
    assert not memo._has_launches(torch.empty(2))
    assert memo.key_of((), (3, torch.empty(2))) is None
