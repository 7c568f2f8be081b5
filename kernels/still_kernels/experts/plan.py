"""Kernels of still::Experts; see `meaning.py` for the definition."""

from __future__ import annotations

from still_kernels.common.grouped_plan import GroupedVariant, grouped_op, grouped_plan
from still_kernels.experts.spec import EXPERTS
from still_kernels.op_kernels import HALVES, later

PLAN = grouped_plan(EXPERTS, "M", {})
Variant = GroupedVariant

OP = grouped_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in HALVES],
    later("still_kernels.experts.meaning", "naive_experts"),
    covers="experts have",
)
