"""Run code written for flash_attn without changing it: ``import flash_attn`` finds flashtile.

::

    from flashtile.integrations import flash_attn

    flash_attn.install()  # before the code, or transformers, looks for flash_attn

    with flash_attn.install():  # or inside a block only
        from flash_attn import flash_attn_func

``python -m flashtile.as_flash_attn script.py`` runs a script in this way. `flash_attn_modules`
lists the modules; importing any other module of flash_attn raises an ImportError that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from types import CodeType, FrameType, ModuleType
from typing import Any

from .flash_attn_modules import ELSEWHERE, INSTEAD, Choice, Contents, Package, missing, owner

OWN_NAME = __name__.split(".")[0]
TRANSFORMERS = "transformers.modeling_utils"
IMPLEMENTATIONS = {  # what transformers calls a distribution
    "flash-attn": "flash_attention_2",
    "flash_attn_3": "flash_attention_3",
    "flash-attn-4": "flash_attention_4",
}


def install(
    force: bool = False,
    versions: Collection[int] | None = None,
    version: str | None = None,
) -> Installation:
    """Let ``import flash_attn`` find flashtile, from now on or in a ``with`` block.

    If a distribution of the FlashAttention project is installed, imports continue to find it.
    Blocks nest; leaving the outermost one restores ``sys.modules`` and ``sys.meta_path``, also
    after an exception.

    Args:
        force: replace installed distributions, too.
        versions: which of FlashAttention 2, 3 and 4 to provide, such as (2,) for a program that
            prefers FlashAttention-3 and calls it with an old release's signature. Default: those in
            effect, those of the environment (``flashtile flash-attn install``), or all.
        version: the release of FlashAttention-2 that flashtile reports itself as, from "2.6" on;
            the newest by default. As "2.6", `unpad_input` returns four values; all else is that of
            the newest.

    Returns:
        The installation: a context manager with a method `uninstall`.

    Raises:
        ValueError: there are no such versions.
        RuntimeError: an installation with other versions is in effect.
    """
    outer = [finder.choice for finder in _finders() if finder.choice is not None]
    hooks = [] if outer else _waiting_hooks()
    current = outer[0] if outer else Choice(**hooks[0].choice if hooks else {})
    choice = Choice(
        current.versions if versions is None else tuple(sorted(set(versions))),
        current.version if version is None else version,
    )
    packages = choice.packages()
    if outer and choice != current:
        raise RuntimeError(
            f"versions, version: flash_attn is installed with {tuple(current)}, and cannot be with "
            f"{tuple(choice)} at the same time"
        )
    return Installation(packages, force, choice, hooks)


class Installation:
    """The effect of one call of `install`, here or in `xformers`."""

    def __init__(
        self,
        packages: tuple[Package, ...],
        force: bool = False,
        choice: Choice | None = None,
        hooks: Sequence[Any] = (),
    ) -> None:
        self._hooks = hooks  # of the environment, which this installation replaces
        for hook in hooks:
            sys.meta_path.remove(hook)
        served = [package for finder in _finders() for package in finder.packages]
        self.packages = tuple(
            package
            for package in packages
            if package not in served and (force or not is_installed(package))
        )
        self._force = force
        self._finder: _Finder | None = _Finder(self.packages, choice)
        self._hidden: dict[str, ModuleType] = {}
        sys.meta_path.insert(0, self._finder)
        try:
            self._hidden = self._take_modules()
            self._finder.waits_for_transformers = TRANSFORMERS in sys.modules
            self._finder.open_names_in_time()
        except BaseException:  # such as a warning that is an error
            self.uninstall()
            raise

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()

    def uninstall(self) -> None:
        """Restore the state before `install`. A second call does nothing."""
        if self._finder is None:
            return
        sys.meta_path.remove(self._finder)
        sys.meta_path.extend(self._hooks)
        self._finder.close_names()
        for library in self._finder.libraries.values():
            if library is not None:
                library._destroy()
        self._finder = None
        self._take_modules()
        sys.modules.update(self._hidden)
        for name, module in self._hidden.items():
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], child, module)

    def _take_modules(self) -> dict[str, ModuleType]:
        """Remove the modules with our names from ``sys.modules``, and return them."""
        names = [name for name in sys.modules if self._replaces(name)]
        for name in names:
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)
        return {name: sys.modules.pop(name) for name in names}

    def _replaces(self, name: str) -> bool:
        """Whether this installation provides `name`; with `force`, all submodules count as well."""
        package = _provider(name, self.packages)
        return package is not None and (self._force or name in package.modules)


def is_installed(package: Package) -> bool:
    """Whether the real distribution can be imported; does not import it."""
    name, path = "", None
    for part in package.marker.split("."):
        name = f"{name}.{part}" if name else part
        spec = _real_spec(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


def _real_spec(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """The spec of a module according to the other finders."""
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            continue
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _provider(name: str, packages: tuple[Package, ...]) -> Package | None:
    """That of the packages which a module belongs to."""
    of_module = owner(name)
    distribution = None if of_module is None else of_module.distribution
    return next((x for x in packages if x.distribution == distribution), None)


def _waiting_hooks() -> list[Any]:
    """Those of `flash_attn_hook` that have not installed anything yet."""
    hooks: list[Any] = [finder for finder in sys.meta_path if hasattr(finder, "integration")]
    return [x for x in hooks if x.integration == "flash_attn" and not x.is_installing]


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


class _Finder(DistributionFinder):
    """Finds the modules and the metadata of the packages it is given; those of flash_attn have a
    choice.
    """

    def __init__(self, packages: tuple[Package, ...], choice: Choice | None) -> None:
        self.packages, self.choice = packages, choice
        self.libraries: dict[str, Any] = {}  # of operators, by namespace
        self.close_names: Callable[[], None] = lambda: None
        self.waits_for_transformers = False

    def open_names_in_time(self) -> None:
        """Call `open_names` once, when transformers is there: it looks for flash_attn while it is
        imported, and such a question may be what installs this finder.
        """
        spec = getattr(sys.modules.get(TRANSFORMERS), "__spec__", None)
        if self.waits_for_transformers and not getattr(spec, "_initializing", False):
            self.waits_for_transformers = False
            self.open_names()

    def _names(self) -> list[str]:
        """The attention implementations of transformers that need our packages."""
        distributions = [package.distribution for package in self.packages]
        return [name for key, name in IMPLEMENTATIONS.items() if key in distributions]

    def open_names(self) -> None:
        """Let transformers' names of our packages find flashtile, on a CPU too."""
        from .transformers_loader import LoaderChangedError, patch_loader

        names = self._names()
        try:
            self.close_names = patch_loader(*names) if names else self.close_names
        except LoaderChangedError as error:
            warnings.warn(
                f"attn_implementation={names[0]!r} keeps the checks of this transformers, "
                f"because its loader has changed ({error})",
                stacklevel=4,
            )

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that we provide.

        Importing any other module of our packages raises an error; `importlib.util.find_spec`
        returns None for it.
        """
        self.open_names_in_time()
        if fullname == TRANSFORMERS and self._names():
            spec = _real_spec(fullname, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Opening(spec.loader, self)
            return spec
        package = _provider(fullname, self.packages)
        # Compiled, beside the packages of flash_attn.
        is_library = self.choice is not None and "." not in fullname and fullname in INSTEAD
        if package is None and not is_library:
            return None
        contents = None if package is None else package.modules.get(fullname)
        if contents is not None:
            loader = _Loader(contents, self)
            # Every module is a package, so ``from module import name`` asks this finder for a name
            # that the module lacks.
            spec = ModuleSpec(fullname, loader, origin=OWN_NAME, is_package=True)
            # The path keeps other namespace packages visible, such as FlashAttention-4's.
            real = None if "." in fullname else _real_spec(fullname, None)
            if real is not None and real.loader is None and real.submodule_search_locations:
                spec.submodule_search_locations = list(real.submodule_search_locations)
            return spec
        if _real_spec(fullname, path) is not None or _is_probe(sys._getframe(1)):
            return None
        # Not with the argument `name`: ``from ... import`` would then raise its own error instead.
        raise ModuleNotFoundError(missing(fullname))

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """The metadata of our packages, as `importlib.metadata` asks for it."""
        wanted = getattr(context, "name", None)
        for package in self.packages:
            if wanted is None or _normalized(wanted) == _normalized(package.distribution):
                yield _Metadata(package)


def _normalized(distribution: str) -> str:
    return distribution.lower().replace("_", "-").replace(".", "-")


def _is_probe(frame: FrameType | None) -> bool:
    """Whether the caller is `importlib.util.find_spec`, which returns None for missing modules."""
    probe: CodeType = importlib.util.find_spec.__code__
    for _ in range(3):
        if frame is None:
            return False
        if frame.f_code is probe:
            return True
        frame = frame.f_back
    return False


class _Opening(Loader):
    """Loads the module of transformers that checks names, and then opens ours."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run it by its own loader."""
        spec = module.__spec__
        assert spec is not None
        module.__loader__ = spec.loader = self.loader
        self.loader.exec_module(module)
        self.finder.open_names()


class _Loader(Loader):
    """Creates a module that holds names of flashtile's modules."""

    def __init__(self, contents: Contents, finder: _Finder) -> None:
        self.contents, self.finder = contents, finder

    def exec_module(self, module: ModuleType) -> None:
        """Fill the module with the names of its sources."""
        contents = self.contents
        for source in contents.sources:
            content = vars(importlib.import_module(f"{OWN_NAME}.{source}"))
            names = content if contents.names is None else contents.names
            shown = {name: content[name] for name in names if not name.startswith("__")}
            vars(module).update(shown)
        vars(module).update(contents.constants)
        namespace = contents.operators
        libraries = self.finder.libraries
        if namespace is not None and namespace not in libraries:
            from .flash_attn_ops import register

            libraries[namespace] = register(namespace)
        module.__doc__ = f"{OWN_NAME} instead of {module.__name__}."
        vars(module)["__getattr__"] = partial(_attribute, self.finder.packages, module.__name__)


def _attribute(packages: tuple[Package, ...], module: str, name: str) -> Any:
    """What a module of ours imports when it is first asked for: a submodule, or a name that it has
    from elsewhere.
    """
    path = f"{module}.{name}"
    if path in sys.modules:  # a submodule of a namespace package
        return sys.modules[path]
    package = _provider(path, packages)
    if package is not None and path in package.modules:
        return importlib.import_module(path)
    if path in ELSEWHERE:
        source, _, name = ELSEWHERE[path].rpartition(".")
        with suppress(ImportError):  # einops, which flash-attn requires and flashtile does not
            return getattr(importlib.import_module(source), name)
    raise AttributeError(missing(path))


class _Metadata(Distribution):
    """Metadata like that which pip writes for an installed package."""

    def __init__(self, package: Package) -> None:
        self._package = package

    def read_text(self, filename: str) -> str | None:
        """One of the files of a ``.dist-info`` folder."""
        package = self._package
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {package.distribution}\nVersion: {package.version}\n"
                f"Summary: {OWN_NAME} instead of {package.distribution}\n"
            )
        if filename == "top_level.txt":
            return "".join(f"{top}\n" for top in sorted({r.split(".")[0] for r in package.roots}))
        return None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Raise FileNotFoundError: this metadata has no files."""
        raise FileNotFoundError(f"{path}: {OWN_NAME} stands in for {self._package.distribution}")
