"""The few calls of the CUDA driver that a runner needs, by ctypes: no CUDA toolkit, no torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2


class CudaError(RuntimeError):
    """A driver call failed; `status` is the driver's code."""

    def __init__(self, message: str, status: int = -1) -> None:
        super().__init__(message)
        self.status = status


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        *((f"src_{n}", t) for n, t in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int))),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        *((f"dst_{n}", t) for n, t in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("kind", ctypes.c_int))),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Buffer:
    """Device memory, freed with the object."""

    def __init__(self, driver: Driver, size: int) -> None:
        self.driver, self.size = driver, max(size, 16)
        address = ctypes.c_uint64()
        try:
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(self.size))
        except CudaError as error:
            if error.status == OUT_OF_MEMORY:
                free, total = driver.memory()
                raise CudaError(
                    f"out of device memory: {self.size >> 20} MiB more were needed, {free >> 20} of {total >> 20} MiB are free.",
                    error.status,
                ) from None
            raise
        self.address = address.value

    def zero(self, begin: int = 0, size: int | None = None) -> None:
        """Fill `size` bytes from `begin` on (None: all) with zeros, in the order of the stream."""
        size = self.size - begin if size is None else size
        assert 0 <= begin and begin + size <= self.size
        address = ctypes.c_uint64(self.address + begin)
        self.driver.call("cuMemsetD8Async", address, 0, ctypes.c_size_t(size), self.driver.stream)

    def write(self, array: np.ndarray, begin: int = 0) -> None:
        """Copy a C-contiguous array to the bytes from `begin` on, in the order of the stream; the array may be reused at once."""
        assert array.flags.c_contiguous and begin + array.nbytes <= self.size
        self.driver.call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(self.address + begin),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(array.nbytes),
            self.driver.stream,
        )

    def read(self, array: np.ndarray, begin: int = 0) -> np.ndarray:
        """Copy the bytes from `begin` on into `array` and wait for them."""
        assert array.flags.c_contiguous and begin + array.nbytes <= self.size
        self.driver.call(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_uint64(self.address + begin),
            ctypes.c_size_t(array.nbytes),
            self.driver.stream,
        )
        self.driver.synchronize()
        return array

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.driver.library.cuMemFree_v2(ctypes.c_uint64(self.address))


class Driver:
    """The primary context of one device and a stream of it."""

    def __init__(self, device: int = 0) -> None:
        self.library = self._open()
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(handle), device)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)  # TensorRT works in the primary context
        self.call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        name, major, minor = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetName", name, 128, handle)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, handle)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, handle)
        self.name, self.architecture = name.value.decode(), 10 * major.value + minor.value
        self.free_at_start = self.memory()[0]

    @staticmethod
    def _open() -> Any:
        try:
            library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise CudaError(f"the CUDA driver cannot be opened: {error}. This needs an NVIDIA GPU.") from error
        status = library.cuInit(0)
        if status:
            raise CudaError(f"cuInit failed with CUDA error {status}; no usable NVIDIA GPU.", status)
        return library

    @classmethod
    def device_count(cls) -> int:
        """Number of CUDA devices.

        Raises:
            CudaError: There is no driver.
        """
        count = ctypes.c_int()
        library = cls._open()
        return count.value if library.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function; CudaError when it fails."""
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(status, ctypes.byref(text))
            raise CudaError(f"{name} failed with CUDA error {status} ({(text.value or b'unknown').decode()})", status)

    def memory(self) -> tuple[int, int]:
        """Bytes of free and of all device memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call("cuStreamSynchronize", self.stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy device memory in the order of the stream."""
        self.call(
            "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), self.stream
        )

    def copy_rows(self, target: int, target_pitch: int, source: int, source_pitch: int, rows: int) -> None:
        """Copy `rows` rows of the shorter pitch's bytes between device memories."""
        device = 2
        copy = Memcpy2D(
            src_kind=device,
            src_device=source,
            src_pitch=source_pitch,
            dst_kind=device,
            dst_device=target,
            dst_pitch=target_pitch,
            width=min(target_pitch, source_pitch),
            height=rows,
        )
        self.call("cuMemcpy2DAsync_v2", ctypes.byref(copy), self.stream)

    def capture(self, work: Any) -> Graph:
        """A CUDA graph of the launches that `work()` makes on the stream."""
        captured, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, 2)  # relaxed: other threads may allocate
        try:
            work()
        finally:
            self.call("cuStreamEndCapture", self.stream, ctypes.byref(captured))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), captured, ctypes.c_ulonglong(0))
        self.call("cuGraphDestroy", captured)
        return Graph(self, executable)


class Graph:
    """An instantiated CUDA graph, destroyed with the object."""

    def __init__(self, driver: Driver, executable: ctypes.c_void_p) -> None:
        self.driver, self.executable = driver, executable

    def launch(self) -> None:
        """Replay on the driver's stream."""
        self.driver.call("cuGraphLaunch", self.executable, self.driver.stream)

    def __del__(self) -> None:
        self.driver.library.cuGraphExecDestroy(self.executable)
