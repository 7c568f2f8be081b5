"""The kernel of attend for sm_90 in machine code: no GPU. What it computes is shown on one, by `test_attend.py`."""

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

from still_kernels.hybrid_attention.gluon_attend import attend_tma_kernel
from still_kernels.tile import SHARED_BYTES
from tests.machine_code import disassembly, inner_loops, lines

LLAMA: dict[str, Any] = {"D": 128, "DTYPE": "bf16", "GATE": 1, "FACTOR": 0, "RAGGED": 0, "COUNTS": "i64", "PAGES": 0}


def compiled(**changes: Any) -> Any:
    """The kernel for sm_90."""
    kind = {**LLAMA, **changes}
    constants = {"C": 64, "SLOTS": 256 // kind["D"]} | {
        name: kind[name] for name in ("D", "GATE", "FACTOR", "RAGGED", "PAGES")
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
    source = GluonASTSource(fn=attend_tma_kernel, signature=signature, constexprs=values, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


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
            pytest.param(kind, marks=[pytest.mark.slow, *more])
            for kind, more in (
                ({"DTYPE": "fp16", "RAGGED": 1, "COUNTS": "i32"}, []),
                ({"RAGGED": 1, "COUNTS": "i32", "PAGES": (1 << 20, 73, 5, 8, 128)}, []),
                ({"D": 64}, [pytest.mark.long]),
                ({"D": 64, "DTYPE": "fp16", "GATE": 0, "FACTOR": 1, "RAGGED": 1}, [pytest.mark.long]),
            )
        ),
    ],
    ids=str,
)
def test_products_run_beside_the_softmax(kind: dict[str, Any], tmp_path: Path) -> None:
    """No matrix instruction waits for the one before it (C7511 and its like), nothing is spilled in the loop over the cache."""
    kernel = compiled(**kind)
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
