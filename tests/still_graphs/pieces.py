"""Two sequences in calls, and an op's definition and body over them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import torch
from torch import Tensor

from tests.still_graphs.node_model import NodeOfStates
from tests.still_kernels.linear_attention.inputs import Split, error


def counts_of(splits: Sequence[Split]) -> Tensor:
    """New tokens by call and sequence, [calls, 2]."""
    return torch.tensor([s if isinstance(s, list) else [s] * 2 for s in splits])


def drawn(
    heads: Mapping[str, int], size: int, splits: Sequence[Split], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Random tensors [2, T, heads, size] for all tokens of the calls, by name, and `counts_of` the calls."""
    counts, generator = counts_of(splits), torch.Generator().manual_seed(0)
    tokens = int(counts.sum(0).max())
    return {n: torch.randn(2, tokens, h, size, generator=generator).to(dtype) for n, h in heads.items()}, counts


def pieces(
    x: Mapping[str, Tensor], expected: Sequence[Tensor], counts: Tensor
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Cut tensors [2, T, ...] and outputs of each sequence into calls: (tensors and counts, lengths before it, outputs).

    Where there is no token: NaN, or 1 in integers.
    """
    past = torch.zeros(2, dtype=torch.int64)
    for new in counts:
        longest = max(int(new.max()), 1)
        feeds = {
            n: torch.full((2, longest, *t.shape[2:]), torch.nan if t.is_floating_point() else 1, dtype=t.dtype)
            for n, t in x.items()
        }
        output = torch.zeros(2, longest, *expected[0].shape[1:], dtype=torch.float64)
        for row, count in enumerate(new.tolist()):
            place = slice(int(past[row]), int(past[row]) + count)
            for name, t in x.items():
                feeds[name][row, :count] = t[row, place]
            output[row, :count] = expected[row][place]
        yield feeds | {"new_tokens": new}, past, output
        past = past + new


Op = Callable[[Any, Any], tuple[Tensor, Any]]
"""A definition: (inputs, state) to (output, state)."""
Calls = Iterable[tuple[Any, ...]]
"""Of each call the inputs, lengths before it, and outputs."""


def check_definition_and_body(
    op: Op, model: onnx.ModelProto, start: Any, names: Sequence[str], calls: Calls, bound: float, of_states: float = 0.0
) -> None:
    """Hold a definition, and a body in place and apart, to outputs; the body's states to the definition's, by default to the bit."""
    state, worst = start, 0.0
    nodes = [NodeOfStates(model, {n: getattr(start, n).clone() for n in names}, place) for place in (True, False)]
    for inputs, past, output, *_ in calls:
        found, state = op(inputs, state)
        feeds = {n: t for n, t in vars(inputs).items() if isinstance(t, Tensor)} | {"past_length": past}
        made = [node(feeds, output.to(found.dtype)) for node in nodes]
        worst = max(worst, *(error(x, output) for x in (found, *made)))
        for node in nodes:
            for name, kept in node.states().items():
                same = getattr(state, name)
                assert error(kept, same.double()) <= of_states if of_states else torch.equal(kept, same), name
    assert worst <= bound


def check_rows_without_tokens(op: Op, state: Any, calls: Calls) -> None:
    """A sequence that brings no token keeps its state."""
    for inputs, *_ in calls:
        before, (_, state) = state, op(inputs, state)
        for row in range(2):
            if not inputs.new_tokens[row]:
                assert all(torch.equal(a[row], b[row]) for a, b in zip(before, state, strict=True))
