"""RADLADS' models against their formulas in float64: whole, in pieces, steps, ragged rows; as packages; what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.models.load import load_model, open_source
from tests.still_export.linear_models import linear_model
from tests.still_export.models.formulas import calm, demand_formulas, demand_half, demand_package
from tests.still_export.models.test_linear_families import LOGITS, far, ids
from tests.still_export.radlads_models import FORMS, RadladsModel


def right(form: str) -> tuple[int, torch.Tensor, Any]:
    family, changes = FORMS[form]
    return calm(family, **changes)


def model_of(form: str) -> RadladsModel:
    family, changes = FORMS[form]
    model: RadladsModel = linear_model(family, seed=right(form)[0], **changes)
    return model


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    demand_formulas(tmp_path, *right(form)[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["six", "seven", "three"])
def test_half_precision_errs_as_the_formulas_do(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    demand_half(model_of(form), dtype, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    "form, part, value",
    [
        ("six", "time_decay", None),
        ("six", "time_maa_w2", None),
        ("six", "gate.weight", None),
        ("seven", "k_a", None),
        ("seven", "v0", None),
        ("seven, the first", "r_k", None),
        ("three", "balance_state", False),
        ("three", "rope_theta", 1e4),
        ("six", "balance_state", False),
    ],
)
def test_every_part_counts(form: str, part: str, value: Any, tmp_path: Path) -> None:
    """Where a tensor is zero, or config.json says otherwise, logits are others."""
    model, expected = model_of(form), right(form)[1]
    model.tensors = {name: x * (0 if name.endswith(f"self_attn.{part}") else 1) for name, x in model.tensors.items()}
    if value is not None:
        model.config[part] = value
    model.save_pretrained(tmp_path)
    assert far(load_model(tmp_path)(ids(), use_cache=False).logits, expected) > 100 * LOGITS


def test_what_is_said_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of("three").save_pretrained(tmp_path)
    check_model(tmp_path)
    assert describe_folder(tmp_path)["model"].startswith("rwkv7qwen3, 3 layers")
    said = open_source(tmp_path).left_out()
    # k_k, k_a and r_k of two layers, and what the first one would read of its own values
    assert said == "9 tensors of RWKV-7 that its published code does not read"
    ids = open_source(tmp_path).config.layer_types
    assert ids == ["linear_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    "form, changes, error, message",
    [
        ("seven", {"balance_state": None}, UnsupportedModelError, "has use_rope and no balance_state: a form between"),
        (
            "seven",
            {"gate_rank_type": 0},
            UnsupportedModelError,
            "gate_rank_type=0 .* an rwkv7qwen2 model; covered: 1 or 2",
        ),
        ("seven", {"use_tokenshift": True}, UnsupportedModelError, "use_tokenshift=True .*; covered: False or None"),
        (
            "seven",
            {"num_attention_layers": 1, "use_rope": False},
            UnsupportedModelError,
            "num_attention_layers=1 .* use_rope",
        ),
        (
            "three",
            {"num_attention_layers": 3},
            UnsupportedModelError,
            "num_attention_layers=3 .* the first layer is none",
        ),
        ("three", {"use_k_first": True}, UnsupportedModelError, "use_k_first=True .* an rwkv7qwen3 model; covered"),
        (
            "three",
            {"first_attention_layer": 9999},
            UnsupportedModelError,
            "first_attention_layer=9999 .* covered: None",
        ),
        ("three", {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window=True"),
        ("three", {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ("three", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "rope_type='dynamic'"),
        ("six", {"num_attention_layers": 1}, UnsupportedModelError, "num_attention_layers=1 .* an rwkv6qwen2 model"),
        ("six", {"num_attention_heads": 5}, ConfigError, "hidden_size=24 .* no multiple of num_attention_heads=5"),
        ("six", {"num_key_value_heads": 2}, UnsupportedModelError, "num_attention_heads=3 is not a multiple"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    form: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_of(form).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {name: value for name, value in {**config, **changes}.items() if value is not None or name not in changes}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("form, name", [("seven", "ln_x.weight"), ("six", "time_maa_w1"), ("three", "w1")])
def test_a_lost_or_foreign_tensor_is_named(form: str, name: str, tmp_path: Path) -> None:
    """A file of another form than config.json says is none of this one."""
    model_of(form).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({n: x for n, x in tensors.items() if not n.endswith(f"1.self_attn.{name}")}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn"):
        load_model(tmp_path)
    save_file({**tensors, "model.layers.1.self_attn.x_q": torch.zeros(1, 1, 24)}, path, {"format": "pt"})
    with pytest.raises((CheckpointError, UnsupportedModelError), match="x_q"):
        load_model(tmp_path)


FEW = ("seven, the first", "three")


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if form in FEW else pytest.mark.long)
        for form in ("six", "seven", "seven, the first", "three")
    ],
)
def test_a_folder_becomes_a_proven_package(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget(weight: Any) -> None:
        weight[..., :8] = 0

    plant = (("layers.1.self_attn.a0",), forget) if form == "three" else None
    demand_package(model_of(form), tmp_path, capsys, plant=plant)


@pytest.mark.long
@pytest.mark.parametrize("form", ["six", "seven", "three"])
def test_a_package_in_half_precision(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demand_package(model_of(form), tmp_path, capsys, "--dtype", "float16", short=True)


@pytest.mark.slow
def test_thin_products_in_int4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one input, in another order than the names of their weights: the shares of the first layer's values are asked before decays."""
    wide = dict(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, intermediate_size=96)
    ranks = {f"lora_rank_{name}": 16 for name in ("decay", "iclr", "value_residual_mix", "gate")}
    demand_package(linear_model("rwkv7qwen2", **wide, **ranks), tmp_path, capsys, "--quantize", "int4", short=True)
