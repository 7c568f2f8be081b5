"""HypeNet, Zebra-Llama, RADLADS' models and Mamba-in-Llama against their formulas in float64: whole, in pieces, steps, ragged rows; as
packages; what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.description import describe_folder
from still_export.folders.model import check_model
from still_export.folders.sources import demand_model
from still_export.models.load import load_model, open_source
from tests.still_export import hype_models, in_llama_models, radlads_models
from tests.still_export.linear_models import linear_model
from tests.still_export.models.formulas import add_half, calm, demand_formulas, demand_package
from tests.still_export.models.test_linear_families import LOGITS, demand_half, far, ids

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"hypenet, {form}": ("hypenet", changes) for form, changes in hype_models.FORMS.items()},
    **{f"zebra, {form}": ("zebra_llama", changes) for form, changes in in_llama_models.ZEBRA_FORMS.items()},
    **radlads_models.FORMS,
    **in_llama_models.FORMS,
}
HYPE, ZEBRA = "hypenet, published", "zebra, published"


def right(form: str) -> tuple[int, torch.Tensor, Any]:
    family, changes = FORMS[form]
    return calm(family, **changes)


def model_of(form: str, **changes: Any) -> Any:
    family, own = FORMS[form]
    return linear_model(family, seed=right(form)[0], **{**own, **changes})


@torch.no_grad()
def distance(folder: Path, form: str) -> float:
    """Of the logits of a folder's model from those of the form's formulas."""
    return far(load_model(folder)(ids(), use_cache=False).logits, right(form)[1])


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_states_are_those_of_the_formulas(form: str, tmp_path: Path) -> None:
    model_of(form).save_pretrained(tmp_path)
    demand_formulas(tmp_path, *right(form)[1:])


@pytest.mark.parametrize("form", in_llama_models.FORMS)
def test_one_file_has_its_projections_taken_apart(form: str, tmp_path: Path) -> None:
    model_of(form, one=True).save_pretrained(tmp_path)
    assert distance(tmp_path, form) <= LOGITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["hypenet, places", "six", "seven", "three", "mamba", "mamba2"])
def test_half_precision_errs_as_the_formulas_do(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    demand_half(model_of(form), dtype, tmp_path)


@pytest.mark.parametrize(
    "form, one, start",
    [
        (HYPE, False, "hypenet, 3 layers"),
        (ZEBRA, False, "zebra_llama, 3 layers (2 linear, 1 full)"),
        ("three", False, "rwkv7qwen3, 3 layers"),
        *(("mamba2", one, "mambainllama_mamba2, 3 layers (2 linear, 1 full)") for one in (False, True)),
    ],
)
def test_what_is_said_of_a_folder(form: str, one: bool, start: str, tmp_path: Path) -> None:
    model_of(form, **({"one": True} if one else {})).save_pretrained(tmp_path)
    check_model(tmp_path)
    assert describe_folder(tmp_path)["model"].startswith(start)
    kind = demand_model(str(tmp_path), "export").model_type
    assert kind.startswith(start.partition("_")[0].partition(",")[0])
    with pytest.raises(UnsupportedModelError, match=rf"is an? {kind} model, and linearize needs a softmax model"):
        demand_model(str(tmp_path), "linearize")


def test_tensors_that_the_published_code_does_not_read_are_said(tmp_path: Path) -> None:
    model_of("three").save_pretrained(tmp_path)
    source = open_source(tmp_path)
    # k_k, k_a and r_k of two layers, and what the first one would read of its own values
    assert source.left_out() == "9 tensors of RWKV-7 that its published code does not read"
    assert source.config.layer_types == ["linear_attention", "linear_attention", "full_attention"]


SSM = {"ngroups": 4, "d_state": 6}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
CONFIG, ZEBRAS, MAMBAS = "config.json", "hybrid_config.json", "mamba_config.json"
YARN = {"rope_type": "yarn", "factor": 8.0, "mscale_all_dim": 1}
NO_SOFTMAX = r"softmax layers \[3\] .* none of its 3"


@pytest.mark.parametrize(
    "form, file, changes, error, message",
    [
        (HYPE, CONFIG, {"mixer_types": ["attn", "kda", "attn"]}, UnsupportedModelError, "mixer_types='kda' .* a hypenet model; covered"),
        (HYPE, CONFIG, {"lightning_use_short_conv": True}, UnsupportedModelError, "lightning_use_short_conv=True"),
        (HYPE, CONFIG, {"lightning_head_dim": 12}, UnsupportedModelError, "lightning_head_dim=12 .* 10"),
        (HYPE, CONFIG, {"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        (HYPE, CONFIG, {"attn_logits_scaling": "hype 1"}, ConfigError, "attn_logits_scaling='hype 1' .* at least 2"),
        (HYPE, CONFIG, {"lightning_nkv": 4}, ConfigError, "lightning_nh=6 .* no multiple of lightning_nkv=4"),
        (HYPE, CONFIG, DYNAMIC, UnsupportedModelError, "rope_type='dynamic'"),
        (ZEBRA, ZEBRAS, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, UnsupportedModelError, "rope_scaling='llama3'"),
        (ZEBRA, ZEBRAS, {"rope_scaling": YARN}, UnsupportedModelError, "mscale_all"),
        (ZEBRA, ZEBRAS, {"mla_layers": [3]}, CheckpointError, NO_SOFTMAX),
        (ZEBRA, ZEBRAS, {"hidden_size": 48}, CheckpointError, "hidden_size is 24 in config.json of .* and 48 in hybrid_config.json"),
        (ZEBRA, ZEBRAS, {"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
        (ZEBRA, ZEBRAS, {"d_xb": 10}, ConfigError, "d_xb=10"),
        (ZEBRA, ZEBRAS, {"kv_lora_rank": None}, ConfigError, "no valid zebra_llama configuration: KeyError: 'kv_lora_rank'"),
        ("seven", CONFIG, {"balance_state": None}, UnsupportedModelError, "has use_rope and no balance_state: a form between"),
        ("seven", CONFIG, {"gate_rank_type": 0}, UnsupportedModelError, "gate_rank_type=0 .* an rwkv7qwen2 model; covered: 1 or 2"),
        ("seven", CONFIG, {"use_tokenshift": True}, UnsupportedModelError, "use_tokenshift=True .*; covered: False or None"),
        ("seven", CONFIG, {"num_attention_layers": 1, "use_rope": False}, UnsupportedModelError, "num_attention_layers=1 .* use_rope"),
        ("three", CONFIG, {"num_attention_layers": 3}, UnsupportedModelError, "num_attention_layers=3 .* the first layer is none"),
        ("three", CONFIG, {"use_k_first": True}, UnsupportedModelError, "use_k_first=True .* an rwkv7qwen3 model; covered"),
        ("three", CONFIG, {"first_attention_layer": 9999}, UnsupportedModelError, "first_attention_layer=9999 .* covered: None"),
        ("three", CONFIG, {"use_sliding_window": True}, UnsupportedModelError, "use_sliding_window=True"),
        ("three", CONFIG, {"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ("three", CONFIG, DYNAMIC, UnsupportedModelError, "rope_type='dynamic'"),
        ("six", CONFIG, {"num_attention_layers": 1}, UnsupportedModelError, "num_attention_layers=1 .* an rwkv6qwen2 model"),
        ("six", CONFIG, {"num_attention_heads": 5}, ConfigError, "hidden_size=24 .* no multiple of num_attention_heads=5"),
        ("six", CONFIG, {"num_key_value_heads": 2}, UnsupportedModelError, "num_attention_heads=3 is not a multiple"),
        ("mamba2", MAMBAS, {"ssm_cfg": SSM | {"dt_limit": [0.1, 1]}}, UnsupportedModelError, "has dt_limit; read"),
        ("mamba2", MAMBAS, {"ssm_cfg": SSM | {"rmsnorm": False}}, UnsupportedModelError, "rmsnorm=False .* True"),
        ("mamba2", MAMBAS, {"ssm_cfg": SSM | {"ngroups": 3}}, ConfigError, "d_inner=24, d_xb=12, .* ngroups=3"),
        ("mamba", MAMBAS, {"d_xb": 13}, ConfigError, "d_xb=13"),
        ("mamba", MAMBAS, {"ssm_cfg": {"d_state": 3, "proj_z_bias": True}}, UnsupportedModelError, "proj_z_bias=True"),
        ("mamba", MAMBAS, {"attn_layers": [3]}, CheckpointError, NO_SOFTMAX),
        ("mamba", MAMBAS, {"n_layer": 2}, UnsupportedModelError, "n_layer=2"),
        ("mamba", MAMBAS, {"rms_norm_eps": 1e-5}, CheckpointError, "rms_norm_eps is 1e-06 in config.json of .* and 1e-05 in mamba_config"),
        ("mamba", CONFIG, {"model_type": "gemma2"}, UnsupportedModelError,
         "it has mamba_config.json, beside a gemma2 model; covered: llama, mistral"),
        ("mamba", CONFIG, {"model_type": "mistral", "sliding_window": 64}, UnsupportedModelError, "sliding_window=64 .* without a window"),
        ("mamba", CONFIG, DYNAMIC, UnsupportedModelError, "rope_type='dynamic'"),
        ("mamba", CONFIG, {"attention_bias": True}, UnsupportedModelError, "attention_bias=True"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(
    form: str, file: str, changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model_of(form).save_pretrained(tmp_path)
    said = json.loads((tmp_path / file).read_text()) | changes
    if form in radlads_models.FORMS:  # as its first configurations, which lack fields
        said = {name: value for name, value in said.items() if value is not None or name not in changes}
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(error, match=message):
        load_model(tmp_path)


@torch.no_grad()
def test_sizes_that_one_file_leaves_out_are_those_of_the_attention(tmp_path: Path) -> None:
    """transformers writes no values that are the configuration's defaults."""
    model = model_of("mamba", one=True)
    model.config = {name: value for name, value in model.config.items() if name not in ("d_inner", "d_xb", "d_model")}
    model.save_pretrained(tmp_path)
    assert distance(tmp_path, "mamba") <= LOGITS


def test_a_mistral_and_scaled_positions_are_read(tmp_path: Path) -> None:
    """Llama 3.1's table changes the angles of the softmax layers."""
    model = model_of("mamba")
    model.config |= {"model_type": "mistral", "sliding_window": None}
    model.save_pretrained(tmp_path / "a")
    assert distance(tmp_path / "a", "mamba") <= LOGITS
    table = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model.config["rope_scaling"] = {"rope_type": "llama3", **table}
    model.save_pretrained(tmp_path / "b")
    assert distance(tmp_path / "b", "mamba") > 100 * LOGITS


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


def forget(weight: Any) -> None:
    weight[..., :8] = 0


STEPS = ("layers.2.mamba.dt_bias", "layers.2.mamba.dt_proj.bias")
PLANTS = {
    "hypenet, places": (("layers.1.self_attn.q_norm.weight",), add_half),
    ZEBRA: (("layers.2.mamba.dt_bias",), add_half),
    "three": (("layers.1.self_attn.a0",), forget),
    **{form: (STEPS, add_half) for form in in_llama_models.FORMS},
}
FEW = ("hypenet, places", ZEBRA, "seven, the first", "three", "mamba", "mamba2")
OTHERS = [form for form in FORMS if form.startswith("hypenet") or form in in_llama_models.FORMS]
OTHERS += ["zebra, norms", "six", "seven"]


@pytest.mark.parametrize(
    "form",
    [
        *(pytest.param(form, marks=pytest.mark.slow) for form in FEW),
        *(pytest.param(form, marks=pytest.mark.long) for form in OTHERS if form not in (*FEW, "mamba, alone")),
    ],
)
def test_a_folder_becomes_a_proven_package(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demand_package(model_of(form), tmp_path, capsys, plant=PLANTS.get(form))


@pytest.mark.long
@pytest.mark.parametrize("form", ["hypenet, places", ZEBRA, "six", "seven", "three", "mamba", "mamba2"])
def test_a_package_in_half_precision(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demand_package(model_of(form), tmp_path, capsys, "--dtype", "float16", short=form not in ("hypenet, places", ZEBRA))


@pytest.mark.slow
def test_thin_products_in_int4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one input, in another order than the names of their weights: the shares of the first layer's values are asked before decays."""
    wide = dict(hidden_size=64, num_attention_heads=2, num_hidden_layers=2, intermediate_size=96)
    ranks = {f"lora_rank_{name}": 16 for name in ("decay", "iclr", "value_residual_mix", "gate")}
    demand_package(linear_model("rwkv7qwen2", **wide, **ranks), tmp_path, capsys, "--quantize", "int4", short=True)
