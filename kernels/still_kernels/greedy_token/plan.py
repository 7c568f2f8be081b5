"""The launch of still::GreedyToken: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.greedy_token import GREEDY_TOKEN
from still_kernels.plan import Launch, Plan

PLAN = Plan(
    GREEDY_TOKEN,
    key={
        "dtype": "dtype",
        "aligned": "V % 8 == 0",  # loads of 16 bytes
        "count_dtype": "'int32'",  # there are no counts
    },
    arguments={"V": "V"},
    steps=(Launch("greedy", ("tokens", "1", "1")),),
)
