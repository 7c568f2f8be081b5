"""still::Experts: kernels; its definition is `meaning.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from still_kernels.common.grouped_plan import GroupedVariant, grouped_op, grouped_plan
from still_kernels.experts.spec import EXPERTS
from still_kernels.op_kernels import HALVES, imported

if TYPE_CHECKING:
    from torch import Tensor

    from still_kernels.experts.meaning import Inputs


PLAN = grouped_plan(EXPERTS, "M", {})


class Variant(GroupedVariant):
    """As of `GroupedVariant`."""


def _definition(inputs: Inputs) -> Tensor:
    return imported("still_kernels.experts.meaning", "naive_experts")()(inputs)  # type: ignore[no-any-return]


OP = grouped_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in HALVES],
    _definition,
    covers="experts have",
)
