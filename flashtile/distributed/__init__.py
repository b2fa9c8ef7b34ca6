"""Context parallelism: exact attention over sequences that are sharded across ranks.

::

    from flashtile.distributed import ContextParallel

    parallel = ContextParallel()  # over the default group of torch.distributed
    layout = parallel.layout(seq_len=65536)
    q, k, v = (layout.shard(x) for x in (q, k, v))  # this rank's tokens
    out = parallel.attention(q, k, v, layout, causal=True)
"""

from .collectives import global_mean
from .context import ContextParallel
from .layout import Layout, shift_labels
from .partition import Mask
from .strategy import MACHINES, Link, Machine

__all__ = [
    "MACHINES",
    "ContextParallel",
    "Layout",
    "Link",
    "Machine",
    "Mask",
    "global_mean",
    "shift_labels",
]
