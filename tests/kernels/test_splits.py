"""How many parts the keys of a call are split into, and the memory for them. No GPU is needed."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from flashtile import CacheFormat, workspace_size
from flashtile.backends.triton.plan import fastest_splits, plan, splits_of
from flashtile.gpu.hardware import multiprocessors
from flashtile.gpu.memory import MOST_PART_ROWS
from flashtile.problem import AttentionProblem, Operands, Options

HERE = torch.device("cuda")


def problem_of(batch: int, seq_q: int, seq_k: int, heads: tuple[int, int], **options: int):
    """A call of head dim 64 on an H100."""
    q = torch.empty(batch, seq_q, heads[0], 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, seq_k, heads[1], 64, dtype=torch.bfloat16, device="meta")
    described = AttentionProblem.of(Operands(q, k, k), Options(seq_q, seq_k, 0.125, **options))
    return described._replace(device_type="cuda", capability=(9, 0))


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_a_workspace_of_the_size_asked_for_is_enough(num_splits: int):
    """For every batch, number of queries and cache up to the largest."""
    for heads in ((1, 1), (8, 1), (32, 8), (128, 1)):
        enough = workspace_size(300, 8, heads[0], 64, num_splits)
        batches, queries, keys = (1, 2, 7, 64, 128, 300), (1, 2, 5, 8), (1, 65, 4096, 131072)
        for batch, seq_q, seq_k in product(batches, queries, keys):
            problem = problem_of(batch, seq_q, seq_k, heads, num_splits=num_splits)
            config = plan(problem, False).split.config
            splits = splits_of(problem, config, multiprocessors(HERE), batch * seq_q)
            assert num_splits in (0, splits)
            if splits > 1:
                assert 4 * splits * batch * seq_q * heads[0] * 65 <= enough


@pytest.mark.parametrize(
    ("seq_q", "heads", "tiles"), [(1, 8, 1), (1, 64, 1), (1, 128, 2), (4, 32, 2), (2, 128, 0)]
)
def test_all_tiles_of_few_queries_share_the_gpu(seq_q: int, heads: int, tiles: int):
    """Up to 128 queries of one key head are split, in one tile of 64 rows or two."""
    problem = problem_of(1, seq_q, 32768, (heads, 1), num_splits=0)
    config = plan(problem, False).split.config
    steps = 32768 // config.BLOCK_N
    wanted = fastest_splits(tiles, steps, 132) if tiles else 1
    assert splits_of(problem, config, 132, seq_q) == wanted
    assert (wanted > 1) == (tiles > 0)


@pytest.mark.parametrize(
    ("batch", "seq_q", "wanted"), [(64, 1, 1), (64, 4, 1), (16, 1, 4), (1, 1, 64), (1, 4, 16)]
)
def test_latents_share_the_gpu(batch: int, seq_q: int, wanted: int):
    """128 heads in tiles of 64 rows, one at a time on each of 132 multiprocessors."""
    q = torch.empty(batch, seq_q, 128, 576, dtype=torch.bfloat16, device="meta")
    latents = torch.empty(batch, 8192, 1, 576, dtype=torch.bfloat16, device="meta")
    operands = Operands(q, latents, latents[..., :512])
    problem = AttentionProblem.of(operands, Options(seq_q, 8192, 0.1))
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    assert splits_of(problem, plan(problem, False).split.config, 132, batch * seq_q) == wanted


@pytest.mark.parametrize(
    ("batch", "seq_q", "seq_k", "tile", "wanted"),
    [
        (64, 1, 16384, (16, 128, 3), 1),
        (16, 1, 8192, (16, 64, 3), 2),
        (16, 16, 8192, (64, 128, 3), 1),
        (8, 16, 32768, (64, 128, 3), 2),
        (1, 16, 32768, (64, 128, 3), 16),
    ],
)
def test_tiles_that_fill_shared_memory_have_a_multiprocessor_each(
    batch: int, seq_q: int, seq_k: int, tile: tuple[int, int, int], wanted: int
):
    """32 query heads on 8 key heads of 128, as measured on an H200; not in pages."""
    q = torch.empty(batch, seq_q, 32, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, seq_k, 8, 128, dtype=torch.bfloat16, device="meta")
    problem = AttentionProblem.of(Operands(q, k, k), Options(seq_q, seq_k, 0.125))
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    found = plan(problem, True)
    assert splits_of(problem, found.split.config, 132, batch * seq_q) == wanted
    chosen = found.split if wanted > 1 else found.forward
    assert (chosen.config.BLOCK_M, chosen.config.BLOCK_N, chosen.stages) == tile
    paged = plan(problem._replace(page_size=16), True).forward
    assert (paged.config.BLOCK_N, paged.stages) == ((128, 3) if seq_q == 1 else (64, 5))


@pytest.mark.parametrize(("size", "wanted"), [(128, 4), (144, 32)])
def test_rows_that_share_lines_of_memory_have_short_parts(size: int, wanted: int):
    """Parts of 2048 keys, which the programs of neighbouring heads read at about the same time."""
    row = CacheFormat(size, lambda row, d: row[d] - 128.0, head_dim=128)
    q = torch.empty(16, 1, 32, 128, dtype=torch.bfloat16, device="meta")
    cache = torch.empty(16, 65536, 8, size, dtype=torch.uint8, device="meta")
    options = Options(1, 65536, 0.1, k_unpack=row.program, v_unpack=row.program, value_head_dim=128)
    problem = AttentionProblem.of(Operands(q, cache, cache.clone()), options)
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    assert splits_of(problem, plan(problem, True).split.config, 132, 16) == wanted


def test_rows_of_no_sequence_count():
    """Parts have rows for them too, so there are fewer parts."""
    problem = problem_of(2, 1, 131072, (32, 1), num_splits=0)
    config = plan(problem, False).split.config
    few, many = (splits_of(problem, config, 132, tokens) for tokens in (2, 1000))
    assert few > many >= 1
    assert many * 1000 * 32 <= MOST_PART_ROWS * 132


def test_a_packed_batch_without_tokens_is_not_split():
    """The bound allows queries, but the tensor has none."""
    problem = problem_of(2, 7, 250, (4, 2), num_splits=0)
    config = plan(problem, False).split.config
    assert splits_of(problem, config, 132, tokens=0) == 1


def test_the_memory_of_parts_is_bounded():
    """However large the call: 35 MB at head dim 128 on a GPU of 132 multiprocessors."""
    assert multiprocessors(HERE) == 132 or torch.cuda.is_available()
    most = 4 * MOST_PART_ROWS * multiprocessors(HERE) * 130
    assert workspace_size(10**6, 8, 64, 128) == most
