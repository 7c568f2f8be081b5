"""How one kernel is compiled, and what architectures give it. Integers only: no torch, no Triton."""

from __future__ import annotations

from dataclasses import dataclass, field

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10,
                110: 227 << 10, 120: 99 << 10, 121: 99 << 10}  # fmt: skip
"""Shared memory that one block may use, by architecture."""


def pow2(n: int) -> int:
    """The smallest power of two that is at least n and at least 16 (the least that a matrix instruction takes)."""
    return max(16, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class KernelTile:
    """How one kernel is compiled: its block-size constants, warps and stages."""

    constants: dict[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None  # per thread; None = the compiler's choice
    dependent: bool = False  # launched before the kernel ahead of it has ended, for which it then waits

    def options(self) -> dict[str, int]:
        """Compile options in Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.dependent:
            options["launch_pdl"] = True
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}
