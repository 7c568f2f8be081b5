"""A fault is a name, a place and a few lines that change what a package is made of; one decorator registers it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Random = np.random.Generator
Plant = Callable[[Random, Any], bool | None]


@dataclass(frozen=True)
class Fault:
    """`plant` changes weights (arrays by name), a graph (onnx.ModelProto), a runner, or a library of kernels in front of a package's ops;
    False: this package has nothing of the kind.

    Args:
        where: "weights", "graph", "kernels" (bodies of ops), "native" (kernels for ONNX Runtime's CPU), "states" or "runner".
    """

    name: str
    where: str
    plant: Plant


FAULTS: list[Fault] = []


def fault(where: str, name: str) -> Callable[[Plant], Plant]:
    """Register what it decorates."""

    def register(plant: Plant) -> Plant:
        FAULTS.append(Fault(name, where, plant))
        return plant

    return register


def one(random: Random, found: Any) -> Any:
    found = list(found)
    return found[int(random.integers(len(found)))] if found else None


def two(random: Random, count: int) -> tuple[int, int]:
    """Two different numbers below `count`, which is at least 2."""
    first = int(random.integers(count))
    return first, (first + 1 + int(random.integers(count - 1))) % count


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to bfloat16, in its own type."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(x.dtype)
