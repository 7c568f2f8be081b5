"""The kernels in Gluon for sm_90 in machine code: no GPU. What they compute is shown on one, by `test_attend.py` and `test_linear.py`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from still_kernels import aot
from still_kernels.hybrid_attention.plan import KERNELS, Variant
from still_kernels.hybrid_attention.sm90.gluon_attend import attend_tma_kernel
from still_kernels.tile import SHARED_BYTES
from tests.machine_code import disassembly, inner_loops, lines

LLAMA: dict[str, Any] = {
    "D": 128,
    "DTYPE": "bf16",
    "GATE": 1,
    "FACTOR": 0,
    "RAGGED": 0,
    "COUNTS": "i64",
    "PAGES": 0,
    "CODES": 0,
}


def source_of(**changes: Any) -> GluonASTSource:
    """The kernel, of a kind."""
    kind = {**LLAMA, **changes}
    constants = {"C": 64, "SLOTS": 256 // kind["D"]} | {
        name: kind[name] for name in ("D", "GATE", "FACTOR", "RAGGED", "PAGES", "CODES")
    }
    absent = {"p_new_tokens"} if kind["RAGGED"] else {"p_query_start", "p_state_row"}
    absent |= set() if kind["GATE"] else {"d_gate"}
    absent |= set() if kind["FACTOR"] else {"p_window_factor"}
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    signature, values = {}, {}
    for name in attend_tma_kernel.arg_names:
        if name in absent:
            signature[name], values[name] = "constexpr", None
        elif name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name.startswith("d_"):
            rows = 128 if name.endswith(("key", "value")) else 64
            dtype = "bf16" if name == "d_linear" else kind["DTYPE"]
            signature[name] = f"tensordesc<{dtype}[{rows}, {kind['D']}],{layout!r}>"
        elif name in ("p_new_tokens", "p_past_length", "p_query_start", "p_state_row"):
            signature[name] = "*" + kind["COUNTS"]
        elif name.startswith("p_"):
            signature[name] = "*fp32" if name in ("p_linear_sum", "p_window_factor") else "*" + kind["DTYPE"]
        else:
            signature[name] = "fp32" if name in ("scale", "epsilon") else "i32"
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(attend_tma_kernel.arg_names)
        if signature[name].startswith("*")
    }
    return GluonASTSource(fn=attend_tma_kernel, signature=signature, constexprs=values, attrs=attrs)


def complaints(ptx: str, folder: Path) -> list[str]:
    """What the assembler says of a kernel."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-arch=sm_90a", "-v", str(file), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if "warning" in line.lower() or "(C7" in line]


@pytest.mark.parametrize(
    "kind",
    [
        {},
        *(
            pytest.param(kind, marks=pytest.mark.long)
            for kind in (
                {"DTYPE": "fp16", "RAGGED": 1, "COUNTS": "i32", "PAGES": (1 << 20, 73, 5, 8, 128)},
                {"DTYPE": "fp16", "RAGGED": 1, "COUNTS": "i32"},
                {"RAGGED": 1, "COUNTS": "i32", "PAGES": (1 << 20, 73, 5, 8, 128)},
                {"D": 64},
                {"D": 64, "DTYPE": "fp16", "GATE": 0, "FACTOR": 1, "RAGGED": 1},
            )
        ),
    ],
    ids=str,
)
def test_products_run_beside_the_softmax(kind: dict[str, Any], tmp_path: Path) -> None:
    """No matrix instruction waits for the one before it (C7511 and its like), nothing is spilled in the loop over the cache."""
    source = source_of(**kind)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert kernel.metadata.shared <= SHARED_BYTES[90]
    assert (kernel.metadata.global_scratch_size, kernel.metadata.profile_scratch_size) == (0, 0)
    assert complaints(kernel.asm["ptx"], tmp_path) == []
    loops = inner_loops(lines(disassembly(kernel.asm["cubin"], tmp_path)), "HGMMA")
    assert len(loops) == 2, "over the cache, one of each consumer"
    for loop in loops:
        always = [
            block for block in loop if not any(line.name.startswith("STS") for line in block)
        ]  # not what clears values
        assert sum(line.name.startswith("HGMMA") for block in always for line in block) == (
            16 if kind.get("D") != 64 else 12
        )
        assert [line for block in always for line in block if line.name.startswith(("STL", "LDL"))] == []
        assert sum(line.name.startswith("PRMT") for block in always for line in block) < 8, (
            "weights are taken apart and packed again"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "products"), [("scan_tma", 16), ("linear_tma", 68)])
def test_the_rest_of_prefill(kernel: str, products: int, tmp_path: Path) -> None:
    """No matrix instruction waits for the one before it, accumulators stay in registers, what is written is there before it is read."""
    variant = Variant()
    build = KERNELS.build(variant, 90)
    tile, function = build.tiles[kernel], KERNELS.functions()[kernel]
    signature, values = aot.signature_of(function, KERNELS, variant, tile, build)
    attrs = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(function.arg_names) if signature[x].startswith("*")}
    source = GluonASTSource(fn=function, signature=signature, constexprs=values, attrs=attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options())
    assert made.metadata.shared <= SHARED_BYTES[90]
    assert (made.metadata.global_scratch_size, made.metadata.profile_scratch_size) == (0, 0)
    assert complaints(made.asm["ptx"], tmp_path) == []
    code = lines(disassembly(made.asm["cubin"], tmp_path))
    assert sum(line.name.startswith("HGMMA") for line in code) == products
    assert sum(line.name.startswith("STL") for line in code) <= 24  # numbers of a tile, not of its elements
    ptx = made.asm["ptx"].splitlines()
    for i, line in enumerate(ptx):  # groups give a buffer back once all their warps are done with it
        if "mbarrier.arrive.shared" in line and "expect" not in line:
            assert any("bar.sync" in before or "bar.warp.sync" in before for before in ptx[max(i - 4, 0) : i]), ptx[
                i - 6 : i + 1
            ]
