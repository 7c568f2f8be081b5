"""Terms and factors near 0 and 1 stay in the graph: onnxscript's rules would drop them, and norms would lose a small epsilon."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

from still_export.graph.lower import exact_constants, onnx_of

ort = pytest.importorskip("onnxruntime")
Operation = Callable[[Tensor, float], Tensor]
OPERATIONS: list[tuple[Operation, float]] = [
    *((op, value) for op in (operator.add, operator.sub) for value in (1e-8, 1e-9, 1e-12, 1e-30, -5e-9)),
    *((op, value) for op in (operator.mul, operator.truediv) for value in (1 + 1e-6, 1 - 8e-6)),
]


class Applied(nn.Module):
    def __init__(self, operation: Operation, value: float, left: bool) -> None:
        super().__init__()
        self.operation, self.value, self.left = operation, value, left

    def forward(self, x: Tensor) -> Tensor:
        constant = torch.tensor(self.value, dtype=x.dtype)
        return self.operation(constant, x) if self.left else self.operation(x, constant)  # type: ignore[arg-type]


def run(model: ir.Model, x: np.ndarray, folder: Path) -> np.ndarray:
    ir.save(model, folder / "model.onnx")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


@pytest.mark.parametrize("operation, value", OPERATIONS, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.parametrize("left", [False, True])
def test_no_term_is_dropped(tmp_path: Path, operation: Operation, value: float, left: bool) -> None:
    module, x = Applied(operation, value, left), torch.tensor([1e-10, 3e-9, 1.0, -2.0])
    program = torch.export.export(module, (x,))
    found = run(onnx_of(program, ["x"], ["y"], [], {}), x.numpy(), tmp_path)
    np.testing.assert_array_equal(found, module(x).numpy())


class Norm(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.epsilon).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12])
def test_a_norm_of_zeros_is_zero(tmp_path: Path, epsilon: float, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 6, dtype=dtype)
    program = torch.export.export(Norm(epsilon), (x,))
    found = run(onnx_of(program, ["x"], ["y"], [], {}), x.numpy(), tmp_path)
    assert not found.any() and np.isfinite(found).all()


def test_every_constant_of_every_rule_is_exact() -> None:
    from onnxscript.rewriter import _DEFAULT_REWRITE_RULES, _pattern_ir

    constants = [
        value
        for rule in _DEFAULT_REWRITE_RULES
        for node in rule._target_pattern
        for value in node.inputs
        if isinstance(value, _pattern_ir.Constant)
    ]
    assert constants
    before = {(value._rel_tol, value._abs_tol) for value in constants}
    assert (
        max(max(each) for each in before) > 0
    )  # if this fails, onnxscript's rules are exact and `exact_constants` is needless
    with exact_constants():
        assert {(value._rel_tol, value._abs_tol) for value in constants} == {(0.0, 0.0)}
        assert not math.isclose(1e-8, 0, rel_tol=constants[0]._rel_tol, abs_tol=constants[0]._abs_tol)
    assert {(value._rel_tol, value._abs_tol) for value in constants} == before
