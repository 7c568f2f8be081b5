"""still::LocalLinearAttention, definition and function body, against its formulas in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.attention.meaning import AttentionState
from still_kernels.local_linear_attention.meaning import Inputs, local_linear_attention
from still_kernels.local_linear_attention.spec import LOCAL_LINEAR_ATTENTION
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, counts_of, pieces
from tests.still_kernels.attention.inputs import Layer
from tests.still_kernels.block_attention.inputs import SPLITS

LAYER = Layer(rows=320)
SIZES = {"H": LAYER.heads, "HK": LAYER.kv_heads, "D": LAYER.dim}
BOUND = 5e-6
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Output [D] of a query [D], what is beside it, keys and values [N, D] of one head."""


def parallax(q: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of the public implementation: O1 / d1 (1 + d2 / d1) - O2 / d1."""
    weights = (k @ q * len(q) ** -0.5).exp()
    across = weights * (k @ r)
    return weights @ v / weights.sum() * (1 + across.sum() / weights.sum()) - across @ v / weights.sum()


def local_linear(q: Tensor, ridge: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The value at `q` of the weighted line with the least squares, from its normal equations with a constant term."""
    weights = (k @ q * len(q) ** -0.5).exp()
    design = torch.cat((torch.ones(len(k), 1, dtype=k.dtype), k - q), 1)
    penalty = torch.diag(torch.cat((torch.zeros(1, dtype=k.dtype), ridge.expand(len(q)))))
    normal = design.T @ (weights[:, None] * design) + penalty
    return torch.linalg.solve(normal, design.T @ (weights[:, None] * v))[0]


def whole(form: Form, x: dict[str, Tensor], beside: str) -> Tensor:
    """Outputs [T, H, D] of one sequence."""
    group = LAYER.heads // LAYER.kv_heads
    rows = []
    for t in range(len(x["query"])):
        for h in range(LAYER.heads):
            given = x["ridge"][h] if beside == "ridge" else x["correction"][t, h]
            key, value = (x[name][: t + 1, h // group] for name in ("key", "value"))
            rows.append(form(x["query"][t, h], given, key, value))
    return torch.stack(rows).view(-1, LAYER.heads, LAYER.dim)


def calls(
    beside: str, dtype: torch.dtype = torch.float32, spread: float = 1.0, ridge: float = 1.0
) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs. Keys are spread by 1 down to 1 / `spread` in
    directions that are no channels."""
    counts = counts_of(SPLITS)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())

    def normal(heads: int) -> Tensor:
        return torch.randn(2, tokens, heads, LAYER.dim, generator=generator)

    sizes = torch.logspace(0, -float(torch.tensor(spread).log10()), LAYER.dim)
    ways = torch.linalg.qr(torch.randn(LAYER.dim, LAYER.dim, generator=generator)).Q
    x = {"query": normal(LAYER.heads), "key": normal(LAYER.kv_heads) * sizes @ ways, "value": normal(LAYER.kv_heads)}
    if beside == "correction":
        x["correction"] = 0.5 * normal(LAYER.heads)
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    given = {"ridge": ridge * torch.linspace(1, 2, LAYER.heads)} if beside == "ridge" else {}
    form = parallax if beside == "correction" else local_linear
    wide = {name: tensor.double() for name, tensor in given.items()}
    expected = [whole(form, {n: t[row].double() for n, t in x.items()} | wide, beside) for row in range(2)]
    for feeds, past, output in pieces(x, expected, counts):
        yield Inputs(**feeds, **given), past, output


def empty(dtype: torch.dtype = torch.float32) -> AttentionState:
    return AttentionState.empty(2, LAYER.kv_heads, LAYER.dim, LAYER.rows, dtype)


CASES = [
    pytest.param("correction", torch.float32, {}, BOUND, id="parallax"),
    pytest.param("correction", torch.float16, {}, 1e-3, id="parallax, half"),
    pytest.param("ridge", torch.float32, {}, BOUND, id="ridge"),
    pytest.param("ridge", torch.float32, {"spread": 100.0, "ridge": 1e-2}, BOUND, id="ridge, condition 1e4"),
    pytest.param("ridge", torch.float32, {"spread": 1000.0, "ridge": 1e-4}, BOUND, id="ridge, condition 1e6"),
    pytest.param("ridge", torch.float16, {}, 1e-3, id="ridge, half"),
]


@pytest.mark.parametrize("beside, dtype, changes, bound", CASES)
def test_definition_and_body_equal_the_formulas(
    beside: str, dtype: torch.dtype, changes: dict[str, float], bound: float
) -> None:
    absent = ("ridge",) if beside == "correction" else ("correction",)
    model = node_model(LOCAL_LINEAR_ATTENTION, SIZES, dtype, absent)
    given = calls(beside, dtype, **changes)
    check_definition_and_body(local_linear_attention, model, empty(dtype), ("key", "value"), given, bound)


def test_what_is_not_solved_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is answered by a solution that is not near."""
    inputs = next(calls("ridge"))[0]
    assert not local_linear_attention(inputs, empty())[0].isnan().any()
    monkeypatch.setattr("still_kernels.local_linear_attention.meaning.MOST", 2)
    assert local_linear_attention(inputs, empty())[0].isnan().any()


def test_what_does_not_fit_is_named() -> None:
    x, y = (next(calls(beside))[0] for beside in ("correction", "ridge"))
    assert y.ridge is not None and x.correction is not None
    wrong = {
        r"ridge: -1 must be above 0": replace(y, ridge=-torch.ones(LAYER.heads)),
        r"ridge: 0 must be above 0": replace(y, ridge=0 * y.ridge),
        r"ridge: expected \[6\], got \[2\]": replace(y, ridge=y.ridge[:2]),
        r"it has correction and ridge; it takes one": replace(x, ridge=y.ridge),
        r"it has neither correction nor ridge": replace(x, correction=None),
        r"correction: expected \[2, 70, 6, 10\]": replace(x, correction=x.correction[:, 1:]),
    }
    for message, inputs in wrong.items():
        with pytest.raises(ShapeError, match=message):
            local_linear_attention(inputs, empty())
    with pytest.raises(UnsupportedError, match="neither correction nor ridge; it takes one"):
        node_model(LOCAL_LINEAR_ATTENTION, SIZES, torch.float32, ("ridge", "correction"))
