"""Kernels in CUDA C++, for features that Triton lacks: blocks that write into each other's shared memory.

NVRTC compiles a source for one set of constants, which are macros there; the driver launches it. A `CudaFunction` has the interface of a
Triton function: `arg_names` and `params`, `function[grid](**arguments, **options)`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import logging
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from still_graphs.errors import ConfigError, UnsupportedError

NVRTC = ("libnvrtc.so.12", "libnvrtc.so.13")
"""The first one found is used: a cubin of an older compiler runs with more drivers."""


@dataclass(frozen=True)
class Parameter:
    """An argument, as checks of kernels read it; nothing is specialised."""

    name: str
    is_constexpr: bool
    do_not_specialize: bool = True


@dataclass(frozen=True)
class Compiled:
    """A kernel for one set of constants."""

    cubin: bytes
    symbol: str
    shared_bytes: int


class CudaFunction:
    """A kernel `symbol` of a source.

    Args:
        source: The file. The macros PARAMETERS and ARGUMENTS stand for its arguments.
        arguments: C types by name, in order; pointers are named p_*, an absent one is null.
        constants: Macros from a tile or a variant.
        types: Macros derived from the element type of a pointer: name of the pointer, and the macro's value for each type.
        shared_bytes: Computes a block's shared memory from the constants.
        cluster: The constant with the number of blocks in a cluster; empty: none.
    """

    def __init__(
        self,
        source: Path,
        symbol: str,
        arguments: Mapping[str, str],
        constants: tuple[str, ...],
        types: Mapping[str, tuple[str, Mapping[str, int]]],
        shared_bytes: Callable[[Mapping[str, Any]], int],
        cluster: str = "",
    ) -> None:
        self.source, self.symbol, self.types, self.shared_bytes = source, symbol, types, shared_bytes
        self.arguments, self.constants, self.cluster = dict(arguments), constants, cluster
        self.arg_names = [*arguments, *constants]
        self.params = [Parameter(name, name in constants) for name in self.arg_names]

    def is_gluon(self) -> bool:
        return False

    def compiled(self, arch: int, arguments: Mapping[str, Any]) -> Compiled:
        """The kernel for sm_<arch> and the arguments of a launch, by name; compiled once. Raises as `ahead`."""
        elements = {name: str(arguments[name].dtype).removeprefix("torch.") for name, _ in self.types.values()}
        return self.ahead(arch, arguments, elements)

    def ahead(
        self, arch: int, constants: Mapping[str, Any], elements: Mapping[str, str], absent: Collection[str] = ()
    ) -> Compiled:
        """The kernel for sm_<arch>, compiled once.

        Args:
            constants: By name, including the function's own.
            elements: Element types of the pointers in `types`, such as "float16".
            absent: Pointers that no launch passes; they are null in the source, not arguments.

        Raises:
            ConfigError: NVRTC is missing, or it rejects the source.
        """
        macros = {name: int(constants[name]) for name in self.constants}
        macros |= {macro: numbers[elements[pointer]] for macro, (pointer, numbers) in self.types.items()}
        return _compiled(self, arch, tuple(sorted(macros.items())), tuple(sorted(absent)))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Any]:
        """A callable that compiles and launches, with all arguments by name. It returns the kernel, whose [grid] takes them in order."""
        return partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, int, int], num_warps: int, num_stages: int, launch_pdl: bool = False, **arguments: Any
    ) -> Loaded:
        import torch

        device = next(x.device for x in arguments.values() if isinstance(x, torch.Tensor))
        major, minor = torch.cuda.get_device_capability(device)
        found = self.compiled(10 * major + minor, arguments)
        loaded = _loaded(found, tuple(self.arguments.values()), 32 * num_warps, launch_pdl, device.index)
        loaded[grid](*[arguments[name] for name in self.arg_names])
        return loaded


@cache
def _compiled(
    function: CudaFunction, arch: int, macros: tuple[tuple[str, int], ...], absent: tuple[str, ...]
) -> Compiled:
    from triton.runtime.cache import get_cache_manager

    text = function.source.read_bytes()
    shared = function.shared_bytes(dict(macros))
    taken = {name: kind for name, kind in function.arguments.items() if name not in absent}
    defined = {
        **dict(macros),
        **{name: f"(({function.arguments[name]})0)" for name in absent},
        "SHARED_BYTES": shared,
        "PARAMETERS": ",".join(f"{kind} {name}" for name, kind in taken.items()),
        "ARGUMENTS": ",".join(taken),
    }
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in defined.items())]
    library, version = nvrtc()
    key = hashlib.sha256(repr((version, options)).encode() + text).hexdigest()
    name = f"{function.symbol}.cubin"
    manager = get_cache_manager(key)
    if (path := manager.get_file(name)) is not None:
        cubin = Path(path).read_bytes()
    else:
        cubin = compile_source(library, text, function.source.name, options)
        manager.put(cubin, name, binary=True)
    return Compiled(cubin, function.symbol, shared)


@cache
def nvrtc() -> tuple[Any, tuple[int, int]]:
    """NVRTC as a library, and its version: from an installed package, else the system's.

    Raises:
        ConfigError: NVRTC is missing.
    """
    places: list[Path] = []
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = find_spec(package)
        except ModuleNotFoundError:
            continue
        places += [Path(root) / "lib" for root in (spec.submodule_search_locations or ())] if spec else []
    names = [str(place / name) for name in NVRTC for place in places if (place / name).exists()]
    for name in [*names, *NVRTC, ctypes.util.find_library("nvrtc") or ""]:
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if library is not None:
            major, minor = ctypes.c_int(), ctypes.c_int()
            library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            return library, (major.value, minor.value)
    raise ConfigError(
        "NVRTC, which compiles the kernels in CUDA C++, is not installed: pip install nvidia-cuda-nvrtc-cu12."
    )


@cache
def can_compile() -> bool:
    """Whether NVRTC is available; a missing one is logged once."""
    try:
        nvrtc()
    except ConfigError as error:
        logging.getLogger(__name__).warning("kernels in CUDA C++ are left out, slower ones run: %s", error)
        return False
    return True


def compile_source(library: Any, source: bytes, name: str, options: list[str]) -> bytes:
    """A cubin; ConfigError with the compiler's log if it fails."""
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 0, None, None)
    arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    status = library.nvrtcCompileProgram(program, len(options), arguments)
    size = ctypes.c_size_t()
    if status:
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise ConfigError(f"NVRTC does not compile {name}: {log.value.decode(errors='replace').strip()}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, cubin)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


MOST_SHARED, SERIALIZATION = 8, 6
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION."""


@cache
def _loaded(compiled: Compiled, kinds: tuple[str, ...], threads: int, dependent: bool, device: int) -> Loaded:
    return Loaded(compiled, kinds, threads, dependent)


@cache
def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")  # holds the interpreter's lock, so a launch's buffer is not refilled meanwhile


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise UnsupportedError(f"{what}: {(text.value or b'').decode()} ({status}).")


class Loaded:
    """A compiled kernel on the current device."""

    def __init__(self, compiled: Compiled, kinds: tuple[str, ...], threads: int, dependent: bool) -> None:
        import torch

        torch.cuda.current_stream()  # makes the device's context current
        self.compiled, self.kinds, self.threads, self.dependent = compiled, kinds, threads, dependent
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self.module), compiled.cubin), f"loading {compiled.symbol}")
        found = driver.cuModuleGetFunction(ctypes.byref(self.function), self.module, compiled.symbol.encode())
        _check(found, f"finding {compiled.symbol}")
        set_ = driver.cuFuncSetAttribute(self.function, MOST_SHARED, compiled.shared_bytes)
        _check(set_, f"{compiled.shared_bytes} bytes of shared memory for {compiled.symbol}")

    @cached_property
    def layout(self) -> struct.Struct:
        """Struct format of the arguments, eight bytes each."""
        codes = {"int": "i4x", "float": "f4x"}
        return struct.Struct("=" + "".join(codes.get(kind, "Q") for kind in self.kinds))

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        """A callable that launches on this grid, with all values in order: tensors, addresses or None for pointers. Constants after them
        are ignored."""
        import torch

        count = len(self.kinds)
        buffer = ctypes.create_string_buffer(8 * count)
        base = ctypes.addressof(buffer)
        places = (ctypes.c_void_p * count)(*[base + 8 * i for i in range(count)])
        attribute = _Attribute(SERIALIZATION, 0, (ctypes.c_uint64 * 8)(1))
        config = _Config(*grid, self.threads, 1, 1, self.compiled.shared_bytes)
        config.attributes, config.count = ctypes.pointer(attribute), int(self.dependent)
        launch, pack, address = _driver().cuLaunchKernelEx, self.layout.pack_into, ctypes.byref(config)

        def run(*values: Any) -> None:
            config.stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
            plain = [x if isinstance(x, int | float) else 0 if x is None else x.data_ptr() for x in values[:count]]
            pack(buffer, 0, *plain)
            _check(launch(address, self.function, places, None), f"launching {self.compiled.symbol}")

        return run
