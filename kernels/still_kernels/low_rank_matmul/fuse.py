"""Fuse two products with thin matrices and the following sum: still::LowRankMatMul.

Thin matrices, of a separate LoRA pair or a low-rank gate, take almost no time to read. Their products cost two launches and two memory
latencies, and the sum a third.

requires: weights are initializers.
ensures: no two consecutive products of tokens [B, T, I] of a requested type are left, of which the first matrix has at most RANK columns,
fewer than rows, and nothing else reads the value in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from still_graphs.edits import in_half, is_weight, rank
from still_graphs.later_ir import ir
from still_graphs.ops import DOMAIN
from still_graphs.patterns import Fusion, Match, Op, Val, fusing
from still_graphs.pipelines import CPU, CUDA
from still_kernels.low_rank_matmul.spec import LOW_RANK_MATMUL

RANK = 256
"""Most columns between both products. For few rows each program computes all of them."""


def _matrix(value: ir.Value) -> bool:
    """Whether the sizes are known; an adapter chosen at run time has its own rank."""
    return is_weight(value) and rank(value) == 2 and value.shape is not None and value.shape.is_static()


X, BASE = Val(lambda value: rank(value) == 3), Val(lambda value: not is_weight(value))
INNER, OUTER = Val(_matrix), Val(_matrix)
SECOND = Op("MatMul", Op("MatMul", X, INNER), OUTER)
TOTAL = Op("Add", SECOND, BASE)


def _floats(*values: ir.Value) -> bool:
    return all(value.dtype == ir.DataType.FLOAT for value in values)


def _thin(typed: Callable[..., bool], match: Match) -> bool:
    x, inner, outer = (match.value(pattern) for pattern in (X, INNER, OUTER))
    assert inner.shape is not None
    rows, columns = inner.shape.numpy()
    return columns <= RANK and columns < rows and typed(x, inner, outer)


def _with_base(typed: Callable[..., bool], match: Match) -> bool:
    base, second = match.value(BASE), match.value(SECOND)
    return _thin(typed, match) and base is not second and base.shape is not None and base.shape == second.shape


def _replace(match: Match) -> Sequence[ir.Value]:
    inputs = [match.value(pattern) for pattern in (X, INNER, OUTER, BASE) if pattern in match]
    last = match.node(TOTAL if TOTAL in match else SECOND)
    return match.add(LOW_RANK_MATMUL.name, inputs, name=f"{last.name or last.outputs[0].name}.fused", domain=DOMAIN)


def _fusions(typed: Callable[..., bool]) -> tuple[Fusion, Fusion]:
    return Fusion((TOTAL,), _replace, partial(_with_base, typed)), Fusion((SECOND,), _replace, partial(_thin, typed))


OF_HALVES = fusing(
    "fuse_low_rank",
    "its CUDA provider launches what lies between two products node by node",
    *_fusions(in_half),
)
OF_FLOATS = fusing(
    "fuse_low_rank_floats",
    "a kernel of ours takes what is one node for one token, and gives the same for several",
    *_fusions(_floats),
)
fuse_low_rank, fuse_low_rank_floats = OF_HALVES.run, OF_FLOATS.run

PASSES = {CPU: (OF_FLOATS,), CUDA: (OF_HALVES,)}
