"""Linear families and configurations that are refused, by what they say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from still_export.errors import ConfigError, UnsupportedModelError
from still_export.folders.families import NEWER, NOT_COVERED
from still_export.folders.model import check_model
from still_export.mixers.config import StillConfig
from still_export.models import attach_untrained
from still_export.models.build import family_of
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.load import load_model
from still_export.systems.nats_l.family import NATS
from tests.still_export.fla_models import SOFTMAX
from tests.still_export.linear_models import OWN, linear_model
from tests.still_export.tiny import plain_model

SALA = OWN["minicpm_sala"].sizes["sparse_config"]


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gla", {"feature_map": "relu"}),
    ("delta_net", {"use_short_conv": False}),
    ("transnormer", {"linear_act_fun": "relu"}),
    ("minicpm_sala", {"lightning_scale": "1"}),
    (NATS, {"nats_block_size": 128}),
    (NATS, {"nats_block_size": 32}),
    (NATS, {"ops_for_incomplete_chunks": "attn"}),
    (NATS, {"attn_apply_pos_encoding": True}),
    ("llama_with_landmark", {"cache_top_k": 0}),
    ("rwkv5", {"attention_hidden_size": 48}),
    ("rwkv7", {"attn": SOFTMAX}),
    ("rwkv7", {"value_dim": 48}),
    ("rwkv7", {"value_dim": [24, 48, 24]}),
    ("flux_qwen3", {"toggle_type": "xattn"}),
    ("flux_qwen3", {"retrieval_mode": "xattn"}),
    ("flux_qwen3", {"pooling_mode": "q"}),
    ("flux_qwen3", {"use_softmax": False}),
    ("mamba3", {"is_mimo": True}),
    ("parallax", {"window_size": 37}),
    ("parallax", {"attnres_block_size": 4}),
    ("retnet", {"attn": SOFTMAX}),
    ("retnet", {"num_kv_heads": 1}),
]
"""Families, and the one change that is refused with its value."""


def refused(changes: dict[str, Any]) -> str:
    """What a message says of the one change."""
    ((field, value),) = changes.items()
    return f"{field}={value!r} in config.json of a"


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "family, changes, message",
    [
        *((family, changes, refused(changes)) for family, changes in VARIANTS),
        ("kimi_linear", {"mla_use_nope": False}, "without positions alone"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "only silu is covered"),
        ("falcon_h1", {"hidden_act": "gelu"}, "only silu is covered"),
        ("minicpm_sala", {"mixer_types": ["minicpm4", "mamba", "minicpm4"]}, "mixer_types='mamba' in config.json"),
        ("llama_with_landmark", {"include_landmark_in_loss": False}, "include_landmark_in_loss=false in config.json"),
        ("rwkv6", {"expand_k": 0.5}, "expand_k in config.json of an rwkv6 model: flash-linear-attention's form"),
        ("lfm2", {"rope_parameters": ROPE}, "rope_type='dynamic'"),
    ],
)
def test_variants_are_refused_by_name(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    linear_model(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        load_model(tmp_path)


@pytest.mark.parametrize("name", sorted({*NOT_COVERED} - {*NEWER}))
def test_families_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """By the class and, before transformers is asked, by the folder."""
    said = re.escape(f"model_type='{name}' in config.json is not covered: {NOT_COVERED[name]}")
    with pytest.raises(UnsupportedModelError, match=said):
        family_of(name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    with pytest.raises(UnsupportedModelError, match=said):
        check_model(tmp_path)
    assert set(NOT_COVERED) & set(LINEAR_FAMILIES) <= set(NEWER)  # by the version of transformers


def test_an_older_transformers_runs_softmax_families_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("still_export.models.build.transformers.__version__", "5.20.2")
    assert family_of("llama").name == "llama"
    with pytest.raises(UnsupportedModelError, match=r"'mamba2' .* need transformers 5\.23; 5\.20\.2 is"):
        family_of("mamba2")


def test_softmax_families_have_no_layers_of_linear_ones() -> None:
    layers = StillConfig(layer_types=("mamba2", "hybrid_attention", "full_attention"))
    with pytest.raises(ConfigError, match=r"layer_types of still_config name mamba2, .* llama model"):
        attach_untrained(plain_model("llama"), layers)


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("gla", {"num_heads": 5}, r"^config\.json gives heads of 9.6 keys and 7.2 values, which"),
        ("gla", {"attn": {**SOFTMAX, "window_size": 0}}, r"^attn\.window_size=0 in config\.json is outside 1\.\.65536"),
        (NATS, {"num_nats_head": 4}, "num_nats_head=4 in config.json must divide num_heads=2 and num_attn_heads=4"),
        ("llama_with_landmark", {"mem_freq": 0}, "mem_freq=0 and mem_id=60 in config.json"),
        ("llama_with_landmark", {"mem_id": 61}, "mem_freq=12 and mem_id=61 in config.json"),
        ("routing_transformer", {"num_clusters": 1}, "num_clusters=1 and window_size=9 in config.json"),
        ("routing_transformer", {"window_size": 0}, "num_clusters=5 and window_size=0 in config.json"),
        ("hgrn2", {"expand_ratio": "8"}, "config.json is no valid hgrn2 configuration: TypeError"),
        ("minicpm_sala", {"sparse_config": {**SALA, "block_size": 7}}, "must be a multiple of block_size=7"),
        ("minicpm_sala", {"sparse_config": {**SALA, "kernel_stride": 3}}, "block_size=8 must be a multiple of "),
        ("minicpm_sala", {"sparse_config": {**SALA, "topk": 1}}, "top_blocks=3 must be at least init_blocks=1 "),
        ("minicpm_sala", {"sparse_config": {**SALA, "dense_len": 9}}, "dense_length=9 must be at least lse_length=16"),
        ("minicpm_sala", {"sparse_config": None}, "config.json is no valid minicpm_sala configuration: AttributeError"),
        ("transnormer", {"decoder_layers": 1}, "decoder_layers=1 in config.json: the decay of a layer is divided"),
        ("transnormer", {"linear_use_lrpe_list": [1]}, "linear_use_lrpe_list in config.json has 1 entries"),
        ("moh_llama", {"shared_heads": 6, "routed_heads": 2}, "shared_heads=6 and routed_heads=2 of 8 heads"),
        ("mirrorla", {"mirrors": 0}, r"mirrors=0 in config\.json; it must be 1 and more for mirrorla"),
        ("inline", {"head_mirrors": 2}, r"head_mirrors=2 in config\.json; it must be 0, or more for mirrorla"),
        ("inline", {"mirrors": 2}, r"mirrors=2 in config\.json; it must be 0 for inline"),
        ("mirrorla", {"feature_map": "relu"}, r"feature_map='relu' in config\.json; covered: identity"),
        ("inline", {"kernel_size": 1}, r"kernel_size=1 in config\.json; it must be 0, or 2 to 64"),
        ("mirrorla", {"kernel_size": 3}, r"kernel_size=3 in config\.json; it must be 0 for mirrorla"),
        ("polaformer", {"kernel_size": 1}, r"kernel_size=1 in config\.json; it must be 2 to 64, taps for polaformer"),
        ("polaformer", {"num_attention_heads": 8, "num_key_value_heads": 8}, r"hidden_size=24 .* no multiple of 16"),
        ("inline", {"feature_map": "exp"}, r"feature_map='exp' in config\.json; covered: identity, and relu of InLine"),
        ("flux_qwen3", {"pool_size": 0}, r"pool_size=0 in config\.json; they must"),
        ("mamba3", {"head_dim": 7}, r"config\.json gives 48 channels of heads of head_dim=7 in n_groups=2"),
        ("rat", {"window_size": 0}, r"interleave_step=1 and window_size=0 in config\.json; they must be at least 1"),
        ("rat", {"chunk_size": 0}, r"config\.json: chunk_size: Input should be greater than or equal to 1, not 0"),
        ("rat", {"ngroups": 3}, r"d_model=24 in config\.json must be a multiple of .* ngroups=3"),
        ("parallax", {"num_heads": 5}, r"hidden_size=24 in config\.json is no multiple of num_heads=5"),
        ("local_linear", {"ridge": 0.0}, r"ridge=0 in config\.json; a ridge must be above 0"),
        ("local_linear", {"ridge": -1.0}, r"ridge=-1 in config\.json; a ridge must be above 0"),
        ("local_linear", {"ridge": "inf"}, r"ridge=inf in config\.json; a ridge must be above 0"),
        ("rwkv6", {"head_size": 7}, r"hidden_size=24 in config\.json is no multiple of head_size=7"),
        ("rwkv7", {"head_dim": 7}, r"hidden_size=24 in config\.json is no multiple of head_dim=7"),
        ("transnormer", {"hidden_dim": 36}, "hidden_dim=36 in config.json must be a multiple of"),
        ("routing_transformer", {"hidden_size": 26}, "hidden_size=26 in config.json is no multiple of num_attention_h"),
    ],
)
def test_configurations_that_do_not_fit(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = linear_model(family)
    model.config |= changes
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)
