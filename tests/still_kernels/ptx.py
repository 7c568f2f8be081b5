"""Computes the few instructions of PTX that kernels have in inline assembly, each on all elements of a tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Bits = np.ndarray
"""Registers of 32 bits, uint32, or halves of them, uint16."""


def _halves(x: Bits) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.float16).reshape(*x.shape, 2)


def _pairs(of: Callable[..., np.ndarray]) -> Callable[..., Bits]:
    """An instruction on two half precision numbers of a register, computed exactly and rounded once."""

    def run(*registers: Bits) -> Bits:
        wide = of(*(_halves(x).astype(np.float64) for x in registers))
        return np.ascontiguousarray(wide.astype(np.float16)).view(np.uint32)[..., 0]

    return run


def _brains(of: Callable[..., Tensor]) -> Callable[..., Bits]:
    """An instruction on two bfloat16 numbers of a register, so."""

    def run(*registers: Bits) -> Bits:
        shape = np.broadcast_shapes(*(x.shape for x in registers))
        wide = [
            torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, shape)).view(np.int16).reshape(*shape, 2))
            .view(torch.bfloat16)
            .double()
            for x in registers
        ]
        found = of(*wide)
        rounded = found.to(torch.bfloat16)  # from float64 in one step: sums and products of few bits are exact there
        return np.ascontiguousarray(rounded.view(torch.int16).numpy()).view(np.uint32)[..., 0]

    return run


def _permute(x: Bits, y: Bits, selector: Bits) -> Bits:
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(both)
    for byte in range(4):
        source = selector.astype(np.uint64) >> np.uint64(4 * byte) & np.uint64(7)
        found |= (both >> (source * np.uint64(8)) & np.uint64(0xFF)) << np.uint64(8 * byte)
    return found.astype(np.uint32)


def _logic(x: Bits, y: Bits, z: Bits, table: Bits) -> Bits:
    found = np.zeros(np.broadcast_shapes(x.shape, y.shape, z.shape), np.uint32)
    for row in range(8):
        if int(table.reshape(-1)[0]) >> row & 1:
            found |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
    return found


INSTRUCTIONS: dict[str, Callable[..., Bits]] = {
    "mov.b32": lambda x: x,
    "shr.u32": lambda x, y: x >> y,
    "lop3.b32": _logic,
    "prmt.b32": _permute,
    "add.rn.f16x2": _pairs(lambda x, y: x + y),
    "mul.rn.f16x2": _pairs(lambda x, y: x * y),
    "fma.rn.f16x2": _pairs(lambda x, y, z: x * y + z),
    "fma.rn.bf16x2": _brains(lambda x, y, z: x * y + z),
}


def run(
    text: str, constraints: str, arguments: Sequence[Tensor], half: torch.dtype = torch.float16
) -> Tensor | tuple[Tensor, ...]:
    """Results of an assembly text, by the constraints "=h" (`half`) or "=r" (int32), on arguments alike; a single one is no tuple."""
    kinds = constraints.split(",")
    results = [kind for kind in kinds if kind.startswith("=")]
    given = np.broadcast_arrays(*(x.numpy() for x in arguments))
    registers: dict[str, Any] = {  # integers are wider than on hardware where PyTorch made them so
        f"${len(results) + i}": np.ascontiguousarray(x).view(np.uint16)
        if x.dtype in (np.float16, np.int16)
        else x.astype(np.uint32)
        for i, x in enumerate(given)
    }

    def read(name: str) -> Bits:
        if name.startswith("{"):
            low, high = (registers[part].astype(np.uint32) for part in re.findall(r"[$\w]+", name))
            return low | high << np.uint32(16)
        return registers[name] if name in registers else np.array([int(name, 0)], np.uint32)

    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":  # declarations
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[$\w]+", rest)
        value = np.broadcast_to(INSTRUCTIONS[name](*map(read, sources)), given[0].shape)
        if target.startswith("{"):
            low, high = re.findall(r"[$\w]+", target)
            registers[low], registers[high] = value.astype(np.uint16), (value >> np.uint32(16)).astype(np.uint16)
        else:
            registers[target] = value
    found = [
        torch.from_numpy(np.ascontiguousarray(registers[f"${i}"]).view(np.int16)).view(half)
        if kind == "=h"
        else torch.from_numpy(np.ascontiguousarray(registers[f"${i}"]).view(np.int32))
        for i, kind in enumerate(results)
    ]
    return found[0] if len(found) == 1 else tuple(found)
