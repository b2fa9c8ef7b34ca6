"""Runs the source of a warp-specialised Gluon kernel in PyTorch on a CPU: a model of what the
hardware guarantees, and of nothing more.

The kernel files are imported once more with a stand-in for Triton. Roles are threads, one of which
runs at a time; a seed picks the next one at every point where threads synchronise. What the
hardware does asynchronously happens as late as it may: a copy lands when the scheduler picks it,
and until then its target holds NaN; a product reads shared memory when it is waited for; a copy or
an addition to memory reads its tile when its buffer is waited for, and lands when the scheduler
picks it. If no thread can proceed, the emulator reports a deadlock. A result that is used before
its wait, or a generic store that no fence makes visible to products and copies, is an error.
"""

from __future__ import annotations

import importlib
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flashtile.gpu.launch

from .inputs import UNWRITTEN
from .linear_layout import LinearLayout
from .memory import Descriptor, Pointer, Tile, load, philox, store, tile, where
from .scheduler import Scheduler, context, released

ROOT = "emulated_flashtile"
FOLDER = Path(__file__).parents[2] / "flashtile"
PACKAGES = ("", ".backends", ".backends.hopper")  # without what their own __init__ imports

scheduler: Scheduler


class Shared:
    """A tile in shared memory."""

    def __init__(self, data: Tensor, offsets: Tensor | None = None) -> None:
        self.data, self.offsets = data, offsets
        self.dtype, self.shape = data.dtype, list(data.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def allocation(self) -> int:
        return self.data.untyped_storage().data_ptr()

    def load(self, layout: Any) -> Tile:
        data = self.data if self.offsets is None else self.data.view(-1)[self.offsets]
        return tile(data.clone().view(self.data.shape))

    def store(self, value: Tensor) -> None:
        context.unfenced.add(self.allocation())
        if self.offsets is not None:
            self.data.view(-1)[self.offsets] = value.reshape(-1).as_subclass(Tensor)
        else:
            self.data.copy_(value)
        scheduler.meet()

    def recast(self, shape: list[int], layout: Any) -> Shared:
        if layout == "columns first" and len(shape) == 3:
            columns = self.data.view(-1, self.data.shape[-1] // shape[-1], shape[-1])
            return Shared(columns.transpose(0, 1).view(shape))
        data = self.data.contiguous().view(-1)
        assert data.data_ptr() == self.data.data_ptr(), "recast of a part with gaps"
        offsets = layout.offsets(shape) if isinstance(layout, LinearLayout) else None
        return Shared(data[: torch.Size(shape).numel()].view(shape), offsets)


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def complete_phase(self) -> None:
        assert self.pending >= 0, "more arrivals than expected"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def arrive(self, count: int = 1) -> None:
        self.pending -= count
        self.complete_phase()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def land(self, size: int) -> None:
        self.bytes -= size
        self.complete_phase()

    def wait(self, phase: Any, pred: Any = True) -> None:
        if pred:
            scheduler.meet(lambda: self.phase % 2 != int(phase))


class Barriers:
    """An array of them."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


class Product:
    """A product in flight."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.value = compute, None

    def finish(self) -> None:
        self.value = self.value if self.value is not None else tile(self.compute())


def visible(*tiles: Any) -> None:
    for x in tiles:
        if isinstance(x, Shared):
            assert x.allocation() not in context.unfenced, "stores without a fence"


def warpgroup_mma(
    a: Any, b: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
) -> Product:
    visible(a, b)
    assert is_async
    assert not isinstance(acc, Product) or acc is context.products[-1]  # they end in order

    def compute() -> Tensor:
        left = a.data if isinstance(a, Shared) else a
        product = left.float() @ b.data.float()
        start = acc.value if isinstance(acc, Product) else acc
        return product + start if use_acc else product

    context.products.append(Product(compute))
    return context.products[-1]


def warpgroup_mma_wait(outstanding: int, deps: list[Any]) -> Any:
    scheduler.meet()
    while len(context.products) > outstanding:
        context.products.pop(0).finish()
    values = [x.value if isinstance(x, Product) else x for x in deps]
    assert all(x is not None for x in values), "a result before its wait"
    return values[0] if len(values) == 1 else values


def copy_to_shared(desc: Descriptor, coord: list[Any], barrier: Barrier, target: Shared) -> None:
    target.data.fill_(torch.nan)

    def land() -> None:
        target.data.zero_()
        memory, part = desc.parts(coord, target.data)
        part.copy_(memory)
        barrier.land(desc.block_type.nbytes)

    scheduler.copies.append(land)


def copy_out(desc: Descriptor, coord: list[Any], source: Shared, add: bool) -> None:
    visible(source)

    ticket, arriving = tickets.get(context.program, 0), context.arriving

    def read() -> None:
        memory, part = desc.parts(coord, source.data.clone())
        arriving.append(coord)

        def land() -> None:
            arriving.pop()
            memory.add_(part) if add else memory.copy_(part)
            if add:
                additions.append((int(coord[0]), ticket))

        scheduler.copies.append(land)

    context.bulk.append(read)


tickets: dict[Any, int] = {}  # what a program drew
additions: list[tuple[int, int]] = []  # (block of the workspace, ticket), in order


def store_wait(pending: int) -> None:
    """Until the tiles of all but the last ones have been read; memory changes later."""
    scheduler.meet()
    while len(context.bulk) > pending:
        context.bulk.pop(0)()


shapes: list[tuple[int, ...]] = []  # the grid of each launch
grids: list[dict[Any, Any]] = []  # the threads of the programs of each launch
letting: set[Any] = set()  # programs that let the next launch start


def may_start(number: int) -> bool:
    """Whether the programs of launch `number`, an early one unless it is the first, may start."""
    before = grids[number - 1].items() if number else ()
    return all(program in letting or x in scheduler.finished for program, x in before)


def let_next_kernel_start() -> None:
    """From here on the program is slow, so that the next launch comes before its end."""
    letting.add(context.program)
    scheduler.slow_down()
    scheduler.meet()


def wait_for_earlier_kernels() -> None:
    """Until the launch before has ended: not those before it, unless it has waited for them."""
    before = set(grids[context.program[-1] - 1].values()) if context.program[-1] else set()
    scheduler.meet(lambda: scheduler.finished.issuperset(before) and not scheduler.copies)


class NamedBarriers:
    """Hardware barriers of each program."""

    def __init__(self) -> None:
        self.threads: dict[Any, int] = {}

    def sync(self, number: int, threads: int) -> None:
        key = context.program, number
        arrived = self.threads[key] = self.threads.get(key, 0) + 128
        last = (arrived + threads - 1) // threads * threads
        scheduler.meet(lambda: self.threads[key] >= last)


named_barriers = NamedBarriers()


def kept_halves(asm: str, words: Tensor, lower: Tensor, first: Tensor) -> Tensor:
    """In which halves two numbers are at least `first`, compared as float16: see
    `dropout.kept_pairs`."""
    (choice,) = re.findall(r"0x[0-9a-f]{4}", asm)
    has_minimum = "min.u16x2" in asm
    number: list[Any] = [0, 0]
    for place, digit in enumerate(map(int, reversed(choice[2:]))):
        source = words if digit < 4 else lower if "$2" in asm else torch.zeros_like(words)
        number[place // 2] |= (source >> 8 * (digit % 4) & 0xFF) << 8 * (place % 2)
    least = torch.as_tensor(first & 0xFFFF)
    halves = [torch.minimum(x, least) if has_minimum else x for x in number]
    kept = [as_float16(x) >= as_float16(least) for x in halves]
    return tile(sum(x * (0xFFFF << 16 * half) for half, x in enumerate(kept)).to(torch.int32))


def as_float16(x: Tensor) -> Tensor:
    return x.as_subclass(Tensor).to(torch.int16).view(torch.float16)


def barrier_of(asm: str, args: list[Any]) -> tuple[int, int]:
    """The number of a hardware barrier, and the threads that arrive at it."""
    return int(args[0]), int(asm.partition(";")[0].rpartition(", ")[2])


def inline_asm(asm: str, constraints: str, args: list[Any], **_: Any) -> Any:
    if asm.startswith("barrier.cta.sync"):
        return named_barriers.sync(*barrier_of(asm, args))
    if "ld.acquire" in asm:
        semaphore, n = args
        return scheduler.meet(lambda: int(load(semaphore)) == int(n))
    if "wait_group 0" in asm:
        store_wait(0)
        arriving = context.arriving
        return scheduler.meet(lambda: not arriving)
    if "set.ge.u32.f16x2" in asm:
        return kept_halves(asm, *args)
    if "nanosleep" in asm:  # `after_products`
        return args[0]
    if asm.startswith("and.b32"):  # 16-bit numbers or zeros
        return where(args[1] != 0, args[0], torch.zeros_like(args[0]))
    # Waits for the clock change nothing: any order of the threads is possible anyway.
    assert asm == "mov.b32 $0, 0;" or "%clock" in asm, asm
    return torch.zeros_like(args[0]) if constraints == "=f,f" else 0


def atomic_add(p: Pointer, value: Any, sem: str = "acq_rel", scope: str = "gpu") -> Any:
    """A number at once, as a ticket unless it releases a semaphore; a tile when the scheduler picks
    it.
    """
    if isinstance(value, Tensor):
        scheduler.copies.append(lambda: p.flat().index_add_(0, p.offset, value))
        return value
    old = load(p)
    store(p, old + value)
    if sem == "release":
        return released() or scheduler.meet()
    tickets[context.program] = int(old)
    return old


def warp_specialize(roles: list[Any], warps: Any, registers: Any, **_: Any) -> None:
    program = context.program
    threads = [scheduler.spawn(lambda f=f, a=a: f(*a), program) for f, a in roles]
    scheduler.meet(lambda: scheduler.finished.issuperset(threads))


def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return Barriers(shape[0])
    if dtype == torch.int32:
        return Shared(torch.full(tuple(shape), UNWRITTEN, dtype=dtype))
    return Shared(torch.full(tuple(shape), torch.nan, dtype=dtype))


class Constexpr:
    """Both the annotation and the constant."""

    def __new__(cls, value: Any) -> Any:
        return value


def maximum(x: Any, y: Any, nan: str = "none") -> Tensor:
    """Unless NaN propagates, the number wins over it."""
    return (torch.maximum if nan == "all" else torch.fmax)(tile(x), tile(y))


LANGUAGE: dict[str, Any] = {
    "constexpr": Constexpr,
    "tensor": Tile,
    "shared_memory_descriptor": Shared,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "int1": torch.bool,
    "int8": torch.int8,
    "uint32": torch.int64,  # PyTorch's own has few operations
    "uint64": torch.int64,
    "philox": philox,
    "log2": lambda x: torch.log2(torch.as_tensor(x)),
    "xor_sum": torch.sum,  # of numbers without common bits
    "join": lambda x, y: torch.stack([x, y], -1),
    "arange": lambda start, stop, layout=None: tile(torch.arange(start, stop)),
    "zeros": lambda shape, dtype, layout=None: tile(torch.zeros(shape, dtype=dtype)),
    "full": lambda shape, value, dtype, layout=None: tile(torch.full(shape, value, dtype=dtype)),
    "where": where,
    "max": torch.amax,
    "maximum": maximum,
    "minimum": lambda x, y: torch.minimum(tile(x), tile(y)),
    "cdiv": lambda x, y: (x + y - 1) // y,
    "clamp": lambda x, low, high, nan: torch.clamp(x, low, high),
    "PropagateNan": SimpleNamespace(ALL="all"),
    **{x: getattr(torch, x) for x in ("abs", "exp2", "permute", "reshape", "sum", "zeros_like")},
    **{x: getattr(torch, x) for x in ("exp", "log", "sqrt")},  # of score functions
    "expand_dims": torch.unsqueeze,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "multiple_of": lambda x, sizes: x,
    "assume": lambda truth: None,
    "to_tensor": tile,
    "barrier": lambda: scheduler.meet(),
    "static_range": range,
    "static_assert": lambda truth: None,
    "load": load,
    "store": store,
    "atomic_add": atomic_add,
    "atomic_xchg": lambda p, value, sem, scope: (released(), store(p, value), scheduler.meet()),
    "program_id": lambda axis: tile(context.program[axis]),
    "num_programs": lambda axis: tile(shapes[context.program[-1]][axis]),
    "allocate_shared_memory": allocate,
    "inline_asm_elementwise": inline_asm,
    "warp_specialize": warp_specialize,
    "SharedLinearLayout": LinearLayout,
    # Up to 128 bytes of all rows, then the next ones. Tiles are rows here: `recast` finds columns.
    "NVMMASharedLayout": lambda *sizes, **more: "columns first",
    "NVMMADistributedLayout": lambda *sizes: None,
    "SwizzledSharedLayout": lambda *sizes: None,
    "BlockedLayout": lambda *sizes: None,
    "SliceLayout": lambda *sizes: None,
    "DotOperandLayout": lambda *sizes: None,
    "DistributedLinearLayout": lambda *bases: None,
}


class Recasting:
    """What `builtin` functions ask of the compiler."""

    @staticmethod
    def memdesc_reinterpret(x: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
        return x.recast(shape, layout)


def jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else lambda f: f


def builtin(function: Any) -> Any:
    given = {"_semantic": Recasting, "_generator": SimpleNamespace()}
    names = inspect.signature(function).parameters
    return lambda *args: function(*args, **{x: given[x] for x in given if x in names})


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules under Triton's names."""
    found: dict[str, types.ModuleType] = {}

    def module(name: str, **names: Any) -> types.ModuleType:
        found[name] = types.ModuleType(name)
        found[name].__spec__ = ModuleSpec(name, None)
        found[name].__dict__.update(names)
        return found[name]

    gluon = "triton.experimental.gluon"
    language = module(gluon + ".language", **LANGUAGE)
    plain = module("triton.language", **LANGUAGE)
    module("triton.language.core", _aggregate=lambda cls: cls, builtin=builtin)
    module("triton.experimental")
    module(gluon, jit=jit, constexpr_function=jit, language=language)
    module(gluon + ".language._core", builtin=builtin, _unwrap_if_constexpr=lambda x: x)
    module(gluon + ".language._semantic", GluonCallerContext=lambda num_warps: None)
    module(gluon + ".language.nvidia")
    module(
        gluon + ".language.nvidia.hopper",
        fence_async_shared=lambda: context.unfenced.clear(),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
        tma=SimpleNamespace(
            async_load=copy_to_shared,
            async_store=lambda desc, coord, source: copy_out(desc, coord, source, False),
            async_atomic_add=lambda desc, coord, source: copy_out(desc, coord, source, True),
            store_wait=store_wait,
        ),
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, size: barrier.expect(size),
            arrive=lambda barrier, count=1: barrier.arrive(count),
            wait=lambda barrier, phase, pred=True: barrier.wait(phase, pred),
        ),
    )
    # A module has any attribute that it is given, which mypy does not know.
    plain.extra = SimpleNamespace(  # type: ignore[attr-defined]
        cuda=SimpleNamespace(
            gdc_wait=wait_for_earlier_kernels, gdc_launch_dependents=let_next_kernel_start
        )
    )
    interpreting = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
    module("triton", jit=jit, constexpr_function=jit, language=plain, knobs=interpreting)
    return found


def load_file(name: str) -> types.ModuleType:
    """A kernel file of the package, or one elsewhere that imports from the package's kernels."""
    if name.startswith("flashtile."):
        return importlib.import_module(ROOT + name.removeprefix("flashtile"))
    found = sys.modules[f"{ROOT}.{name}"] = types.ModuleType(f"{ROOT}.{name}")
    source = Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8")
    exec(source.replace("from flashtile.backends", f"from {ROOT}.backends"), vars(found))
    return found


def generated(function: Any) -> Any:
    """A function that `gpu/score_source.py` has printed."""
    source = "".join(linecache.getlines(function.__code__.co_filename))
    names: dict[str, Any] = {"__name__": "emulated"}
    exec(source.replace("from flashtile.", f"from {ROOT}."), names)
    return names[function.__name__]


@contextmanager
def emulated() -> Iterator[Callable[[str], types.ModuleType]]:
    """Imports a kernel file against the stand-ins."""
    fakes = stand_ins()
    kept = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    for name in PACKAGES:
        package = sys.modules[ROOT + name] = types.ModuleType(ROOT + name)
        package.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
    sys.modules[f"{ROOT}.gpu.launch"] = flashtile.gpu.launch  # which needs all of Triton to compile
    try:
        yield load_file
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == ROOT]:
            del sys.modules[name]
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def argument(x: Any) -> Any:
    """An argument of a launch as the emulated kernel takes it."""
    if isinstance(x, Tensor):
        return Pointer(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(argument, x))
    if getattr(x, "SCORE_MOD", None) is not None:
        named = {n: f for n, f in vars(x).items() if n.startswith("SCORE_") and f is not None}
        return replace(x, **{name: generated(f.fn) for name, f in named.items()})
    return tile(x) if isinstance(x, int) and not isinstance(x, bool) else x


def run(launch: Any, seed: int) -> list[tuple[int, int]]:
    """Run all programs of a launch, a few at once, in any order; the `additions`."""
    return run_chain([launch], seed)


def run_chain(launches: list[Any], seed: int) -> list[tuple[int, int]]:
    """Run launches, of which early ones start while the one before ends; the `additions` of the
    last one that is not early and those after it."""
    last = max((n for n, launch in enumerate(launches) if n and not launch.is_early), default=0)
    if last:
        run_chain(launches[:last], seed)
        return run_chain(launches[last:], seed)
    global scheduler, named_barriers
    scheduler, named_barriers = Scheduler(seed), NamedBarriers()
    for record in (additions, tickets, shapes, grids, letting):
        record.clear()
    with emulated() as load_file:
        conditions = {}
        for number, launch in enumerate(launches):
            assert launch.is_early or number == 0
            function = launch.kernel.fn
            kernel = getattr(load_file(function.__module__), function.__name__)
            run = partial(kernel, **{name: argument(x) for name, x in launch.arguments.items()})
            shapes.append(launch.grid)
            ids = [(*program, number) for program in product(*map(range, launch.grid))]
            grids.append({program: scheduler.spawn(run, program) for program in ids})
            conditions |= dict.fromkeys(grids[-1].values(), partial(may_start, number))
        scheduler.start(conditions)
    return list(additions)
