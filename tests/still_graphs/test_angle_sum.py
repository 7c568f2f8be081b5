"""still::AngleSum, definition and function body, against a loop in float64: angles, turns, padding."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.angle_sum.meaning import Inputs, naive_angle_sum
from still_kernels.angle_sum.spec import ANGLE_SUM
from tests.still_graphs.node_model import StatefulNode, node_model
from tests.still_graphs.pieces import counts_of, pieces
from tests.still_kernels.block_attention.inputs import SPLITS

HEADS, ANGLES = 3, 5
BOUND = 5e-6


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference of angles, which wrap."""
    return float(torch.polar(torch.ones_like(expected), found.double() - expected).angle().abs().max())


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("longest", [0.3, 30.0])
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, in_place: bool, longest: float) -> None:
    counts, generator = counts_of(SPLITS), torch.Generator().manual_seed(0)
    tokens = int(counts.sum(0).max())
    angle = torch.randn(2, tokens, ANGLES, generator=generator).to(dtype)
    step = longest * torch.rand(2, tokens, HEADS, generator=generator)
    exact = (math.pi * angle.double().tanh()[:, :, None] * step.double()[..., None]).cumsum(1)
    state = torch.zeros(2, HEADS, ANGLES, 2)
    node = StatefulNode(ANGLE_SUM, node_model(ANGLE_SUM, {"H": HEADS, "A": ANGLES}, dtype), state, in_place)
    bound = BOUND * max(1.0, longest)  # of what one token adds, which is rounded
    for feeds, _, right in pieces({"angle": angle, "step": step}, list(exact), counts):
        output, state = naive_angle_sum(Inputs(**feeds), state)
        made, kept = node(feeds, output)
        for row, count in enumerate(feeds["new_tokens"].tolist()):
            assert not count or max(apart(x[row, :count], right[row, :count]) for x in (output, made)) <= bound
            assert not output[row, count:].any() and not made[row, count:].any()
        assert (kept - state).abs().max() <= bound


def test_what_does_not_fit_is_named() -> None:
    x = Inputs(torch.zeros(1, 9, ANGLES), torch.ones(1, 9, HEADS), torch.tensor([9]))
    state = torch.zeros(1, HEADS, ANGLES, 2)
    with pytest.raises(ShapeError, match=r"step: expected \[1, 9, 3\], got \[1, 8, 3\]"):
        naive_angle_sum(replace(x, step=x.step[:, 1:]), state)
    with pytest.raises(ShapeError, match=r"angle_state: expected \[1, 3, 5, 2\], got \[1, 5, 3, 2\]"):
        naive_angle_sum(x, state.transpose(1, 2))
