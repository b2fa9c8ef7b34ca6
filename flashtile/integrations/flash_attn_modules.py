"""The table of modules that `flash_attn.install` provides.

A `Package` describes one distribution of the FlashAttention project. Its `modules` map each name
that users import to the modules of flashtile that provide the contents.
"""

from __future__ import annotations

from typing import NamedTuple


class Contents(NamedTuple):
    """The contents of a module."""

    sources: tuple[str, ...] = ()  # modules of flashtile, without the prefix "flashtile."
    names: tuple[str, ...] | None = None  # names to take from them; None for all
    constants: tuple[tuple[str, object], ...] = ()
    operators: str | None = None  # namespace of torch.ops that comes with it


class Package(NamedTuple):
    """One distribution: its metadata, and the modules that it installs."""

    distribution: str
    version: str
    # The real distribution is installed if another finder knows this module.
    marker: str
    modules: dict[str, Contents]

    def owns(self, name: str) -> bool:
        """Whether a module of that name belongs to this distribution."""
        return any(name == root or name.startswith(f"{root}.") for root in self.roots)

    @property
    def roots(self) -> tuple[str, ...]:
        """The topmost modules: those whose parent is not a module of the package."""
        return tuple(name for name in self.modules if name.rpartition(".")[0] not in self.modules)


_SEVEN = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)

FLASH_ATTN_2 = Package(
    distribution="flash-attn",
    version="2.8.4",
    marker="flash_attn.flash_attn_interface",
    modules={
        "flash_attn": Contents(
            ("flash_attn_2_interface",),
            names=_SEVEN,
            constants=(("__version__", "2.8.4"),),
            operators="flash_attn",
        ),
        "flash_attn.flash_attn_interface": Contents(("flash_attn_2_interface",)),
        "flash_attn_2_cuda": Contents(("flash_attn_2_cuda",)),
        "flash_attn.bert_padding": Contents(("bert_padding",)),
        "flash_attn.flash_blocksparse_attn_interface": Contents(
            ("flash_blocksparse_attn_interface",)
        ),
        "flash_attn.layers": Contents(),
        "flash_attn.layers.patch_embed": Contents(("layers.patch_embed",)),
        "flash_attn.layers.rotary": Contents(("layers.rotary",)),
        "flash_attn.losses": Contents(),
        "flash_attn.losses.cross_entropy": Contents(
            ("losses.token_losses", "losses.cross_entropy")
        ),
        "flash_attn.models": Contents(),
        "flash_attn.models.gpt": Contents(("models.gpt",)),
        "flash_attn.modules": Contents(),
        "flash_attn.modules.block": Contents(("modules.block",)),
        "flash_attn.modules.embedding": Contents(("modules.embedding",)),
        "flash_attn.modules.mha": Contents(("modules.alibi", "modules.mha")),
        "flash_attn.modules.mlp": Contents(("layers.dense", "modules.mlp")),
        "flash_attn.ops": Contents(),
        "flash_attn.ops.activations": Contents(("layers.activations",)),
        "flash_attn.ops.fused_dense": Contents(("layers.dense", "modules.mlp")),
        "flash_attn.ops.layer_norm": Contents(("layers.dropout_norm",)),
        "flash_attn.ops.rms_norm": Contents(("layers.dropout_norm",)),
        "flash_attn.ops.triton": Contents(),
        "flash_attn.ops.triton.k_activations": Contents(("layers.activations",)),
        "flash_attn.ops.triton.layer_norm": Contents(("layers.norm",)),
        "flash_attn.ops.triton.linear": Contents(("layers.dense",)),
        "flash_attn.ops.triton.mlp": Contents(("layers.dense", "modules.mlp")),
        "flash_attn.ops.triton.cross_entropy": Contents(("losses.token_losses",)),
        "flash_attn.ops.triton.rotary": Contents(("layers.apply_rotary",)),
        "flash_attn.utils": Contents(),
        "flash_attn.utils.distributed": Contents(("layers.tensor_parallel",)),
        "flash_attn.utils.generation": Contents(
            ("models.generation",), names=("InferenceParams", "sample")
        ),
    },
)

FLASH_ATTN_3 = Package(
    distribution="flash_attn_3",
    version="3.0.0",
    marker="flash_attn_interface",
    modules={
        "flash_attn_interface": Contents(("flash_attn_3_interface",), operators="flash_attn_3"),
        "flash_attn_3": Contents(constants=(("__version__", "3.0.0"),), operators="flash_attn_3"),
        "flash_attn_3.flash_attn_interface": Contents(("flash_attn_3_interface",)),
    },
)

# FlashAttention-4 is inside the package flash_attn; `_owner` prefers such an inner package.
FLASH_ATTN_4 = Package(
    distribution="flash-attn-4",
    version="4.0.0",
    marker="flash_attn.cute.interface",
    modules={
        "flash_attn.cute": Contents(
            ("flash_attn_4_interface",),
            names=("flash_attn_func", "flash_attn_varlen_func"),
            constants=(("__version__", "4.0.0"),),
        ),
        "flash_attn.cute.interface": Contents(("flash_attn_4_interface",)),
    },
)

PACKAGES: tuple[Package, ...] = (FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4)
