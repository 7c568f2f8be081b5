"""The launch of still::AddRmsNorm: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.add_rms_norm import ADD_RMS_NORM
from still_kernels.plan import Launch, Plan

COLUMNS = 1024
"""Numbers of a token up to which a narrow block holds them."""

PLAN = Plan(
    ADD_RMS_NORM,
    key={
        "dtype": "dtype",
        "wide": f"I > {COLUMNS}",
        "summed": "has(residual)",
        "aligned": "I % 8 == 0",  # loads and stores of 16 bytes
        "count_dtype": "'int32'",  # there are no counts
    },
    arguments={"K": "I", "epsilon": "norm_epsilon"},
    steps=(Launch("add_norm", ("tokens", "1", "1")),),
)
