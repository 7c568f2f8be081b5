"""The native CPU kernel of still::LowRankMatMul, in ONNX Runtime: against float64, and calls against the calls of their tokens."""

import pytest
import torch
from torch import Tensor

from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL
from tests.still_graphs.node_model import NodeOfStates, node_model, session

SIZES = [(288, 8, 77), (64, 24, 96), (5, 3, 2), (40, 1, 33), (96, 40, 64), (2, 48, 5)]
"""Inputs, rank and outputs: whole vectors and rests of them, and ranks below and above one."""


def weights(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    inputs, rank, outputs = sizes
    inner, outer = torch.randn(inputs, rank, generator=generator), torch.randn(rank, outputs, generator=generator)
    return (inner / inputs**0.5).to(dtype), (outer / rank**0.5).to(dtype)


def tokens(batch: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, count, size, generator=torch.Generator().manual_seed(batch + count)).to(dtype)


class Node(NodeOfStates):
    """Outputs start as NaN."""

    def __init__(
        self, sizes: tuple[int, int, int], based: bool, library: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.inner, self.outer = weights(sizes, dtype)
        self.dtype, self.outputs = dtype, sizes[2]
        given = dict(zip(("I", "R", "O"), sizes, strict=True))
        model = node_model(LOW_RANK_MATMUL, given, dtype, () if based else ("base",))
        super().__init__(model, {}, False, library=library, threads=2)

    def __call__(self, input: Tensor, base: Tensor | None) -> Tensor:
        feeds = {"input": input, "inner": self.inner, "outer": self.outer} | ({} if base is None else {"base": base})
        return super().__call__(feeds, torch.empty(*input.shape[:2], self.outputs, dtype=self.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("based", [True, False], ids=["base", "alone"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_equals_both_products(
    library: str, sizes: tuple[int, int, int], based: bool, dtype: torch.dtype
) -> None:
    node = Node(sizes, based, library, dtype)
    for batch, count in ((1, 1), (3, 1), (2, 17)):
        input, base = tokens(batch, count, sizes[0], dtype), tokens(batch, count, sizes[2], dtype) if based else None
        expected = input.double() @ node.inner.double() @ node.outer.double()
        expected = expected if base is None else expected + base.double()
        error = (node(input, base).double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_a_call_gives_what_the_calls_of_its_tokens_give(library: str, sizes: tuple[int, int, int]) -> None:
    node = Node(sizes, True, library)
    input, base = tokens(1, 37, sizes[0], torch.float32), tokens(1, 37, sizes[2], torch.float32)
    whole = node(input, base)
    for parts in ([1] * 37, [2] * 18 + [1], [9, 8, 3, 17]):
        pieces = zip(input.split(parts, 1), base.split(parts, 1), strict=True)
        assert torch.equal(torch.cat([node(a, b) for a, b in pieces], 1), whole)


def test_matrices_that_do_not_fit_are_refused(library: str) -> None:
    node = Node((40, 1, 33), False, library)
    model = node_model(LOW_RANK_MATMUL, {"R": 2, "O": 33}, torch.float32, ("base",))
    node.session, node.outer = session(model, library=library), node.outer.expand(2, 33)
    node.inner = node.inner.expand(40, 2)[:1]
    with pytest.raises(Exception, match="LowRankMatMul: inner has 1 inputs; expected 40"):
        node(tokens(1, 1, 40, torch.float32), None)
