"""Compile options of one kernel, and limits of architectures. Integers only: no torch, no Triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
                110: 227 << 10, 120: 99 << 10, 121: 99 << 10}  # fmt: skip
"""Shared memory that one block may use, by architecture."""


def pow2(n: int) -> int:
    """Smallest power of two that is at least n and at least 16, the minimum of a matrix instruction."""
    return max(16, 1 << (n - 1).bit_length())


def for_two_programs(shared: int, dim: int, keys: int, stages: int) -> tuple[int, int]:
    """(keys per step, stages) of prompt attention with 64 queries in 16 bits, so that two programs fit on a multiprocessor with `shared`
    bytes per block, as they do in registers. Three stages of 64 keys of 128 leave room for one. Computed, not measured."""
    if dim != 128 or shared >= (200 << 10):
        return keys, stages
    return (min(keys, 32) if shared < (160 << 10) else keys), 2


@dataclass(frozen=True)
class KernelTile:
    """Compile options of one kernel: block-size constants, warps and stages.

    blocks: Rows and columns per copy of each matrix that the kernel receives as a descriptor: numbers or names of constants.
    """

    constants: dict[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None  # per thread; None = the compiler's choice
    dependent: bool = False  # launched before its predecessor ends; the kernel waits for that
    blocks: Mapping[str, tuple[int | str, int | str]] = field(default_factory=dict)

    def block(self, matrix: str) -> tuple[int, int]:
        """Rows and columns per copy of a matrix."""
        rows, columns = (self.constants[n] if isinstance(n, str) else n for n in self.blocks[matrix])
        return rows, columns

    def options(self) -> dict[str, int]:
        """Compile options in Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.dependent:
            options["launch_pdl"] = True
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


Setting = dict[str, int | None]
"""Changes of one kernel's tile, by name."""


@dataclass(frozen=True)
class TileTable:
    """Tiles of one variant's kernels, and the constants of its plan for the host only."""

    tiles: Mapping[str, KernelTile]
    host: Mapping[str, int] = field(default_factory=dict)

    def kernels(self) -> dict[str, KernelTile]:
        """Tiles by kernel."""
        return dict(self.tiles)


def changed(table: TileTable, kernel: str, setting: Setting) -> TileTable:
    """`table` with another setting of one kernel, or of `<kernel>_tma` if the table has that instead.

    Args:
        setting: By name: constants and options of the kernel's tile, constants of the host, or "other_kernel.NAME".

    Raises:
        KeyError: Unknown name.
    """
    for name, value in setting.items():
        owner, _, plain = name.rpartition(".")
        if plain in table.host:
            assert value is not None
            table = replace(table, host={**table.host, plain: value})
            continue
        owner = owner or kernel
        if owner not in table.tiles and f"{owner}_tma" in table.tiles:
            owner += "_tma"
        tile = table.tiles.get(owner, KernelTile())
        if plain in tile.constants:
            tile = replace(tile, constants={**tile.constants, plain: value})  # type: ignore[dict-item]
        elif plain in ("num_warps", "num_stages", "max_registers", "dependent"):
            tile = replace(tile, **{plain: value})  # type: ignore[arg-type]
        else:
            raise KeyError(f"{kernel} has no setting {name}; it has {', '.join(tile.constants)}.")
        table = replace(table, tiles={**table.tiles, owner: tile})
    return table
