"""What verify asks of a package follows from what the package takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from still_export.mixers.cache import state_table
from still_export.proof.torch_cases import TorchCases
from tests.still_export.tiny import CHUNK, VOCAB, still_model


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({"target": "trt", "trt": {"batch": 1}}, 1),
        ({"target": "trt", "trt": {"batch": 6}, "engines": []}, 6),
        ({"target": "trt", "trt": {"batch": 8}, "engines": [{"batch": 2}]}, 2),
        ({"target": "onnx"}, 4),
    ],
    ids=["one row", "not built", "built for fewer", "onnx"],
)
def test_rows_are_those_that_the_engine_takes(facts: dict[str, Any], batch: int) -> None:
    model = still_model("llama", torch.float32)
    manifest = {
        **facts,
        "model": {"all_logits": False, "vocab_size": VOCAB},
        "ops": {},
        "states": [s.to_dict() for s in state_table(model.config, torch.float32)],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
    }
    asked = TorchCases(manifest, model, lengths=(1, CHUNK + 1), decode_steps=4)
    cases = [make() for make in asked]
    assert len(cases) == asked.count
    rows = {case.name: case.feeds[0]["input_ids"].shape[0] for case in cases}
    several = {name: count for name, count in rows.items() if count > 1}
    assert several == ({f"ragged batch of {batch}": batch, f"1 decode steps, {batch} rows": batch} if batch > 1 else {})
    if batch > 1:
        ragged = next(case for case in cases if case.name.startswith("ragged")).feeds[0]["new_tokens"]
        assert 0 in ragged and len(np.unique(ragged)) > 1, "lengths differ, one row is empty"
