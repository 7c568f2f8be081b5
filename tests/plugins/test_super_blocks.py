"""The native CPU kernel of still::MatMulNBits over K-quants, in ONNX Runtime, and its body: against float64 over what the gguf package
reads, and calls against the calls of their tokens."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

from still_export.models.read.super_blocks import from_tiles, tile_numbers, tile_words
from still_graphs.errors import UnsupportedError
from still_kernels.matmul_nbits.spec import MATMUL_NBITS, SUPER
from tests.plugins.test_matmul_nbits import error
from tests.still_graphs.node_model import NodeOfStates, node_model
from tests.still_kernels.matmul_nbits.inputs import rounded, with_outliers
from tests.still_kernels.matmul_nbits.super_block_cases import CASES, Case

UNIT = 32
"""Inputs that the kernel rounds with one factor."""


def model_of(case: Case, own: bool = True, **sizes: int) -> onnx.ModelProto:
    """A model of one node; `own`: with the body for ONNX Runtime."""
    absent = ("zero_points", "offsets")
    return node_model(
        MATMUL_NBITS, case.sizes | sizes, torch.float32, absent, 23, own, torch.float16, **case.attributes
    )


class Node(NodeOfStates):
    """The node with the case's weight; outputs start as NaN."""

    def __init__(self, case: Case, library: str, model: onnx.ModelProto | None = None) -> None:
        self.case = case
        words, numbers = (torch.from_numpy(x) for x in case.held())
        self.feeds = {"blocks": words, "scales": numbers}
        super().__init__(model_of(case) if model is None else model, {}, False, library=library, threads=2)

    def __call__(self, given: Tensor) -> Tensor:
        return super().__call__({"input": given, **self.feeds}, torch.empty(*given.shape[:2], self.case.outputs))


@pytest.mark.parametrize("name", list(CASES))
def test_tiles_hold_what_the_file_holds(name: str) -> None:
    case = CASES[name]
    words, numbers = case.held()
    assert torch.equal(torch.from_numpy(from_tiles(words, numbers, case.bits)), case.weight())


def test_a_large_weight_is_laid_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["Q6_K"]
    whole = case.held()
    monkeypatch.setattr("still_export.models.read.super_blocks.SLAB_ROWS", 16)
    assert np.array_equal(tile_words(case.rows(), 6), whole[0])
    assert np.array_equal(tile_numbers(case.rows(), 6), whole[1])


@pytest.mark.parametrize("own", [False, True], ids=["portable", "own"])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_K, one tile", "Q6_K, one tile"])
def test_body_multiplies_with_the_files_numbers(name: str, own: bool) -> None:
    case = CASES[name]
    given = case.tokens(2, 3)
    found = Node(case, "", model_of(case, own))(given)
    assert error(found, given.double() @ case.weight().double().T) < 1e-6


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", list(CASES))
def test_kernel_equals_rounded_tokens_times_the_files_numbers(library: str, name: str) -> None:
    """And a call gives bit for bit what the calls of its tokens give."""
    case = CASES[name]
    node = Node(case, library)
    given = with_outliers(case.tokens(1, 131))  # more than pass at once
    whole = node(given)
    assert error(whole, rounded(given.double()) @ case.weight().double().T) < 1e-6
    for parts in ([1] * 131, [2] * 65 + [1], [64, 65, 2]):
        assert torch.equal(torch.cat([node(part) for part in given.split(parts, 1)], 1), whole)
    assert torch.equal(node(given.reshape(1, 131, -1).expand(3, -1, -1).contiguous())[2:], whole)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_largest_codes_and_tokens_do_not_overflow(library: str, name: str) -> None:
    case = CASES[name]
    rows = np.full_like(case.rows(), 255)
    number = np.array([0.5], "<f2").view(np.uint8)
    raw = rows.reshape(case.outputs, -1, rows.shape[1] // (case.inputs // SUPER))
    if case.bits == 4:
        raw[..., :4] = np.tile(number, 2)
    else:
        raw[..., 192:208], raw[..., -2:] = 128, number  # the scale of largest magnitude is -128
    node = Node(case, library)
    words, numbers = tile_words(rows, case.bits), tile_numbers(rows, case.bits)
    node.feeds = {"blocks": torch.from_numpy(words), "scales": torch.from_numpy(numbers)}
    weight = torch.from_numpy(from_tiles(words, numbers, case.bits)).double()
    for sign in (1.0, -1.0):
        given = torch.full((1, 2, case.inputs), sign)
        assert error(node(given), given.double() @ weight.T) < 1e-6


def test_numbers_that_are_none_stay_in_their_token(library: str) -> None:
    case = CASES["Q4_K"]
    node = Node(case, library)
    given = case.tokens(1, 4)
    plain = node(given)
    given[0, 1, 7], given[0, 2] = torch.nan, 0
    found = node(given)
    assert found[0, 1].isnan().all() and not found[0, 2].any()
    assert torch.equal(found[0, [0, 3]], plain[0, [0, 3]])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"super_block": 128}, "super_block=128 with bits=4, block_size=32"),
        ({"block_size": 16}, "super_block=256 with bits=4, block_size=16"),
        ({"bits": 6, "block_size": 16}, "blocks have 108 words and scales are 6 for I=768 inputs of 6 bits"),
    ],
    ids=str,
)
def test_attributes_that_do_not_fit_are_refused(library: str, change: Mapping[str, int], words: str) -> None:
    case = CASES["Q4_K"]
    model = model_of(case)
    for attribute in model.graph.node[0].attribute:
        attribute.i = change.get(attribute.name, attribute.i)
    with pytest.raises(Exception, match=words):
        Node(case, library, model)(case.tokens(1, 1))


def test_sizes_without_a_body_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="107 words and 6 scales for 768 inputs and 40 outputs"):
        model_of(CASES["Q4_K"], IW=107)
