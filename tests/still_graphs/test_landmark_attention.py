"""still::LandmarkAttention, definition and function body, against a loop in float64."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.attention.meaning import AttentionState
from still_kernels.landmark_attention.meaning import Inputs, landmark_attention
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, drawn, pieces
from tests.still_kernels.attention.inputs import Layer
from tests.still_kernels.block_attention.inputs import SPLITS

LAYER, SIZE = Layer(), 51
SIZES = {"H": LAYER.heads, "HK": LAYER.kv_heads, "D": LAYER.dim}
BOUND, ROWS, BASE = 5e-6, 300, 1000.0
SHORT = [30, 1, [12, 7], [1, 0], [0, 2], 3, 1]


def looped(x: dict[str, Tensor], size: int) -> Tensor:
    """Outputs [T, H, D] of one sequence, as two softmaxes."""
    group, rows = LAYER.heads // LAYER.kv_heads, []
    for t in range(len(x["query"])):
        block = t // size
        own = [s for s in range(block * size, t + 1) if s % size != size - 1]
        for h in range(LAYER.heads):
            key, value = x["key"][:, h // group], x["value"][:, h // group]
            scores = key @ x["query"][t, h] / LAYER.dim**0.5
            gates = [b * size + size - 1 for b in range(block)]
            shares = torch.cat((scores[own], scores[gates])).softmax(0)
            output = shares[: len(own)] @ value[own]
            for b, share in enumerate(shares[len(own) :]):
                inside = slice(b * size, b * size + size - 1)
                output = output + share * (scores[inside].softmax(0) @ value[inside])
            rows.append(output)
    return torch.stack(rows).view(-1, LAYER.heads, LAYER.dim)


def retrieved(x: dict[str, Tensor], size: int, top: int, base: float = BASE) -> Tensor:
    """The same of a sequence whose heads read `top` blocks each, as the published code does where a call is a token: cached keys have no
    positions, landmarks are turned where they are asked, blocks where they are read."""
    _, heads, dim = x["query"].shape
    speed = base ** (-torch.arange(0, dim, 2).double() / dim)

    def turned(y: Tensor, place: int) -> Tensor:
        both = torch.complex(y[: dim // 2], y[dim // 2 :]) * torch.polar(torch.ones_like(speed), place * speed)
        return torch.cat((both.real, both.imag))

    rows = []
    for t in range(len(x["query"])):
        full = t // size
        k = min(top, full)
        first = full - k - 1  # the block before the latest k
        for h in range(heads):
            key, value = (x[n][:, h * x[n].shape[1] // heads] for n in ("key", "value"))
            query = turned(x["query"][t, h], t) / dim**0.5
            asked = [max(b, first) for b in range(full)]
            marks = torch.tensor(
                [float(query @ turned(key[b * size + size - 1], asked[b] * size + size - 1)) for b in range(full)]
            )
            chosen = sorted(marks.sort(descending=True, stable=True).indices[:k].tolist())
            scores, values = [], []
            for slot, b in enumerate(chosen):
                at = first + slot + (b > first)
                inner = torch.stack([query @ turned(key[b * size + r], at * size + r) for r in range(size)])
                scores.append((inner[-1], inner[:-1].softmax(0)))
                values.append(value[b * size : b * size + size - 1])
            own = [s for s in range(full * size, t + 1) if s % size != size - 1]
            words = [query @ turned(key[s], s) for s in own]
            shares = torch.stack([*words, *(mark for mark, _ in scores)]).softmax(0)
            output = shares[: len(own)] @ value[own]
            for share, (_, weights), read in zip(shares[len(own) :], scores, values, strict=True):
                output = output + share * (weights @ read)
            rows.append(output)
    return torch.stack(rows).view(-1, heads, dim)


def calls(
    dtype: torch.dtype = torch.float32, size: int = SIZE, top: int = 0
) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs."""
    heads = {"query": LAYER.heads, "key": LAYER.kv_heads, "value": LAYER.kv_heads}
    x, counts = drawn(heads, LAYER.dim, SHORT if top else SPLITS, dtype)
    wide = [{n: t[row].double() for n, t in x.items()} for row in range(2)]
    expected = [retrieved(each, size, top) if top else looped(each, size) for each in wide]
    for feeds, past, output in pieces(x, expected, counts):
        yield Inputs(**feeds, block_tokens=size, top_blocks=top, rope_base=BASE), past, output


def empty(dtype: torch.dtype = torch.float32) -> AttentionState:
    return AttentionState.empty(2, LAYER.kv_heads, LAYER.dim, ROWS, dtype)


@pytest.mark.parametrize(
    ("size", "top", "dtype", "bound"),
    [
        *((size, 0, torch.float32, BOUND) for size in (2, SIZE)),
        *((size, 0, torch.float16, 1e-3) for size in (2, SIZE)),
        (2, 5, torch.float32, BOUND),
        (7, 1, torch.float32, BOUND),
        (7, 3, torch.float16, 2e-3),
    ],
    ids=str,
)
def test_definition_and_body_equal_the_loop(size: int, top: int, dtype: torch.dtype, bound: float) -> None:
    """Whole prompts, pieces, steps, ragged rows; before there are so many blocks as are read, and after."""
    chosen = {"top_blocks": top, "rope_base": BASE} if top else {}
    model = node_model(LANDMARK_ATTENTION, SIZES, dtype, block_tokens=size, **chosen)
    check_definition_and_body(
        landmark_attention, model, empty(dtype), ("key", "value"), calls(dtype, size, top=top), bound
    )


def test_blocks_that_are_not_chosen_are_not_read() -> None:
    """The last token's answer stays as it is where keys and values of blocks that no head chooses become NaN, but for their landmarks."""
    found = []
    for spoilt in (False, True):
        state, every = empty(), list(calls(size=7, top=1))
        for number, (inputs, _, _) in enumerate(every):
            if spoilt and number == len(every) - 1:
                best = {chosen_by(inputs, state, h) for h in range(LAYER.heads)}
                for b in set(range(int(state.length[0]) // 7)) - best:
                    state.key[0, :, 7 * b : 7 * b + 6] = torch.nan
                    state.value[0, :, 7 * b : 7 * b + 7] = torch.nan
            output, state = landmark_attention(inputs, state)
        found.append(output[0, 0])
    assert found[0].isfinite().all() and torch.equal(*found)


def chosen_by(inputs: Inputs, state: AttentionState, head: int) -> int:
    """The one block that the call's first token of the first sequence reads with a head."""
    x = {"query": inputs.query[0, :1].double(), "key": state.key[0].transpose(0, 1).double()}
    place, size = int(state.length[0]), inputs.block_tokens
    full = place // size
    speed = BASE ** (-torch.arange(0, LAYER.dim, 2).double() / LAYER.dim)

    def turned(y: Tensor, at: int) -> Tensor:
        both = torch.complex(*y.unflatten(0, (2, -1))) * torch.polar(torch.ones_like(speed), at * speed)
        return torch.cat((both.real, both.imag))

    query = turned(x["query"][0, head], place)
    marks = [x["key"][b * size + size - 1, head * LAYER.kv_heads // LAYER.heads] for b in range(full)]
    places = [max(b, full - 2) * size + size - 1 for b in range(full)]
    return int(torch.stack([query @ turned(mark, at) for mark, at in zip(marks, places, strict=True)]).argmax())


def test_what_does_not_fit_is_named() -> None:
    x, _, _ = next(calls())
    with pytest.raises(ShapeError, match="block_tokens=1 must be at least 2"):
        landmark_attention(replace(x, block_tokens=1), empty())
    with pytest.raises(UnsupportedError, match="block_tokens=1 must be at least 2"):
        node_model(LANDMARK_ATTENTION, SIZES, torch.float32, block_tokens=1)
