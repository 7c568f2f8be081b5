"""The kernel of cuda_between.cu: its arguments, and how much shared memory a block takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from still_kernels.common.cuda_function import CudaFunction

ROWS = ("attention", "residual")
WEIGHTS = ("output_weight", "norm_weight", "gate_up", "down", "next_norm_weight", "next_weight", "next_gate_weight")
ARGUMENTS = {
    **{f"p_{name}": "u16 const*" for name in (*ROWS, *WEIGHTS)},
    "p_words": "int*",
    **dict.fromkeys(("p_output", "p_next", "p_next_gate"), "u16*"),
    "epsilon": "float",
}
CONSTANTS = ("ATTENDED", "WIDTH", "MIDDLE", "OUTPUTS", "GATE", "THREADS")


def shared_bytes(constants: Mapping[str, Any]) -> int:
    """Of 16 columns of the highest weight, twice for gate and up; of what they are multiplied with, and of sums of warps."""
    attended, width, middle = (constants[name] for name in ("ATTENDED", "WIDTH", "MIDDLE"))
    return (
        32 * max(attended, middle, 2 * width)
        + 2 * max(attended, middle, width)
        + 4 * (17 * constants["THREADS"] // 32 + 4)
    )


between_kernel = CudaFunction(
    Path(__file__).with_name("cuda_between.cu"),
    "between_kernel",
    ARGUMENTS,
    CONSTANTS,
    {"T16": ("p_attention", {"float16": 0, "bfloat16": 1})},
    shared_bytes,
)

FUNCTIONS = {"between": between_kernel}
