"""Sums over the lanes of a warp in machine code: every lane must get the same one. No GPU.

A butterfly adds what each lane has to what its partner has. Where that is a product, ptxas may multiply and add in one instruction,
which rounds the partner's product and not the lane's own. Lanes then disagree in the last bit, and where several of them store
what they computed from the sum to one place, as Triton's layout conversions do, that is a race.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from still_kernels import aot
from still_kernels.common.triton_shared import rounded
from still_kernels.hybrid_attention.plan import Variant
from tests.machine_code import disassembly

REACH = 200  # instructions between the parts of a sum


def instructions(cubin: bytes, folder: Path) -> list[str]:
    """Machine code without predicates."""
    text = disassembly(cubin, folder)
    found = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", text, re.MULTILINE)
    return [instruction.replace(".reuse", "").strip() for instruction in found]


def disagreeing_sums(code: list[str]) -> list[str]:
    """Exchanges of a product whose first addition multiplies again."""
    found = []
    for i, instruction in enumerate(code):
        exchange = re.match(r"SHFL\.BFLY \w+, (R\d+), (R\d+),", instruction)
        if not exchange:
            continue
        got, sent = exchange.groups()
        made = next((x for x in reversed(code[max(0, i - REACH) : i]) if re.match(rf"[A-Z]\S* {sent},", x)), "")
        used = next((x for x in code[i + 1 : i + REACH] if re.search(rf", -?{got}\b", x)), "")
        if made.startswith("FMUL") and used.startswith("FFMA"):
            found.append(f"{made}; {instruction}; {used}")
    return found


@triton.jit
def dot_kernel(p_x, p_y, p_out, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    o_lane = tl.arange(0, 32)
    b_x, b_y = tl.load(p_x + o_lane), tl.load(p_y + o_lane)
    tl.store(p_out, tl.sum(rounded(b_x, b_y) if ROUNDED else b_x * b_y, 0))


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_rounded_product_is_what_keeps_lanes_together(is_rounded: bool, tmp_path: Path) -> None:
    """Also that the search finds what it looks for in what the present assembler writes."""
    signature = dict.fromkeys(("p_x", "p_y", "p_out"), "*fp32") | {"ROUNDED": "constexpr"}
    source = ASTSource(fn=dot_kernel, signature=signature, constexprs={"ROUNDED": is_rounded})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    code = instructions(compiled.asm["cubin"], tmp_path)
    assert any("SHFL.BFLY" in x for x in code)
    assert bool(disagreeing_sums(code)) != is_rounded


LLAMA: dict[str, Any] = {"head_dim": 128, "feature_rows": 128, "chunk_size": 64}
SMALL: dict[str, Any] = {"head_dim": 64, "feature_rows": 64, "chunk_size": 32}


@pytest.mark.parametrize(
    ("size", "scope"),
    [
        (SMALL, "q_head"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((LLAMA, "kv_group_max"), (SMALL, "kv_group_max"), (LLAMA, "q_head"))
        ),
    ],
)
def test_lanes_of_decode_agree(size: dict[str, Any], scope: str, tmp_path: Path) -> None:
    variant = Variant(**size, select_scope=scope)
    _, cubins = aot.compile_variant("HybridAttention", variant, 90, "decode")
    for cubin in cubins.values():
        assert disagreeing_sums(instructions(cubin, tmp_path)) == []
