"""What verify asks of a package follows from what the package takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from still_export.mixers.cache import state_table
from still_export.proof.cases import row_errors
from still_export.proof.layerwise import Chain, LayerwiseModel, Passage
from still_export.proof.sessions import Session
from still_export.proof.tolerance import Bounds
from still_export.proof.torch_cases import ROUNDED, TorchCases
from still_export.runtime.torch import TorchModel
from still_kernels.ties import Ties
from tests.still_export.proof.test_layerwise import source_of
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
        "model": {"all_logits": False, "vocab_size": VOCAB, "layer_types": []},
        "ops": {},
        "states": [s.to_dict() for s in state_table(model.config, torch.float32)],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
    }
    reference = LayerwiseModel(manifest, source_of(model), dtype=torch.float64)
    own = LayerwiseModel(manifest, source_of(model))
    cases = TorchCases(manifest, reference, own, lengths=(1, CHUNK + 1), decode_steps=4)
    cases = cases.draw(range(cases.count))
    rows = {case.name: case.feeds[0]["input_ids"].shape[0] for case in cases}
    several = {name: count for name, count in rows.items() if count > 1}
    assert several == ({f"ragged batch of {batch}": batch, f"1 decode steps, {batch} rows": batch} if batch > 1 else {})
    if batch > 1:
        ragged = next(case for case in cases if case.name.startswith("ragged")).feeds[0]["new_tokens"]
        assert 0 in ragged and len(np.unique(ragged)) > 1, "lengths differ, one row is empty"


def test_short_prompts_are_not_held_to_the_rounding_of_one() -> None:
    model, half = still_model("llama", torch.float32), still_model("llama", torch.float16)
    manifest = {
        "target": "onnx",
        "model": {"all_logits": False, "vocab_size": VOCAB, "layer_types": []},
        "ops": {},
        "states": [s.to_dict() for s in state_table(model.config, torch.float16)],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
    }
    reference, own = (LayerwiseModel(manifest, source_of(each)) for each in (model, half))
    asked = TorchCases(manifest, reference, own, (1, ROUNDED // 2 - 1, ROUNDED))
    fed: list[tuple[int, ...]] = []
    right = reference.begin

    def begin(chains: Sequence[Chain]) -> Passage:
        fed.extend(call.tokens.shape for chain in chains for call in chain.calls)
        return right(chains)

    reference.begin = begin  # type: ignore[method-assign]
    (case,) = asked.draw([0])
    assert fed == [(1, 1), (ROUNDED - 1, 1)] and case.feeds[0]["input_ids"].shape == (1, 1)
    assert sum(call["logits"][0].size for call in case.own) == ROUNDED
    (pair,), _ = case.pairs(Session(TorchModel(manifest, half)), Ties())
    np.testing.assert_allclose(
        row_errors(*(outputs["logits"] for outputs in pair))[0], case.own[0]["logits"][0], rtol=0.6
    )
    assert Bounds([case]).judge(case, "logits", [pair]).share <= 1
    fed.clear()
    asked.draw([1, 2])
    assert fed == [(1, ROUNDED // 2 - 1), (2, ROUNDED // 2 - 1), (1, ROUNDED)]
