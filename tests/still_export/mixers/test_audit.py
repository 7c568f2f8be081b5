"""The audit finds what is wrong, and only that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from still_export.evaluation.audit import audit, passed, write_audit
from still_export.mixers.hybrid_attention import audit as module
from still_export.report.audit import page
from still_export.report.render import render
from tests.still_export.tiny import CHUNK, random_ids, still_model
from tests.still_export.training import byte_tokenizer


def test_a_sound_model_passes(tmp_path: Path) -> None:
    model = still_model("llama", torch.float32, mix_epsilon=1e-9)
    (result,) = results = audit(model, byte_tokenizer(), random_ids(1, 10 * CHUNK + 3)[0])
    assert result.passed and max(result.linear_mass.values()) < 1e-5
    assert result.offsets.shape == (3, CHUNK) and result.offsets.sum() == 3 * 6 * 3 * 10
    norms = result.norms["keys"]
    assert norms["after NP-Map"] == pytest.approx(norms["before the map"], rel=1e-4)
    assert norms["direction alone"] != pytest.approx(norms["before the map"], rel=1e-2)
    write_audit(results, tmp_path, "command")
    assert json.loads((tmp_path / "audit.json").read_text())["passed"] is True
    made = page(results, "model", {}, "command")
    assert [part.title for part in made.parts] == ["norms", "salient offsets"] and made.passed
    (chosen,) = made.parts[1].plots
    assert len(chosen.cells) == 3 * CHUNK and max(chosen.cells.values()) == 1
    assert "Where choices fall" in render(made)


def test_layers_with_salient_tokens_of_their_own() -> None:
    model = still_model("llama", torch.float32, salient_by_layer=(2, 5, 0))
    (result,) = audit(model, byte_tokenizer(), random_ids(1, 10 * CHUNK)[0])
    assert result.passed and "k = 0, 2, 5" in result.linear_mass
    assert result.offsets.sum(1).tolist() == [k * 6 * 10 for k in (2, 5, 0)]


def test_wrong_attention_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = still_model("llama", torch.float32)
    ids = random_ids(1, 6 * CHUNK)[0]
    softmax = module.make_trainable(model)[0].__class__._hybrid

    def scaled(self: object, *arguments: object) -> torch.Tensor:
        return softmax(self, *arguments) * 1.01  # type: ignore[arg-type]

    monkeypatch.setattr(module.TrainableAttention, "_hybrid", scaled)
    (result,) = results = audit(model, byte_tokenizer(), ids)
    assert not passed(results) and result.full_selection > 1e-3
