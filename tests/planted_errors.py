"""Plants errors in a copy of the package, one at a time, and runs the tests that should catch them.

    python tests/planted_errors.py [--jobs N] [--list] [NAME ...]

A planted error names a function or class, not a line, so that the list survives moved code: the
text `right` occurs exactly once in the source of exactly one definition called `symbol` in
``flashtile/``, and becomes `wrong`. An error is caught if its tests fail, and missed if they pass.
The list shows how much a faster suite still sees. `test_planted_errors.py` keeps it up to date.
"""

from __future__ import annotations

import argparse
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted_outside_kernels import CPU, DISTRIBUTED, INTEGRATIONS_AND_MODELS, MASKS_AND_SCORES
from planting import ROOT, Planted, planted_source

SECONDS = 900  # of one error's tests; a planted error may also make them wait forever


CASES = "tests/kernels/test_interpreter.py::test_forward_and_backward -k"
SHORT = "tests/kernels/test_interpreter_short.py::test_forward_and_backward -k"

TRITON: list[Planted] = [
    Planted(
        "triton: kernels are compiled anew for other lengths and strides",
        "kernel",
        "do_not_specialize=[*fields, *unspecialised]",
        "do_not_specialize=[*unspecialised]",
        "tests/kernels/test_variants.py -k triton",
    ),
    Planted(
        "triton: the odd elements of a packed row are its even ones",
        "unpack_source",
        "range(n, count, pair)",
        "range(0, count, pair)",
        "tests/kernels/test_interpreter_formats.py -k int4",
        interpreted=True,
    ),
    Planted(
        "triton: elements without the factor of their row leave float16",
        "unpack_source",
        "dtype != torch.float16 or is_within(first, count, limits.tiny, limits.max)",
        "True",
        "tests/kernels/test_interpreter_formats.py -k user",
        interpreted=True,
    ),
    Planted(
        "triton: all blocks of a packed row have the scale of the first",
        "blocked",
        "range(0, count, size)",
        "range(0, 1, size)",
        "tests/kernels/test_interpreter_formats.py -k int4",
        interpreted=True,
    ),
    Planted(
        "triton: the second of two codes in a register is moved like none",
        "Bits.assembly",
        "x << 16 | x",
        "x",
        "tests/test_lanes.py -k number",
    ),
    Planted(
        "triton: scores do without the scale of a packed key",
        "attend_keys",
        "len(k_tiles) > PAIR",
        "len(k_tiles) > PAIR + 1",
        "tests/kernels/test_interpreter_formats.py -k int8",
        interpreted=True,
    ),
    Planted(
        "triton: the scale of a hidden packed value counts",
        "add_packed_values",
        "without_hidden(factors, p) if IS_HIDING else factors",
        "factors",
        "tests/kernels/test_interpreter_formats.py -k window",
        interpreted=True,
    ),
    Planted(
        "triton: packed rows past the end are read",
        "row_pointers",
        "tl.maximum(sequence.N - 1, 0)",
        "tl.maximum(sequence.N, 0)",
        "tests/kernels/test_interpreter_formats.py -k int8",
        interpreted=True,
    ),
    Planted(
        "triton: a tile of keys takes the queries of the other runs in it",
        "listed_key_gradient_kernel",
        "(keys // RUN == run) & inside",
        "inside",
        "tests/kernels/test_interpreter_listed.py -k keys",
        interpreted=True,
    ),
    Planted(
        "triton: dK and dV of a listed key are those of its last query",
        "add_rows",
        'tl.atomic_add(pointers, tl.trans(tile), mask=inside, sem="relaxed")',
        "tl.store(pointers, tl.trans(tile), mask=inside)",
        "tests/kernels/test_interpreter_listed.py -k keys",
        interpreted=True,
    ),
    Planted(
        "triton: lists of packed queries are those of the first sequence",
        "queries_of_runs",
        "(sequence * heads +",
        "(0 * sequence +",
        "tests/kernels/test_interpreter_listed.py -k packed",
        interpreted=True,
    ),
    Planted(
        "triton: the weighted exponents do not follow a new maximum",
        "statistics_of",
        "(weighted + row_sum * tl.maximum(drop, NO_WEIGHT))",
        "weighted",
        "tests/kernels/test_interpreter_statistics.py -k causal",
        interpreted=True,
    ),
    Planted(
        "triton: column sums are those of the last tile of queries",
        "add_column_sums",
        "return sums + p",
        "return p",
        "tests/kernels/test_interpreter_statistics.py -k descriptors",
        interpreted=True,
    ),
    Planted(
        "triton: column sums forget what rounding the log-sum-exp has lost",
        "add_column_sums",
        "exponent_factor(score, cfg), cfg, lost)",
        "exponent_factor(score, cfg), cfg, None)",
        "tests/kernels/test_interpreter_statistics.py -k large",
        interpreted=True,
    ),
    Planted(
        "triton: all values are the first columns of the keys",
        "starts_after",
        "y.storage_offset() == x.storage_offset() + columns",
        "True",
        "tests/kernels/test_explain.py -k latents",
    ),
    Planted(
        "memo: values of their own, as if they were those of latents",
        "key_of",
        "address == last",
        "True",
        "tests/test_memo.py -k view_of_the_keys",
    ),
    Planted(
        "memo: calls that differ in a number are equal",
        "key_of",
        "indices.plain_values(arguments)",
        "None",
        "tests/test_memo.py -k bad_call_after_a_good_one",
    ),
    Planted(
        "memo: calls that differ in the name of an argument are equal",
        "key_of",
        "names,\n        types",
        "types",
        "tests/test_memo.py -k same_tensor_as_another_argument",
    ),
    Planted(
        "memo: a sparse tensor is like a strided one",
        "key_of",
        "x.device, x.layout,",
        "x.device,",
        "tests/test_memo.py -k another_layout",
    ),
    Planted(
        "triton: a row of NaN",
        "forward_kernel",
        "row_sum != 0.0",
        "row_sum > 0.0",
        "tests/kernels/test_interpreter_hidden_keys.py -k 'nan_in and tiles'",
        interpreted=True,
    ),
    Planted(
        "triton, batch_invariant: tiles of queries begin with the call",
        "key_gradient_kernel",
        "before = N - M - floor_to(N - M, BLOCK_M)",
        "before = 0",
        "tests/kernels/test_interpreter_invariance.py -k gradients",
        interpreted=True,
    ),
    Planted(
        "triton, batch_invariant: parts begin with what the tile sees",
        "forward_kernel",
        "first = part * part_tiles",
        "first = steps[0][0] + (part - first_part) * part_tiles",
        "tests/kernels/test_interpreter_invariance.py -k 'decoded and window and parts'",
        interpreted=True,
    ),
    Planted(
        "triton: a row of NaN in parts",
        "merge_kernel",
        "row_sum != 0.0",
        "row_sum > 0.0",
        "tests/kernels/test_interpreter_hidden_keys.py -k 'nan_in and parts'",
        interpreted=True,
    ),
    Planted(
        "triton: gradient of a row of NaN",
        "recompute_p",
        'stats.pivot != float("inf")',
        'stats.pivot < float("inf")',
        "tests/kernels/test_interpreter_hidden_keys.py -k 'nan_in and hidden'",
        interpreted=True,
    ),
    Planted(
        "triton: a short row of NaN",
        "short_forward_kernel",
        "row_sum != 0.0",
        "row_sum > 0.0",
        "tests/kernels/test_interpreter_hidden_keys.py -k 'nan_in and short'",
        interpreted=True,
    ),
    Planted(
        "triton: right side of a window",
        "visible_keys",
        "p + mask.right + 1, sequence",
        "p + mask.right, sequence",
        f"{CASES} 'full and tiles'",
        interpreted=True,
    ),
    Planted(
        "triton: left side of a window",
        "visible_keys",
        "p - mask.left, sequence",
        "p - mask.left + 1, sequence",
        f"{CASES} 'left and window'",
        interpreted=True,
    ),
    Planted(
        "triton: first key of a chunk",
        "visible_keys",
        "start = tl.maximum(start, keys_before(chunk, sequence, cfg))",
        "start = start",
        f"{CASES} chunk",
        interpreted=True,
    ),
    Planted(
        "triton: output not rescaled",
        "weighted_sum",
        "acc * rescale[:, None]",
        "acc",
        f"{CASES} 'full and tiles'",
        interpreted=True,
    ),
    Planted(
        "triton: sink missing in the sum",
        "first_sums",
        "tl.full([BLOCK_M], 1.0, tl.float32)",
        "tl.full([BLOCK_M], 0.0, tl.float32)",
        f"{CASES} sink-float",
        interpreted=True,
    ),
    Planted(
        "triton: last part of split keys",
        "split_range",
        "tl.cdiv(steps, tl.num_programs(1))",
        "steps // tl.num_programs(1)",
        "tests/kernels/test_interpreter_decoding.py::test_decoding -k queries",
        interpreted=True,
    ),
    Planted(
        "triton: bias gradient of one head",
        "bias_gradient_kernel",
        "h = own_h + h_term % h_terms",
        "h = own_h",
        f"{CASES} 'keys and bias and not heads and not distance'",
        interpreted=True,
    ),
    Planted(
        "triton: bias gradient without delta",
        "score_gradient_tile",
        " - stats.delta)",
        ")",
        f"{CASES} 'bias and rows'",
        interpreted=True,
    ),
    Planted(
        "triton: delta of short sequences without dropout",
        "short_backward_kernel",
        "delta = tl.sum(p * dp, 1)",
        "delta = tl.sum(p_kept.to(tl.float32) * dp, 1)",
        f"{SHORT} 'dropout'",
        interpreted=True,
    ),
    Planted(
        "triton: short sequences without the gradient of the log-sum-exp",
        "short_backward_kernel",
        "delta -= tl.load(dlse_ptr + stats, mask=has_lse, other=0.0)",
        "delta -= 0.0",
        f"{SHORT} 'full'",
        interpreted=True,
    ),
    Planted(
        "triton: dK of the last head of a group of short sequences",
        "short_backward_kernel",
        "dk_acc = tl.dot(tl.trans(ds), q_tile, dk_acc, input_precision",
        "dk_acc = tl.dot(tl.trans(ds), q_tile, input_precision",
        f"{SHORT} 'short and causal'",
        interpreted=True,
    ),
    Planted(
        "triton: queries of short sequences without keys are loaded",
        "short_backward_kernel",
        "tl.where(N > 0, M, 0)",
        "M",
        "tests/kernels/test_interpreter_short.py::test_what_lone_queries_and_keys_hold_does_not_matter",
        interpreted=True,
    ),
    Planted(
        "triton: padding sees keys",
        "forward_kernel",
        "tl.where(rows < M, stop, start)",
        "stop",
        "tests/kernels/test_interpreter_hidden_keys.py",
        interpreted=True,
    ),
    Planted(
        "triton: dV without dropout",
        "add_queries",
        "p_kept = drop(p, keep, score.data.drop_scale, cfg)",
        "p_kept = drop(p, visible, score.data.drop_scale, cfg)",
        f"{CASES} 'packed and dropout and not score'",
        interpreted=True,
    ),
    Planted(
        "append: page of a slot",
        "slot_of_token",
        "position // cfg.PAGE_SIZE",
        "(position + 1) // cfg.PAGE_SIZE",
        "tests/kernels/test_interpreter.py::test_append",
        interpreted=True,
    ),
    Planted(
        "merge: weights of parts",
        "merge_kernel",
        "tl.math.exp2((lse_part - finite) * LOG2E)",
        "tl.math.exp2(lse_part - finite)",
        "tests/kernels/test_interpreter_decoding.py::test_combine",
        interpreted=True,
    ),
    Planted(
        "gather: columns of the table",
        "gather_kernel",
        "page = tl.load(page_table_ptr + number.to(tl.int64))",
        "page = tl.load(page_table_ptr + (number % columns).to(tl.int64))",
        "tests/kernels/test_interpreter_decoding.py::test_gather_pages",
        interpreted=True,
    ),
    Planted(  # shows where a tile begins one row before those that see it
        "triton: dK and dV begin one query late",
        "seeing_rows",
        "j - mask.right, sequence",
        "j - mask.right + 1, positions",
        f"{CASES} 'window-float and not left'",
        interpreted=True,
    ),
    Planted(
        "triton: derivative of the softcap without the square",
        "score_slope",
        "1.0 - t * t",
        "1.0 - t",
        f"{CASES} [softcap-",
        interpreted=True,
    ),
    Planted(
        "triton: tangents without that of the sink",
        "forward_tangent_kernel",
        "mu += p * tl.load(tsink_ptr + h)",
        "mu += p * tl.load(sink_ptr + h)",
        "tests/kernels/test_interpreter_tangents.py -k sink",
        interpreted=True,
    ),
    Planted(
        "triton: the tangents of hidden values count",
        "add_keys",
        "tv_tile = without_hidden(tv_tile, p)",
        "tv_tile = tv_tile",
        "tests/kernels/test_interpreter_tangents.py -k hidden",
        interpreted=True,
    ),
    Planted(
        "triton: ALiBi favours distant keys",
        "scores_of",
        "s -= slope",
        "s += slope",
        f"{CASES} [alibi-",
        interpreted=True,
    ),
    Planted(  # right on the diagonal
        "triton: dropout of dK and dV at the rows of the keys",
        "add_queries",
        "offs_m[:, None], n0, sequence",
        "offs_m[:, None], m0, sequence",
        f"{CASES} [dropout-",
        interpreted=True,
    ),
    Planted(
        "triton: dQ without the scale of the scores",
        "query_gradient_kernel",
        "dq_acc * score.data.scale",
        "dq_acc * score.data.drop_scale",
        f"{CASES} [full-",
        interpreted=True,
    ),
    Planted(  # right for one key head
        "triton: query heads of another group",
        "key_gradient_kernel",
        "h = kv_head * cfg.GROUP + g",
        "h = kv_head + g * kv_heads",
        f"{CASES} [full-",
        interpreted=True,
    ),
    Planted(
        "triton: gradient of a shared bias from one sequence",
        "bias_gradient_kernel",
        "range(b_terms * h_terms * m_terms * n_terms)",
        "range(h_terms * m_terms * n_terms)",
        f"{CASES} heads-float",
        interpreted=True,
    ),
    Planted(  # shows where one step does not merge all parts
        "triton: later steps of a merge",
        "merge_kernel",
        "tl.math.exp2((row_max - finite) * LOG2E)",
        "tl.math.exp2(row_max - finite)",
        "tests/kernels/test_interpreter_decoding.py::test_combine",
        interpreted=True,
    ),
    Planted(  # shows where they cross an edge
        "triton: new tokens on the page of the first one",
        "append_tokens",
        "tl.load(pages + position // cfg.PAGE_SIZE",
        "tl.load(pages + (position - index) // cfg.PAGE_SIZE",
        "tests/kernels/test_interpreter_appending.py::test_a_step -k pages",
        interpreted=True,
    ),
    Planted(
        "triton: interleaved features with the signs of halves",
        "rotated",
        "tl.where(is_first, -s, s)",
        "tl.where(dims < PAIRS, -s, s)",
        "tests/kernels/test_interpreter_appending.py::test_a_step -k token",
        interpreted=True,
    ),
    Planted(  # right for one sequence and head
        "triton: scale of a last, shorter float8 block",
        "first_key_block",
        "tl.cdiv(lengths.N, KEY_BLOCK)",
        "(lengths.N // KEY_BLOCK)",
        "tests/kernels/test_interpreter_float8.py::test_per_block_scales -k softcap",
        interpreted=True,
    ),
    Planted(
        "triton: quantising rotates all blocks like the first",
        "load_tile",
        "angles = block * recipe.ROWS + rows",
        "angles = rows",
        "tests/kernels/test_interpreter_quantize.py::test_rotary",
        interpreted=True,
    ),
    Planted(  # right for small captured tensors
        "triton: captured numbers after a large table",
        "Writer._address",
        'address, stride = f"{offset}", 1',
        'address, stride = f"{offset % 256}", 1',
        f"{CASES} 'score and not other'",
        interpreted=True,
    ),
    Planted(
        "triton: relative bias near the diagonal",
        "add_relative_bias",
        "(farthest <= -R)",
        "(farthest <= R)",
        f"{CASES} bias-float",
        interpreted=True,
    ),
    Planted(  # shows where stops differ by one
        "triton: a full tile whose last key some rows do not see",
        "span_kind",
        "least_stop >= n1",
        "least_stop >= n1 - 1",
        f"{CASES} spans-float",
        interpreted=True,
    ),
    Planted(
        "triton: a small term of float32 products",
        "small_terms",
        "small = tl.dot(x[1], y[1], small)",
        "small = small",
        "tests/kernels/test_interpreter_products.py -k exact",
        interpreted=True,
    ),
    Planted(
        "triton: float32 products summed in one piece",
        "add_product_in_halves",
        "TERMS // 2",
        "TERMS",
        "tests/kernels/test_interpreter_tensor_cores.py -k halves",
        interpreted=True,
    ),
    Planted(
        "triton: float32 products that start from zero",
        "product",
        "small - centre) + centre",
        "small)",
        "tests/kernels/test_interpreter_tensor_cores.py -k halves",
        interpreted=True,
    ),
    Planted(
        "triton: delta of exact dO beside dO V^T of rounded dO",
        "delta_kernel",
        'if PRECISION == "tf32":',
        'if PRECISION == "none":',
        "tests/kernels/test_interpreter.py -k of_one_sign",
        interpreted=True,
    ),
    Planted(
        "a repeated step of context parallelism misses PyTorch's switch for TF32",
        "_problem",
        "switch = operands.q.is_cuda and allows_tf32()",
        "switch = False",
        "tests/test_tf32.py -k step_of_context",
    ),
    Planted(
        "triton: a repeated call that misses PyTorch's switch for TF32",
        "key_of",
        "allows_tf32()",
        "True",
        "tests/test_tf32.py -k repeated",
    ),
]

HOPPER: list[Planted] = [
    Planted(
        "warmup: the files of a moved folder",
        "read_kernels_folder",
        "str(place / name)",
        "str(kernel / name) + '.moved'",
        "tests/hopper_kernels/test_warmup_target.py -k own",
    ),
    Planted(
        "gpu: a pass that is only described is launched",
        "run",
        "found = described_launches()",
        "found = None",
        "tests/hopper_kernels/test_compilation.py -k listed",
    ),
    Planted(
        "warmup: the launches of the next pass are forgotten",
        "compile_together",
        "_new(launches_of_next_pass()) if new else {}",
        "{}",
        "tests/hopper_kernels/test_compilation.py::test_the_backward_compiles_with_the_forward",
    ),
    Planted(
        "launchers of a first call, one after the other",
        "_compile",
        "launch.launcher(launch.compile())",
        "launch.compile()",
        "tests/hopper_kernels/test_compilation.py::test_launchers_are_made_at_the_same_time",
    ),
    Planted(
        "ranks: later stages of a first call compile alone",
        "_describe",
        "if wants_grad:",
        "if False:",
        "tests/hopper_kernels/test_compilation.py -k 'over_ranks and triton'",
    ),
    Planted(  # right for pages of no more than one box
        "hopper: all boxes of a page are its first rows",
        "boxes_in_pages",
        "box % OF_PAGE * cfg.PAGE_BOX",
        "0",
        "tests/hopper_kernels/test_forward_cache_emulated.py -k '48'",
    ),
    Planted(
        "hopper: pages after those of a short table are read",
        "boxes_in_pages",
        "gl.minimum(block * COUNT + n, last)",
        "block * COUNT + n",
        "tests/hopper_kernels/test_forward_cache_emulated.py -k table",
    ),
    Planted(
        "hopper: left pads are keys",
        "work_of",
        "start_k + pad, N - pad",
        "start_k, N - pad",
        "tests/hopper_kernels/test_forward_cache_emulated.py -k pads",
    ),
    Planted(
        "hopper: keys after the last latent are values",
        "issue_output",
        "if n0 + KEYS > N:",
        "if n0 > N:",
        "tests/hopper_kernels/test_latent_emulated.py -k decoding",
    ),
    Planted(
        "hopper: weights of latents without a fence",
        "attend",
        "store(row_max)\n        fence_async_shared()",
        "store(row_max)",
        "tests/hopper_kernels/test_latent_emulated.py -k decoding",
    ),
    Planted(
        "hopper: keys replace weights that the other warpgroup still reads",
        "copy_half",
        "if TILE == ME:",
        "if TILE != ME:",
        "tests/hopper_kernels/test_latent_emulated.py -k many_pairs",
    ),
    Planted(
        "hopper: the sum of a row ignores the maximum of the other warpgroup",
        "issue_output_of_other",
        "rescaled(row_sum, rescale)",
        "row_sum",
        "tests/hopper_kernels/test_latent_emulated.py -k many_pairs",
    ),
    Planted(
        "hopper: padding of queries over latents",
        "attend",
        "(total != 0.0) & (token < used)",
        "total != 0.0",
        "tests/hopper_kernels/test_latent_emulated.py -k padding",
    ),
    Planted(
        "hopper: the sums of p log p do not follow a new maximum",
        "Math16.next_block",
        "rescaled(logarithms + rescaled(now.row_sum, drop), rescale)",
        "rescaled(logarithms, rescale)",
        "tests/hopper_kernels/test_statistics_emulated.py -k large_scores",
    ),
    Planted(
        "hopper: the lazy maximum is the largest score",
        "Math16.next_block",
        "largest = gl.maximum(largest, seen_max)",
        "largest = row_max",
        "tests/hopper_kernels/test_statistics_emulated.py -k causal",
    ),
    Planted(
        "hopper: left window off by one",
        "masked",
        "visible = visible & (eight >= bounds(start - n0, LAYOUT))",
        "visible = visible & (eight >= bounds(start - 1 - n0, LAYOUT))",
        "tests/hopper_kernels/test_forward_emulated.py::test_options -k window",
    ),
    Planted(
        "hopper: first block of a window",
        "blocks_of",
        "start // cfg.BLOCK_N",
        "(start + 1) // cfg.BLOCK_N",
        "tests/hopper_kernels/test_tile_order.py::test_blocks_of_a_window",
    ),
    Planted(
        "hopper: last block of a window",
        "blocks_of",
        "gl.cdiv(stop, cfg.BLOCK_N)",
        "gl.cdiv(stop - 1, cfg.BLOCK_N)",
        "tests/hopper_kernels/test_tile_order.py::test_blocks_of_a_window",
    ),
    Planted(
        "hopper: pieces of dq swapped",
        "add_at_once",
        "+ ME * (64 * piece_columns(cfg))",
        "+ (1 - ME) * (64 * piece_columns(cfg))",
        "tests/hopper_kernels/test_backward_emulated.py::test_short_loops_of_groups_and_batches",
    ),
    Planted(
        "hopper: second part of a last block",
        "some_rows",
        "tile.slice(FIRST, COUNT)",
        "tile.slice(0, COUNT)",
        "tests/hopper_kernels/test_forward_emulated.py -k 'last_blocks and 80'",
    ),
    Planted(
        "hopper: consumers without rows where a step is peeled off the loop",
        "own_blocks",
        "1 if cfg.LAST_KEYS == cfg.BLOCK_N else 2",
        "1",
        "tests/hopper_kernels/test_forward_emulated.py -k 'last_blocks and 64'",
    ),
    Planted(
        "hopper: ping-pong passed to itself",
        "pass_ping_pong",
        "(me + 1) % cfg.CONSUMERS",
        "me",
        "tests/hopper_kernels/test_forward_emulated.py::test_head_dims",
    ),
    Planted(
        "hopper: phase of a writer",
        "add_put",
        "i // cfg.WRITERS * PUTS + PUT",
        "i * PUTS + PUT",
        "tests/hopper_kernels/test_backward_emulated.py::test_deterministic_adds_in_order -k 192",
    ),
    Planted(
        "hopper: rows that heads together load",
        "Model.lost_steps",
        "together = float(order.swizzle)",
        "together = 1.0",
        "tests/test_hopper_order.py::test_the_sum_for_dq_counts_in_the_cache",
    ),
    Planted(
        "hopper: order of a model",
        "Model.backwards",
        "reversed(lengths)",
        "lengths",
        "tests/test_hopper_order.py::test_makespan_is_that_of_all_programs_in_their_order",
    ),
    Planted(
        "hopper: first group of heads",
        "swizzled_order",
        "swizzle + gl.minimum(first, 0)",
        "swizzle",
        "tests/hopper_kernels/test_tile_order.py::test_head_swizzle",
    ),
    Planted(
        "hopper: keys of a query head",
        "load_blocks",
        "head = work.h // sizes.group\n    for j",
        "head = work.h % (sizes.heads // sizes.group)\n    for j",
        "tests/hopper_kernels/test_forward_emulated.py::test_strides",
    ),
    Planted(
        "hopper: log-sum-exp of a packed sequence",
        "store_number",
        "work.h.to(gl.int64) * sizes.total_q + work.start_q",
        "work.h.to(gl.int64) * sizes.total_q",
        "tests/hopper_kernels/test_forward_emulated.py::test_packed -k 64",
    ),
    Planted(
        "hopper: workspace of packed sequences",
        "blocks_before",
        "first_block = start_q // BLOCK_M + b",
        "first_block = start_q // BLOCK_M",
        "tests/hopper_kernels/test_backward_emulated.py::test_packed -k 64",
    ),
    Planted(
        "hopper: end of a packed sequence in the backward",
        "box_at",
        "stop, ROWS_END - rows.count + rows.row",
        "rows.start, rows.row",
        "tests/hopper_kernels/test_backward_emulated.py::test_packed -k 64",
    ),
    Planted(
        "hopper: dS of keys past the end",
        "end_of_step",
        "ds = rows_or_zeros(ds, keys.stop > 0)",
        "pass",
        "tests/hopper_kernels/test_backward_emulated.py::test_keys_past_the_end_weigh_nothing",
    ),
    Planted(
        "hopper: last block of a span",
        "kinds",
        "(greatest_stop > n0)",
        "(greatest_stop > n1)",
        "tests/hopper_kernels/test_forward_emulated.py::test_spans_of_everyday_masks -k prefix",
    ),
    Planted(
        "hopper: delta of a sequence without keys",
        "delta_kernel",
        "tl.where(o == 0.0, 0.0, o * do)",
        "o * do",
        "tests/hopper_kernels/test_hidden_keys_emulated.py -k 'rows_without and packed and keys'",
    ),
    Planted(
        "hopper: a row of NaN",
        "normalisation",
        "row_sum != 0.0",
        "row_sum > 0.0",
        "tests/hopper_kernels/test_hidden_keys_emulated.py -k 'nan_in and packed'",
    ),
    Planted(
        "hopper: values of hidden keys",
        "kept_values",
        "first = rows.unseen - n0",
        "first = 0 * n0",
        "tests/hopper_kernels/test_hidden_keys_emulated.py -k 'forward and window'",
    ),
    Planted(
        "hopper: marks of keys that no span contains",
        "unseen_keys_kernel",
        "tl.minimum(stop, last)",
        "tl.maximum(stop, last)",
        "tests/hopper_kernels/test_hidden_keys_emulated.py -k 'forward and span'",
    ),
    Planted(
        "hopper: gradients of rows without a key",
        "kept_rows",
        "dead - m * cfg.BLOCK_M",
        "0 * dead",
        "tests/hopper_kernels/test_hidden_keys_emulated.py -k 'rows_without and causal'",
    ),
    Planted(
        "hopper: bits of a large mask tile",
        "cut_mask",
        "(index * down + m % down)",
        "(index * down + m % across)",
        "tests/hopper_kernels/test_forward_emulated.py::test_block_masks",
    ),
    Planted(
        "hopper: dropout of sequences and heads",
        "kept_pairs",
        "words = random_words(draws.key, draws.b, draws.h",
        "words = random_words(draws.key, draws.h, draws.b",
        "tests/hopper_kernels/test_forward_dropout_emulated.py::test_every_head_and_sequence_has_its_own_mask",
    ),
    Planted(
        "hopper: dropout of a tile inside a block",
        "work_of",
        "first_key % BLOCK_KEYS",
        "first_key % 32",
        "tests/hopper_kernels/test_forward_dropout_emulated.py::test_tiles_that_begin_inside_a_block_of_keys",
    ),
    Planted(
        "hopper: dropout by numbers of 16 bits without the lower ones",
        "kept_pairs",
        "lower = random_words(draws.key, draws.b, draws.h, queries, groups + LOWER_BITS)",
        "lower = words",
        "tests/hopper_kernels/test_forward_dropout_emulated.py::test_options",
    ),
    Planted(
        "triton: dropout of a tile of fewer keys than a block",
        "random_bytes",
        "tl.join(word_of(n0, words), word_of(n0 + 16, words))",
        "tl.join(words[0], words[1])",
        "tests/kernels/test_interpreter_dropout.py",
        interpreted=True,
    ),
    Planted(
        "hopper: ratio of float8 scales",
        "Float8Math.next_block",
        "ratio(now.v_unit, v_unit)",
        "ratio(v_unit, now.v_unit)",
        "tests/hopper_kernels/test_float8_emulated.py::test_options",
    ),
    Planted(
        "hopper: float8 scales of a key head",
        "float8_math",
        "work.b * key_heads + work.h // sizes.group",
        "work.b * key_heads + work.h % key_heads",
        "tests/hopper_kernels/test_float8_emulated.py::test_strides",
    ),
    Planted(
        "hopper: a score function of the first column",
        "indices_of",
        "columns = place.first_row + (16 * warp + row) + 8 * second, first + 8 * eight",
        "columns = place.first_row + (16 * warp + row) + 8 * second, first + 0 * eight",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'forward and batch'",
    ),
    Planted(
        "hopper: distances of the second row of a thread",
        "indices_of",
        "steps = 8 * (eight - second)",
        "steps = 8 * (eight + second)",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'forward and alibi'",
    ),
    Planted(
        "hopper: distances of a backward",
        "indices_of",
        "steps = 8 * (second - eight)",
        "steps = 8 * (eight - second)",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'backward and alibi'",
    ),
    Planted(
        "hopper: ALiBi counts queries from the first key",
        "with_alibi",
        "place.first_row + shift",
        "place.first_row",
        "tests/hopper_kernels/test_forward_emulated.py -k 'test_options and alibi'",
    ),
    Planted(
        "hopper: a relative bias counts queries by their rows",
        "_program",
        "sub.Tensor(r0, {SHIFT})",
        "sub.Tensor(r0, 0)",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'relative and near'",
    ),
    Planted(
        "a backend's gradients replace those of what scores read",
        "_with_score_gradients",
        "y if x is None else x for",
        "x for",
        "tests/test_score_gradients.py",
    ),
    Planted(
        "hopper: slope of a score function in a gradient",
        "probabilities",
        "factor = modified_gradient(capped, p, place, keys.shift, score, cfg)",
        "factor = p",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'backward and softcap'",
    ),
    Planted(
        "hopper: slope of a score that a mask hides",
        "without_hidden",
        "gl.where(seen, factor, 0.0)",
        "factor",
        "tests/hopper_kernels/test_score_functions_emulated.py -k 'backward and infinite'",
    ),
    Planted(
        "hopper: rows that a score function hides",
        "Math16.next_block",
        "pivot_of(row_max, IS_MASKED or cfg.SCORE_MOD is not None)",
        "pivot_of(row_max, IS_MASKED)",
        "tests/hopper_kernels/test_score_functions_emulated.py -k hides",
    ),
    Planted(
        "hopper: rows that a score function hides in float8",
        "Float8Math.next_block",
        "IS_MASKED or cfg.SCORE_MOD is not None",
        "IS_MASKED",
        "tests/hopper_kernels/test_float8_emulated.py -k hides",
    ),
    Planted(
        "hopper: a score function of keys on parts of sequences",
        "reads_only_score",
        "not set(line.names) & set(INDICES)",
        "True",
        "tests/hopper_kernels/test_forward_plan.py -k score",
    ),
    Planted(
        "hopper: huge numbers of a score function",
        "may_be_large",
        "return True",
        "return False",
        "tests/hopper_kernels/test_forward_plan.py -k score",
    ),
    Planted(
        "hopper: first row of a run",
        "positions_of",
        "gl.where(rows >= first",
        "gl.where(rows > first",
        "tests/hopper_kernels/test_forward_parts_emulated.py::test_parts_of_sequences -k ragged",
    ),
    Planted(
        "hopper: remainder of shared tiles",
        "steps_of",
        "(part + 1) * total // sizes.parts",
        "first + total // sizes.parts",
        "tests/hopper_kernels/test_backward_emulated.py::test_parts",
    ),
    Planted(
        "hopper: sink gradient in base 2",
        "sink_gradient",
        "sink.float()[:, None] * torch.log2(torch.tensor(torch.e)).item()",
        "sink.float()[:, None]",
        "tests/hopper_kernels/test_backward_emulated.py::test_options -k sink",
    ),
    Planted(
        "hopper: dS over a dK that has not left",
        "query_loop",
        "tma.store_wait(0)",
        "pass",
        "tests/hopper_kernels/test_backward_emulated.py::test_head_dims -k 64",
    ),
    Planted(
        "hopper: a piece of dQ over one that has not left",
        "stage_piece",
        "tma.store_wait(1)",
        "tma.store_wait(2)",
        "tests/hopper_kernels/test_backward_emulated.py::test_tiles_of_128_keys",
    ),
    Planted(
        "hopper: order of additions to the last block",
        "acquire_semaphore",
        "m < work.before",
        "m < work.before - 1",
        "tests/hopper_kernels/test_backward_emulated.py::test_deterministic_adds_in_order",
    ),
    Planted(
        "hopper: log-sum-exp of rows without keys",
        "normalisation",
        '* LN2, -float("inf")',
        "* LN2, 0.0",
        "tests/hopper_kernels/test_forward_emulated.py::test_packed -k 64",
    ),
]

PLANTED = [*CPU, *MASKS_AND_SCORES, *TRITON, *HOPPER, *DISTRIBUTED, *INTEGRATIONS_AND_MODELS]


def is_caught(error: Planted, copy: Path) -> tuple[bool, str]:
    """Whether the error's tests fail in the copy, and the end of what they print."""
    path, text = planted_source(error, copy)
    before = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    if error.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(
            [*command, *shlex.split(error.tests)],
            cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, f"not done after {SECONDS} s"
    finally:
        path.write_text(before, encoding="utf-8")
    if done.returncode not in (0, 1):  # no test ran, or not the ones that are named
        raise RuntimeError(
            f"{error.name}: pytest stopped with {done.returncode}\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 1, done.stdout


def copies(number: int, folder: Path) -> Iterator[Path]:
    """Copies of the working tree's files."""
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for i in range(number):
        copy = folder / str(i)
        for name in names:
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        yield copy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="planted errors to try (all of them)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="tried at once")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args()
    unknown = set(args.names) - {error.name for error in PLANTED}
    if unknown:
        parser.error(f"no planted error is called {', '.join(sorted(unknown))}")
    errors = [error for error in PLANTED if not args.names or error.name in args.names]
    if args.list:
        print("\n".join(error.name for error in errors))
        return 0
    missed = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as threads:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies(args.jobs, Path(folder)):
            free.put(copy)

        def attempt(error: Planted) -> tuple[Planted, bool, str, float]:
            copy, start = free.get(), time.monotonic()
            try:
                return error, *is_caught(error, copy), time.monotonic() - start
            finally:
                free.put(copy)

        for number, (error, caught, output, seconds) in enumerate(threads.map(attempt, errors), 1):
            missed += not caught
            verdict = "caught" if caught else "MISSED"
            print(
                f"{number:3d}/{len(errors)}  {verdict}  {seconds:6.1f} s  {error.name}", flush=True
            )
            if not caught:
                print("\n".join(output.splitlines()[-3:]), flush=True)
    print(f"{len(errors) - missed} caught, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
