"""``flashtile flash-attn`` and ``flashtile xformers``: every process of this environment finds
flashtile as flash_attn or as xformers.

Child processes, workers, notebooks and ``pip install`` of packages that require it then need no
call of `install` of `flashtile.integrations.flash_attn` or `xformers`.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any

from ..integrations import flash_attn_hook
from ..integrations.flash_attn_modules import Choice, Package

OWNER = "flashtile"  # what pip calls the installer
ACTIONS = ("install", "uninstall", "status")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the folder, and what to provide."""
    add_action(parser)
    add_choice(parser)


def add_action(parser: argparse.ArgumentParser) -> None:
    """Add the action and the folder."""
    parser.add_argument("action", choices=ACTIONS, help="what to do; status only tells")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where Python looks for packages (default: site-packages of this Python)",
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add what to provide."""
    parser.add_argument(
        "--only",
        dest="versions",
        type=_versions,
        metavar="2,3,4",
        help="which of FlashAttention 2, 3 and 4 to provide (default: all)",
    )
    parser.add_argument(
        "--version",
        help="release of FlashAttention 2 that flashtile reports itself as, from 2.6 on (default: "
        f"{Choice().version})",
    )


def _versions(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, want numbers such as 2,3") from error


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `flashtile.integrations.flash_attn.install` that were given."""
    given = {"versions": args.versions, "version": args.version}
    return {name: value for name, value in given.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    """Do it for flash_attn."""
    try:
        choice = chosen(args)
        return act(args, package_of(choice), choice)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1


def act(args: argparse.Namespace, package: Package, choice: dict[str, Any]) -> int:
    """Do it, and print which files were written or removed."""
    folder = args.folder or Path(sysconfig.get_path("purelib"))
    name, module = package.distribution, package.roots[0]
    context = DistributionFinder.Context(name=name, path=[str(folder)])
    there = next(iter(MetadataPathFinder.find_distributions(context)), None)  # of the folder only
    ours = there if there and (there.read_text("INSTALLER") or "").strip() == OWNER else None
    spec = PathFinder.find_spec(module, [str(folder), *sys.path])
    if args.action == "status":
        print(status(module, folder, ours, spec is not None))
        return 0
    if args.action == "uninstall":
        if ours is None:
            print(f"nothing to remove: no {name} of {OWNER} in {folder}", file=sys.stderr)
            return 1
        return uninstall(folder, ours)
    if spec is not None or there is not ours:
        is_xformers = module == "xformers"
        instead = "" if is_xformers else ", or flash_attn.install(force=True) in a program"
        print(
            f"the real {name} is installed; uninstall it first (pip uninstall {name}){instead}",
            file=sys.stderr,
        )
        return 1
    before = recorded(folder, ours) if ours else []  # perhaps of another version
    return install(folder, contents(package, **choice), before)


def status(module: str, folder: Path, ours: Distribution | None, is_real: bool) -> str:
    """One line on who serves the module."""
    if is_real:
        return f"{module} is the real one"
    if ours is None:
        return f"{module} is not installed in {folder}"
    return f"{module} is {OWNER}, as version {ours.version}, in {folder}"


def package_of(choice: dict[str, Any]) -> Package:
    """FlashAttention 2 as chosen; ValueError if there is nothing to choose like this."""
    package = Choice(**choice).packages()[0]
    if package.distribution != "flash-attn":
        raise ValueError("--only: want 2 among them, whose name and version pip sees")
    return package


def hook_of(package: Package) -> str:
    """The name of the copy of `flash_attn_hook` in site-packages."""
    return f"_flashtile_as_{package.roots[0]}"


def contents(package: Package, **choice: Any) -> dict[str, str]:
    """The files of an installation, by path; the one that starts the hook is the last."""
    name, version, module = package.distribution, package.version, package.roots[0]
    info, hook = f"{module}-{version}.dist-info", hook_of(package)
    start = ", ".join([repr(module), *(f"{key}={value!r}" for key, value in choice.items())])
    files = {
        f"{hook}.py": Path(flash_attn_hook.__file__).read_text(encoding="utf-8"),
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            f"Summary: {OWNER} in place of {name}\n"
        ),
        f"{info}/INSTALLER": f"{OWNER}\n",
        f"{info}/top_level.txt": f"{module}\n",
        f"{info}/RECORD": "",
        f"{hook}.pth": f"import {hook}; {hook}.start({start})\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    return files


def install(folder: Path, files: dict[str, str], before: list[Path]) -> int:
    """Write all files in place of those of before. If one cannot be written, keep those."""
    kept = [(path, path.read_text(encoding="utf-8")) for path in before if path.is_file()]
    remove(before, folder)
    written: list[Path] = []
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            written.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        remove(written, folder)
        for path, text in kept:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"nothing was installed: {error}", file=sys.stderr)
        return 1
    for path in written:
        print(f"wrote {path}")
    return 0


def uninstall(folder: Path, ours: Distribution) -> int:
    """Remove the files in the record."""
    paths = recorded(folder, ours)
    remove(paths, folder)
    for path in paths:
        print(f"removed {path}")
    return 0


def recorded(folder: Path, ours: Distribution) -> list[Path]:
    """The files that an installation wrote, in that order."""
    return [folder / file for file in ours.files or ()]


def remove(paths: list[Path], folder: Path) -> None:
    """Remove files, the last one first, what Python compiled of them, and the folders that this
    leaves empty.
    """
    compiled = [x for path in paths for x in folder.glob(f"__pycache__/{path.stem}.*.pyc")]
    for path in reversed([*compiled, *paths]):
        if path.is_file():
            path.unlink()
        if path.parent != folder and path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
