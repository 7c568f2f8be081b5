"""Mamba-in-Llama against its formulas in float64: whole, in pieces, steps, ragged rows; as packages; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from still_export.errors import CheckpointError, ConfigError, StillExportError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.models.load import load_model
from still_export.sources import demand_model
from tests.still_export.in_llama_models import FORMS, InLlamaModel
from tests.still_export.linear_models import linear_model
from tests.still_export.models.formulas import add_half, calm, demand_formulas, demand_half, demand_package
from tests.still_export.models.test_linear_families import LOGITS, far, ids


def right(form: str) -> tuple[int, torch.Tensor, Any]:
    family, changes = FORMS[form]
    return calm(family, **changes)


def model_of(form: str, **changes: Any) -> InLlamaModel:
    family, own = FORMS[form]
    model: InLlamaModel = linear_model(family, seed=right(form)[0], **{**own, **changes})
    return model


@torch.no_grad()
@pytest.mark.parametrize("one", [False, True], ids=["two files", "one file"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, one: bool, tmp_path: Path) -> None:
    model_of(form, one=one).save_pretrained(tmp_path)
    if one:  # its projections are taken apart
        assert far(load_model(tmp_path)(ids(), use_cache=False).logits, right(form)[1]) <= LOGITS
    else:
        demand_formulas(tmp_path, *right(form)[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["mamba", "mamba2"])
def test_half_precision_errs_as_the_formulas_do(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    demand_half(model_of(form), dtype, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    "form, part",
    [
        *(("mamba", part) for part in ("dt_proj.bias", "dt_proj_down.weight", "B_proj.weight", "D", "q_proj.weight")),
        *(("mamba2", part) for part in ("dt_bias", "conv1d.bias", "A_log", "D", "in_proj.weight", "k_proj.weight")),
    ],
)
def test_every_part_counts(form: str, part: str, tmp_path: Path) -> None:
    model, expected = model_of(form), right(form)[1]
    model.tensors = {name: x * (0 if name.endswith(f".{part}") else 1) for name, x in model.tensors.items()}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


@pytest.mark.parametrize("one", [False, True], ids=["two files", "one file"])
def test_what_is_said_of_a_folder(one: bool, tmp_path: Path) -> None:
    model_of("mamba2", one=one).save_pretrained(tmp_path)
    check_model(tmp_path)
    said = describe_folder(tmp_path)
    assert said["model"].startswith("mambainllama_mamba2, 3 layers (2 linear, 1 full)")
    assert demand_model(str(tmp_path), "export").model_type.startswith("mambainllama")
    with pytest.raises(UnsupportedModelError, match=r"is a mambainllama\w* model, and linearize takes softmax models"):
        demand_model(str(tmp_path), "linearize")


BAD: list[tuple[str, dict[str, Any], type[StillExportError], str]] = [
    (
        "mamba2",
        {"ssm_cfg": {"ngroups": 4, "d_state": 6, "dt_limit": [0.1, 1]}},
        UnsupportedModelError,
        "has dt_limit; read",
    ),
    (
        "mamba2",
        {"ssm_cfg": {"ngroups": 4, "d_state": 6, "rmsnorm": False}},
        UnsupportedModelError,
        "rmsnorm=False .* True",
    ),
    ("mamba2", {"ssm_cfg": {"ngroups": 3, "d_state": 6}}, ConfigError, "d_inner=24, d_xb=12, .* ngroups=3"),
    ("mamba", {"d_xb": 13}, ConfigError, "d_xb=13"),
    ("mamba", {"ssm_cfg": {"d_state": 3, "proj_z_bias": True}}, UnsupportedModelError, "proj_z_bias=True"),
    ("mamba", {"attn_layers": [3]}, CheckpointError, r"softmax layers \[3\] .* none of its 3"),
    ("mamba", {"n_layer": 2}, UnsupportedModelError, "n_layer=2"),
    (
        "mamba",
        {"rms_norm_eps": 1e-5},
        CheckpointError,
        "rms_norm_eps is 1e-06 in config.json of .* and 1e-05 in mamba_config",
    ),
]


@pytest.mark.parametrize("form, changes, error, message", BAD)
def test_what_is_not_read_is_refused_by_name(
    form: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_of(form).save_pretrained(tmp_path)
    path = tmp_path / "mamba_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"model_type": "gemma2"},
            UnsupportedModelError,
            "it has mamba_config.json, beside a gemma2 model; covered: llama, mistral",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            UnsupportedModelError,
            "sliding_window=64 .* without a window",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_type='dynamic'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
    ],
)
def test_bases_that_are_not_read_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = model_of("mamba")
    model.config |= changes
    model.save_pretrained(tmp_path)
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@torch.no_grad()
def test_sizes_that_one_file_leaves_out_are_those_of_the_attention(tmp_path: Path) -> None:
    """transformers writes no values that are the configuration's defaults."""
    model = model_of("mamba", one=True)
    model.config = {name: value for name, value in model.config.items() if name not in ("d_inner", "d_xb", "d_model")}
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids()).logits, right("mamba")[1]) <= LOGITS


@torch.no_grad()
def test_a_mistral_and_scaled_positions_are_read(tmp_path: Path) -> None:
    """Llama 3.1's table changes the angles of the softmax layers."""
    model = model_of("mamba")
    model.config |= {"model_type": "mistral", "sliding_window": None}
    model.save_pretrained(tmp_path / "a")
    assert far(load_model(tmp_path / "a")(ids()).logits, right("mamba")[1]) <= LOGITS
    table = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model.config["rope_scaling"] = {"rope_type": "llama3", **table}
    model.save_pretrained(tmp_path / "b")
    assert far(load_model(tmp_path / "b")(ids()).logits, right("mamba")[1]) > 100 * LOGITS


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if form in ("mamba", "mamba2") else pytest.mark.long)
        for form in FORMS
        if form != "mamba, alone"
    ],
)
def test_a_folder_becomes_a_proven_package(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant = (("layers.2.mamba.dt_bias", "layers.2.mamba.dt_proj.bias"), add_half)
    demand_package(model_of(form), tmp_path, capsys, plant=plant)


@pytest.mark.long
@pytest.mark.parametrize("form", ["mamba", "mamba2"])
def test_a_package_in_half_precision(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demand_package(model_of(form), tmp_path, capsys, "--dtype", "float16", short=True)
