"""Runs launch plans with Triton: prepares the arguments once per kind of call, then fills in pointers and launches.

The C++ core (plugins/core) runs the same plans from cubins. Nothing is read back from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.op_kernels import OpKernels
from still_kernels.plan import Call, Launches
from still_kernels.tile import KernelTile, TileTable

_compiled: dict[tuple[Any, ...], Any] = {}  # compiled kernels by name, function, variant and kinds of pointers


@dataclass(frozen=True)
class PreparedLaunch:
    """One launch: `values` in the kernel's order, None at `pointers` (position, name of the tensor).

    descriptors: Position, name of the tensor, and its rows and columns.
    """

    name: str
    function: Any
    grid: tuple[int, int, int]
    tile: KernelTile
    values: tuple[Any, ...]
    pointers: tuple[tuple[int, str], ...]
    descriptors: tuple[tuple[int, str, tuple[int, int]], ...] = ()


@dataclass(frozen=True)
class Prepared:
    """The launches of one kind of call.

    Args:
        variant: Key of the calls' compile-time values. Together with the kinds of pointers it finds a compiled kernel quickly; Triton's own
            search over all arguments took 30 us per launch. None leaves the search to Triton.
    """

    launches: tuple[PreparedLaunch, ...]
    workspace: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    persistent: tuple[tuple[str, int], ...]
    aliases: Mapping[str, str]
    variant: object | None


def prepare(
    launches: Launches,
    functions: Mapping[str, Any],
    tiles: Mapping[str, KernelTile],
    constants: Mapping[str, Any],
    variant: object | None = None,
) -> Prepared:
    """Prepare the arguments of an evaluated plan.

    Args:
        functions, tiles, constants: As in `op_kernels`. An argument comes from the tile's constants, else the step, else the plan, else
            `constants`.
        variant: As in `Prepared`.
    """
    made = []
    for step in launches.steps:
        function, tile = functions[step.kernel], tiles[step.kernel]
        known = {**constants, **launches.arguments, **step.arguments, **tile.constants}
        names = function.arg_names
        pointers = tuple((i, name.removeprefix("p_")) for i, name in enumerate(names) if name.startswith("p_"))
        descriptors = tuple(
            (i, name.removeprefix("d_"), launches.matrices[name.removeprefix("d_")])
            for i, name in enumerate(names)
            if name.startswith("d_")
        )
        values = tuple(None if name.startswith(("p_", "d_")) else known[name] for name in names)
        made.append(PreparedLaunch(step.kernel, function, step.grid, tile, values, pointers, descriptors))
    workspace = tuple((b.name, b.shape, getattr(torch, b.element)) for b in launches.workspace)
    persistent = tuple((b.name, math.prod(b.shape)) for b in launches.persistent)
    return Prepared(tuple(made), workspace, persistent, launches.aliases, variant)


def prepare_call(kernels: OpKernels, call: Call, arch: int, table: TileTable | None = None, **own: Any) -> Prepared:
    """The launches of a call whose plan constants are not known yet.

    Args:
        table: Block sizes; None: those of the architecture, whose kernels are then found without a comparison.
        own: Compile-time values of this call that replace the variant's.

    Raises:
        UnsupportedError: No kernel covers the call; the message lists what is covered.
    """
    reasons = kernels.refusals(call)
    if reasons:
        raise UnsupportedError(f"no Triton kernel of still::{kernels.spec.name} covers this layer: {' '.join(reasons)}")
    variant = kernels.variant_of(call)
    built = kernels.build(variant, arch, table)
    launches = kernels.plan.evaluate(replace(call, constants=built.plan_constants))
    known = variant_of(arch, variant, *own.values()) if table is None else None
    return prepare(launches, kernels.functions(), built.tiles, {**built.constants, **own}, known)


def cached_launches(kernels: OpKernels) -> Callable[..., Prepared]:
    """A cached function that lays out launches of an op, `prepared(device, table, dtype, sizes, ...)`; table None: the device's block
    sizes.

    Sizes, attributes and compile-time values of the call's own are pairs of name and value; `present` and `packed` (tokens of all
    sequences, rows of the state); see `Call`.
    """

    def prepare(
        device: torch.device,
        table: TileTable | None,
        dtype: torch.dtype,
        sizes: tuple[tuple[str, int], ...],
        attributes: tuple[tuple[str, Any], ...] = (),
        present: tuple[str, ...] = (),
        packed: tuple[int, int] | None = None,
        own: tuple[tuple[str, int], ...] = (),
    ) -> Prepared:
        tokens, rows = packed or (None, None)
        seen = Call(
            dict(sizes),
            dict(attributes),
            dtype=str(dtype).removeprefix("torch."),
            count_dtype="int64",  # Triton reads the counts' types itself
            present=frozenset(present),
            tokens=tokens,
            rows=rows,
        )
        return prepare_call(kernels, seen, arch_of(device), table, **dict(own))

    known = lru_cache(1024)(prepare)
    return lambda device, table, *call: (known if table is None else prepare)(device, table, *call)


def check_device(tensor: Tensor) -> None:
    """Raise UnsupportedError if kernels cannot run on the tensor's device."""
    if tensor.device.type != "cuda":
        raise UnsupportedError(f"device {tensor.device.type!r} has no kernel; known: cpu (PyTorch), cuda (Triton).")


def written(state: Tensor, in_place: bool) -> Tensor:
    """The tensor that kernels write: the state or a copy. ShapeError if a state to be written in place is not contiguous."""
    if in_place and not state.is_contiguous():
        raise ShapeError("the state is not contiguous, and the kernels write it in place.")
    return state if in_place else state.clone(memory_format=torch.contiguous_format)


@cache
def variant_of(*what: Any) -> object:
    """One object for equal arguments, so that launches compare identities."""
    return object()


class Launcher:
    """Runs prepared launches. Tools replace it by a subclass to observe each launch."""

    def run(self, prepared: Prepared, tensors: Mapping[str, Tensor | None], like: Tensor) -> None:
        """Allocate the workspace and launch.

        Args:
            tensors: By the kernels' names without p_; missing ones are null. Workspace buffers among them belong to the caller.
            like: A tensor on the device.
        """
        if not prepared.launches:
            return
        every = dict(tensors)
        for name, shape, dtype in prepared.workspace:
            if name not in every:
                every[name] = allocate(like, shape, dtype)
        if prepared.persistent:
            zeros, at = persistent_counters(like.device, sum(size for _, size in prepared.persistent)), 0
            for name, size in prepared.persistent:
                every[name], at = zeros[at:] if at else zeros, at + size
        for name, source in prepared.aliases.items():
            every[name] = every.get(source)
        with torch.cuda.device_of(like):  # Triton launches on the current device
            for launch in prepared.launches:
                found = list(launch.values)
                for i, name in launch.pointers:
                    found[i] = every.get(name)
                for i, name, shape in launch.descriptors:
                    found[i] = descriptor(launch.function, every.get(name), shape, launch.tile.block(name), like)
                self.launch(launch, found, prepared.variant)

    def launch(self, launch: PreparedLaunch, values: list[Any], variant: object | None) -> Any:
        """Launch one kernel with all its arguments in order. Returns the compiled kernel; None if Triton does not report it."""
        key = None
        if variant is not None:
            kinds = [x if (x := values[i]) is None else (x.dtype, x.data_ptr() % 16) for i, _ in launch.pointers]
            key = (
                launch.name,
                launch.function,
                variant,
                *kinds,
            )  # a function with two names is compiled with the constants of each
            if key in _compiled:
                self.start(launch.name, partial(_compiled[key][launch.grid], *values))
                return _compiled[key]
        arguments = dict(zip(launch.function.arg_names, values, strict=True))
        compiled = self.start(launch.name, partial(launch.function[launch.grid], **arguments, **launch.tile.options()))
        if key is not None and compiled is not None:
            _compiled[key] = compiled
        return compiled

    def start(self, name: str, run: Callable[[], Any]) -> Any:
        """Run one launch and return the compiled kernel if Triton reports it. `tune` also records the launch."""
        return run()


class Bound:
    """A prepared call with mostly fixed tensors: a decode step of a layer with its own state.

    Addresses are laid out once; a call fills in its own. The first call for each kind of pointers uses `Launcher`.

    Args:
        prepared: With a variant; its kernels have no descriptors.
        dtype: Type of the activations.
        fixed: Tensors by the kernels' names without p_; kept alive.
        names: Names of each call's tensors, its output first.
    """

    def __init__(
        self, prepared: Prepared, dtype: torch.dtype, fixed: Mapping[str, Tensor | None], names: tuple[str, ...]
    ) -> None:
        self.prepared, self.dtype, self.fixed, self.names = prepared, dtype, dict(fixed), names
        self.kinds: dict[Any, list[_BoundLaunch] | None] = {}
        self.workspace, self.work_bytes = {}, 0
        for name, shape, dtype in prepared.workspace:
            self.workspace[name] = self.work_bytes
            self.work_bytes += -(-math.prod(shape) * dtype.itemsize // 256) * 256
        self.counters, self.count = {}, 0
        for name, size in prepared.persistent:
            self.counters[name] = 4 * self.count
            self.count += size

    def run(self, output: Tensor, *inputs: Tensor) -> None:
        """Launch on contiguous copies of `inputs`, in the order of `names`; `output`, contiguous, is the first."""
        tensors = [output, *[x if x.is_contiguous() else x.contiguous() for x in inputs]]
        addresses = [tensor.data_ptr() for tensor in tensors]
        counters = persistent_counters(output.device, self.count).data_ptr() if self.count else 0
        kind = (*[tensor.dtype for tensor in tensors], *[address % 16 for address in addresses], counters % 16)
        launches = self.kinds.get(kind)
        if launches is None:
            watching = _Watching()
            watching.run(self.prepared, {**self.fixed, **dict(zip(self.names, tensors, strict=True))}, output)
            self.kinds[kind] = self._lay_out(watching.seen)
            return
        work = allocate(output, (self.work_bytes,), torch.uint8)
        bases = (work.data_ptr(), counters)
        with torch.cuda.device_of(output):
            for run, values, mine, offsets in launches:
                for position, index in mine:
                    values[position] = addresses[index]
                for position, base, offset in offsets:
                    values[position] = bases[base] + offset
                run(*values)

    def _lay_out(self, seen: list[tuple[PreparedLaunch, Any]]) -> list[_BoundLaunch] | None:
        """Each launch with its addresses; None if a kernel is not compiled yet."""
        places = {name: index for index, name in enumerate(self.names)}
        made: list[_BoundLaunch] = []
        for launch, compiled in seen:
            if compiled is None or launch.descriptors:
                return None
            values, mine, offsets = list(launch.values), [], []
            for position, pointer in launch.pointers:
                name = self.prepared.aliases.get(pointer, pointer)
                if name in places:
                    mine.append((position, places[name]))
                elif name in self.workspace:
                    offsets.append((position, 0, self.workspace[name]))
                elif name in self.counters:
                    offsets.append((position, 1, self.counters[name]))
                elif (tensor := self.fixed.get(name)) is not None:
                    values[position] = tensor.data_ptr()
            made.append((compiled[launch.grid], values, mine, offsets))
        return made


_BoundLaunch = tuple[Callable[..., Any], list[Any], list[tuple[int, int]], list[tuple[int, int, int]]]
"""(launcher of the kernel, its arguments, (position, index) of the call's own tensors, (position, base, offset) of buffers)."""


class _Watching(Launcher):
    """Records each launch with its kernel."""

    def __init__(self) -> None:
        self.seen: list[tuple[PreparedLaunch, Any]] = []

    def launch(self, launch: PreparedLaunch, values: list[Any], variant: object | None) -> Any:
        compiled = super().launch(launch, values, variant)
        self.seen.append((launch, compiled))
        return compiled


def descriptor(
    function: Any, tensor: Tensor | None, shape: tuple[int, int], block: tuple[int, int], like: Tensor
) -> Any:
    """A descriptor of a contiguous tensor as `shape` rows and columns, for a kernel that copies blocks; None without a tensor.

    An empty tensor is replaced by `like`, as nothing is copied from it. An integer tensor contains e4m3 numbers.
    """
    if tensor is None:
        return None
    if not tensor.is_floating_point():
        tensor = tensor.view(torch.float8_e4m3fn)
    place = (tensor if tensor.numel() else like, [max(shape[0], 1), shape[1]], [shape[1], 1], list(block))
    if not getattr(function, "is_gluon", bool)():  # functions of the interpreter lack it
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(*place)
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia import hopper

    return hopper.TensorDescriptor(*place, NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A workspace buffer on the device of `like`; tests add guards around it."""
    return like.new_empty(shape, dtype=dtype)


COUNTERS = 4096  # least size for one stream: 64 rows of 32 heads
_counters: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, list[Tensor]] = {}  # zero and unused; the last one is the largest
_made: list[Tensor] = []  # kept for ever: CUDA graphs hold addresses


def current_stream(device: torch.device) -> tuple[int, bool]:
    """The current stream of a device, and whether a CUDA graph is capturing it."""
    if device.type != "cuda":
        return 0, False
    return torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()


def persistent_counters(device: torch.device, size: int) -> Tensor:
    """Counters for the current stream, int32: zero between launches, at least `size` of them.

    A capture only records work, so counters allocated in it would be zero only in its own replays. Captures therefore use spare counters of
    an earlier call. Graphs captured on one stream share counters and must not run at the same time.

    Raises:
        UnsupportedError: A capture without an earlier call of this size.
    """
    stream, capturing = current_stream(device)
    found = _counters.get((device, stream))
    if found is None or found.numel() < size:
        if not capturing:
            spare_counters(device, size)
        spare = _spare.get(device, [])
        if not (spare and spare[-1].numel() >= size):
            raise UnsupportedError(
                f"a CUDA graph is being captured, and no {size} counters are ready. "
                "Run the call once with this batch before the capture; that also loads the kernel."
            )
        found = _counters[device, stream] = spare.pop()
    return found


def spare_counters(device: torch.device, size: int) -> None:
    """Allocate spare counters for a stream without any, at least `size`. Must not run in a capture, nor in PyTorch's warm-up for one, which
    counts the memory pool afterwards."""
    spare = _spare.setdefault(device, [])
    if spare and spare[-1].numel() >= size:
        return
    blocks = torch.zeros(8, max(size, COUNTERS), dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()  # other streams will use them
    _made.append(blocks)
    spare.extend(blocks)


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability, 90 for sm_90; for the interpreter, that of its block sizes."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
