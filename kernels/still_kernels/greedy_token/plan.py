"""still::GreedyToken: the likeliest token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from still_kernels.common.stateless import StatelessInputs, StatelessVariant, keyed, stateless_op
from still_kernels.greedy_token.spec import GREEDY_TOKEN
from still_kernels.op_kernels import DTYPES
from still_kernels.plan import Launch, Plan
from still_kernels.tile import KernelTile, TileTable

if TYPE_CHECKING:
    from torch import Tensor


PLAN = Plan(
    GREEDY_TOKEN,
    key=keyed(aligned="V % 8 == 0"),  # loads of 16 bytes
    arguments={"V": "V"},
    steps=(Launch("greedy", ("tokens", "1", "1")),),
)


@dataclass(frozen=True)
class Inputs(StatelessInputs, plan=PLAN):
    """logits: [B, T, V]."""

    logits: Tensor


def naive_greedy_token(inputs: Inputs) -> Tensor:
    """The first of the likeliest tokens, int32 [B, T]; -1 if a logit is NaN or the largest is infinite, as after an overflow.
    ShapeError: The logits do not fit."""
    import torch

    inputs.check()
    largest = inputs.logits.amax(-1, keepdim=True)  # NaN where a logit is
    found = (inputs.logits == largest).int().argmax(-1)
    return found.where(largest[..., 0].isfinite(), -1).to(torch.int32)


@dataclass(frozen=True)
class Variant(StatelessVariant):
    """aligned: Whether V is a multiple of 8, for 16-byte loads."""

    DTYPES = DTYPES
    aligned: int = 1


TILES = TileTable({"greedy": KernelTile({"BC": 8192}, 16)})
"""One for every variant and architecture. A program reads a whole row of logits, so many loads are in flight: 49,152 logits in six
iterations, Llama's 128,256 in sixteen."""

OP = stateless_op(
    PLAN,
    Variant,
    [Variant(dtype) for dtype in DTYPES],
    lambda variant, arch: TILES,
    naive_greedy_token,
    module="still_kernels.greedy_token.kernels",
)
