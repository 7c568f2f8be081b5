"""The launch of still::Decay."""

from __future__ import annotations

from still_kernels.plan import Check, Launch, Plan
from tests.toy.spec import DECAY

PLAN = Plan(
    DECAY,
    key={"dtype": "dtype", "count_dtype": "count_dtype"},
    constants=("block",),  # channels of one program
    checks=(Check("decay <= 1", "decay={decay} grows without bound."),),
    arguments={"T": "T", "H": "H", "D": "D", "decay": "decay"},
    steps=(Launch("decay", ("ceil_div(D, block)", "H", "B")),),
)
