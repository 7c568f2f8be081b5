"""The native CPU kernel of still::MatMulNBits, in ONNX Runtime: against float64, and calls against the calls of their tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.still_graphs.node_model import NodeOfStates, session
from tests.still_graphs.test_matmul_nbits import model_of
from tests.still_kernels.matmul_nbits.inputs import (
    CODES_FROM_0,
    FEW,
    MANY,
    Case,
    exact,
    exact_numbers,
    tokens,
    weight,
    with_outliers,
)

CASES = {
    **FEW,
    **CODES_FROM_0,
    **{f"many, {name}": case for name, case in MANY.items()},
    "blocks of 128": Case(outputs=9, inputs=640, block_size=128, rows=((1, 1), (1, 9)), offsets=True),
    "blocks of 256": Case(8, outputs=6, inputs=512, block_size=256, rows=((1, 1), (1, 9))),
    "more tokens than are rounded at once": Case(outputs=5, inputs=96, rows=((3, 257),)),
    "several tasks": Case(outputs=1030, inputs=1056, rows=((1, 1), (1, 11))),
}


class Node(NodeOfStates):
    """The node with the case's weight; outputs start as NaN."""

    def __init__(
        self, case: Case, library: str, kept: torch.dtype = torch.float16, threads: int = 1, **sizes: int
    ) -> None:
        self.case = case
        self.weight = weight(case, torch.float16)
        held = {"scales", "offsets"}
        self.feeds: dict[str, Any] = {
            name: x.to(kept) if name in held else x
            for name, x in vars(self.weight).items()
            if isinstance(x, torch.Tensor) and name != "input"
        }
        model = model_of(case, torch.float32, kept, False, **sizes)
        super().__init__(model, {}, False, library=library, threads=threads)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        return super().__call__({"input": given, **self.feeds}, torch.empty(*given.shape[:2], self.case.outputs))

    def expected(self, given: torch.Tensor, rounded: bool = True) -> torch.Tensor:
        return exact_numbers(replace(self.weight, input=given), rounded)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", list(CASES))
def test_kernel_equals_rounded_tokens_times_the_weight(library: str, name: str) -> None:
    case = CASES[name]
    node = Node(case, library, threads=2)
    for batch, count in case.rows:
        for given in (own := tokens(case, batch, count, torch.float32), with_outliers(own)):
            assert error(node(given), node.expected(given)) < 1e-6


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    "name", ["4 bits", "4 bits from 0, offsets", "8 bits, zero points, offsets", "one block", "blocks of 256"]
)
@pytest.mark.parametrize("kept", [torch.float16, torch.float32], ids=str)
def test_a_call_gives_what_the_calls_of_its_tokens_give(library: str, name: str, kept: torch.dtype) -> None:
    case = CASES[name]
    given = with_outliers(tokens(case, 1, 69, torch.float32))  # more than are computed at once
    node = Node(case, library, kept, threads=2)
    whole = node(given)
    assert error(whole, node.expected(given)) < 1e-6
    for parts in ([1] * 69, [2] * 34 + [1], [5, 8, 3, 53]):
        assert torch.equal(torch.cat([node(part) for part in given.split(parts, 1)], 1), whole)


@pytest.mark.parametrize("block_size", [16, 96])
def test_other_blocks_are_computed_without_rounding(library: str, block_size: int) -> None:
    case = Case(block_size=block_size, offsets=True)
    node = Node(case, library)
    given = tokens(case, 2, 3, torch.float32)
    assert error(node(given), node.expected(given, rounded=False)) < 1e-6


def test_float16_activations_are_computed_without_rounding(library: str) -> None:
    case = CASES["4 bits"]
    given = replace(weight(case), input=tokens(case, 2, 3))
    runner = session(model_of(case, torch.float16), library=library)
    found = runner.run(None, {name: x.numpy() for name, x in vars(given).items() if isinstance(x, torch.Tensor)})[0]
    assert error(torch.from_numpy(found), exact(given)) < 1e-3


def test_numbers_that_are_none_stay_in_their_token(library: str) -> None:
    case = CASES["4 bits"]
    node = Node(case, library)
    given = tokens(case, 1, 4, torch.float32)
    plain = node(given)
    given[0, 1, 7], given[0, 2] = torch.nan, 0
    found = node(given)
    assert found[0, 1].isnan().all() and not found[0, 2].any()
    assert torch.equal(found[0, [0, 3]], plain[0, [0, 3]])


def test_no_token_gives_no_output(library: str) -> None:
    assert Node(CASES["4 bits"], library)(torch.empty(1, 0, 288)).shape == (1, 0, 77)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"zero_code": 16}, "zero_code=16 is no code of 4 bits"),
        ({"bits": 3}, "bits=3; the kernels have 4 and 8"),
        ({"block_size": 48 + 7}, "block_size=55 does not divide I=288 inputs"),
        ({"bits": 8}, "blocks have 36 words for I=288 inputs of 8 bits"),
        ({"block_size": 96}, "scales are 9 for I=288 inputs in blocks of 96"),
        ({"block_size": 0}, "block_size=0 is outside 1"),
    ],
    ids=str,
)
def test_attributes_that_do_not_fit_are_refused(library: str, change: Mapping[str, int], words: str) -> None:
    case = CASES["4 bits"]
    model = model_of(case, torch.float32, torch.float16)
    for attribute in model.graph.node[0].attribute:
        attribute.i = change.get(attribute.name, attribute.i)
    with pytest.raises(Exception, match=words):
        node = Node(case, library)
        node.session = session(model, library=library)
        node(tokens(case, 1, 1, torch.float32))


def test_zero_points_of_another_length_are_refused(library: str) -> None:
    case = CASES["4 bits"]
    node = Node(case, library, IZ=3)
    node.feeds["zero_points"] = torch.zeros(case.outputs, 3, dtype=torch.int32)
    with pytest.raises(Exception, match="zero_points have 3 words for 9 blocks of 4 bits"):
        node(tokens(case, 1, 1, torch.float32))
