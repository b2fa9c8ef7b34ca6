"""The table of modules that `flash_attn.install` and `xformers.install` provide.

A `Package` describes one distribution. Its `modules` map each name that users import to the modules
of flashtile that provide the contents.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from .. import flash_attn_interface


class RealPackageError(RuntimeError):
    """What flashtile is to stand in for is there itself."""


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
        """Whether a module of that name belongs to this distribution: it or one that it is in."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return bool(name)

    @property
    def roots(self) -> tuple[str, ...]:
        """The topmost modules: those whose parent is not a module of the package."""
        return tuple(name for name in self.modules if name.rpartition(".")[0] not in self.modules)


_SEVEN = tuple(name for name in flash_attn_interface.__all__ if name.startswith("flash_attn_"))

_FAMILIES = ("baichuan", "bigcode", "btlm", "falcon", "gpt_neox", "gptj", "opt")
# Modules of FlashAttention 2 -> those of flashtile whose names they have.
_SOURCES = {
    "flash_attention": "modules.flash_attention",
    "flash_attn_interface": "flash_attn_2_interface flash_attn_1_interface",
    "flash_attn_triton": "flash_attn_triton",
    "bert_padding": "bert_padding",
    "flash_blocksparse_attn_interface": "flash_blocksparse_attn_interface",
    "layers": "",
    "layers.patch_embed": "layers.patch_embed",
    "layers.rotary": "layers.rotary",
    "losses": "",
    "losses.cross_entropy": "losses.token_losses losses.cross_entropy",
    "models": "",
    "models.bert": "models.bert",
    "models.gpt": "models.hugging_face models.shards models.gpt",
    **{f"models.{family}": "models.hugging_face models.families" for family in _FAMILIES},
    "models.llama": "models.hugging_face models.families models.checkpoints",
    "models.vit": "models.vit",
    "modules": "",
    "modules.block": "modules.block",
    "modules.embedding": "modules.embedding",
    "modules.mha": "modules.alibi modules.mha",
    "modules.mlp": "layers.tensor_parallel modules.mlp",
    "ops": "",
    "ops.activations": "layers.activations",
    "ops.fused_dense": "layers.tensor_parallel layers.dense modules.mlp",
    "ops.layer_norm": "layers.dropout_norm",
    "ops.rms_norm": "layers.dropout_norm",
    "ops.triton": "",
    "ops.triton.k_activations": "layers.activations",
    "ops.triton.layer_norm": "layers.norm",
    "ops.triton.linear": "layers.dense",
    "ops.triton.mlp": "layers.dense modules.mlp",
    "ops.triton.cross_entropy": "losses.token_losses",
    "ops.triton.rotary": "layers.apply_rotary",
    "utils": "",
    "utils.benchmark": "integrations.flash_attn_benchmark",
    "utils.distributed": "layers.tensor_parallel",
    "utils.generation": "models.generation models.decoding",
    "utils.pretrained": "models.checkpoints",
}

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
        **{f"flash_attn.{name}": Contents((*of.split(),)) for name, of in _SOURCES.items()},
        "flash_attn_2_cuda": Contents(("flash_attn_2_cuda",)),
    },
)

FLASH_ATTN_3 = Package(
    distribution="flash_attn_3",
    version="3.0.0",
    marker="flash_attn_interface",
    modules={
        "flash_attn_interface": Contents(("flash_attn_3_interface",), operators="flash_attn_3"),
        "flash_attn_3": Contents(constants=(("__version__", "3.0.0"),), operators="flash_attn_3"),
        "flash_attn_3._C": Contents(operators="flash_attn_3"),
        "flash_attn_3.flash_attn_interface": Contents(("flash_attn_3_interface",)),
    },
)

# FlashAttention-4 is inside the package flash_attn; `owner` prefers such an inner package.
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

# Kernels of xFormers, which ``op=`` selects there. They are hints: no result changes.


class AttentionOpBase:
    """A kernel of xFormers, which ``op=`` selects."""


class AttentionFwOpBase(AttentionOpBase):
    """Of the forward."""


class AttentionBwOpBase(AttentionOpBase):
    """Of the backward."""


_OPERATOR_BASES = {
    base.__name__: base for base in (AttentionOpBase, AttentionFwOpBase, AttentionBwOpBase)
}
_KERNELS = ("ck", "ck_splitk", "cutlass", "cutlass_blackwell", "flash", "flash3", "triton_splitk")
_OPERATORS = {
    family: {
        "FwOp": type(f"{family}.FwOp", (AttentionFwOpBase,), {}),
        "BwOp": type(f"{family}.BwOp", (AttentionBwOpBase,), {}),
    }
    for family in _KERNELS
}
_PAIRS = {
    "Ck": ("ck", "ck"),
    "Cutlass": ("cutlass", "cutlass"),
    "CutlassBlackwell": ("cutlass_blackwell", "cutlass_blackwell"),
    "CutlassFwdFlashBw": ("cutlass", "flash"),
    "FlashAttention": ("flash", "flash"),
    "SplitKCk": ("ck_splitk", "ck"),
}
_OPERATOR_PAIRS = {
    "AttentionOp": tuple[type[AttentionFwOpBase] | None, type[AttentionBwOpBase] | None],
    **{
        f"MemoryEfficientAttention{name}Op": (_OPERATORS[fw]["FwOp"], _OPERATORS[bw]["BwOp"])
        for name, (fw, bw) in _PAIRS.items()
    },
}

_XFORMERS_OPS = Contents(
    ("integrations.xformers_attn_bias", "integrations.xformers_ops"),
    constants=(*_OPERATOR_BASES.items(), *_OPERATOR_PAIRS.items()),
)

XFORMERS = Package(
    distribution="xformers",
    version="0.0.35",
    marker="xformers",
    modules={
        "xformers": Contents(constants=(("__version__", "0.0.35"),)),
        "xformers.ops": _XFORMERS_OPS,
        "xformers.ops.swiglu_op": Contents(
            ("integrations.xformers_ops",), ("SwiGLU", "SwiGLUEagerOp", "SwiGLUOp", "swiglu")
        ),
        "xformers.ops.fmha": _XFORMERS_OPS,
        "xformers.ops.fmha.attn_bias": Contents(("integrations.xformers_attn_bias",)),
        "xformers.ops.fmha.common": Contents(
            ("integrations.xformers_attn_bias",), ("AttentionBias",), (*_OPERATOR_BASES.items(),)
        ),
        **{
            f"xformers.ops.fmha.{family}": Contents(constants=(*operators.items(),))
            for family, operators in _OPERATORS.items()
        },
    },
)


def owner(name: str) -> Package | None:
    """The package that a module or a name belongs to; the innermost one if packages are nested."""
    owners = [package for package in (*PACKAGES, XFORMERS) if package.owns(name)]
    return max(owners, key=lambda package: len(package.marker.rpartition(".")[0]), default=None)


class Choice(NamedTuple):
    """What to provide: which of FlashAttention 2, 3 and 4, and as which version of 2."""

    versions: Collection[int] = (2, 3, 4)
    version: str = FLASH_ATTN_2.version

    def packages(self) -> tuple[Package, ...]:
        """The packages; ValueError if there are none like these."""
        if not self.versions or not {2, 3, 4}.issuperset(self.versions):
            raise ValueError(f"versions: got {self.versions}, want some of (2, 3, 4)")
        if 4 in self.versions and 2 not in self.versions:
            raise ValueError(
                f"versions: got {self.versions}; 4 needs 2, because flash_attn.cute is inside "
                "flash_attn"
            )
        if not re.fullmatch(r"2\.[678](\.\w+)*", self.version):
            raise ValueError(f"version: got {self.version!r}, want one of 2.6, 2.7 and 2.8")
        if 2 not in self.versions and self.version != FLASH_ATTN_2.version:
            raise ValueError(f"version: got {self.version!r}, but versions={self.versions} lack 2")
        modules = FLASH_ATTN_2.modules.copy()
        shown = (("__version__", self.version),)
        modules["flash_attn"] = modules["flash_attn"]._replace(constants=shown)
        if self.version.startswith("2.6"):
            sources = ("bert_padding", "integrations.flash_attn_2_6")
            modules["flash_attn.bert_padding"] = Contents(sources)
        chosen = FLASH_ATTN_2._replace(version=self.version, modules=modules)
        numbered = {2: chosen, 3: FLASH_ATTN_3, 4: FLASH_ATTN_4}
        return tuple(numbered[number] for number in sorted(set(self.versions)))


# Names that flash_attn's modules import from elsewhere, and programs from them.
ELSEWHERE = {
    "flash_attn.bert_padding.rearrange": "einops.rearrange",
    "flash_attn.bert_padding.repeat": "einops.repeat",
    "flash_attn.flash_attn_interface.flash_attn_cuda": (  # until 2.6
        "flash_attn.flash_attn_interface.flash_attn_gpu"
    ),
    "flash_attn.modules.mha.rearrange": "einops.rearrange",
    "flash_attn.modules.mha.repeat": "einops.repeat",
    **{
        f"flash_attn.modules.mha.{name}": f"flash_attn.{name}"
        for name in _SEVEN
        if "packed" in name or "kvcache" in name
    },
}

# Names that are missing -> what to use; of modules and of what they hold.
INSTEAD = {
    "dropout_layer_norm": "flash_attn.ops.layer_norm",
    "flash_attn_cuda": "flash_attn.flash_attn_interface",
    "fused_dense_lib": "flash_attn.ops.fused_dense",
    "rotary_emb": "flash_attn.layers.rotary",
    "xentropy_cuda_lib": "flash_attn.losses.cross_entropy",
    **{
        name: "einops itself (pip install einops)"
        for name, source in ELSEWHERE.items()
        if source.startswith("einops.")
    },
    "flash_attn.flash_attn_interface.flash_attn_unpadded_qkvpacked_split_func": (
        "flash_attn_varlen_qkvpacked_func"
    ),
    "flash_attn.flash_attn_triton_og": "flash_attn_func",
    "flash_attn.flash_blocksparse_attention": "flashtile.attention with block_mask=",
    "flash_attn.fused_softmax": "flash_attn_func, or torch.softmax",
    "flash_attn.layers.rotary.ApplyRotaryEmb": "apply_rotary_emb",
    "flash_attn.layers.rotary.ApplyRotaryEmbQKV_": "apply_rotary_emb_qkv_",
    "flash_attn.layers.rotary.ApplyRotaryEmbKV_": "apply_rotary_emb_kv_",
    "flash_attn.ops.activations.FastGeLUFunction": "fast_gelu_impl",
    "flash_attn.ops.activations.GeLUFunction": "bias_gelu_impl",
    "flash_attn.ops.activations.SwiGLUFunction": "swiglu",
    "flash_attn.ops.fused_dense.FusedDenseFunc": "fused_dense_func",
    "flash_attn.ops.fused_dense.FusedMLPFunc": "fused_mlp_func",
    "flash_attn.ops.layer_norm.DropoutAddLayerNormFn": "dropout_add_layer_norm",
    "flash_attn.ops.layer_norm.DropoutAddLayerNormSubsetFn": "dropout_add_layer_norm_subset",
    "flash_attn.ops.layer_norm.DropoutAddLayerNormParallelResidualFn": (
        "dropout_add_layer_norm_parallel_residual"
    ),
    "flash_attn.ops.triton.cross_entropy.CrossEntropyLoss": "cross_entropy_loss",
    "flash_attn.ops.triton.layer_norm.LayerNormFn": "layer_norm_fn",
    "flash_attn.ops.triton.layer_norm.LayerNormLinearFn": "layer_norm_linear_fn",
    "flash_attn.ops.triton.layer_norm.layer_norm_ref": "torch.nn.functional.layer_norm",
    "flash_attn.ops.triton.layer_norm.rms_norm_ref": "torch.nn.functional.rms_norm",
    "flash_attn.ops.triton.mlp.FusedDenseSqreluDenseFunc": "fused_dense_sqrelu_dense_function",
    **{
        f"flash_attn.utils.benchmark.benchmark_{name}": "torch.utils.benchmark, torch.profiler"
        for name in ("all", "backward", "combined", "fwd_bwd", "memory")
    },
    "flash_attn.utils.benchmark.pytorch_profiler": "torch.utils.benchmark, torch.profiler",
    "flash_attn.utils.distributed.AllGatherFunc": "all_gather",
    "flash_attn.utils.distributed.AllReduceFunc": "all_reduce",
    "flash_attn.utils.distributed.ReduceScatterFunc": "reduce_scatter",
    "flash_attn.utils.generation.DecodingCGCache": "decode with cg=True",
    "flash_attn.utils.generation.allocate_inference_cache": "model.allocate_inference_cache",
    "flash_attn.utils.generation.capture_graph": "decode with cg=True",
    "flash_attn.utils.generation.update_graph_cache": "decode with cg=True",
    "flash_attn.utils.library": "torch.library",
    "flash_attn.utils.testing": "flashtile.testing",
    "flash_attn.utils.torch": "torch.amp",
    "xformers.components": "torch.nn",
    "xformers.ops.RMSNorm": "torch.nn.RMSNorm",
}


# Where other releases than those of `PACKAGES` have them.
RELEASES = {
    "flash_attn_cuda": "flash-attn 1.0.9",
    "flash_attn.flash_attn_interface.flash_attn_unpadded_qkvpacked_split_func": "flash-attn 1.0.9",
    "flash_attn.fused_softmax": "flash-attn 2.8.2",
}


def missing(name: str) -> str:
    """What to say about a name that flashtile lacks."""
    package = owner(name) or FLASH_ATTN_2
    release = RELEASES.get(name, f"{package.distribution} {package.version}")
    if name in INSTEAD:
        return f"flashtile has no {name}, which {release} has; use {INSTEAD[name]}"
    return f"flashtile has no {name}; it provides names of {release}"
