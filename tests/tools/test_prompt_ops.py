"""What tools.benchmarks.prompt_ops says of a run: shares of the processor's time, layers alone, products of attention at their rate."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import helper

from tools.benchmarks import prompt_ops
from tools.benchmarks.common import Findings


def event(op: str, name: str, dur: int, given: list[tuple[int, ...]], made: tuple[int, ...]) -> dict[str, Any]:
    sides = {
        "input_type_shape": [{"float": list(shape)} for shape in given],
        "output_type_shape": [{"float": list(made)}],
    }
    return {"name": f"{name}_kernel_time", "dur": dur, "args": {"op_name": op, **sides}}


def test_a_run_is_divided_by_the_profile_and_compared_with_its_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of 64 tokens: 3 of 4 parts of the clock are the layer's, which alone takes 0.5 s a call: 2.0 / 1.0; attention's products
    count once for the whole prompt."""
    layer = event("MatMul", "layer", 300, [(1, 64, 32)], (1, 64, 48))
    attention = event("Attention", "attention", 100, [(1, 64, 4, 16), (1, 64, 2, 16)], (1, 64, 4, 16))
    monkeypatch.setattr(prompt_ops, "run", lambda package, length: (2.0, [layer, attention] * 2))
    alone = SimpleNamespace(seconds=lambda event: 0.5, nodes={"attention": None})
    monkeypatch.setattr(prompt_ops, "Alone", lambda package, runs: alone)
    findings = Findings()
    prompt_ops.measure(Path("p"), argparse.Namespace(lengths="128", runs=1, repeat=1, ops=5), findings)
    (row,) = findings.rows
    assert row["ops"] == {"MatMul": 1.5, "Attention": 0.5} and row["alone"] == {"MatMul": 1.0} and row["ratio"] == 2.0
    rate = 2 * 2.0 * 64 * 32 * 48 / 1.0
    assert row["products"] == pytest.approx(2.0 * 4 * 16 * 128 * 129 / rate, abs=1e-3)
    assert row["ratio_products"] == pytest.approx(2.0 / (1.0 + row["products"]), abs=1e-3)


def test_products_of_hybrid_attention_are_the_least_of_its_layer() -> None:
    """By hand for four chunks of 64, two of which see slots: window, slots, projections and state."""
    node = helper.make_node("HybridAttention", ["q"], ["o"], chunk_size=64, salient_per_chunk=16)
    given = event("HybridAttention", "a", 1, [(1, 64, 9, 64), (1, 64, 3, 64)], (1, 64, 9, 64))
    slots = 16 * (1 * 2 / 2) / 4  # a query's mean
    by_hand = 256 * 9 * (4 * 64 * (1.5 * 64 - 0.5 + slots) + 4 * 64 * 64 + 4 * 128 * 64)
    assert prompt_ops.products(node, given, 256) == by_hand
