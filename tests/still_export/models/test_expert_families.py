"""Families with experts against transformers' own classes in float64: whole, in pieces, padded; published names; what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.mixers.experts.module import Router, Stacked
from still_export.models.families.experts import single_experts, stacked_experts
from still_export.models.load import load_model, open_source
from still_export.models.read import checkpoint
from still_export.models.read.checkpoint import open_tensors
from still_export.models.read.weights import Deferred, value_of
from tests.still_export.expert_models import expert_model
from tests.still_export.files import edit_json, edit_tensors, read_json


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("qwen3_next", dict(num_experts_per_tok=8), "config.json of .*: a token goes to 8 experts and has 7 of 7"),
        ("kimi_linear", dict(num_expert_group=3), "3 groups, of which a token takes 2, do not fit 8 experts"),
        ("kimi_linear", dict(topk_group=1), "a token goes to 3 experts and has 2 of 8"),
        (
            "kimi_linear",
            dict(moe_router_activation_func="softmax"),
            "moe_router_activation_func='softmax' .* kimi_linear",
        ),
        ("bailing_hybrid", dict(score_function="softmax"), "score_function='softmax' .* bailing_hybrid: 'sigmoid'"),
        ("nemotron_h", dict(topk_method="greedy"), "topk_method='greedy' .* nemotron_h: 'noaux_tc'"),
        ("qwen3_next", dict(scoring_func="sigmoid"), "scoring_func='sigmoid' .* qwen3_next: 'softmax'"),
    ],
)
def test_bad_configurations_are_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    expert_model(name).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        load_model(tmp_path)


def test_an_activation_that_is_not_covered_is_refused() -> None:
    base = SimpleNamespace(act_fn=torch.nn.GELU(), gate_up_proj=None, down_proj=None)
    with pytest.raises(UnsupportedModelError, match="experts have the activation GELU with a gate; covered are silu"):
        Stacked(base)
    with pytest.raises(UnsupportedModelError, match="Linear is no router that is covered: Qwen3_5MoeTopKRouter, "):
        Router(torch.nn.Linear(3, 4), None)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.0.mlp.experts.4.up_proj.weight"), "mlp.experts has no up of expert 4"),
        (lambda t: t.pop("model.layers.2.mlp.experts.6.down_proj.weight"), "mlp.experts has no down of expert 6"),
        (
            lambda t: [t.pop(n) for n in list(t) if ".experts.6." in n],
            r"gate_up has shape \[6, 36, 24\], .* \[7, 36, 24\]",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.down_proj.weight": torch.zeros(24, 17)}),
            r"expert 3 has \[24, 17\], expert 0 \[24, 18\]",
        ),
        (lambda t: t["model.layers.0.mlp.gate.weight"].fill_(torch.nan), "mlp.gate.weight in .* holds NaN"),
    ],
    ids=["up missing", "down missing", "expert missing", "other size", "NaN in a router"],
)
def test_damaged_files_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    expert_model("qwen3_5_moe").save_pretrained(tmp_path)
    edit_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path)


def test_concatenated_experts_and_the_text_of_a_model_that_sees_images(tmp_path: Path) -> None:
    """Qwen3.5 with experts as it is published: all experts of a layer in one tensor, the language model beside others."""
    theirs = expert_model("qwen3_5_moe")
    theirs.save_pretrained(tmp_path)
    expected = load_model(tmp_path)
    config = read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": config}))
    named = {n.replace("model.", "model.language_model.", 1): x for n, x in theirs.state_dict().items()}
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in named
    others = {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.patch_embed.weight": torch.zeros(2, 2)}
    save_file(named | others, tmp_path / "model.safetensors", {"format": "pt"})
    source = open_source(tmp_path)
    assert source.left_out() == "1 tensors of images and 1 tensors of layers that guess tokens ahead"
    found = source.read()
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi_linear": dict(
        architectures=["KimiLinearForCausalLM"],
        auto_map={
            "AutoConfig": "configuration_kimi.KimiLinearConfig",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
        },
        first_k_dense_replace=1,
        linear_attn_config=dict(
            full_attn_layers=[2], kda_layers=[1, 3], head_dim=12, num_heads=3, short_conv_kernel_size=4
        ),
        moe_layer_freq=1,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
    ),
    "nemotron_h": dict(
        architectures=["NemotronHForCausalLM"],
        auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        hybrid_override_pattern="ME*-E",
        num_hidden_layers=5,
        mlp_hidden_act="relu2",
    ),
}
"""What configurations of published folders say in other words; their code is never run."""
_FIELDS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "linear_head_dim",
    "linear_num_heads",
    "linear_conv_kernel_dim",
)


@pytest.mark.parametrize("family", PUBLISHED)
def test_configurations_of_remote_code_are_read_without_running_it(family: str, tmp_path: Path) -> None:
    expert_model(family).save_pretrained(tmp_path)
    expected = open_source(tmp_path).config
    config = read_json(tmp_path / "config.json")
    kept = {name: value for name, value in config.items() if name not in _FIELDS}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **PUBLISHED[family]}))
    for name in ("configuration_kimi", "configuration_nemotron_h", "modeling_kimi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the code of a model was run')\n")
    found = open_source(tmp_path).config
    assert {name: getattr(found, name, None) for name in _FIELDS} == {
        name: getattr(expected, name, None) for name in _FIELDS
    }


def test_layers_that_guess_tokens_ahead_are_left_out_and_said(tmp_path: Path) -> None:
    """Ling has them behind the others, as further layers."""
    expert_model("bailing_hybrid").save_pretrained(tmp_path)
    expected = load_model(tmp_path)
    edit_tensors(
        tmp_path, lambda t: t.update({n.replace(".2.", ".3."): x.clone() for n, x in t.items() if ".2.input" in n})
    )
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=1, num_mtp_layers=1)
    source = open_source(tmp_path)
    assert source.left_out() == "1 tensors of layers that guess tokens ahead"
    assert all(torch.equal(a, b) for a, b in zip(source.read().parameters(), expected.parameters(), strict=True))
    edit_json(tmp_path / "config.json", num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(CheckpointError, match="num_hidden_layers=3, the weights have 4 layers"):
        open_source(tmp_path)


def test_an_own_folder_is_read_again_and_corrections_stay_float32(tmp_path: Path) -> None:
    expert_model("kimi_linear").save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs", dtype="float16")
    ours.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    types = {name.endswith("_bias"): p.dtype for name, p in again.named_parameters()}
    assert types == {True: torch.float32, False: torch.float16}


def test_experts_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer the stacked tensor is held, and one of the tensors that it is made of."""
    expert_model("qwen3_5_moe").save_pretrained(tmp_path)
    held: list[str] = []
    own = checkpoint.checked

    def noted(name: str, *rest: Any, **more: Any) -> torch.Tensor:
        held.append(name)
        return own(name, *rest, **more)

    monkeypatch.setattr(checkpoint, "checked", noted)
    source = open_source(tmp_path)
    assert not held
    value = value_of(source.weights["model.layers.1.mlp.experts.gate_up"])
    assert value.shape == (7, 36, 24) and len(held) == 14 and all(".layers.1.mlp.experts." in name for name in held)


def test_experts_in_one_tensor_are_read_one_at_a_time(tmp_path: Path) -> None:
    """An export holds one of them, not a gigabyte: in turns, of the file's type."""
    whole = torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"model.layers.0.mlp.experts.gate_up_proj": whole}, tmp_path / "a.safetensors")
    tensors = stacked_experts(open_tensors([tmp_path / "a.safetensors"], torch.float32))
    found = tensors["model.layers.0.mlp.experts.gate_up"]
    assert isinstance(found, Deferred) and found.part is not None
    for number in range(5):
        one = found.part(number)
        assert one.dtype == torch.bfloat16 and torch.equal(one[::2], whole[number, :4])
        assert torch.equal(one[1::2], whole[number, 4:])
    assert torch.equal(found.read(), torch.stack([found.part(n) for n in range(5)]).float())
    whole[3, 2, 1] = torch.nan
    save_file({"model.layers.0.mlp.experts.gate_up_proj": whole}, tmp_path / "b.safetensors")
    damaged = stacked_experts(open_tensors([tmp_path / "b.safetensors"], torch.float32))
    part = damaged["model.layers.0.mlp.experts.gate_up"].part  # type: ignore[union-attr]
    assert part is not None and part(2).isfinite().all()
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        part(3)


def test_experts_of_a_stack_come_apart_as_they_were_published() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    published = {
        f"model.layers.0.mlp.experts.{number}.{part}.weight": torch.randn(shape, generator=draw)
        for number in range(3)
        for part, shape in shapes.items()
    } | {"model.layers.0.mlp.gate.weight": torch.randn(3, 6, generator=draw)}
    stacked = {name: value_of(weight) for name, weight in stacked_experts(published).items()}
    assert len(stacked) == 3
    apart = dict(single_experts(stacked.items()))
    assert apart.keys() == published.keys()
    assert all(torch.equal(apart[name], tensor) for name, tensor in published.items())
    assert dict(single_experts(published.items())) == published
