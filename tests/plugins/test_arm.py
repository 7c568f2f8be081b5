"""The native kernels' products of whole numbers on 64-bit ARM, under an emulator: plain NEON, dot products, products of matrices; against
float64, and calls against the calls of their tokens."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from still_export.models.read.super_blocks import from_tiles
from tests.plugins.instructions import (
    ARM,
    Call,
    Machine,
    Products,
    counted_calls,
    demand,
    experts_call,
    matmul_call,
    super_block_call,
)
from tests.plugins.test_experts import errors_of_tokens, rounded, with_tokens
from tests.plugins.test_matmul_nbits import CASES, error
from tests.still_kernels.experts.inputs import nbits_inputs
from tests.still_kernels.matmul_nbits.inputs import exact_numbers, tokens, weight, with_outliers
from tests.still_kernels.matmul_nbits.inputs import rounded as rounded_tokens
from tests.still_kernels.matmul_nbits.super_block_cases import CASES as SUPER_BLOCKS

pytestmark = [pytest.mark.slow, pytest.mark.long]
PARTS = (1, 2, 5, 61)
"""Of a call's tokens, which are more than are computed at once."""


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Products:
    demand("aarch64")
    return Products("aarch64", tmp_path_factory.mktemp("products"))


@pytest.mark.parametrize("machine", ARM, ids=str)
def test_instruction_sets_are_those_of_the_processor(products: Products, machine: Machine) -> None:
    assert products.sets(machine) == machine.sets


def demand_parts(products: Products, machine: Machine, call: Callable[[Tensor], Call], given: Tensor) -> Tensor:
    """What all tokens give, which is bit for bit what PARTS of them give."""
    whole = products.output(call(given), machine)
    assert torch.equal(torch.cat([products.output(call(part), machine) for part in given.split(PARTS, 1)], 1), whole)
    return whole


@pytest.mark.parametrize("machine", ARM, ids=str)
@pytest.mark.parametrize("kept", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("m")])
def test_blocks(products: Products, name: str, kept: torch.dtype, machine: Machine) -> None:
    case = CASES[name]
    given = with_outliers(tokens(case, 1, sum(PARTS), torch.float32))
    held = replace(weight(case, kept), input=given)
    found = demand_parts(products, machine, lambda part: matmul_call(held, part), given)
    assert error(found, exact_numbers(held)) < 1e-6


@pytest.mark.parametrize("machine", ARM, ids=str)
@pytest.mark.parametrize("name", list(SUPER_BLOCKS))
def test_super_blocks(products: Products, name: str, machine: Machine) -> None:
    case = SUPER_BLOCKS[name]
    given = with_outliers(case.tokens(1, sum(PARTS)))
    found = demand_parts(products, machine, lambda part: super_block_call(case, part), given)
    assert error(found, rounded_tokens(given.double()) @ case.weight().double().T) < 1e-6


@pytest.mark.parametrize("bits, sign", [(4, 1.0), (4, -1.0), (8, 1.0), (8, -1.0)])
@pytest.mark.parametrize("machine", ARM, ids=str)
def test_largest_codes_and_tokens_do_not_overflow(products: Products, machine: Machine, bits: int, sign: float) -> None:
    case = CASES["4 bits, no zero points" if bits == 4 else "8 bits"]
    for word in (-1, 0):
        held = replace(weight(case), input=torch.full((1, 2, case.inputs), sign))
        held = replace(held, blocks=torch.full_like(held.blocks, word))
        assert error(products.output(matmul_call(held, held.input), machine), exact_numbers(held)) < 1e-6


@pytest.mark.parametrize("machine", ARM, ids=str)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_largest_codes_of_super_blocks_do_not_overflow(products: Products, name: str, machine: Machine) -> None:
    case = SUPER_BLOCKS[name]
    words, numbers = case.held()
    words[:] = -1
    weights = torch.from_numpy(from_tiles(words, numbers, case.bits)).double()
    for sign in (1.0, -1.0):
        given = torch.full((1, 2, case.inputs), sign)
        call = super_block_call(case, given)
        call.tensors[1] = torch.from_numpy(words)
        assert error(products.output(call, machine), given.double() @ weights.T) < 1e-6


@pytest.mark.parametrize("machine", ARM, ids=str)
@pytest.mark.parametrize("bits, zero_points", [(4, True), (4, False), (8, True), (8, False)])
def test_experts(products: Products, bits: int, zero_points: bool, machine: Machine) -> None:
    given = nbits_inputs(1, 29, bits, zero_points, torch.float32, 32)
    whole = products.output(experts_call(given), machine)
    errors = errors_of_tokens(whole, rounded(given))
    # Where an inner number lies half way between codes, a token may have the other one.
    assert errors.median() < 1e-6 and errors.max() < 5e-3
    pieces = [
        products.output(experts_call(with_tokens(given, given.input, *piece)), machine) for piece in ((0, 1), (1, 28))
    ]
    assert torch.equal(torch.cat(pieces, 1), whole)


def test_instruction_sets_give_the_same_bits_in_fewer_instructions(products: Products) -> None:
    machine = ARM[-1]
    for name, (*_, call) in counted_calls().items():
        sets = range(len(machine.sets))
        found = [products.output(call, machine, index) for index in sets]
        assert all(torch.equal(one, found[0]) for one in found), name
        counts = [products.instructions(call, machine, index) for index in sets]
        assert counts == sorted(counts), (name, counts)
