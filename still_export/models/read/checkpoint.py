"""Reading a checkpoint's files: configuration and safetensors, each fault with its own message. Pickles are never opened."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.folders.files import damaged
from still_export.folders.weights import PICKLE_SUFFIXES, refuse_pickle
from still_export.models.families.experts import FLOAT32
from still_export.models.read.rows import FLOAT_TYPES, PARTS, from_rows, is_part
from still_export.models.read.weights import Deferred

MADV_PAGEOUT = 21
"""Linux' madvise flag: write back changed pages, and drop all."""
EXPERTS_DIM = 3
"""Dimensions of a tensor with all experts of a layer, or a convolution."""


def iterate_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one safetensors file; low-bit rows as float32.

    Raises:
        CheckpointError: The file is damaged, truncated, or a pickle.
    """
    if path.suffix in PICKLE_SUFFIXES:
        raise refuse_pickle(path)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for name in file.keys():
                if not is_part(name, names):
                    parts = {end: file.get_tensor(name + end) for end in PARTS if name + end in names}
                    yield name, from_rows(file.get_tensor(name), parts)
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, error) from error


def open_tensors(
    files: list[Path], dtype: torch.dtype | None = None, quantized: Mapping[str, Any] | None = None
) -> dict[str, Deferred]:
    """All tensors of `files` as `dtype` (None: as stored), read and checked to be finite lazily.

    Args:
        quantized: `quantization_config` of a checkpoint with low-bit weights.

    Raises:
        CheckpointError: A file is damaged, or has a tensor that is not of a float type.
    """
    if quantized:
        raw = {name: tensor for path in files for name, tensor in iterate_tensors(path)}  # views of the files, as below
        return _dequantizing(raw, dtype, quantized, files[0].parent)
    tensors: dict[str, Deferred] = {}
    for path in files:
        for name, tensor in iterate_tensors(path):  # a view of the file: nothing is read yet
            _demand_float(name, tensor, str(path))
            as_type, kind = partial(checked, name, tensor, origin=str(path)), _kind(name, dtype)
            tensors[name] = Deferred(
                tensor.shape,
                kind or tensor.dtype,
                partial(as_type, dtype=kind),
                narrow=partial(as_type, dtype=None) if kind == torch.float32 and tensor.dtype.itemsize == 2 else None,
                exact=partial(as_type, dtype=None) if kind not in (None, tensor.dtype) else None,
                part=partial(_part, name, tensor, str(path)) if tensor.dim() == EXPERTS_DIM else None,
            )
    if not tensors:
        raise CheckpointError(f"{', '.join(map(str, files))}: no tensors. The file is damaged; fetch it again.")
    return tensors


def _part(name: str, tensor: Tensor, origin: str, number: int) -> Tensor:
    """One entry of the first dimension, in the file's type."""
    return checked(name, tensor[number], None, origin)


def _kind(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type of a tensor in a model of `dtype`."""
    return torch.float32 if name.endswith(FLOAT32) else dtype


def _dequantizing(
    raw: Mapping[str, Tensor], dtype: torch.dtype | None, quantized: Mapping[str, Any], folder: Path
) -> dict[str, Deferred]:
    """Tensors of a quantized checkpoint, with their codes."""
    from still_export.models.quantized import dequantizing

    def read(name: str, weight: Tensor | Deferred) -> Tensor:
        value = weight.read() if isinstance(weight, Deferred) else weight
        return checked(name, value, _kind(name, dtype), str(folder))

    tensors = {}
    for name, weight in dequantizing(raw, quantized, str(folder)).items():
        if isinstance(weight, Deferred):
            kind = dtype or torch.float32
            tensors[name] = replace(weight, dtype=kind, read=partial(read, name, weight))
        else:
            _demand_float(name, weight, str(folder))
            tensors[name] = Deferred(weight.shape, _kind(name, dtype) or weight.dtype, partial(read, name, weight))
    return tensors


def _demand_float(name: str, tensor: Tensor, origin: str) -> None:
    if tensor.dtype not in FLOAT_TYPES:
        raise CheckpointError(
            f"{name} in {origin} has type {str(tensor.dtype).removeprefix('torch.')}; weights are read as float32, float16 or "
            "bfloat16. Use the unquantized model."
        )


def checked(name: str, tensor: Tensor, dtype: torch.dtype | None, origin: str) -> Tensor:
    """`tensor` as `dtype`.

    Raises:
        CheckpointError: It is not of a float type, has NaN or infinity, or exceeds the range of `dtype`.
    """
    _demand_float(name, tensor, origin)
    result = tensor if dtype is None else in_range(name, tensor, dtype, f" in {origin}")
    if not is_finite(result):
        raise CheckpointError(
            f"{name} in {origin} holds NaN or infinite values, so every output would be NaN. The checkpoint is damaged or its training "
            "diverged; use another."
        )
    return result


def in_range(name: str, tensor: Tensor, dtype: torch.dtype, origin: str = "") -> Tensor:
    """`tensor` as `dtype`; values that are not finite stay so.

    Raises:
        CheckpointError: A finite value becomes infinite.
    """
    result = tensor.to(dtype)
    if result is not tensor and not is_finite(result) and is_finite(tensor):
        low, high = (float(x) for x in torch.aminmax(tensor))
        raise CheckpointError(
            f"{name}{origin} has the value {high if high > -low else low:.6g}, beyond the range of {str(dtype).removeprefix('torch.')} "
            f"(up to {torch.finfo(dtype).max:.6g}). Use --dtype bfloat16 or float32."
        )
    return result


def give_pages_back() -> None:
    """Release the mapped pages of safetensors files that were read; they count as this process's memory."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    system = ctypes.CDLL(None)
    for line in maps.splitlines():
        if line.endswith(".safetensors"):
            begin, end = (int(x, 16) for x in line.split(maxsplit=1)[0].split("-"))
            system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_PAGEOUT)  # refused by old systems


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite, without a temporary of the tensor's size."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The type that a configuration names for its weights, else float32."""
    name = config.get("dtype", config.get("torch_dtype"))
    dtype = getattr(torch, str(name).removeprefix("torch."), None) if name else None
    return dtype if dtype in FLOAT_TYPES[:3] else torch.float32
