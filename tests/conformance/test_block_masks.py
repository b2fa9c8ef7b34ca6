"""Block-sparse attention: tiles, FlexAttention masks, FlashAttention-1's function."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask as FlexBlockMask,
)
from torch.nn.attention.flex_attention import (
    create_block_mask,
    create_mask,
    flex_attention,
)

import flashtile
from flashtile.flash_blocksparse_attn_interface import (
    convert_blockmask,
    flash_blocksparse_attn_func,
)
from flashtile.masks import BlockMask
from flashtile.testing import (
    assert_close,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    dense_from_tiles,
    floor_of,
    generator,
    normal,
    qkv,
    rounding_variance,
    tile_kinds,
)

from .harness import compare

pytestmark = pytest.mark.usefixtures("poisoned_buffers")


def check(mask, dense, backend, seed, dtype=torch.float32, B=2, M=None, N=None, **options):
    """A block mask compared with the same mask as a dense bool tensor."""
    M, N = M or dense.shape[-2], N or dense.shape[-1]
    leaves = dict(zip("qkv", qkv(generator(seed), B=B, M=M, N=N, dtype=dtype), strict=True))
    compare(
        lambda x: flashtile.attention(
            **x, block_mask=mask, return_lse=True, backend=backend, **options
        ),
        lambda x, **how: attention_reference(**x, block_mask=dense, **options, **how),
        leaves,
        seed=seed,
    )


class TestTiles:
    @pytest.mark.parametrize("tile_size", [(1, 1), (16, 8), (7, 5), (64, 64), (16, 256)], ids=str)
    def test_tile_sizes(self, tile_size, backend, seed):
        kinds = tile_kinds(generator(seed), -(-70 // tile_size[0]), -(-90 // tile_size[1]))
        dense = dense_from_tiles(kinds, tile_size, 70, 90)
        check(BlockMask.from_tiles(kinds, tile_size), dense, backend, seed)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64], ids=str)
    def test_tiles_may_be_bool_or_integer(self, dtype, backend, seed):
        kinds = tile_kinds(generator(seed), 3, 4)
        dense = dense_from_tiles(kinds, (16, 16), 45, 60)
        check(BlockMask.from_tiles(kinds.to(dtype), (16, 16)), dense, backend, seed)

    @pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
    def test_shared_or_for_each_batch_and_head(self, lead, backend, seed):
        g = generator(seed)
        kinds = tile_kinds(g, *lead, 3, 4)
        check(
            BlockMask.from_tiles(kinds, (16, 16)),
            dense_from_tiles(kinds, (16, 16), 45, 60),
            backend,
            seed,
        )
        dense = torch.rand(*lead, 45, 60, generator=g) < 0.5
        check(BlockMask.from_dense(dense, (16, 16)), dense, backend, seed)

    def test_nothing_visible(self, backend, seed):
        kinds = torch.zeros(3, 4, dtype=torch.bool)
        check(BlockMask.from_tiles(kinds, (16, 16)), torch.zeros(45, 60).bool(), backend, seed)

    def test_a_mask_larger_than_the_call(self, backend, seed):
        kinds = tile_kinds(generator(seed), 5, 5)
        dense = dense_from_tiles(kinds, (16, 16), 45, 60)
        check(BlockMask.from_tiles(kinds, (16, 16)), dense, backend, seed)

    @pytest.mark.parametrize("sizes", [(46, 60), (45, 61), (64, 64)], ids=str)
    def test_a_mask_smaller_than_the_call_is_refused(self, sizes):
        """Its tiles reach to 48 and 64, its elements to 45 and 60."""
        M, N = sizes
        mask = BlockMask.from_dense(torch.ones(45, 60).bool(), (16, 16))
        q, k, v = qkv(generator(0), B=1, M=M, N=N, Hq=2, Hk=2, D=8)
        starts = (cu_seqlens([M]), cu_seqlens([N]))
        with pytest.raises(ValueError, match=f"block_mask: got .* at least {M} and {N}"):
            flashtile.attention(q, k, v, block_mask=mask)
        with pytest.raises(ValueError, match="block_mask: got a mask for 45 queries and 60 keys"):
            flashtile.attention_varlen(q[0], k[0], v[0], *starts, M, N, block_mask=mask)
        with pytest.raises(ValueError, match="block_mask: got a mask for 45 queries and 60 keys"):
            flashtile.attention_with_kvcache(q, k, v, cache_seqlens=7, block_mask=mask)
        with pytest.raises(ValueError, match="M, N"):
            mask.to_dense(M, N)

    @pytest.mark.parametrize("shape", [(45, 60), (64, 64), (33, 80)], ids=str)
    def test_dense_and_tiles_agree(self, shape, seed):
        g = generator(seed)
        dense = torch.rand(2, 3, *shape, generator=g) < 0.5
        dense[:, :, :16, :16] = True
        dense[:, :, 16:32, :16] = False
        mask = BlockMask.from_dense(dense, (16, 16))
        assert torch.equal(mask.to_dense(*shape), dense)
        assert (mask.kinds[:, :, 0, 0] == 1).all()
        assert (mask.kinds[:, :, 1, 0] == 0).all()
        assert mask.tile_size == (16, 16)


def sliding(b, h, i, j):
    return (i >= j) & (i - j <= 70)


def by_head(b, h, i, j):
    return (i - j).abs() <= 20 * (h + 1) - 8 * b


documents = torch.arange(300) // 77


def same_document(b, h, i, j):
    return documents[i] == documents[j]


class TestFlexAttention:
    """A FlexAttention `BlockMask` is taken as it is, training included."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mod", [sliding, by_head, same_document])
    @pytest.mark.parametrize("block", [32, 128, (64, 32)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_forward_and_backward(self, mod, block, dtype, backend, seed):
        flex = create_block_mask(mod, 2, 4, 300, 300, device="cpu", BLOCK_SIZE=block)
        dense = create_mask(mod, 2, 4, 300, 300, device="cpu")
        check(flex, dense, backend, seed, dtype)

    def test_shared_over_batch_and_heads(self, backend, seed):
        flex = create_block_mask(sliding, None, None, 150, 200, device="cpu", BLOCK_SIZE=64)
        check(flex, create_mask(sliding, 1, 1, 150, 200, device="cpu"), backend, seed)

    def test_without_full_blocks(self, backend, seed):
        """`full_kv_indices=None`: every block is partial."""
        blocks = torch.ones(1, 1, 3, dtype=torch.int32)
        indices = torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
        flex = FlexBlockMask.from_kv_blocks(blocks, indices, BLOCK_SIZE=32, mask_mod=sliding)
        dense = create_mask(sliding, 1, 1, 96, 96, device="cpu")
        dense &= dense_from_tiles(torch.eye(3).bool(), (32, 32), 96, 96)
        check(flex, dense, backend, seed)

    @pytest.mark.parametrize("options", [{"softcap": 2.0}, {"window_size": (9, 30)}], ids=str)
    def test_with_other_options(self, options, backend, seed):
        flex = create_block_mask(by_head, 2, 4, 100, 100, device="cpu", BLOCK_SIZE=32)
        check(flex, create_mask(by_head, 2, 4, 100, 100, device="cpu"), backend, seed, **options)

    @pytest.mark.parametrize("lengths", [(256, 200), (200, 256), (256, 256), (100, 200), (200, 64)])
    def test_a_mask_made_for_other_lengths_is_refused(self, lengths):
        """FlexAttention's tiles reach to 256, its mask to 200."""
        q, k, v = qkv(generator(0), M=lengths[0], N=lengths[1])
        flex = create_block_mask(sliding, None, None, 200, 200, device="cpu", BLOCK_SIZE=128)
        for _ in range(2):  # a refusal leaves no memo entry
            with pytest.raises(ValueError, match="block_mask: got a mask for 200 queries and 200"):
                flashtile.attention(q, k, v, block_mask=flex)

    def test_a_converted_mask_serves_shorter_calls(self, backend, seed):
        flex = create_block_mask(sliding, None, None, 200, 200, device="cpu", BLOCK_SIZE=128)
        mask = BlockMask.from_flex(flex)
        assert mask.lengths == (200, 200)
        check(mask, create_mask(sliding, 1, 1, 100, 64, device="cpu"), backend, seed)

    def test_a_mask_of_some_rows_of_tiles(self, backend, seed):
        """A sliced FlexAttention mask keeps the lengths of the whole; the user adapts mask_mod."""
        flex = create_block_mask(sliding, None, None, 128, 128, device="cpu", BLOCK_SIZE=32)
        part = flex[:, :, 1]
        part.mask_mod = lambda b, h, i, j: sliding(b, h, i + 32, j)
        mask = BlockMask.from_flex(part)
        assert mask.lengths == (32, 128)
        check(
            mask, create_mask(sliding, 1, 1, 128, 128, device="cpu")[..., 32:64, :], backend, seed
        )

    def test_agrees_with_flex_attention_itself(self, backend, seed):
        q, k, v = qkv(generator(seed), M=100, N=100)
        flex = create_block_mask(by_head, 2, 4, 100, 100, device="cpu", BLOCK_SIZE=32)

        def theirs(dtype):
            given = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
            return flex_attention(*given, block_mask=flex, enable_gqa=True).transpose(1, 2)

        ours = flashtile.attention(q, k, v, block_mask=flex, backend=backend)
        rounding = rounding_variance(torch.float32)
        variance = attention_reference(q, k, v, block_mask=flex, attend=rounding).out
        assert_close(
            "out", ours, theirs(torch.float64), theirs(torch.float32), floor=floor_of(variance)
        )


class TestFlashAttention1:
    """`flash_blocksparse_attn_func`: packed qkv, one mask of 16 x 256 tiles for all heads."""

    LENGTHS = (300, 17, 0, 280)

    def inputs(self, seed, dtype=torch.float32):
        g = generator(seed)
        kinds = tile_kinds(g, 19, 2)
        kinds[:, 0] = True
        qkv_packed = normal(g, sum(self.LENGTHS), 3, 2, 16, dtype=dtype)
        dense = dense_from_tiles(kinds, (16, 256), 300, 300)
        return qkv_packed, cu_seqlens(list(self.LENGTHS)), kinds, dense

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
    @pytest.mark.parametrize("integer", [False, True], ids=["bool mask", "int mask"])
    @pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.7}, {"causal": True}], ids=str)
    def test_forward_and_backward(self, dtype, integer, options, seed):
        packed, cu, kinds, dense = self.inputs(seed, dtype)
        mask = kinds.int() if integer else kinds
        compare(
            lambda x: flash_blocksparse_attn_func(x["qkv"], cu, mask, 0.0, 300, **options),
            lambda x, **how: attention_varlen_reference(
                *x["qkv"].unbind(1), cu, cu, 300, 300, block_mask=dense, **options, **how
            ),
            {"qkv": packed},
            seed=seed,
        )

    def test_a_converted_mask_means_the_same(self, seed):
        packed, cu, kinds, _ = self.inputs(seed)
        plain = flash_blocksparse_attn_func(packed, cu, kinds, 0.0, 300)
        converted = convert_blockmask(kinds, causal=False)
        assert converted.dtype == torch.int32
        assert converted.shape == (2, 19)
        again = flash_blocksparse_attn_func(packed, cu, converted, 0.0, 300, convert_mask=False)
        assert torch.equal(plain, again)
