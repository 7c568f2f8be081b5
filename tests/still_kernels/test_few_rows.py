"""Plans of products for a few rows: what a builder measures covers every smaller call, and a row is summed as it is alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from still_kernels.plan import ELEMENTS, Call
from still_kernels.registry import kernels_of

SIZES: dict[str, list[tuple[dict[str, tuple[int, ...]], tuple[str, int]]]] = {
    "DenseMatMul": [
        ({"weight": (inputs, outputs), **more}, ("input", inputs))
        for inputs, outputs in ((4096, 10240), (14336, 4096), (1536, 576), (2051, 37))
        for more in ({}, {"norm_weight": (inputs,)})
    ],
    "GatedMlp": [
        ({"norm_weight": (width,), "down": (middle, width), "gate_up": (width, 2 * middle)}, ("input", width))
        for width, middle in ((4096, 14336), (576, 1536), (72, 2112))
    ],
}
"""Shapes of the weights, and the activations with their width."""


def call_of(op: str, shapes: Mapping[str, tuple[int, ...]], tokens: tuple[str, int], rows: int, length: int) -> Call:
    """A call of `rows` rows of `length` tokens with the constants of its variant on sm_90."""
    kernels = kernels_of(op)
    attributes = {a.name: a.default for a in kernels.spec.attributes}
    call = Call.of(kernels.spec, {tokens[0]: (rows, length, tokens[1]), **shapes}, attributes, "float16", None)
    return replace(call, constants=kernels.build(kernels.variant_of(call), 90).plan_constants)


def bytes_of(op: str, call: Call) -> int:
    """Of all regions of workspace."""
    buffers: Any = kernels_of(op).plan.evaluate(call).workspace
    return sum(math.prod(buffer.shape) * ELEMENTS[buffer.element] for buffer in buffers)


@pytest.mark.parametrize(("op", "given"), [(op, i) for op, cases in SIZES.items() for i in range(len(cases))])
@pytest.mark.parametrize(("rows", "most"), [(1, 100), (8, 40), (70, 1)])
def test_what_is_measured_covers_smaller_calls(op: str, given: int, rows: int, most: int) -> None:
    """Of fewer rows and tokens; every batch is measured at one token and at the most."""
    shapes, tokens = SIZES[op][given]
    size = {
        (r, t): bytes_of(op, call_of(op, shapes, tokens, r, t)) for r in range(1, rows + 1) for t in range(1, most + 1)
    }
    measured = max(size[r, t] for r in range(1, rows + 1) for t in (1, most))
    assert max(size.values()) == measured


@pytest.mark.parametrize(("op", "given"), [(op, i) for op, cases in SIZES.items() for i in range(len(cases))])
def test_a_row_of_a_few_is_summed_as_it_is_alone(op: str, given: int) -> None:
    """The same kernels, and as many programs for the inputs of an output."""
    shapes, tokens = SIZES[op][given]
    few = [
        kernels_of(op).plan.evaluate(call_of(op, shapes, tokens, *at)).steps for at in ((1, 1), (2, 7), (8, 1), (1, 64))
    ]
    assert len({tuple((step.kernel, *step.grid[1:]) for step in steps) for steps in few}) == 1
