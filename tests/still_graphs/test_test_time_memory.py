"""still::TestTimeMemory, definition and function body, against autograd and singular values in float64."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from still_graphs.errors import ShapeError, UnsupportedError
from still_kernels.test_time_memory.meaning import Inputs, MemoryState, read_and_learn
from still_kernels.test_time_memory.spec import TEST_TIME_MEMORY
from tests.still_graphs.node_model import node_model
from tests.still_graphs.pieces import check_definition_and_body, check_rows_without_tokens, counts_of, pieces
from tests.still_kernels.linear_attention.inputs import SPLITS

SIZES = {"H": 3, "G": 2, "D": 10, "M": 14}
CHUNK, BOUND = 32, 2e-5


def network(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    before = x @ gate.T
    return (before / (1 + (-before).exp()) * (x @ up.T)) @ down


def polar(x: Tensor) -> Tensor:
    """The quintic polynomials of LaCT's code on singular values."""
    left, values, right = torch.linalg.svd(x / (x.norm() + 1e-7), full_matrices=False)
    for a, b, c in (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ):
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right


def looped(x: Mapping[str, Tensor], initial: Tensor, chunk: int, muon: bool = True) -> Tensor:
    """Outputs [T, H, G, D] of one sequence, in float64."""
    outputs = torch.zeros_like(x["query"])
    for head in range(len(initial)):
        weights = list(initial[head].clone().unbind(0))
        momentum = [torch.zeros_like(w) for w in weights]
        for start in range(0, len(outputs), chunk):
            part = slice(start, start + chunk)
            key, value = x["key"][part, head], x["value"][part, head]
            old = list(weights)
            if len(key) == chunk:
                leaves = [w.clone().requires_grad_() for w in weights]
                fit = (value * network(key, *leaves)).sum(-1)
                for i, leaf in enumerate(leaves):
                    rates = x["rate"][part, head, i]
                    (gradient,) = torch.autograd.grad((rates * fit).sum(), leaf, retain_graph=True)
                    momentum[i] = gradient + x["momentum"][part, head].mean() * momentum[i]
                    moved = weights[i] + (polar(momentum[i]) if muon else momentum[i])
                    axis = 0 if i == 2 else 1
                    size = initial[head, i].norm(dim=axis, keepdim=True)
                    weights[i] = moved / (moved.norm(dim=axis, keepdim=True) + 1e-5) * size
            for query in range(outputs.shape[2]):
                outputs[part, head, query] = network(x["query"][part, head, query], *old)
    return outputs


def calls(dtype: torch.dtype = torch.float32, muon: bool = True) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
    """Calls of two sequences, lengths before them, outputs."""
    counts = counts_of(SPLITS)
    generator, tokens = torch.Generator().manual_seed(0), int(counts.sum(0).max())

    def drawn(*shape: int) -> Tensor:
        return torch.randn(2, tokens, *shape, generator=generator, dtype=torch.float64)

    heads, group, dim, hidden = (SIZES[n] for n in "HGDM")
    x = {"query": drawn(heads, group, dim), "key": drawn(heads, dim), "value": drawn(heads, dim)}
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    x |= {"rate": 0.05 * drawn(heads, 3).exp().float(), "momentum": drawn(heads).sigmoid().float()}
    initial = torch.randn(heads, 3, hidden, dim, generator=generator) * dim**-0.5
    made = [looped({n: t[row].double() for n, t in x.items()}, initial.double(), CHUNK, muon) for row in range(2)]
    settings: dict[str, Any] = {"chunk_size": CHUNK, "memory_update": "muon" if muon else "gradient"}
    for feeds, past, output in pieces(x, made, counts):
        yield Inputs(**feeds, initial=initial, past_length=past, **settings), past, output


def empty() -> MemoryState:
    heads, _, dim, hidden = SIZES.values()
    return MemoryState(*(torch.zeros(2, heads, 3, hidden, dim) for _ in range(3)), torch.zeros(2, heads))


@pytest.mark.parametrize("dtype, bound", [(torch.float32, BOUND), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("muon", [True, False])
def test_definition_and_body_equal_the_chunks(dtype: torch.dtype, bound: float, muon: bool) -> None:
    model = node_model(TEST_TIME_MEMORY, SIZES, dtype, chunk_size=CHUNK, memory_update="muon" if muon else "gradient")
    check_definition_and_body(
        read_and_learn, model, empty(), MemoryState._fields, calls(dtype, muon), bound, of_states=bound
    )


def test_a_sequence_without_tokens_keeps_its_state() -> None:
    check_rows_without_tokens(read_and_learn, empty(), calls())


def test_what_does_not_fit_is_named() -> None:
    inputs, *_ = next(calls())
    with pytest.raises(ShapeError, match=r"memory_step: expected \[2, 3, 3, 14, 10\], got \[2, 3, 3, 14, 9\]"):
        read_and_learn(inputs, empty()._replace(memory_step=torch.zeros(2, 3, 3, 14, 9)))
    with pytest.raises(ShapeError, match="memory_update='adam' is unknown; known: gradient, muon"):
        read_and_learn(replace(inputs, memory_update="adam"), empty())
    with pytest.raises(UnsupportedError, match="chunk_size=0"):
        node_model(TEST_TIME_MEMORY, SIZES, torch.float32, chunk_size=0)
