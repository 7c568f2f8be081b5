"""The launch of still::RotaryQkv: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.rotary_qkv import ROTARY_QKV
from still_kernels.plan import Check, Launch, Plan

PLAN = Plan(
    ROTARY_QKV,
    key={
        "dtype": "dtype",
        "gated": "gate_width > 0",
        "biased": "has(gate_bias)",
        "apart": "has(gate_input)",
        "aligned": "query_width % 8 == 0 and key_width % 8 == 0 and value_width % 8 == 0 and gate_width % 8 == 0 and D % 16 == 0",
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("column_block",),
    checks=(
        Check(
            "F == query_width + key_width + value_width + (0 if has(gate_input) else gate_width)",
            "widths {query_width}, {key_width}, {value_width} and {gate_width} are not the input's {F} together.",
        ),
        Check(
            "D % 2 == 0 and query_width % D == 0 and key_width % D == 0",
            "query_width={query_width}, key_width={key_width} are no heads of an even D={D}.",
        ),
        Check(
            "query_width > 0 and key_width > 0 and value_width > 0 and gate_width >= 0 "
            "and (gate_width > 0 or not (has(gate_bias) or has(gate_input)))",
            "query, key and value must have numbers, and a gate_bias or gate_input a gate.",
        ),
    ),
    arguments={"Q": "query_width", "K": "key_width", "V": "value_width", "G": "gate_width", "D": "D"},
    steps=(
        Launch("rotary", ("tokens", "ceil_div(query_width + key_width + value_width + gate_width, column_block)", "1")),
    ),
)
