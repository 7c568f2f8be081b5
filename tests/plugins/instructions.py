"""Products of whole numbers on processors that are not here: calls of the native kernels under qemu-user, and the instructions they take.

    python -m tests.plugins.instructions

prints the table of docs/notebook/onnxruntime.md, for 64-bit ARM and, by the same emulator, x86-64. It needs cmake, gcc, g++,
g++-aarch64-linux-gnu and qemu-user 7.2 to 8.2; Debian 12 has them.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from still_export.targets.ort.library import cross_compiler
from still_export.targets.trt.plugins import SOURCE, run_cmake
from still_kernels.experts_nbits.meaning import Inputs as ExpertsInputs
from still_kernels.matmul_nbits.plan import Inputs
from tests.plugins.builds import locked
from tests.still_kernels.matmul_nbits.inputs import Case, tokens, weight
from tests.still_kernels.matmul_nbits.super_block_cases import Case as SuperBlocks

PROGRAM = Path(__file__).parent / "products"
COUNTED = re.compile(r"instructions: (\d+)")


@dataclass(frozen=True)
class Machine:
    """A processor that QEMU emulates."""

    cpu: str
    """As CMake names its kind."""
    model: str
    """QEMU's name."""
    sets: tuple[str, ...]
    """Instruction sets of the kernels that it has, best first."""

    def __str__(self) -> str:
        return self.model

    @property
    def command(self) -> list[str]:
        return [f"qemu-{self.cpu}", "-cpu", self.model]


ARM = (
    Machine("aarch64", "cortex-a72", ("baseline",)),
    Machine("aarch64", "neoverse-n1", ("dotprod", "baseline")),
    Machine("aarch64", "max", ("i8mm", "dotprod", "baseline")),
)
X86 = Machine("x86_64", "max", ("v3", "baseline"))


@dataclass(frozen=True)
class Call:
    """What products.cpp runs."""

    numbers: list[int]
    tensors: list[Tensor | None]
    shape: tuple[int, ...]
    """Of the output."""

    def save(self, path: Path) -> None:
        arrays = [np.array(self.numbers, np.int64), *(np.empty(0) if x is None else x.numpy() for x in self.tensors)]
        with path.open("wb") as file:
            for x in arrays:
                file.write(np.int64(x.nbytes).tobytes() + np.ascontiguousarray(x).tobytes())


def matmul_call(held: Inputs, given: Tensor) -> Call:
    """Of tokens [B, T, I] and a weight in blocks."""
    outputs, inputs = len(held.blocks), given.shape[2]
    zero = held.zero_code if held.zero_code >= 0 else 1 << (held.bits - 1)
    zero_bytes = 0 if held.zero_points is None else 4 * held.zero_points.shape[1]
    half = int(held.scales.dtype == torch.float16)
    numbers = [outputs, inputs, held.block_size, held.bits, zero, zero_bytes, half, 0, given.shape[0] * given.shape[1]]
    return Call(numbers, [given, held.blocks, held.scales, held.zero_points, held.offsets], (*given.shape[:2], outputs))


def super_block_call(case: SuperBlocks, given: Tensor) -> Call:
    """Of tokens [B, T, I] and K-quants."""
    words, scales = (torch.from_numpy(x) for x in case.held())
    numbers = [case.outputs, case.inputs, case.block, case.bits, 0, 0, 1, 256, given.shape[0] * given.shape[1]]
    return Call(numbers, [given, words, scales, None, None], (*given.shape[:2], case.outputs))


def experts_call(given: ExpertsInputs) -> Call:
    """Of tokens and experts in blocks, whose scales are float32."""
    tensors: list[Tensor | None] = [given.input, given.expert, given.weight]
    numbers: list[int] = []
    for name in ("gate_up", "down"):
        words, scales, zeros = (getattr(given, name + part) for part in ("", "_scales", "_zero_points"))
        tensors += [words, scales, zeros]
        zero_bytes = 0 if zeros is None else 4 * zeros.shape[2]
        inputs = scales.shape[2] * given.block_size
        numbers += [words.shape[1], inputs, given.block_size, given.bits, 1 << (given.bits - 1), zero_bytes, 0, 0]
    batch, count, chosen = given.expert.shape
    numbers += [len(given.gate_up), chosen, int(given.activation == "swiglu"), batch * count]
    return Call(numbers, tensors, tuple(given.input.shape))


def demand(cpu: str) -> None:
    """Skip the test where there is no compiler for a kind of processor, or no emulator of it."""
    compiler = "g++" if cpu == "x86_64" else f"{cpu}-linux-gnu-g++"
    missing = [name for name in ("cmake", "gcc", compiler, f"qemu-{cpu}") if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")


class Products:
    """The program for a kind of processor, compiled."""

    def __init__(self, cpu: str, folder: Path) -> None:
        self._folder = folder
        with locked(f"products-{cpu}") as build:
            options: dict[str, Path | str | None] = {"STILL_PROGRAMS": PROGRAM, **cross_compiler(cpu)}
            built = run_cmake(SOURCE, build, options, "products") / "programs/products"
            self._program = Path(shutil.copy(built, folder / f"products-{cpu}"))
        self._counter = folder / "count.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", self._counter, PROGRAM / "count.c"], check=True)

    def sets(self, machine: Machine) -> tuple[str, ...]:
        """Instruction sets that the kernels find on a machine."""
        return tuple(self._run(machine).split())

    def output(self, call: Call, machine: Machine, index: int = 0) -> Tensor:
        """What a call gives by the machine's instruction set of this number."""
        self._run(machine, *self._arguments(call, index, 1))
        found = np.fromfile(self._folder / "output", np.float32)
        return torch.from_numpy(found).reshape(call.shape)

    def instructions(self, call: Call, machine: Machine, index: int = 0) -> int:
        """How many one run of the call takes."""

        def executed(runs: int) -> int:
            counted = COUNTED.search(self._run(machine, *self._arguments(call, index, runs), count=True))
            if not counted:
                raise RuntimeError(f"{machine.command[0]} took no plugin of version 1; qemu-user 7.2 to 8.2 does.")
            return int(counted[1])

        return executed(2) - executed(1)

    def _arguments(self, call: Call, index: int, runs: int) -> list[str]:
        call.save(self._folder / "call")
        return [str(self._folder / "call"), str(self._folder / "output"), str(index), str(runs)]

    def _run(self, machine: Machine, *arguments: str, count: bool = False) -> str:
        plugin = ["-plugin", str(self._counter)] if count else []
        command = [*machine.command, *plugin, str(self._program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
        return done.stdout + done.stderr


OUTPUTS, INPUTS = 1536, 768
"""Of the layers that are counted."""
COUNTS = (1, 8, 64)
"""Tokens."""


def counted_calls() -> dict[str, Sequence[Call]]:
    """Layers as packages have them, by what they hold; a call for each of COUNTS."""

    def plain(bits: int) -> Sequence[Call]:
        case = Case(bits, zero_points=False, outputs=OUTPUTS, inputs=INPUTS)
        return [matmul_call(weight(case), tokens(case, 1, count, torch.float32)) for count in COUNTS]

    def kept(kind: str) -> Sequence[Call]:
        case = SuperBlocks(kind, OUTPUTS, INPUTS)
        return [super_block_call(case, case.tokens(1, count)) for count in COUNTS]

    return {"int4": plain(4), "int8": plain(8), "Q4_K": kept("Q4_K"), "Q6_K": kept("Q6_K")}


def main() -> None:
    """Print the table: instructions for a thousand products, by tokens of a call."""
    machines = (ARM[-1], X86)
    calls = counted_calls()
    with tempfile.TemporaryDirectory() as folder:
        programs = {machine: Products(machine.cpu, Path(folder)) for machine in machines}
        print("| | " + " | ".join(calls) + " |")
        print("|---" * (1 + len(calls)) + "|")
        for machine in machines:
            for index, name in enumerate(machine.sets):
                cells = []
                for row in calls.values():
                    counts = (programs[machine].instructions(call, machine, index) for call in row)
                    each = zip(counts, COUNTS, strict=True)
                    cells.append(" / ".join(f"{1000 * n / (OUTPUTS * INPUTS * count):,.0f}" for n, count in each))
                print(f"| {machine.cpu}, {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
