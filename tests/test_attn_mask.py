"""`attn_mask` and `key_padding_mask` around the backends: PyTorch, errors, `explain`, tracers."""

from itertools import product

import pytest
import torch

import flashtile
from flashtile.call import converted_masks
from flashtile.call.converted_masks import block_mask
from flashtile.masks import BlockMask
from flashtile.testing import attention_reference, generator, normal, qkv


@pytest.fixture
def call():
    return dict(zip("qkv", qkv(generator(0), B=2, M=9, N=11, Hq=4, Hk=4, D=8), strict=True))


MATRIX = torch.rand(9, 11, generator=generator(1)) < 0.5
KEEP = torch.arange(11) < torch.tensor([[4], [11]])


@pytest.mark.parametrize("mask", [MATRIX, MATRIX.float()], ids=["bool", "floating"])
def test_means_what_it_means_in_pytorch(mask, call):
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in call.values()), attn_mask=mask
    )
    torch.testing.assert_close(flashtile.attention(**call, attn_mask=mask).transpose(1, 2), wanted)


BAD = {
    "attn_mask of integers": ("attn_mask", MATRIX.int()),
    "attn_mask of float8": ("attn_mask", torch.zeros(9, 11).to(torch.float8_e4m3fn)),
    "attn_mask of other lengths": ("attn_mask", MATRIX[:, :7]),
    "attn_mask of rank 5": ("attn_mask", torch.zeros(1, 1, 1, 9, 11)),
    "attn_mask is a list": ("attn_mask", [True]),
    "attn_mask on meta": ("attn_mask", MATRIX.to("meta")),
    "key_padding_mask of integers": ("key_padding_mask", KEEP.int()),
    "key_padding_mask of floats": ("key_padding_mask", KEEP.float()),
    "key_padding_mask without a batch": ("key_padding_mask", KEEP[0]),
    "key_padding_mask of other lengths": ("key_padding_mask", KEEP[:, :5]),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case, call):
    name, mask = BAD[case]
    with pytest.raises((TypeError, ValueError), match=f"{name}: "):
        flashtile.attention(**call, **{name: mask})
    with pytest.raises((TypeError, ValueError), match=f"{name}: "):
        flashtile.explain(**call, **{name: mask})


def test_a_bad_bias_is_named(call):
    with pytest.raises(ValueError, match="bias: got shape"):
        flashtile.attention(**call, bias=torch.zeros(9, 10), attn_mask=MATRIX.float())
    with pytest.raises(ValueError, match="q: got shape"):
        flashtile.attention(call["q"][0], call["k"], call["v"], attn_mask=MATRIX)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_the_other_functions_say_what_to_use(name, call):
    packed = {n: x.flatten(0, 1) for n, x in call.items()}
    with pytest.raises(TypeError, match=f"attention_varlen.*{name}.*want .*(bias|seqused_k)"):
        flashtile.attention_varlen(**packed, **{name: MATRIX})
    cache = {"q": call["q"], "k_cache": call["k"], "v_cache": call["v"]}
    with pytest.raises(TypeError, match=f"attention_with_kvcache.*{name}.*want .*(bias|seqlens)"):
        flashtile.attention_with_kvcache(**cache, **{name: MATRIX})
    with pytest.raises(TypeError, match=name):
        flashtile.explain(**packed, cu_seqlens_q=torch.tensor([0, 18]), **{name: MATRIX})


@pytest.mark.parametrize("rows", [1, 300])
def test_a_tile_is_as_small_as_the_call_and_no_larger_than_memory_allows(rows):
    for M, N, tile in ((300, 9, (256, 16)), (300, 700, (256, 256)), (33, 9, (64, 16))):
        mask = torch.ones(1, 1, min(rows, M), N, dtype=torch.bool)
        assert block_mask(mask, M, N).tile_size == tile


def test_explain_sees_the_masks(call, monkeypatch):
    for masks in ({"attn_mask": MATRIX}, {"key_padding_mask": KEEP}):
        problem = flashtile.explain(**call, **masks).problem
        assert (problem.block_tile, problem.has_bias) == (None, True)  # a single tile
        for tile in ((8, 16), (16, 8)):
            with monkeypatch.context() as patch:
                patch.setattr(converted_masks, "CPU_TILE", tile)
                problem = flashtile.explain(**call, **masks).problem
            assert (problem.block_tile, problem.has_bias) == ((min(tile[0], 16), tile[1]), False)
    problem = flashtile.explain(**call, attn_mask=MATRIX.float().requires_grad_()).problem
    assert problem.has_bias
    assert problem.bias_needs_grad
    assert not flashtile.explain(**call, attn_mask=None, key_padding_mask=None).problem.has_bias


def test_repeated_calls_take_the_new_masks(call):
    for seed in range(3):
        scores = normal(generator(seed), 9, 11)
        wanted = attention_reference(**call, bias=scores).out
        torch.testing.assert_close(flashtile.attention(**call, attn_mask=scores), wanted.float())
        keep = torch.rand(2, 11, generator=generator(seed)) < 0.5
        wanted = attention_reference(**call, block_mask=keep[:, None, None]).out
        got = flashtile.attention(**call, key_padding_mask=keep)
        torch.testing.assert_close(got, wanted.float())


@pytest.mark.slow
@pytest.mark.parametrize("mask", [MATRIX, MATRIX.float()], ids=["bool", "floating"])
def test_compiled_with_gradients(mask, call):
    leaves = [x.requires_grad_() for x in call.values()]
    if mask.is_floating_point():
        leaves.append(mask := mask.clone().requires_grad_())

    def run(function):
        out, lse = function(
            **call, attn_mask=mask, key_padding_mask=KEEP, causal=True, return_lse=True
        )
        seen = lse.isfinite()
        return out, lse, *torch.autograd.grad(out.sum() + lse[seen].sum(), leaves)

    compiled = torch.compile(flashtile.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for got, wanted in zip(run(compiled), run(flashtile.attention), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("tile", [converted_masks.CPU_TILE, (4, 4)])
def test_fake_tensors_and_vmap(tile, call, monkeypatch):
    monkeypatch.setattr(converted_masks, "CPU_TILE", tile)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in call.items()}
        mask, keep = mode.from_tensor(MATRIX), mode.from_tensor(KEEP)
        out = flashtile.attention(**fake, attn_mask=mask, key_padding_mask=keep)
        assert out.shape == (2, 9, 4, 8)
    masks = torch.rand(3, 9, 11, generator=generator(2)) < 0.5
    got = torch.vmap(lambda mask: flashtile.attention(**call, attn_mask=mask))(masks)
    wanted = torch.stack([flashtile.attention(**call, attn_mask=mask) for mask in masks])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("rows", [1, 9])
def test_where_the_host_cannot_read_a_mask_of_several_tiles_it_is_no_bias(rows, monkeypatch):
    """In which NaN in a hidden key would reach every row on a GPU."""
    monkeypatch.setattr(converted_masks, "CPU_TILE", (4, 4))
    masks = torch.rand(3, 2, 1, rows, 11, generator=generator(3)) < 0.5
    masks[..., 8:], masks[0, 0] = False, True

    def parts(mask):
        found = converted_masks.options_of(mask, 9, 11)["block_mask"]
        return found.kinds, found.partial_index, found.partial_tiles

    compiled = torch.compile(parts, fullgraph=True, dynamic=True, backend="eager")
    mapped = zip(*torch.vmap(parts)(masks), strict=True)
    for mask, of_transform in zip(masks, mapped, strict=True):
        for found in (of_transform, compiled(mask)):
            dense = BlockMask(*found, (9, 11)).to_dense(9, 11)
            assert torch.equal(dense, mask.expand(2, 1, 9, 11))
            assert torch.equal(found[0], parts(mask)[0])


def test_lengths_share_the_graphs_of_a_compiler():
    """One for each answer to whether there are several tiles of queries, and of keys."""
    graphs = []

    def kept(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def parts(mask):
        found = block_mask(mask, *mask.shape[2:])
        return found.kinds, found.partial_index, found.partial_tiles

    compiled = torch.compile(parts, fullgraph=True, dynamic=True, backend=kept)
    for M, N in product((20, 40, 300), (21, 41, 301)):
        mask = torch.rand(1, 2, M, N, generator=generator(M + N)) < 0.5
        assert torch.equal(BlockMask(*compiled(mask), (M, N)).to_dense(M, N), mask)
    assert len(graphs) == 4


def test_exported_masks_have_any_number_of_tiles():
    """More than one: a tile has 256 queries and keys on a CPU."""

    class Parts(torch.nn.Module):
        def forward(self, mask):
            found = block_mask(mask, *mask.shape[2:])
            return found.kinds, found.partial_index, found.partial_tiles

    M, N = (torch.export.Dim(name, min=257, max=2000) for name in "MN")
    example = torch.ones(1, 1, 300, 310, dtype=torch.bool)
    exported = torch.export.export(Parts(), (example,), dynamic_shapes=({2: M, 3: N},)).module()
    mask = torch.rand(1, 1, 700, 513, generator=generator(1)) < 0.5
    assert torch.equal(BlockMask(*exported(mask), (700, 513)).to_dense(700, 513), mask)
