"""The kernel of cuda_decode.cu: its arguments, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from still_kernels.common.cuda_function import CudaFunction

STAGE, ROOM = 8192, 128
"""Bytes of a stage, and of z after it."""
WARPS = 8

ARGUMENTS = {
    **dict.fromkeys(
        ("p_query", "p_key", "p_value", "p_gate", "p_feature_q_weight", "p_feature_k_weight"), "u16 const*"
    ),
    "p_window_factor": "float const*",
    **dict.fromkeys(("p_window_key", "p_window_value"), "u16*"),
    "p_window_score": "float*",
    **dict.fromkeys(("p_salient_key", "p_salient_value"), "u16*"),
    **dict.fromkeys(("p_kv_state", "p_z_state"), "float*"),
    **dict.fromkeys(("p_new_tokens", "p_past_length"), "Count const*"),
    "p_part_den": "float*",
    "p_counters": "int*",
    "p_output": "u16*",
    "p_present_length": "Count*",
    **dict.fromkeys(("H", "HK", "G", "K", "N", "W_HEADS", "phantom"), "int"),
    **dict.fromkeys(("scale", "epsilon"), "float"),
}
CONSTANTS = ("C", "D", "P", "FEATURE", "SCOPE", "CL", "GR", "NST", "MINB")


def shared_bytes(constants: Mapping[str, Any]) -> int:
    """Upper bound of the size of `Shared` in the source."""
    dim, rows, chunk, cluster, heads, slots = (constants[name] for name in ("D", "P", "C", "CL", "GR", "NST"))
    features = STAGE // (8 * dim)  # features of a stage
    mine = -(-heads * (rows // features) // cluster)  # stages of S of a block
    floats = 2 * cluster * heads * dim + max(2 * WARPS * heads * dim, 16 * rows) + 3 * heads * rows
    floats += 6 * (cluster + WARPS) * heads + heads + chunk + 4
    keys = 2 * mine * 2 * features * (chunk + 8)
    return slots * (STAGE + ROOM) + 4 * floats + keys + chunk + 8 * (2 * slots + 4) + 256


decode_cluster_kernel = CudaFunction(
    Path(__file__).with_name("cuda_decode.cu"),
    "decode_cluster_kernel",
    ARGUMENTS,
    CONSTANTS,
    {"T16": ("p_query", {"float16": 0, "bfloat16": 1}), "LONG": ("p_past_length", {"int32": 0, "int64": 1})},
    shared_bytes,
    "CL",
)
