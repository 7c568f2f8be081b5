"""Machine code of the kernels of still::MatMulNBits: no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from still_kernels.aot import compile_variant
from still_kernels.matmul_nbits.plan import OP, Variant
from tests.machine_code import disassembly, lines

VARIANTS = [
    (90, Variant(span=0)),
    *[
        pytest.param(90, v, marks=pytest.mark.long)
        for v in (
            *(Variant(span=span) for span in (1, 2)),
            *(Variant(bits=8, zero_points=0, span=span) for span in range(3)),
            Variant(aligned=0),
            Variant(zero_points=0, offsets=1),
        )
    ],
    *[
        pytest.param(arch, v, marks=pytest.mark.long)
        for arch in (80, 86)
        for v in (Variant(), Variant(bits=8, zero_points=0))
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("arch, variant", VARIANTS, ids=str)
def test_no_kernel_spills_and_codes_stay_in_registers(arch: int, variant: Variant, tmp_path: Path) -> None:
    """What a program of a few rows reads of the weight goes from 16-byte loads through registers into matrix instructions."""
    entry, cubins = compile_variant("MatMulNBits", variant, arch)
    for name, kernel in entry["kernels"].items():
        code = lines(disassembly(cubins[kernel["cubin"]], tmp_path))
        found = [line.name.split(".")[0] for line in code]
        assert not {"STL", "LDL"} & set(found), f"{name} spills"
        if name == "few":
            tile = OP.tiles(variant, arch).tiles["few"].constants
            of_weight = tile["BN"] // 8 * tile["UNITS"]
            of_tokens = tile["UNITS"] * 16 // variant.bits
            loads = [line for line in code if line.name.startswith("LDG") and ".128" in line.name]
            # For whole turns of the loop and for the last, and before the loop what is asked for ahead.
            assert len(loads) == (2 + (tile["AHEAD"] > 0)) * of_weight + (2 + (tile["AHEAD"] > 1)) * of_tokens
            first = found.index("HMMA")
            assert not {"LDS", "STS", "LDSM"} & set(found[:first]), "what a thread reads stays with it"
