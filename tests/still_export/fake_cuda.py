"""The CUDA driver over host memory: buffers that are freed or overrun are found, captured work is replayed as it was captured."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any, ClassVar

from still_export.runtime import cuda_driver


class HostDriver:
    """The calls of `cuda_driver.Driver` over host memory; `limit` bytes of it."""

    limit = 1 << 40
    blocks: ClassVar[dict[int, Any]] = {}  # of the process: drivers share the device
    recording: ClassVar[list[Callable[[], None]] | None] = None

    def __init__(self, device: int = 0) -> None:
        self.name, self.architecture, self.stream = "stand-in", 90, ctypes.c_void_p(1)
        self.allocations = self.synchronizations = 0
        self.free_at_start = self.memory()[0]
        self.library = types.SimpleNamespace(cuMemFree_v2=lambda address: self.blocks.pop(address.value, None))

    @staticmethod
    def device_count() -> int:
        return 1

    def memory(self) -> tuple[int, int]:
        used = sum(len(b) for b in self.blocks.values())
        return self.limit - used, self.limit

    def synchronize(self) -> None:
        assert self.recording is None, "the host must not wait while a graph is captured"
        self.synchronizations += 1

    @classmethod
    def check(cls, address: int, size: int) -> None:
        """Raise unless the bytes lie in one block."""
        for start, block in cls.blocks.items():
            if start <= address < start + len(block):
                assert address + size <= start + len(block), f"{size} bytes at {address - start} of {len(block)}"
                return
        raise AssertionError(f"{size} bytes at {address:#x} are not allocated, or were freed")

    @classmethod
    def submit(cls, work: Callable[[], None]) -> None:
        """Do work now, or keep it for a graph."""
        if cls.recording is None:
            work()
        else:
            cls.recording.append(work)

    def call(self, name: str, *arguments: Any) -> None:
        values = [getattr(a, "value", a) for a in arguments]
        assert self.recording is None, f"{name} while a graph is captured"
        if name == "cuMemAlloc_v2":
            if values[1] > self.memory()[0]:
                raise cuda_driver.CudaError("cuMemAlloc failed", cuda_driver.OUT_OF_MEMORY)
            block = ctypes.create_string_buffer(b"\xff" * values[1], values[1])  # NaN wherever nobody wrote
            self.blocks[ctypes.addressof(block)] = block
            arguments[0]._obj.value = ctypes.addressof(block)
            self.allocations += 1
        elif name == "cuMemsetD8Async":
            self.check(values[0], values[2])
            ctypes.memset(*values[:3])
        elif name == "cuMemcpyHtoDAsync_v2":
            self.check(values[0], values[2])
            ctypes.memmove(*values[:3])
        elif name == "cuMemcpyDtoHAsync_v2":
            self.check(values[1], values[2])
            ctypes.memmove(*values[:3])
        else:
            raise AssertionError(f"unexpected driver call {name}")

    def copy(self, target: int, source: int, size: int) -> None:
        def work() -> None:
            self.check(target, size)
            self.check(source, size)
            ctypes.memmove(target, source, size)

        self.submit(work)

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, rows: int) -> None:
        self.check(target, target_pitch * rows)
        self.check(source, source_pitch * rows)
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, min(target_pitch, source_pitch))

    def capture(self, work: Callable[[], None]) -> Any:
        """Capturing does no work; replays do what was submitted, at the addresses of then."""
        HostDriver.recording = steps = []
        try:
            work()
        finally:
            HostDriver.recording = None

        def launch() -> None:
            for step in steps:
                step()

        return types.SimpleNamespace(launch=launch)


class HostLibrary:
    """libcuda by ctypes, as a program of a user opens it: the calls that such a program needs, over the same memory."""

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        return 0 if context.value == 1 else 201

    def cuCtxSynchronize(self) -> int:
        return 0

    def cuMemAllocManaged(self, address: Any, size: ctypes.c_size_t, flags: int) -> int:
        block = ctypes.create_string_buffer(b"\xff" * size.value, size.value)
        HostDriver.blocks[ctypes.addressof(block)] = block
        address._obj.value = ctypes.addressof(block)
        return 0 if flags == 1 else 1
