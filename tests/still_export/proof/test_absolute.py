"""What no rounding explains fails: numbers that are not finite, logits of one number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.proof.absolute import (
    Findings,
    Overflow,
    constant_check,
    finite_check,
    overflow_checks,
    rounding_check,
)
from still_export.proof.cases import errors_of
from still_export.proof.judge import Report
from still_export.proof.overflow import overflow_of
from still_export.proof.package import VerifyOptions, verify
from still_export.runtime.ort import OrtModel
from still_export.runtime.sampling import NotFiniteError, Sampling
from still_export.targets.export import export
from tests.still_export.tiny import plain_model

ASKED = VerifyOptions(lengths=(1, 70), decode_steps=2)


def look(expected: dict[str, Any], actual: dict[str, Any]) -> dict[str, Findings]:
    found = Findings()
    found.see(0, {name: errors_of(x, actual[name])[0] for name, x in expected.items()}, expected, actual)
    return {"case": found}


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_the_first_layer_that_is_not_finite_is_named(number: float) -> None:
    right = {f"present_key.{n}": np.ones((1, 2, 4, 3), np.float32) for n in (10, 2)}
    right |= {"logits": np.arange(12, dtype=np.float32).reshape(1, 2, 6)}
    assert finite_check(look(right, right)).passed
    wrong = {name: x.copy() for name, x in right.items()}
    for each in wrong.values():
        each.flat[-1] = number
    check = finite_check(look(right, wrong))
    assert not check.passed and check.where.startswith("present_key.2, layer 2, case, call 1, row [0, 1, 3]")
    assert not finite_check(look(wrong, {**wrong, "logits": right["logits"]})).passed  # whichever side it is of
    scores = {"present_salient_score.0": np.array([[[np.inf, 1.0]]])}
    assert finite_check(look(scores, scores)).passed  # position 0 has an infinite score in both


def test_logits_of_one_number_fail() -> None:
    right = np.random.default_rng(0).standard_normal((1, 5, 9)).astype(np.float32)
    zero = {"logits": right * 0}
    assert constant_check(look({"logits": right}, {"logits": right})).passed
    check = constant_check(look({"logits": right}, zero))
    assert not check.passed and "5 of 5 rows" in check.what


def test_a_run_that_is_off_by_the_spread_of_its_logits_bounds_nothing() -> None:
    spread = np.ones(9)
    assert rounding_check([(0.2 * spread, spread)], "float16").passed
    assert not rounding_check([(1.1 * spread, spread)], "float16").passed
    (check,) = overflow_checks({"a": Overflow(7), "b": Overflow(2), "c": None}, {"a": None}, "float16")
    assert check.what == "this model overflows in float16 in layer 2; use bfloat16 or float32"
    assert not overflow_checks({"a": None}, {"a": None}, "float16")


def folder(where: Path, layer: int, factor: float) -> Path:
    """A Llama whose residual grows by `factor` in a layer."""
    model = plain_model("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight.mul_(factor)
        model.model.layers[layer].mlp.up_proj.weight.mul_(100)
    model.save_pretrained(where / "model")
    return where / "model"


def failures(report: Report) -> str:
    return "; ".join(map(str, [check for check in report.checks if not check.passed]))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 1])
def test_a_float16_package_that_overflows_fails_by_the_layer(layer: int, tmp_path: Path) -> None:
    model = folder(tmp_path, layer, 30000)
    asked = ExportOptions(str(model), dtype="float16", attach_untrained=True)
    assert (
        overflow_of(asked) == Overflow(layer) and overflow_of(ExportOptions(str(model), attach_untrained=True)) is None
    )
    package = export(asked, tmp_path / "package")
    report = verify(package.path, ASKED).report
    assert not report.passed and f"overflows in float16 in layer {layer}; use bfloat16 or float32" in failures(report)
    assert "every output is finite: NO, present_" in failures(report) and f", layer {layer + 1}, " in failures(report)
    runner = OrtModel(package.path)
    runner.start()
    with pytest.raises(NotFiniteError):
        next(runner.generate([1, 2, 3], 4, Sampling()))


@pytest.mark.slow
def test_a_float32_package_whose_logits_are_all_zero_fails(tmp_path: Path) -> None:
    package = export(ExportOptions(str(folder(tmp_path, 1, 1e30)), attach_untrained=True), tmp_path / "package")
    report = verify(package.path, ASKED).report
    assert not report.passed and "one logit for every token" in failures(report)
