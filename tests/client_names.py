"""The names of flash_attn that public repositories import (`client_names.json`, with the commit of
each repository that was read).

    python tests/client_names.py FOLDER    # scan git directories FOLDER/owner+name/repo, write it

A name is "module:name", "module", or the dotted name of something in a submodule of flash_attn. It
is needed if the import of its file fails without it, and otherwise optional: inside ``try``, ``if``
or a function.
Copies of FlashAttention inside a repository are not counted, nor are a repository's own files that
have the name of a package of FlashAttention.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = Path(__file__).with_name("client_names.json")
ROOTS = (
    "dropout_layer_norm",
    "flash_attn",
    "flash_attn_2_cuda",
    "flash_attn_3",
    "flash_attn_cuda",
    "flash_attn_interface",
    "fused_dense_lib",
    "rotary_emb",
    "xentropy_cuda_lib",
)
OLD_NAMES = (  # of repositories that are here under another one
    "OpenAccess-AI-Collective/axolotl",
    "Tencent/HunyuanDiT",
    "microsoft/Megatron-DeepSpeed",
)
COPIES = re.compile(r"(^|/)(flash_attn|flash-attention|third_party/flash|csrc|hopper)/")


def git(directory: Path, *arguments: str) -> str:
    command = ["git", "--git-dir", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, check=False).stdout.decode(errors="replace")


def imports(node: ast.AST, optional: bool = False) -> Iterator[tuple[str, bool]]:
    """(name, whether it is optional) of each import below a node."""
    optional |= isinstance(node, (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.If))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module and not child.level:
            for alias in child.names:
                yield f"{child.module}:{alias.name}", optional
        elif isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, optional
        yield from imports(child, optional)


def in_submodules(tree: ast.AST) -> Iterator[str]:
    """What a file reads as ``flash_attn.submodule.name``."""
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if len(parts) > 1 and isinstance(node, ast.Name) and node.id == "flash_attn":
            yield ".".join([node.id, *parts])


def names_of(directory: Path) -> dict[str, list[str]]:
    """The needed and the optional names of a repository."""
    files = git(directory, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    own = {Path(file).stem for file in files if file.endswith(".py") and not COPIES.search(file)}
    roots = [root for root in ROOTS if root not in own]
    pattern = f"(import|from) +({'|'.join(roots)})\\b"
    found: dict[str, set[str]] = {"needed": set(), "optional": set()}
    for line in git(directory, "grep", "-lE", pattern, "HEAD", "--", "*.py").splitlines():
        path = line.removeprefix("HEAD:")
        if COPIES.search(path):
            continue
        try:
            tree = ast.parse(git(directory, "show", line))
        except (SyntaxError, ValueError):  # a template, or Python 2
            continue
        used = {x for x in imports(tree) if re.split(r"[.:]", x[0])[0] in roots}
        for name, optional in used:
            found["optional" if optional else "needed"].add(name.removesuffix(":*"))
        if any(name == "flash_attn" for name, _ in used):
            found["optional"] |= set(in_submodules(tree))
    found["optional"] -= found["needed"]
    return {kind: sorted(names) for kind, names in found.items()}


def main(folder: str) -> None:
    scanned = {}
    for directory in sorted(Path(folder).glob("*/repo")):
        repository = directory.parent.name.replace("+", "/", 1)
        names = names_of(directory)
        if repository not in (*OLD_NAMES, "Dao-AILab/flash-attention") and any(names.values()):
            scanned[repository] = {"commit": git(directory, "rev-parse", "HEAD").strip()} | names
    NAMES.write_text(json.dumps(scanned, indent=1) + "\n")
    print(len(scanned), "repositories")


if __name__ == "__main__":
    main(*sys.argv[1:])
