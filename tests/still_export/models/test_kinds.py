"""Kinds of checkpoints: each is recognised by what its files hold, and another one is a record in the table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.errors import NotLinearizedError
from still_export.mixers.config import LayersConfig, StillConfig
from still_export.models import kinds
from still_export.models.kinds import KINDS, Checkpoint, Kind, UserChoice, kind_of
from still_export.models.load import load_model, open_source
from tests.still_export.tiny import plain_model, random_ids, still_model

RELEASED = "model.layers.0.self_attn.feature_map_q.mlp.linears.0.weight"
LOLCATS = "model.layers.0.self_attn.feature_map_q.mlp.layer"


@pytest.mark.parametrize(
    ("model_type", "name", "kind"),
    [
        ("still_llama", "", "STILL"),
        ("still_llama", RELEASED, "STILL"),
        ("still", "", "released STILL"),
        ("llama", RELEASED, "released STILL"),
        ("llama", LOLCATS, "LoLCATs"),
        ("mamba2", "", "linear"),
        ("llama", "", "softmax"),
    ],
)
def test_the_first_kind_that_recognises_it(model_type: str, name: str, kind: str) -> None:
    tensors: Mapping[str, Any] = {name: torch.zeros(1)} if name else {}
    assert kind_of(Checkpoint("folder", model_type, {}, dict(tensors))).name == kind


def test_a_kind_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a STILL model under names of somebody's own, beside the plain model's config.json, open by a record of theirs alone."""
    ours = still_model("llama", torch.float32)
    ours.save_pretrained(tmp_path / "still")
    plain_model("llama", torch.float32).save_pretrained(tmp_path / "theirs")
    tensors = load_file(tmp_path / "still" / "model.safetensors")
    named = {name.replace("self_attn", "their_attn"): tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotLinearizedError, match="plain softmax llama model"):
        open_source(tmp_path / "theirs")

    def configure(found: Checkpoint, wanted: UserChoice) -> LayersConfig:
        found.tensors = {name.replace("their_attn", "self_attn"): tensor for name, tensor in found.tensors.items()}
        return StillConfig.from_dict(ours.config.still.to_dict())

    theirs = Kind("theirs", lambda found: any("their_attn" in name for name in found.tensors), configure, True)
    monkeypatch.setattr(kinds, "KINDS", (theirs, *KINDS))
    ids = random_ids(1, 40)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "theirs")(ids).logits, ours(ids).logits)
