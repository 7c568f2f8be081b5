"""What verify asks of a package follows from what the package takes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from still_export.loading.torch import TorchModel
from still_export.mixers.cache import state_table
from still_export.proof.answers import Question, ask
from still_export.proof.cases import row_errors
from still_export.proof.chains import Chain
from still_export.proof.judge import Bounds, Judged
from still_export.proof.layerwise import LayerwiseModel, Passage
from still_export.proof.prompts import ROUNDED, Ranges
from still_export.proof.sessions import Session
from still_export.proof.torch_cases import TorchCases
from still_kernels.ties import Ties
from tests.still_export.proof.test_layerwise import source_of
from tests.still_export.tiny import CHUNK, VOCAB, still_model


def manifest_of(model: Any, dtype: torch.dtype, **facts: Any) -> dict[str, Any]:
    """What a package of a model says as far as cases ask."""
    return {
        "target": "onnx",
        "model": {"all_logits": False, "vocab_size": VOCAB, "layer_types": []},
        "ops": {},
        "states": [s.to_dict() for s in state_table(model.config, dtype)],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
        **facts,
    }


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({"target": "trt", "trt": {"batch": 1}}, 1),
        ({"target": "trt", "trt": {"batch": 6}, "engines": []}, 6),
        ({"target": "trt", "trt": {"batch": 8}, "engines": [{"batch": 2}]}, 2),
        ({"target": "onnx"}, 5),
    ],
    ids=["one row", "not built", "built for fewer", "onnx"],
)
def test_rows_are_those_that_the_engine_takes(facts: dict[str, Any], batch: int) -> None:
    model = still_model("llama", torch.float32)
    manifest = manifest_of(model, torch.float32, **facts)
    reference = LayerwiseModel(manifest, source_of(model), dtype=torch.float64)
    own = LayerwiseModel(manifest, source_of(model))
    cases = TorchCases(manifest, reference, own, Ranges((1, CHUNK + 1), 4, rows=(5,)))
    cases = cases.draw(range(cases.count))
    rows = {case.name: case.feeds[0]["input_ids"].shape[0] for case in cases}
    several = {name: count for name, count in rows.items() if count > 1}
    assert set(several.values()) <= {batch, min(5, batch)} and (batch == 1) == (not several)
    assert batch == 1 or several[f"ragged batch of {batch}"] == batch
    if batch > 1:
        ragged = next(case for case in cases if case.name.startswith("ragged")).feeds[0]["new_tokens"]
        assert 0 in ragged and len(np.unique(ragged)) > 1, "lengths differ, one row is empty"


def test_short_prompts_are_not_held_to_the_rounding_of_one() -> None:
    model, half = still_model("llama", torch.float32), still_model("llama", torch.float16)
    manifest = manifest_of(model, torch.float16)
    reference, own = (LayerwiseModel(manifest, source_of(each)) for each in (model, half))
    asked = TorchCases(manifest, reference, own, Ranges((1, ROUNDED // 2 - 1, ROUNDED)))
    fed: list[tuple[int, ...]] = []
    right = reference.begin

    def begin(chains: Sequence[Chain]) -> Passage:
        fed.extend(call.tokens.shape for chain in chains for call in chain.calls)
        return right(chains)

    reference.begin = begin  # type: ignore[method-assign]
    (case,) = asked.draw([0])
    assert fed == [(1, 1), (ROUNDED - 1, 1)] and case.feeds[0]["input_ids"].shape == (1, 1)
    assert sum(call["logits"][0].size for call in case.own) == ROUNDED
    (pair,) = case.pairs(ask(Session(TorchModel(manifest, half)), Question(case.feeds), Ties()).outputs)
    errors = row_errors(*(outputs["logits"] for outputs in pair))
    np.testing.assert_allclose(errors[0], case.own[0]["logits"][0], rtol=0.6)
    assert Judged.of(case, [pair]).report("logits", Bounds([case])).passed
    fed.clear()
    asked.draw([1, 2])
    assert fed == [(1, ROUNDED // 2 - 1), (2, ROUNDED // 2 - 1), (1, ROUNDED)]


def test_a_layer_is_measured_and_forgotten_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both runs nobody holds a layer's states when the next one begins, but for those that are compared."""
    model, half = still_model("llama", torch.float32), still_model("llama", torch.float16)
    manifest = manifest_of(model, torch.float16)
    order: list[tuple[str, int]] = []
    through = Passage.through

    def watched(passage: Passage, index: int) -> None:
        assert all(name in ("present_length",) for chain in passage.outputs for call in chain for name in call)
        order.append((str(passage._layers.dtype), index))
        through(passage, index)

    monkeypatch.setattr(Passage, "through", watched)
    reference, own = (LayerwiseModel(manifest, source_of(each)) for each in (model, half))
    asked = TorchCases(manifest, reference, own, Ranges((1, CHUNK + 1), 4))
    cases = asked.draw(range(asked.count))
    layers = model.config.num_hidden_layers
    assert order == [(f"torch.{kind}", n) for n in range(layers) for kind in ("float32", "float16")]
    names = {f"present_{s.name}" for s in state_table(model.config, torch.float16)} | {"logits", "present_length"}
    for case in cases:
        assert all(call.keys() >= names for call in case.expected) and set(case.own_mean) == names
        assert all(held.keys() == names for held in case.own)


@pytest.mark.parametrize("seed", range(8))
def test_each_octave_up_to_the_capacity_is_asked(seed: int) -> None:
    manifest = manifest_of(still_model("llama", torch.float32), torch.float32)
    limit = 12 * CHUNK
    ranges = Ranges.of(manifest, seed)
    assert {1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, limit - 1, limit} <= set(ranges.lengths)
    assert (
        all(any(n <= x < 2 * n for x in ranges.lengths) for n in (1, 2, 4, 8, 16, 32, 64))
        and max(ranges.lengths) == limit
    )
    assert ranges.end == limit and ranges.rows == (2, 5) and str(seed) in ranges.asked()
    assert ranges == Ranges.of(manifest, seed) and len(ranges.not_asked(manifest)) == 1


def test_what_takes_too_long_is_said_not_to_be_asked() -> None:
    manifest = manifest_of(still_model("llama", torch.float32), torch.float32)
    manifest["capacity"]["capacity_tokens"], manifest["model"]["parameters"] = 1 << 20, 135_000_000
    ranges = Ranges.of(manifest, 0)
    assert 200 < ranges.longest < 4096 and any("1,048,576" in line for line in ranges.not_asked(manifest))
    assert Ranges.of(manifest, 0, "cuda").longest > ranges.longest > Ranges.of(manifest, 0, share=0.25).longest
    assert len({Ranges.of(manifest, seed).lengths for seed in range(8)}) > 1
    manifest["model"]["parameters"] = 10**12
    assert 1 in Ranges.of(manifest, 0).lengths
    manifest["capacity"]["bounded"] = False
    assert any("any number" in line for line in Ranges.of(manifest, 0).not_asked(manifest))
