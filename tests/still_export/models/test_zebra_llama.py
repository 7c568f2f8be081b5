"""Zebra-Llama against its formulas in float64: whole, in pieces, steps; as a package; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.models.load import load_model
from tests.still_export.in_llama_models import ZEBRA_FORMS, ZebraModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.formulas import add_half, calm, demand_formulas, demand_package
from tests.still_export.models.test_linear_families import LOGITS, far, ids


def right(form: str = "published") -> tuple[int, torch.Tensor, Any]:
    return calm("zebra_llama", **ZEBRA_FORMS[form])


def model_of(form: str = "published") -> ZebraModel:
    model: ZebraModel = linear_model("zebra_llama", seed=right(form)[0], **ZEBRA_FORMS[form])
    return model


@pytest.mark.parametrize("form", ZEBRA_FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    demand_formulas(tmp_path, *right(form)[1:])


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
    model, expected = model_of(), right()[1]
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
    planted = (form, dtype) == ("published", "float32")
    plant = (("layers.2.mamba.dt_bias",), add_half) if planted else None
    demand_package(model_of(form), tmp_path, capsys, "--dtype", dtype, plant=plant)
