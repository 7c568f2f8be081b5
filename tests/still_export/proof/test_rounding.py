"""A row beyond its bounds is right where PyTorch, rounded another way, has that very row as far off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from still_export.mixers.cache import state_table
from still_export.proof.cases import Case, row_errors
from still_export.proof.layerwise import LayerwiseModel
from still_export.proof.rounding import CALLS, SAME, explained, moved
from still_export.proof.tolerance import Bounds
from still_export.proof.torch_cases import TorchCases
from still_export.proof.verify import Judged, Verifier
from tests.still_export.proof.test_layerwise import source_of
from tests.still_export.tiny import CHUNK, VOCAB, still_model

STATE, OTHER = "present_key.0", "present_value.0"
SHAPE = (1, 2, 100, 8)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_move_by_their_rounding_at_most(kind: torch.dtype) -> None:
    weight = torch.randn(64, 33).to(kind)
    generator = torch.Generator().manual_seed(1)
    once, again = (moved(weight, generator) for _ in range(2))
    assert once.dtype == kind and not torch.equal(once, again)
    steps = (once.view(torch.int16).int() - weight.view(torch.int16).int()).abs()
    assert int(steps.max()) == 1 and 0.2 < float(steps.float().mean()) < 0.6


def errors(**rows: float) -> np.ndarray:
    """Of rows (head, slot) named h_s the errors, of all others 1e-3."""
    found = np.full((2, *SHAPE[:-1]), 1e-3)
    for name, error in rows.items():
        head, slot = map(int, name[1:].split("_"))
        found[:, 0, head, slot] = error
    return found


@pytest.mark.parametrize(
    "wrong, asked",
    [
        ({}, 0),
        ({"h1_7": 0.09}, 3),  # the third rounding has it as far off
        ({"h1_7": 0.11}, CALLS),  # none has it this far
        ({"h1_8": 0.09}, CALLS),  # nor another row
        ({"h1_7": 0.09, "h0_3": 0.2}, CALLS),  # each is looked at alone
        ({f"h0_{slot}": 0.09 for slot in range(3)}, 0),  # a fault, not rounding
    ],
    ids=str,
)
def test_a_row_is_held_to_itself_in_other_roundings(wrong: dict[str, float], asked: int) -> None:
    found, calls = errors(**wrong), []

    def rounded(number: int, seed: int) -> Case:
        calls.append((number, seed))
        return Case("prompt", [], [], own=[{STATE: errors(h1_7=0.05 if seed == 2 else 1e-3), OTHER: errors()}])

    assert SAME == 2
    case = Case("prompt", [], [], own=[{STATE: errors(), OTHER: errors()}])
    case.own_mean = {STATE: 1e-3, OTHER: 1e-3}
    each = Judged(case, [{STATE: found, OTHER: errors()}], {n: np.ones(5) for n in (STATE, OTHER)}, np.ones(1, bool))
    verifier: Any = Verifier.__new__(Verifier)
    verifier.dtype, verifier.cases = "float16", SimpleNamespace(rounded=rounded)
    bounds = Bounds([case])
    checks = verifier._explain([(4, each)], bounds)
    assert calls == [(4, seed) for seed in range(asked)]
    right = {"h1_7"} if asked and wrong.get("h1_7") == 0.09 else set()
    assert len(checks) == bool(right) and all("1 of present_key.0, prompt" in check.name for check in checks)
    assert each.report(STATE, bounds).passed == (wrong.keys() == right) and each.report(OTHER, bounds).passed


def test_float32_and_answers_from_a_file_have_no_other_rounding() -> None:
    verifier: Any = Verifier.__new__(Verifier)
    for dtype, cases in (("float32", SimpleNamespace(rounded=None)), ("float16", SimpleNamespace())):
        verifier.dtype, verifier.cases = dtype, cases
        assert verifier._explain([(0, None)], None) == []


def test_pytorch_answers_in_another_rounding_and_then_in_its_own() -> None:
    model, half = still_model("llama", torch.float32), still_model("llama", torch.float16)
    manifest = {
        "target": "onnx",
        "model": {"all_logits": False, "vocab_size": VOCAB, "layer_types": []},
        "ops": {},
        "states": [s.to_dict() for s in state_table(model.config, torch.float16)],
        "capacity": {"capacity_tokens": 12 * CHUNK, "bounded": True},
    }
    reference, own = (LayerwiseModel(manifest, source_of(each)) for each in (model, half))
    cases = TorchCases(manifest, reference, own, (CHUNK + 1,), 4)
    (case,) = cases.draw([0])
    first, second, same = (cases.rounded(0, seed) for seed in (0, 1, 0))
    for other in (first, second, same):
        assert np.array_equal(other.feeds[0]["input_ids"], case.feeds[0]["input_ids"])
        assert np.array_equal(other.expected[0]["logits"], case.expected[0]["logits"])
    errors = [each.own[0]["logits"] for each in (case, first, second, same)]
    assert np.array_equal(errors[1], errors[3]) and not np.array_equal(errors[1], errors[2])
    assert 0.5 < np.median(errors[1][0]) / np.median(errors[0][0]) < 8
    assert own.rounding is None and cases.rounded(0, 0) is not case
    target = row_errors(case.expected[0]["logits"], case.expected[0]["logits"] * (1 + 1e-3))
    assert explained([{"logits": target}], {"logits": [target > np.inf]}, lambda seed: case)["logits"][0].sum() == 0
