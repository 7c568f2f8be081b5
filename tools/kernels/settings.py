"""Settings that tune tries: changes of one kernel's tile by name."""

from __future__ import annotations

from typing import Any

from still_kernels.common.gemm_plan import Gemm
from still_kernels.tile import Setting


def one(name: str, *values: int | None) -> list[Setting]:
    """Settings of one name."""
    return [{name: value} for value in values]


def stages(*values: int) -> list[Setting]:
    """Settings of the stages, which kernel and compiler both have to know."""
    return [{"STAGES": value, "num_stages": value} for value in values]


FEW_MOVES: list[Setting] = [
    *one("BN", 16, 32, 64, 128),
    *one("BK", 64, 128, 256),
    *stages(3, 4, 6),
    *one("num_warps", 4, 8),
]
SPLIT_MOVES: list[Setting] = [
    *one("split_programs", 64, 128, 192, 256),
    *one("split_inputs", 512, 1024, 2048),
    *stages(3, 4, 5, 6),
    *one("num_warps", 4, 8),
]
MANY_MOVES: list[Setting] = [
    *one("BM", 64, 128, 256),
    *one("BN", 64, 128, 256),
    *one("BK", 32, 64),
    *stages(2, 3, 4),
    *one("num_warps", 4, 8),
]


def gemm_calls(*gemms: tuple[Gemm, list[Setting]], split: str) -> dict[str, Any]:
    """Arguments of `Calls` for an op of GEMMs: what tune tries of each GEMM, with further settings; which belongs to a step; and what takes
    its place with TMA.

    split: The kernel whose programs share inputs.
    """
    moves = {split: SPLIT_MOVES}
    for gemm, more in gemms:
        kinds = {"few": FEW_MOVES, "some": [*MANY_MOVES, *more], "many": [*MANY_MOVES, *more]}
        moves |= {f"{kind}{gemm.suffix}": settings for kind, settings in kinds.items()}
    few = frozenset(name for name in moves if name.startswith(("few", "split")))
    return {"moves": moves, "decode": few, "instead": {n: f"{n}_tma" for n in moves.keys() - few}, "peer": "cuBLAS"}
