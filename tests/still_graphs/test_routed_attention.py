"""still::RoutedAttention, definition and function body, against a loop in float64; faults that must be seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.routed_attention.meaning import Inputs, RoutedState, routed_attention
from still_kernels.routed_attention.spec import ROUTED_ATTENTION
from tests.linear_attention_cases import BOUND, SPLITS, error
from tests.still_graphs.node_model import NodeOfStates, node_model

SIZES = {"H": 6, "D": 10, "V": 7, "R": 3}
SIZE = 64


def looped(x: dict[str, Tensor], keep: bool, fault: str = "") -> Tensor:
    """Outputs [T, H, V] of one sequence. `fault`: "kept", no chunk is taken back; "early", a chunk goes where the
    one before it was told to."""
    state = start = torch.zeros(SIZES["H"], SIZES["D"], SIZES["V"], dtype=torch.float64)
    outputs = []
    told = torch.zeros(SIZES["R"], dtype=torch.bool)
    for t in range(len(x["query"])):
        k, left = x["key"][t], x["decay"][t].exp()[:, None, None]
        state = left * state
        start = left * start if keep else start
        new = x["beta"][t, :, None] * (x["value"][t] - torch.einsum("hdv,hd->hv", state, k))
        state = state + k[:, :, None] * new[:, None]
        outputs.append(torch.einsum("hdv,hd->hv", state, x["query"][t]) / SIZES["D"] ** 0.5)
        if t % SIZE == SIZE - 1:
            now = x["softmax"][t] > 0
            went, told = (told if fault == "early" else now), now
            taken = went.repeat_interleave(SIZES["H"] // SIZES["R"])[:, None, None]
            state = start = torch.where(taken & (fault != "kept"), start, state)
    return torch.stack(outputs)


def calls(dtype: torch.dtype = torch.float32, keep: bool = True, fault: str = "") -> Iterator[tuple[Inputs, Tensor]]:
    """Calls of two sequences with NaN, or 1 of numbers that are whole, where there is no token; and outputs."""
    counts = torch.tensor([s if isinstance(s, list) else [s] * 2 for s in SPLITS])
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, generator=generator, dtype=torch.float64)

    heads, dim, size = (SIZES[n] for n in "HDV")
    x = {"query": drawn(heads, dim), "key": normalize(drawn(heads, dim), dim=-1), "value": drawn(heads, size)}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x |= {"decay": -0.05 * drawn(heads).abs(), "beta": drawn(heads).sigmoid(), "softmax": drawn(SIZES["R"]) > 0}
    x |= {name: x[name].float() for name in ("decay", "beta")} | {"softmax": x["softmax"].int()}
    made = [looped({n: t[row].double() for n, t in x.items()}, keep, fault) for row in range(2)]
    past = torch.zeros(2, dtype=torch.int64)
    for new in counts:
        longest = max(int(new.max()), 1)
        feeds = {
            n: torch.full((2, longest, *t.shape[2:]), torch.nan if t.is_floating_point() else 1, dtype=t.dtype)
            for n, t in x.items()
        }
        output = torch.zeros(2, longest, heads, size, dtype=torch.float64)
        for row, count in enumerate(new.tolist()):
            place = slice(int(past[row]), int(past[row]) + count)
            for name, t in x.items():
                feeds[name][row, :count] = t[row, place]
            output[row, :count] = made[row][place]
        yield Inputs(**feeds, new_tokens=new, past_length=past, keep_decay=int(keep)), output
        past = past + new


def empty() -> RoutedState:
    state = torch.zeros(2, *(SIZES[n] for n in "HDV"))
    return RoutedState(state, state.clone())


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_definition_and_body_equal_the_loop(dtype: torch.dtype, bound: float, keep: bool) -> None:
    model = node_model(ROUTED_ATTENTION, SIZES, dtype, keep_decay=int(keep))
    state, worst = empty(), 0.0
    nodes = [NodeOfStates(model, empty()._asdict(), in_place) for in_place in (True, False)]
    for inputs, output in calls(dtype, keep):
        found, state = routed_attention(inputs, state)
        feeds = {n: t for n, t in vars(inputs).items() if isinstance(t, Tensor)}
        made = [node(feeds, output.to(dtype)) for node in nodes]
        worst = max(worst, *(error(x, output) for x in (found, *made)))
        for node in nodes:
            for name, kept in node.states().items():
                assert error(kept, getattr(state, name).double()) <= bound, name
    print(dtype, keep, worst)
    assert worst <= bound


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    state = empty()
    for inputs, _ in calls():
        before, (_, state) = state, routed_attention(inputs, state)
        for row in range(2):
            if not inputs.new_tokens[row]:
                assert all(torch.equal(a[row], b[row]) for a, b in zip(before, state, strict=True))


def test_faults_are_seen() -> None:
    """Each beyond a thousand times the bound: a chunk that is not taken back, and one that goes where the one before it was told to."""
    for fault in ("kept", "early"):
        state, worst = empty(), 0.0
        for inputs, output in calls(fault=fault):
            found, state = routed_attention(inputs, state)
            worst = max(worst, error(found, output))
        assert worst > 1e3 * BOUND, fault


def test_what_does_not_fit_is_named() -> None:
    x, _ = next(calls())
    with pytest.raises(ShapeError, match="4 routes, which do not divide the 6 heads"):
        routed_attention(replace(x, softmax=x.softmax.new_zeros(*x.softmax.shape[:2], 4)), empty())
    with pytest.raises(ShapeError, match="chunk_state: expected"):
        routed_attention(x, empty()._replace(chunk_state=torch.zeros(2, 6, 10, 8)))
    with pytest.raises(UnsupportedError, match="4 routes do not divide the 6 heads"):
        node_model(ROUTED_ATTENTION, SIZES | {"R": 4}, torch.float32)
