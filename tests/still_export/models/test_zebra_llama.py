"""Zebra-Llama against its formulas in float64: whole, in pieces, steps; as a package; what is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.models.load import load_model
from still_export.package.folder import open_package
from tests.still_export.in_llama_models import ZEBRA_FORMS, ZebraModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.test_linear_families import LOGITS, PIECES, STATES, far, ids, pieces
from tests.still_export.proof.plants import with_weights
from tests.still_export.verbs import call


@cache
@torch.no_grad()
def calm(form: str) -> tuple[int, torch.Tensor, Any]:
    """Seed of the first model whose own float32 is near its float64, and the logits and states of the latter."""
    for seed in range(16):
        found = linear_model("zebra_llama", seed=seed, **ZEBRA_FORMS[form])(ids()).logits
        expected = linear_model("zebra_llama", seed=seed, **ZEBRA_FORMS[form]).double()(ids())
        if far(found, expected.logits) <= LOGITS / 3:
            return seed, expected.logits, expected.past_key_values
    raise AssertionError(f"{form}: its own float32 loses too much of 16 random models")


def model_of(form: str = "published") -> ZebraModel:
    model: ZebraModel = linear_model("zebra_llama", seed=calm(form)[0], **ZEBRA_FORMS[form])
    return model


@torch.no_grad()
@pytest.mark.parametrize("form", ZEBRA_FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    ours, (_, expected, seen) = load_model(tmp_path), calm(form)
    assert far(ours(ids(), use_cache=False).logits, expected) <= LOGITS
    for sizes in (PIECES, [1, 2, 3, 2, 1, 127]):
        logits, cache = pieces(ours, ids(), sizes)
        assert far(logits, expected) <= LOGITS, sizes
        for index, states in enumerate(cache.states()):
            if "recurrent_state" in states:
                assert far(states["recurrent_state"], seen.get_recurrent_state(index)) <= STATES
                assert far(states["conv_state"], seen.get_conv_state(index)) <= STATES
    assert far(pieces(ours, ids()[:, :24], [1] * 24)[0], expected[:, :24]) <= LOGITS
    ours.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    "part, value",
    [
        *((part, None) for part in ("kv_b_proj.weight", "q_a_proj.weight", "dt_bias", "D")),
        ("rope_scaling", None),
        ("rope_theta", 50.0),
    ],
)
def test_every_part_counts(part: str, value: Any, tmp_path: Path) -> None:
    """Where a tensor is zero, or hybrid_config.json says otherwise, logits are others."""
    model, expected = model_of(), calm("published")[1]
    model.tensors = {name: x * (0 if name.endswith(f".{part}") else 1) for name, x in model.tensors.items()}
    if part in model.beside:
        model.beside[part] = value
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


def test_what_is_said_of_a_folder(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path)
    check_model(tmp_path)
    assert describe_folder(tmp_path)["model"].startswith("zebra_llama, 3 layers (2 linear, 1 full)")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, UnsupportedModelError, "rope_scaling='llama3'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1}},
            UnsupportedModelError,
            "mscale_all",
        ),
        ({"mla_layers": [3]}, CheckpointError, r"softmax layers \[3\] .* none of its 3"),
        ({"hidden_size": 48}, CheckpointError, "hidden_size is 24 in config.json of .* and 48 in hybrid_config.json"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"d_xb": 10}, ConfigError, "d_xb=10"),
        ({"kv_lora_rank": None}, ConfigError, "no valid zebra_llama configuration: KeyError: 'kv_lora_rank'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_of().save_pretrained(tmp_path)
    path = tmp_path / "hybrid_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "form, dtype",
    [
        pytest.param("published", "float32", marks=pytest.mark.slow),
        pytest.param("published", "float16", marks=pytest.mark.long),
        pytest.param("norms", "float32", marks=pytest.mark.long),
    ],
)
def test_a_folder_becomes_a_proven_package(
    form: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_of(form).save_pretrained(tmp_path / "model")
    assert call("export", tmp_path / "model", "-o", tmp_path / "package", "--dtype", dtype, "--quiet") == 0
    sizes = ("--lengths", "1,130", "--decode-steps", "8", "--quiet")
    assert call("verify", tmp_path / "package", *sizes) == 0, capsys.readouterr().out
    if (form, dtype) != ("published", "float32"):
        return

    def planted(weights: dict[str, Any]) -> None:
        name = next(n for n in weights if n.endswith("layers.2.mamba.dt_bias"))
        weights[name][:2] += 0.5

    with_weights(open_package(tmp_path / "package"), tmp_path / "planted", planted)
    assert call("verify", tmp_path / "planted", *sizes) == 1
