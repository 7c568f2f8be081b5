"""PyTorch in half precision as another rounding has it. Where a score lies behind another by less than it rounds, or a token's activations
are huge, one rounding is far from the next, and PyTorch's own run is one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from still_export.package.calls import Arrays

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from still_export.proof.cases import Case

ROUNDINGS = 24
"""That are tried of an answer, or of a call, which is further off than PyTorch's own run allows."""
CALLS = 8
"""The same of a case of verify, whose PyTorch takes most of the time."""
FEW = 0.01
"""The part of an output's rows, and always one, that may need it: a fault moves more, or rows that no rounding moves."""
SAME = 2.0
"""Times the error of PyTorch's row in one of these roundings that this very row may err."""


def moved(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A weight in half precision, at random another by as much as its type may round it: about what rounding makes of all that it is
    multiplied with."""
    import torch

    part = torch.rand(weight.shape, generator=generator).to(weight.device).mul_(2).sub_(1)
    return (weight.float() * (1 + torch.finfo(weight.dtype).eps / 2 * part)).to(weight.dtype)


def explained(
    errors: Sequence[Arrays], beyond: dict[str, list[np.ndarray]], again: Callable[[int], Case]
) -> dict[str, list[np.ndarray]]:
    """Of rows beyond their bounds those that PyTorch in another rounding has as far off.

    Args:
        errors: Of each call and output `row_errors`, [2, ...].
        beyond: By output, masks of `errors` of each call.
        again: The case in a rounding, by number.

    Returns:
        Masks [...] of the rows of each call.
    """
    if any(
        sum(int(x.any(0).sum()) for x in masks) > max(1, FEW * sum(x[0].size for x in masks))
        for masks in beyond.values()
    ):
        return {}
    left = {name: [x.copy() for x in masks] for name, masks in beyond.items()}
    for number in range(CALLS):
        own = again(number).own
        for name, masks in left.items():
            for mask, call, theirs in zip(masks, errors, own, strict=False):
                mask &= ~(call[name] <= SAME * theirs[name])
        if not any(mask.any() for masks in left.values() for mask in masks):
            break
    return {
        name: [np.asarray(was.any(0) & ~now.any(0)) for was, now in zip(masks, left[name], strict=True)]
        for name, masks in beyond.items()
    }
