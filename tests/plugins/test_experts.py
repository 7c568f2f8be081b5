"""The native CPU kernels of still::Experts and still::ExpertsNBits, in ONNX Runtime: against float64 and the bodies, and calls against
the calls of their tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from still_kernels.experts.meaning import Inputs
from still_kernels.experts.spec import EXPERTS
from still_kernels.experts_nbits.meaning import Inputs as NBitsInputs
from still_kernels.experts_nbits.spec import EXPERTS_NBITS
from tests.still_graphs.node_model import NodeOfStates, node_model
from tests.still_kernels.experts import inputs as experts_cases
from tests.still_kernels.experts.inputs import as_dense, draw, exact, experts_inputs, nbits_inputs
from tests.still_kernels.matmul_nbits.inputs import rounded as rounded_tokens
from tests.still_kernels.matmul_nbits.inputs import with_outliers

E = experts_cases.EXPERTS
ACTIVATIONS = ["swiglu", "relu2"]
CALLS = [(1, 1), (2, 3), (1, 70)]
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3}
AT_ONCE = 1366
"""Tokens of three experts each that are more pairs than are computed at once."""


class Node(NodeOfStates):
    """The node of a call's kind; outputs start as NaN."""

    def __init__(self, given: Inputs | NBitsInputs, library: str) -> None:
        low_bit, sizes = isinstance(given, NBitsInputs), {"E": E, "K": given.expert.shape[2]}
        fields = {name: x for name, x in vars(given).items() if isinstance(x, Tensor)}
        sizes |= {"I": given.input.shape[2], "R": given.gate_up.shape[1]}
        if low_bit:
            for symbol, name in (("I", "gate_up"), ("M", "down")):
                for end, part in (("W", ""), ("S", "_scales"), ("Z", "_zero_points")):
                    sizes[symbol + end] = fields.get(name + part, torch.empty(1)).shape[-1]
        else:
            sizes["M"] = given.down.shape[2]
        set_ = {"activation": given.activation}
        if isinstance(given, NBitsInputs):
            set_ |= {"bits": given.bits, "block_size": given.block_size}
        spec = EXPERTS_NBITS if low_bit else EXPERTS
        absent = tuple(n for n in spec.input_names() if n not in fields)
        model = node_model(spec, sizes, given.input.dtype, absent, **set_)
        for x in model.graph.input:
            for place, dim in enumerate(x.type.tensor_type.shape.dim):
                dim.dim_param = f"{x.name}{place}"  # sizes are the kernel's to check
        super().__init__(model, {}, False, library=library, threads=2)

    def __call__(self, given: Inputs | NBitsInputs) -> Tensor:
        return super().__call__({name: x for name, x in vars(given).items() if isinstance(x, Tensor)}, given.input)


def with_tokens(given: Any, input: Tensor, start: int, count: int) -> Any:
    """The call of some of the tokens."""
    some = slice(start, start + count)
    return replace(given, input=input[:, some], expert=given.expert[:, some], weight=given.weight[:, some])


def far(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def errors_of_tokens(found: Tensor, expected: Tensor) -> Tensor:
    """[tokens]."""
    return ((found.double() - expected).norm(dim=2) / expected.norm(dim=2)).flatten()


def rounded(given: NBitsInputs) -> Tensor:
    """What the op gives where all that its matrices read is rounded as MatMulNBits rounds tokens, float64."""
    dense = as_dense(given)
    output = torch.zeros(given.input.shape, dtype=torch.float64)
    tokens = rounded_tokens(given.input.double())
    for row, token, place in torch.cartesian_prod(*(torch.arange(n) for n in given.expert.shape)).tolist():
        number = int(given.expert[row, token, place])
        inner = dense.gate_up[number].double() @ tokens[row, token]
        if given.activation == "swiglu":
            inner = torch.nn.functional.silu(inner[::2]) * inner[1::2]
        else:
            inner = inner.clamp_min(0) ** 2
        part = dense.down[number].double() @ rounded_tokens(inner)
        output[row, token] += given.weight[row, token, place].double() * part
    return output


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernel_equals_the_sum_token_by_token(library: str, activation: str, dtype: torch.dtype) -> None:
    node = Node(experts_inputs(1, 1, activation=activation, dtype=dtype), library)
    for batch, tokens in CALLS:
        given = experts_inputs(batch, tokens, activation=activation, dtype=dtype)
        assert far(node(given), exact(given)) < LIMITS[dtype], (batch, tokens)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bits, zero_points", [(4, True), (4, False), (8, True), (8, False)])
def test_kernel_of_few_bits_rounds_what_it_reads(library: str, bits: int, zero_points: bool, activation: str) -> None:
    given = nbits_inputs(1, 1, bits, zero_points, torch.float32, 32, activation=activation)
    node = Node(given, library)
    for batch, tokens in CALLS:
        given = nbits_inputs(batch, tokens, bits, zero_points, torch.float32, 32, activation=activation)
        errors = errors_of_tokens(node(given), rounded(given))
        # Where an inner number lies half way between codes, a token may have the other one.
        assert errors.median() < 1e-6 and errors.max() < 5e-3, (batch, tokens, errors)


@pytest.mark.parametrize("dtype, block", [(torch.float32, 16), (torch.float32, 48), (torch.float16, 32)], ids=str)
@pytest.mark.parametrize("bits, zero_points", [(4, True), (8, False)])
def test_other_forms_are_computed_without_rounding(
    library: str, bits: int, zero_points: bool, dtype: torch.dtype, block: int
) -> None:
    node = Node(nbits_inputs(1, 1, bits, zero_points, dtype, block), library)
    for batch, tokens in CALLS:
        given = nbits_inputs(batch, tokens, bits, zero_points, dtype, block)
        assert far(node(given), exact(as_dense(given))) < LIMITS[dtype], (batch, tokens)


def wide(bits: int, activation: str) -> Any:
    """A call of 29 tokens over sizes that fill no vector, or no step."""
    if bits:
        given = nbits_inputs(1, 29, bits, True, torch.float32, 32, activation=activation)
        return replace(given, input=with_outliers(draw(*given.input.shape, seed=9)))
    rows = 45 * (2 if activation == "swiglu" else 1)
    return replace(
        experts_inputs(1, 29, activation=activation),
        input=draw(1, 29, 77, seed=6),
        gate_up=draw(E, rows, 77, seed=7, scale=0.2),
        down=draw(E, 77, 45, seed=8, scale=0.2),
    )


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_call_gives_what_the_calls_of_its_tokens_give(library: str, activation: str, bits: int) -> None:
    given = wide(bits, activation)
    node = Node(given, library)
    whole = node(given)
    assert errors_of_tokens(whole, rounded(given) if bits else exact(given)).median() < 1e-6
    for parts in ([1] * 29, [2] * 14 + [1], [5, 8, 3, 13]):
        starts = [sum(parts[:i]) for i in range(len(parts))]
        pieces = [node(with_tokens(given, given.input, *piece)) for piece in zip(starts, parts, strict=True)]
        assert torch.equal(torch.cat(pieces, 1), whole)


def test_more_tokens_than_are_computed_at_once(library: str) -> None:
    given = experts_inputs(1, AT_ONCE)
    assert far(Node(given, library)(given), exact(given)) < LIMITS[torch.float32]


def test_all_tokens_may_go_to_one_expert(library: str) -> None:
    given = experts_inputs(1, 37, k=1)
    given = replace(given, expert=torch.full_like(given.expert, E - 1))
    assert far(Node(given, library)(given), exact(given)) < LIMITS[torch.float32]


@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numbers_that_are_none_stay_in_their_token(library: str, activation: str, bits: int) -> None:
    given = wide(bits, activation)
    node = Node(given, library)
    plain, input = node(given), given.input.clone()
    input[0, 1, 7] = torch.nan
    found = node(with_tokens(given, input, 0, 29))
    assert found[0, 1].isnan().all()
    assert torch.equal(found[0, [0, *range(2, 29)]], plain[0, [0, *range(2, 29)]])


def test_no_token_gives_no_output(library: str) -> None:
    given = experts_inputs(1, 1)
    empty = with_tokens(given, given.input, 0, 0)
    assert Node(given, library)(empty).shape == (1, 0, experts_cases.CHANNELS)


@pytest.mark.parametrize("expert", [-1, E])
def test_an_expert_that_there_is_not_is_refused(library: str, expert: int) -> None:
    given = experts_inputs(1, 2)
    given.expert[0, 1, 2] = expert
    with pytest.raises(Exception, match=f"expert {expert} is chosen; there are {E}, counted from 0"):
        Node(given, library)(given)


def test_sizes_that_do_not_go_together_are_refused(library: str) -> None:
    given = experts_inputs(1, 2)
    node = Node(given, library)
    with pytest.raises(Exception, match=r"down: expected \[E=12, I=20, M\], got \[1, 20, 14\]"):
        node(replace(given, down=given.down[:1]))
    with pytest.raises(Exception, match="1"):
        node(replace(given, gate_up=given.gate_up[:1]))
    with pytest.raises(Exception, match="gate_up has 26 rows for M=14 channels; expected 28"):
        node(replace(given, gate_up=given.gate_up[:, :26]))
    low_bit = nbits_inputs(1, 2, 4, True, torch.float32, 32)
    node = Node(low_bit, library)
    with pytest.raises(Exception, match="down_zero_points have 2 words for 2 blocks of 4 bits"):
        node(replace(low_bit, down_zero_points=low_bit.down_zero_points.repeat(1, 1, 2)))
