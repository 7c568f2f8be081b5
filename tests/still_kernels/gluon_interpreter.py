"""Runs kernels in Gluon on the CPU, as far as those of this tree need it: Triton's interpreter has none of it.

A kernel's file is executed with stand-ins for Gluon's modules. Partitions are threads that meet at memory barriers and named barriers as on
hardware, in some other order each time; who waits for ever is an error. Products are computed when they are waited for, and an operand
in shared memory that changed since they were issued is an error; so are addresses outside of tensors. Arithmetic in assembly is computed
by `ptx.py`. Layouts mean nothing here, and fences do nothing: what they are for is seen on a GPU alone.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.still_kernels import ptx

KERNELS = Path(__file__).parents[2] / "kernels/still_kernels"
FOLDER = KERNELS / "hybrid_attention/sm90"
PATIENCE_S = 60.0
SHIFT = 40  # bits of an address within a tensor


class Stuck(Exception):
    """A partition waited too long, or another one failed."""


class Machine:
    """State of one launch: tensors by address, the program that runs, and how its threads meet."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.program: tuple[int, ...] = (0, 0, 0)
        self.programs: tuple[int, ...] = (1, 1, 1)
        self.changed = threading.Condition()
        self.failures: list[BaseException] = []
        self.named: dict[int, list[int]] = {}
        self.random = random.Random(0)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Until `done`; holds the lock."""
        if not self.changed.wait_for(lambda: done() or bool(self.failures), PATIENCE_S) or not done():
            raise Stuck(f"{threading.current_thread().name} waits for {what}")

    def pointer(self, tensor: Tensor) -> Pointer:
        """To a tensor's first element."""
        if not tensor.is_contiguous():  # a view of pages: addresses go beyond its own elements
            size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
            tensor = tensor.as_strided((size,), (1,))
        self.tensors.append(tensor.view(-1))
        return Pointer(torch.tensor(len(self.tensors) - 1) << SHIFT, tensor.dtype)


machine = Machine()


class Pointer:
    """Addresses, in elements, of whatever tensors."""

    def __init__(self, address: Tensor, kind: torch.dtype) -> None:
        self.address, self.kind = address, kind
        self.dtype = types.SimpleNamespace(element_ty=kind)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.address + offset, self.kind)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.address[index], self.kind)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Flat addresses and which of them count; all of these are within their tensors."""
        address, used = torch.broadcast_tensors(self.address, torch.as_tensor(True if mask is None else mask))
        for number in torch.unique(address[used] >> SHIFT).tolist():
            offset = address[used & (address >> SHIFT == number)] & ((1 << SHIFT) - 1)
            tensor = machine.tensors[number]
            assert tensor.dtype == self.kind and int(offset.max()) < tensor.numel(), (
                f"address {int(offset.max())} outside"
            )
        return address, used


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    address, used = pointer.places(mask)
    found = torch.full(address.shape, other, dtype=pointer.kind)
    for number in torch.unique(address[used] >> SHIFT).tolist():
        some = used & (address >> SHIFT == number)
        found[some] = machine.tensors[number][address[some] & ((1 << SHIFT) - 1)]
    return found


def store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    address, used = pointer.places(mask)
    value = value.broadcast_to(address.shape)
    for number in torch.unique(address[used] >> SHIFT).tolist():
        some = used & (address >> SHIFT == number)
        machine.tensors[number][address[some] & ((1 << SHIFT) - 1)] = value[some]


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return Pointer(torch.where(condition, x.address, y.address), x.kind)
    return torch.where(torch.as_tensor(condition), x, y)


class Descriptor:
    """A matrix and the block that is copied at a time."""

    def __init__(self, tensor: Tensor, block: tuple[int, int]) -> None:
        self.tensor, self.block, self.dtype, self.layout = tensor, block, tensor.dtype, None
        self.block_type = types.SimpleNamespace(nbytes=math.prod(block) * tensor.element_size())

    def parts(self, at: list[Any]) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """What of the block at some place lies within the matrix: places in the matrix, places in the block."""
        first = [int(x) for x in at]
        begin = [min(max(x, 0), size) for x, size in zip(first, self.tensor.shape, strict=True)]
        end = [min(max(x + n, 0), size) for x, n, size in zip(first, self.block, self.tensor.shape, strict=True)]
        here = tuple(slice(b, max(b, e)) for b, e in zip(begin, end, strict=True))
        return here, tuple(slice(s.start - x, s.stop - x) for s, x in zip(here, first, strict=True))  # type: ignore[return-value]


class Buffer:
    """Shared memory, which begins as garbage; with a dtype of None one of barriers."""

    def __init__(self, memory: Any, dtype: torch.dtype | None) -> None:
        self.memory, self.dtype = memory, dtype

    def index(self, i: Any) -> Any:
        return self.memory[int(i)] if self.dtype is None else Buffer(self.memory[int(i)], self.dtype)

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return Buffer(self.memory.permute(order), self.dtype)

    def load(self, layout: Any) -> Tensor:
        return self.memory.clone()

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype and value.shape == self.memory.shape
        self.memory.copy_(value)


class Barrier:
    """Of arrivals and bytes; a phase ends when both have come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def change(self, arrivals: int, size_bytes: int) -> None:
        with machine.changed:
            self.left -= arrivals
            self.bytes += size_bytes
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
                machine.changed.notify_all()


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Buffer:
    if dtype == torch.int64:
        return Buffer([Barrier() for _ in range(shape[0])], None)
    return Buffer(torch.full(shape, float("nan"), dtype=dtype), dtype)


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.left = count


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    stagger()
    if pred:
        with machine.changed:
            machine.wait(lambda: barrier.phase % 2 != int(phase), f"phase {int(phase)} of a memory barrier")


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    stagger()
    if pred:
        barrier.change(count, 0)


def expect(barrier: Barrier, size_bytes: int, pred: Any = True) -> None:
    if pred:
        barrier.change(1, size_bytes)


def stagger() -> None:
    """Let another thread go first, now and then."""
    if machine.random.random() < 0.1:
        threading.Event().wait(machine.random.random() * 2e-4)


def copy_in(descriptor: Descriptor, at: list[Any], barrier: Barrier, buffer: Buffer, pred: Any = True) -> None:
    """Garbage at once, the block some time later."""
    if not pred:
        return
    buffer.memory.fill_(float("nan"))
    own = machine
    late_s = 1e-2 if machine.random.random() < 0.15 else 0.0

    def copy() -> None:
        threading.Event().wait(late_s)
        here, there = descriptor.parts(at)
        block = torch.zeros(descriptor.block, dtype=descriptor.dtype)
        block[there] = descriptor.tensor[here]
        buffer.store(block)
        try:
            barrier.change(0, -descriptor.block_type.nbytes)
        except AssertionError as failure:
            with own.changed:
                own.failures.append(failure)
                own.changed.notify_all()

    threading.Thread(target=copy, daemon=True).start()


def copy_out(descriptor: Descriptor, at: list[Any], buffer: Buffer) -> None:
    here, there = descriptor.parts(at)
    descriptor.tensor[here] = buffer.memory[there]


class Product:
    """A matrix product that has been issued."""

    def __init__(self, a: Any, b: Buffer, acc: Tensor | Product, use_acc: bool) -> None:
        self.operands, self.acc, self.use_acc = [a, b], acc, use_acc
        self.seen = self.now()

    def now(self) -> list[Tensor]:
        return [(x.memory if isinstance(x, Buffer) else x).clone() for x in self.operands]

    def result(self) -> Tensor:
        a, b = self.now()
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip((a, b), self.seen, strict=True)), (
            "an operand changed under a product"
        )
        product = a.float() @ b.float()
        if not self.use_acc:
            return product
        return product + (self.acc.result() if isinstance(self.acc, Product) else self.acc)


def warpgroup_mma(a: Any, b: Buffer, acc: Tensor | Product, use_acc: bool = True, is_async: bool = False) -> Product:
    assert is_async
    return Product(a, b, acc, use_acc)


def warpgroup_mma_wait(outstanding: int, deps: list[Any]) -> Any:
    stagger()
    found = [x.result() if isinstance(x, Product) else x for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def inline_asm(text: str, constraints: str, arguments: Sequence[Tensor], dtype: Any = None, **_: Any) -> Any:
    """Arithmetic; or named barriers of two groups of four warps: one waits, the other need not."""
    found = re.match(r"bar\.(sync|arrive) (\d+), 256;", text)
    if found is None:
        return ptx.run(text, constraints, arguments, dtype[0] if isinstance(dtype, tuple) else torch.float16)
    with machine.changed:
        state = machine.named.setdefault(int(found[2]), [0, 0])  # arrivals, rounds
        state[0] += 1
        mine = state[1]
        if state[0] == 2:
            state[0], state[1] = 0, state[1] + 1
            machine.changed.notify_all()
        if found[1] == "sync":
            machine.wait(lambda: state[1] > mine, f"named barrier {found[2]}")


def mma(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    return acc + a.float() @ b.float()


def warp_specialize(partitions: list[Any], *_: Any) -> None:
    def run(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as failure:
            with machine.changed:
                machine.failures.append(failure)
                machine.changed.notify_all()

    threads = [
        threading.Thread(target=run, args=partition, name=f"partition {i}", daemon=True)
        for i, partition in enumerate(partitions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if machine.failures:
        raise next((f for f in machine.failures if not isinstance(f, Stuck)), machine.failures[0])


def _jit(function: Any = None, **_: Any) -> Any:
    """The function itself; one of Triton's language with the stand-in for it."""
    if function is None:
        return lambda given: given
    if "tl" in function.__globals__ and function.__globals__["tl"] is not language:
        return types.FunctionType(
            function.__code__, {**function.__globals__, "tl": language}, function.__name__, function.__defaults__
        )
    return function


def _both(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda x, y: of(torch.as_tensor(x), torch.as_tensor(y))


def _ignored(*_: Any, **__: Any) -> None:
    return None


def _expand_dims(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.address.unsqueeze(axis), x.kind)
    return x.unsqueeze(axis)


_convert = torch.Tensor.to


def _to(self: Tensor, dtype: Any, *arguments: Any, bitcast: bool = False, **named: Any) -> Tensor:
    return self.view(dtype) if bitcast else _convert(self, dtype, *arguments, **named)


language = types.SimpleNamespace(
    constexpr=lambda value: value,
    int8=torch.int8, int16=torch.int16, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
    float16=torch.float16,
    static_range=range,
    static_assert=lambda condition, message: None,
    program_id=lambda axis: torch.tensor(machine.program[axis]),
    num_programs=lambda axis: torch.tensor(machine.programs[axis]),
    arange=lambda begin, end, layout=None: torch.arange(begin, end),
    zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
    zeros_like=torch.zeros_like,
    full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
    load=load, store=store, where=where,
    minimum=_both(torch.minimum), maximum=_both(torch.maximum),
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, exp=torch.exp, sqrt=torch.sqrt,
    split=lambda x: x.unbind(-1),
    convert_layout=lambda value, layout, assert_trivial=False: value,
    allocate_shared_memory=allocate, inline_asm_elementwise=inline_asm, warp_specialize=warp_specialize,
    expand_dims=_expand_dims, join=lambda x, y: torch.stack(torch.broadcast_tensors(x, y), -1), reshape=torch.reshape,
    permute=torch.permute,
    BlockedLayout=_ignored, SliceLayout=_ignored, NVMMADistributedLayout=_ignored, DotOperandLayout=_ignored,
    DistributedLinearLayout=_ignored, NVMMASharedLayout=_ignored,
)  # fmt: skip
hopper = types.SimpleNamespace(
    fence_async_shared=_ignored,
    mbarrier=types.SimpleNamespace(MBarrierLayout=_ignored, init=init, wait=wait, arrive=arrive, expect=expect),
    tma=types.SimpleNamespace(
        async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=_ignored
    ),
    warpgroup_mma=warpgroup_mma,
    warpgroup_mma_wait=warpgroup_mma_wait,
)


@functools.cache
def interpreted(path: Path) -> dict[str, Any]:
    """What a kernel's file defines, to be run here."""
    from still_kernels.common import triton_shared

    gluon = types.SimpleNamespace(jit=_jit, constexpr_function=_jit, language=language)
    shared = types.SimpleNamespace(
        LOG2E=triton_shared.LOG2E.value, ROWS=triton_shared.ROWS, row_of=triton_shared.row_of
    )
    stand_ins = {
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.ampere": types.SimpleNamespace(mma_v2=mma),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "still_kernels.common.triton_shared": shared,
    }
    found: dict[str, Any] = {"__name__": path.stem}
    for shared_file in (FOLDER / "gluon_common.py", KERNELS / "common/gluon_codes.py"):
        if path != shared_file and shared_file.stem in path.read_text():
            module = ".".join(shared_file.relative_to(KERNELS.parent).with_suffix("").parts)
            stand_ins[module] = types.SimpleNamespace(**interpreted(shared_file))
    with patch.dict(sys.modules, stand_ins):  # type: ignore[arg-type]
        exec(compile(path.read_text(), str(path), "exec"), found)
    return found


def run(function: Any, programs: int | tuple[int, ...], arguments: dict[str, Any], seed: int = 0) -> None:
    """Run the programs of a kernel, one after the other, its threads in an order that `seed` decides.

    Args:
        function: Gluon's.
        programs: The grid.
        arguments: All of them by name; tensors are passed as pointers.

    Raises:
        Stuck: A partition waits for what nobody does.
    """
    global machine
    machine = Machine()
    machine.random.seed(seed)
    kernel = interpreted(Path(function.fn.__code__.co_filename))[function.fn.__name__]
    given = {name: machine.pointer(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    grid = (programs,) if isinstance(programs, int) else programs
    with patch.object(torch.Tensor, "to", _to):
        for program in itertools.product(*map(range, grid)):
            machine.program, machine.programs, machine.named = program, grid, {}
            kernel(**given)
