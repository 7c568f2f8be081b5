"""still::RoutedAttention, definition and function body, against a loop in float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.routed_attention.meaning import Inputs, RoutedState, routed_attention
from still_kernels.routed_attention.spec import ROUTED_ATTENTION
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, check_rows_without_tokens, counts_of, pieces
from tests.still_kernels.linear_attention.inputs import BOUND, SPLITS

SIZES = {"H": 6, "D": 10, "V": 7, "R": 3}
SIZE = 64


def looped(x: dict[str, Tensor], keep: bool) -> Tensor:
    """Outputs [T, H, V] of one sequence."""
    state = start = torch.zeros(SIZES["H"], SIZES["D"], SIZES["V"], dtype=torch.float64)
    outputs = []
    for t in range(len(x["query"])):
        k, left = x["key"][t], x["decay"][t].exp()[:, None, None]
        state = left * state
        start = left * start if keep else start
        new = x["beta"][t, :, None] * (x["value"][t] - torch.einsum("hdv,hd->hv", state, k))
        state = state + k[:, :, None] * new[:, None]
        outputs.append(torch.einsum("hdv,hd->hv", state, x["query"][t]) / SIZES["D"] ** 0.5)
        if t % SIZE == SIZE - 1:
            taken = (x["softmax"][t] > 0).repeat_interleave(SIZES["H"] // SIZES["R"])[:, None, None]
            state = start = torch.where(taken, start, state)
    return torch.stack(outputs)


def calls(dtype: torch.dtype = torch.float32, keep: bool = True) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs."""
    counts = counts_of(SPLITS)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, generator=generator, dtype=torch.float64)

    heads, dim, size = (SIZES[n] for n in "HDV")
    x = {"query": drawn(heads, dim), "key": normalize(drawn(heads, dim), dim=-1), "value": drawn(heads, size)}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x |= {"decay": -0.05 * drawn(heads).abs(), "beta": drawn(heads).sigmoid(), "softmax": drawn(SIZES["R"]) > 0}
    x |= {name: x[name].float() for name in ("decay", "beta")} | {"softmax": x["softmax"].int()}
    made = [looped({n: t[row].double() for n, t in x.items()}, keep) for row in range(2)]
    for feeds, past, output in pieces(x, made, counts):
        yield Inputs(**feeds, past_length=past, keep_decay=int(keep)), past, output


def empty() -> RoutedState:
    state = torch.zeros(2, *(SIZES[n] for n in "HDV"))
    return RoutedState(state, state.clone())


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, bound: float, keep: bool) -> None:
    model = node_model(ROUTED_ATTENTION, SIZES, dtype, keep_decay=int(keep))
    check_definition_and_body(
        routed_attention, model, empty(), RoutedState._fields, calls(dtype, keep), bound, of_states=bound
    )


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    check_rows_without_tokens(routed_attention, empty(), calls())


def test_what_does_not_fit_is_named() -> None:
    x, *_ = next(calls())
    with pytest.raises(ShapeError, match="4 routes, which do not divide the 6 heads"):
        routed_attention(replace(x, softmax=x.softmax.new_zeros(*x.softmax.shape[:2], 4)), empty())
    with pytest.raises(ShapeError, match="chunk_state: expected"):
        routed_attention(x, empty()._replace(chunk_state=torch.zeros(2, 6, 10, 8)))
    with pytest.raises(UnsupportedError, match="4 routes do not divide the 6 heads"):
        node_model(ROUTED_ATTENTION, SIZES | {"R": 4}, torch.float32)
