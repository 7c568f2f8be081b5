"""HypeNet against its formulas in float64: whole, in pieces, steps, ragged rows; as packages; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.models.load import load_model
from tests.still_export.hype_models import FORMS, HypeModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.formulas import add_half, calm, demand_formulas, demand_half, demand_package
from tests.still_export.models.test_linear_families import LOGITS, far, ids


def right(form: str) -> tuple[int, torch.Tensor, Any]:
    return calm("hypenet", **FORMS[form])


def model_of(form: str, **changes: Any) -> HypeModel:
    model: HypeModel = linear_model("hypenet", seed=right(form)[0], **{**FORMS[form], **changes})
    return model


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    demand_formulas(tmp_path, *right(form)[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_as_the_formulas_do(dtype: torch.dtype, tmp_path: Path) -> None:
    demand_half(model_of("places"), dtype, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    "name, value",
    [
        *((part, None) for part in ("o_gate.weight", "z_proj.weight", "o_norm.weight", "1.self_attn.q_norm.weight")),
        ("attn_logits_scaling", "hype 3"),
        ("attn_logits_scaling", 0.5),
        ("attn_use_rope", True),
        ("lightning_use_rope", False),
        ("lightning_scale", "1/d"),
        ("rope_theta", 1e5),
    ],
)
def test_every_part_counts(name: str, value: Any, tmp_path: Path) -> None:
    """Where a tensor is zero, or config.json says otherwise, logits are others."""
    model, expected = model_of("published"), right("published")[1]
    model.config["lightning_use_output_norm"] = True
    model.tensors = {key: x * (0 if key.endswith(f".{name}") else 1) for key, x in model.tensors.items()}
    if value is not None:
        model.config[name] = value
        if name == "lightning_scale":  # which a norm undoes
            model.config["lightning_use_output_norm"] = False
            model.tensors = {key: x for key, x in model.tensors.items() if "o_norm" not in key}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


def test_what_is_said_of_a_folder(tmp_path: Path) -> None:
    model_of("published").save_pretrained(tmp_path)
    check_model(tmp_path)
    assert describe_folder(tmp_path)["model"].startswith("hypenet, 3 layers")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"mixer_types": ["attn", "kda", "attn"]},
            UnsupportedModelError,
            "mixer_types='kda' .* a hypenet model; covered",
        ),
        ({"lightning_use_short_conv": True}, UnsupportedModelError, "lightning_use_short_conv=True"),
        ({"lightning_head_dim": 12}, UnsupportedModelError, "lightning_head_dim=12 .* 10"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        ({"attn_logits_scaling": "hype 1"}, ConfigError, "attn_logits_scaling='hype 1' .* at least 2"),
        ({"lightning_nkv": 4}, ConfigError, "lightning_nh=6 .* no multiple of lightning_nkv=4"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_type='dynamic'"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = model_of("published")
    model.config |= changes
    model.save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "form, dtype",
    [
        pytest.param("places", "float32", marks=pytest.mark.slow),
        *(pytest.param(form, "float32", marks=pytest.mark.long) for form in FORMS if form != "places"),
        pytest.param("places", "float16", marks=pytest.mark.long),
    ],
)
def test_a_folder_becomes_a_proven_package(
    form: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = (form, dtype) == ("places", "float32")
    plant = (("layers.1.self_attn.q_norm.weight",), add_half) if planted else None
    demand_package(model_of(form), tmp_path, capsys, "--dtype", dtype, plant=plant)
