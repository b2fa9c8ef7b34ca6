"""The float8 forward kernel: shared memory, and who does what; the roles are those of
`forward_pass.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..forward.kernel import OF_PRODUCER, OF_THREE, OF_TWO, Channels
from ..shared.arguments import NUMBERS, Described, Mask, Output, Score, Sizes
from ..shared.channels import make_channel, make_queue
from ..shared.layouts import CONSUMER_ROWS, shared_rows
from ..shared.schedule import WORK_NUMBERS
from .consumer import Scales, consumer8
from .layouts import KEY_GROUP, shared_rows8
from .producer import Keys, producer8


@gluon.jit
def make_channels8(dtype: gl.constexpr, out_dtype: gl.constexpr, cfg: gl.constexpr):
    """Allocate the rings and set up their barriers."""
    C: gl.constexpr = cfg.CONSUMERS
    D: gl.constexpr = cfg.BLOCK_D
    DV: gl.constexpr = cfg.BLOCK_DV
    BLOCK: gl.constexpr = cfg.BLOCK_N
    rows: gl.constexpr = [cfg.Q_SLOTS, 1, CONSUMER_ROWS, 1, D]
    q = gl.allocate_shared_memory(dtype, rows, shared_rows8(D, 4))
    o = gl.allocate_shared_memory(out_dtype, [C, 1, CONSUMER_ROWS, 1, DV], shared_rows(DV))
    groups: gl.constexpr = [cfg.STAGES, BLOCK // KEY_GROUP, 2, 4, 2, D]
    k = gl.allocate_shared_memory(dtype, groups, shared_rows8(D, 5))
    v = gl.allocate_shared_memory(dtype, [cfg.STAGES, 1, 1, DV, BLOCK], shared_rows8(BLOCK, 4))
    channels = Channels(
        make_channel(q, q, cfg.Q_SLOTS, 1),
        make_channel(k, k, cfg.STAGES, C),
        make_channel(v, v, cfg.STAGES, C),
        o,
        o,
        make_queue(2, WORK_NUMBERS, C),
    )
    fence_async_shared()
    return channels


@gluon.jit(do_not_specialize=(*NUMBERS, "batch_groups", "head_step"))
def float8_kernel(
    q_tiles, k_groups, v_tiles, o_tiles, out_ptr, lse_ptr, counter, at, scales, batch_groups,
    head_step, B, M, N, total_q, total_k, heads, group, section, tiles, left, right, scale,
    softcap, cfg: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of every tile; see `arguments.py` for what each argument holds."""
    sizes = Sizes(B, M, N, total_q, total_k, heads, group, section, tiles)
    mask = Mask(left, right, 0)
    score = Score(scale, softcap, None, 0, None)
    q, keys = Described(q_tiles, None), Keys(k_groups, batch_groups, head_step)
    scales = Scales(scales.q, scales.k, scales.v)
    output = Output(Described(o_tiles, None), out_ptr, lse_ptr)
    channels = make_channels8(q_tiles.dtype, o_tiles.dtype, cfg)
    if cfg.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consumer8, (0, output, channels, scales, sizes, mask, score, cfg)),
                (consumer8, (1, output, channels, scales, sizes, mask, score, cfg)),
                (producer8, (q, keys, v_tiles, counter, channels, sizes, at, mask, cfg)),
            ],
            [4, 1],
            [OF_TWO, OF_PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consumer8, (0, output, channels, scales, sizes, mask, score, cfg)),
                (consumer8, (1, output, channels, scales, sizes, mask, score, cfg)),
                (consumer8, (2, output, channels, scales, sizes, mask, score, cfg)),
                (producer8, (q, keys, v_tiles, counter, channels, sizes, at, mask, cfg)),
            ],
            [4, 4, 1],
            [OF_THREE, OF_THREE, OF_PRODUCER],
        )
