"""Limits of options stand beside the option: a value outside of them is refused by the flag that was typed."""

from __future__ import annotations

from typing import Any

import pytest

from still_export.errors import ConfigError
from still_export.evaluation.evaluate import EvaluationOptions
from still_export.linearization.recipe import Recipe, read_recipe
from still_export.mixers.config import StillConfig
from still_export.proof.package import VerifyOptions


@pytest.mark.parametrize(
    ("record", "given", "message"),
    [
        (Recipe, {"natural": 1.5}, r"--natural 1.5: it must be at most 1\."),
        (Recipe, {"window_factor_scale": 0.0}, r"--window-factor-scale 0.0: it must be more than 0\."),
        (Recipe, {"micro_batch_size": 0}, r"--micro-batch-size 0: it must be at least 1\."),
        (Recipe, {"micro_batch_size": 9}, r"--micro-batch-size 9 is more than --batch-size 8\."),
        (Recipe, {"retrieval": 0.6, "chat": 0.5}, r"--retrieval 0.6 --chat 0.5: together they must be at most 1"),
        (EvaluationOptions, {"samples": 0}, r"--samples 0: it must be at least 1\."),
        (EvaluationOptions, {"device": "tpu"}, r"--device tpu is unknown; known: auto, cpu, cuda\."),
        (VerifyOptions, {"decode_steps": 0}, r"--decode-steps 0: it must be at least 1\."),
        (VerifyOptions, {"reference_device": "tpu"}, r"--reference-device tpu is unknown; known: cpu, cuda\."),
    ],
)
def test_a_value_outside_of_its_limits_is_refused(record: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(**given)


def test_names_in_files_are_refused_alike(tmp_path: Any) -> None:
    """By the one function for unknown names: they list the known ones and the nearest."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text("chunk_sise: 64\n")
    with pytest.raises(ConfigError, match=r"'chunk_sise' is unknown; known: base, .* Did you mean 'chunk_size'\?"):
        read_recipe(recipe, {})
    with pytest.raises(ConfigError, match=r"'chunk_sise' is unknown; known: .* Did you mean 'chunk_size'\?"):
        StillConfig.from_dict({"chunk_sise": 64})
