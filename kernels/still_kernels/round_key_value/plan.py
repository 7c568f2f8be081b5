"""The launch of still::RoundKeyValue: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.round_key_value import ROUND_KEY_VALUE
from still_kernels.plan import Launch, Plan

PLAN = Plan(
    ROUND_KEY_VALUE,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("row_block",),
    arguments={"M": "tokens * HK"},
    steps=(Launch("round", ("ceil_div(tokens * HK, row_block)", "2", "1")),),
)
