"""still::RankOneAttention, chunks and function body, against a loop in float64: outputs, states, padding."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from still_graphs.errors import ShapeError
from still_kernels.rank_one_attention.meaning import Inputs, chunked_rank_one_attention
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION
from tests.still_graphs.node_model import StatefulNode, node_model
from tests.still_graphs.pieces import counts_of, pieces
from tests.still_kernels.linear_attention.inputs import BOUND, HARD_BOUND, SPLITS, Split, error

SIZES = {"H": 3, "D": 10, "V": 7}
STRENGTHS = {0.6: BOUND, 60.0: HARD_BOUND}
"""The largest decay of a token, and the error that is allowed."""


def looped(x: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Outputs of one sequence [T, H, ...], the state moved by whole matrices [H, D, D], and the state before and after each token."""
    outputs, states = [], [torch.zeros(*SIZES.values(), dtype=torch.float64)]
    for t in range(len(x["query"])):
        move = torch.eye(SIZES["D"]).double() + x["write_key"][t, :, :, None] * x["read_key"][t, :, None]
        state = move @ (x["decay"][t].exp()[..., None] * states[-1]) + x["key"][t, :, :, None] * x["value"][t, :, None]
        outputs.append(torch.einsum("hd,hdv->hv", x["query"][t], state))
        states.append(state)
    return torch.stack(outputs), states


def calls(splits: list[Split], dtype: torch.dtype, strength: float = 0.6) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences with NaN where there is no token, their outputs and states."""
    counts = counts_of(splits)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())

    def normal(size: int) -> Tensor:
        return torch.randn(2, tokens, SIZES["H"], size, generator=generator, dtype=torch.float64)

    unit = normalize(normal(SIZES["D"]), dim=-1)
    x = {name: normal(SIZES["V" if name == "value" else "D"]) for name in ("query", "key", "value")}
    x |= {"read_key": -unit, "write_key": unit * torch.rand(unit.shape, generator=generator).double()}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x["decay"] = -strength * torch.rand(unit.shape, generator=generator)
    made = [looped({name: tensor[row].double() for name, tensor in x.items()}) for row in range(2)]
    for feeds, past, output in pieces(x, [outputs for outputs, _ in made], counts):
        ends = (past + feeds["new_tokens"]).tolist()
        yield Inputs(**feeds), output, torch.stack([states[end] for (_, states), end in zip(made, ends, strict=True)])


@pytest.mark.parametrize("strength", STRENGTHS)
def test_chunks_equal_the_loop(strength: float) -> None:
    state = torch.zeros(2, *SIZES.values())
    for inputs, output, expected in calls(SPLITS, torch.float32, strength):
        found, state = chunked_rank_one_attention(inputs, state)
        assert max(error(found, output), error(state, expected)) <= STRENGTHS[strength]


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "apart"])
@pytest.mark.parametrize(
    "dtype, strength, bound",
    [(torch.float32, 0.6, BOUND), (torch.float32, 60.0, HARD_BOUND), (torch.float16, 0.6, 1e-3)],
)
def test_body_equals_the_loop(dtype: torch.dtype, strength: float, bound: float, in_place: bool) -> None:
    model = node_model(RANK_ONE_ATTENTION, SIZES, dtype)
    node = StatefulNode(RANK_ONE_ATTENTION, model, torch.zeros(2, *SIZES.values()), in_place)
    for inputs, output, expected in calls(SPLITS, dtype, strength):
        found, state = node(vars(inputs), output.to(dtype))
        assert max(error(found, output), error(state, expected)) <= bound


def test_what_does_not_fit_is_named() -> None:
    x, _, _ = next(calls([5], torch.float32))
    with pytest.raises(ShapeError, match=r"read_key: expected \[2, 5, 3, 10\], got \[2, 4, 3, 10\]"):
        chunked_rank_one_attention(replace(x, read_key=x.read_key[:, 1:]), torch.zeros(2, *SIZES.values()))
    with pytest.raises(ShapeError, match=r"recurrent_state: expected \[2, 3, 10, 7\], got \[2, 3, 7, 10\]"):
        chunked_rank_one_attention(x, torch.zeros(2, 3, 7, 10))
