"""The part of vLLM's interface for attention backends that flashtile implements, as stand-ins.

    python tests/vllm_interface.py WHEEL_OR_FOLDER

compares the stand-ins with a release of vLLM (its wheel, unpacked or not; nothing is imported) and
prints what differs. Last compared with 0.33.0. A stand-in has the names, the arguments and their
order; what vLLM's own code does with them is not here.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile


class AttentionType:
    DECODER, ENCODER = "decoder", "encoder"
    ENCODER_ONLY, ENCODER_DECODER = "encoder_only", "encoder_decoder"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend:
    @staticmethod
    def get_name(): ...
    @staticmethod
    def get_impl_cls(): ...
    @staticmethod
    def get_builder_cls(): ...
    @classmethod
    def supports_head_size(cls, head_size): ...
    @classmethod
    def supports_sink(cls): ...
    @classmethod
    def supports_sliding_window(cls): ...
    @classmethod
    def supports_non_causal(cls): ...
    @classmethod
    def supports_attn_type(cls, attn_type): ...


class AttentionMetadataBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device): ...
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl:
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
    ): ...
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


class TritonAttentionImpl:
    """A backend of vLLM, for what the abstract class leaves out."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping): ...


class AttentionBackendEnum:
    registered = None

    class CUSTOM:
        @staticmethod
        def is_overridden() -> bool:
            return AttentionBackendEnum.registered is not None


def register_backend(backend, class_path=None, is_mamba=False):
    assert backend is AttentionBackendEnum.CUSTOM
    AttentionBackendEnum.registered = class_path


FILES: dict[str, tuple[Any, ...]] = {
    "vllm.v1.attention.backend": (
        AttentionType,
        AttentionCGSupport,
        AttentionBackend,
        AttentionMetadataBuilder,
        AttentionImpl,
        CommonAttentionMetadata,
    ),
    "vllm.v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
    "vllm.v1.attention.backends.triton_attn": (TritonAttentionImpl,),
}


def modules() -> dict[str, ModuleType]:
    """The stand-ins as modules to put into `sys.modules`."""
    found = {}
    for name, contents in FILES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for x in contents:
            setattr(found[name], x.__name__, x)
    return found


def facts(source: str) -> dict[str, list[str]]:
    """The arguments of each function, and the names that each class defines by an assignment."""
    result = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                arguments = child.args
                count = len(arguments.args) - len(arguments.defaults)
                result[prefix + child.name] = [
                    x.arg + "=" * (index >= count) for index, x in enumerate(arguments.args)
                ]
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and prefix:
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            result[prefix + name.id] = []

    visit(ast.parse(source), "")
    return result


def differences(release: Path) -> list[str]:
    """What the stand-ins have that the release lacks or has otherwise."""
    ours = facts(Path(__file__).read_text())
    result = []
    for module, contents in FILES.items():
        file = module.replace(".", "/") + ".py"
        if release.is_file():
            theirs = facts(ZipFile(release).read(file).decode())
        else:
            theirs = facts((release / file).read_text())
        for x in contents:
            for name, arguments in ours.items():
                inside = name == x.__name__ or name.startswith(x.__name__ + ".")
                if not inside or name.endswith((".registered", ".is_overridden")):
                    continue
                if name not in theirs:
                    result.append(f"{module}: {name} is missing")
                elif theirs[name] != arguments:
                    result.append(f"{module}: {name}: {theirs[name]}, here {arguments}")
    return result


if __name__ == "__main__":
    found = differences(Path(sys.argv[1]))
    print("\n".join(found) or "equal")
    sys.exit(bool(found))
