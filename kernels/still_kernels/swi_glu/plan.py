"""The launch of still::SwiGlu: still_kernels.plan says what the parts mean. Integers and texts only: no torch, no Triton."""

from __future__ import annotations

from still_graphs.ops.swi_glu import SWI_GLU
from still_kernels.plan import Check, Launch, Plan

PLAN = Plan(
    SWI_GLU,
    key={
        "dtype": "dtype",
        "aligned": "width % 8 == 0",  # loads and stores of 16 bytes
        "count_dtype": "'int32'",  # there are no counts
    },
    constants=("column_block",),
    checks=(Check("width > 0", "width={width}: expected numbers."),),
    arguments={"N": "width"},
    steps=(Launch("swi_glu", ("tokens", "ceil_div(width, column_block)", "1")),),
)
