"""The checks that reject invalid user input.

Every message names the argument, the given value and the expected one. A call writes nothing before
the last check has passed. Checks that read tensor values make the host wait for the GPU, so for
tensors on a GPU they run only with ``FLASHTILE_CHECK=1``.
"""

from .caches import cache_values, cached, length_on_host
from .hints import hints
from .keywords import unexpected_keywords
from .layouts import PAGES, cumulative, dense, one_page_table, packed, padded
from .on_host import (
    checking_values,
    checks_values_on_gpu,
    cumulative_values,
    longest,
    packed_lengths,
    page_lengths,
    used_lengths,
    values,
)
from .optional_tensors import (
    absorbed,
    attn_mask,
    block_mask_kinds,
    block_mask_lengths,
    broadcastable,
    extras,
    flex_mask,
    flex_mask_lengths,
    float8_forward_only,
    key_padding_mask,
)
from .results import output, workspace
from .scalars import (
    chunk,
    flag,
    generator,
    integer,
    length,
    number,
    probability,
    scale,
    softcap,
    splits,
)
from .spans import spans
from .tensors import (
    index_tensor,
    is_readable,
    per_sequence,
    rank,
    same_device,
    shape,
    shape_of,
    tensor,
    unpacked,
)
from .window import window
