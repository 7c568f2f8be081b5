"""Folders with more files than a model has: transformers' choice, adapters by what they set, settings that it reads with a warning."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from still_export.errors import CheckpointError, ConfigError, UnsupportedModelError
from still_export.folders.adapter_config import lora_scale, read_adapter_config
from still_export.folders.files import Files
from still_export.folders.model import ModelFolder
from still_export.models.build import read_generation
from still_export.models.description import describe_model, warn_of_settings
from still_export.models.families.linear_families import LINEAR_FAMILIES
from still_export.models.load import load_model, load_tokenizer, open_source
from still_export.models.read.weights import value_of
from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.files import edit_json, read_json
from tests.still_export.linear_models import linear_model
from tests.still_export.tiny import plain_model, random_ids
from tests.still_export.training import byte_tokenizer

Tensors = dict[str, Tensor]
SINGLE = "model.safetensors"


def shards(folder: Path, tensors: Tensors, index: bool = True, extra: Tensors | None = None) -> None:
    names, places = sorted(tensors), {}
    for part in range(2):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file(
            {**{n: tensors[n] for n in names[part::2]}, **(extra or {})}, folder / file, metadata={"format": "pt"}
        )
        places.update({n: file for n in names[part::2]})
    if index:
        content = json.dumps({"metadata": {}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(content)


def halved(tensors: Tensors) -> Tensors:
    return {name: tensor / 2 for name, tensor in tensors.items()}


READ: dict[str, Callable[[Path, Tensors], Any]] = {
    "an index of other shards beside one file": lambda d, t: shards(d, halved(t)),
    "shards beside one file": lambda d, t: shards(d, halved(t), index=False),
    "another name beside one file": lambda d, t: save_file(halved(t), d / "a_model.safetensors"),
    "Mistral's own names": lambda d, t: save_file(
        {"layers.0.attention.wq.weight": torch.ones(2)}, d / "consolidated.safetensors"
    ),
    "an optimizer": lambda d, t: save_file({"state.0.exp_avg": torch.ones(2)}, d / "optimizer.safetensors"),
    "an adapter without its configuration": lambda d, t: save_file(
        {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 24)}, d / "adapter_model.safetensors"
    ),
    "shards without an index": lambda d, t: (shards(d, t, index=False), (d / SINGLE).unlink()),
    "shards and others": lambda d, t: (shards(d, t), (d / SINGLE).unlink(), save_file(halved(t), d / "zz.safetensors")),
}
REFUSED: dict[str, tuple[Callable[[Path, Tensors], Any], str]] = {
    "shards without an index, one of them lost": (
        lambda d, t: (
            shards(d, t, index=False),
            (d / SINGLE).unlink(),
            (d / "model-00002-of-00002.safetensors").rename(d / "model-00003-of-00003.safetensors"),
        ),
        r"neither model\.safetensors nor",
    ),
    "shards without an index, of two models": (
        lambda d, t: (shards(d, t, index=False, extra={"a": torch.ones(1)}), (d / SINGLE).unlink()),
        r"a is in model-00001-of-00002\.safetensors and in model-00002-of-00002\.safetensors",
    ),
    "a tensor in two shards": (
        lambda d, t: (shards(d, t, extra={"model.norm.weight": torch.ones(24)}), (d / SINGLE).unlink()),
        r"model\.norm\.weight is in model-00001.* and in model-00002",
    ),
    "a tensor that the index does not name": (
        lambda d, t: (shards(d, t, extra={"model.x": torch.ones(1)}), (d / SINGLE).unlink()),
        r"model\.x is in",
    ),
    "a tensor under two names": (
        lambda d, t: save_file({**t, "norm.weight": torch.ones(24)}, d / SINGLE),
        r"model\.norm\.weight twice, as .*model\.norm\.weight.*norm\.weight",
    ),
    "a tensor under two names of a model with images": (
        lambda d, t: save_file({**t, "model.language_model.norm.weight": torch.ones(24)}, d / SINGLE),
        r"model\.norm\.weight twice, as ",
    ),
    "a link to weights that are gone": (
        lambda d, t: ((d / SINGLE).unlink(), (d / SINGLE).symlink_to("../blobs/0")),
        r"model\.safetensors is a link to \.\./blobs/0, which is not there",
    ),
    "a link to settings that are gone": (
        lambda d, t: ((d / "generation_config.json").unlink(), (d / "generation_config.json").symlink_to("nowhere")),
        r"generation_config\.json is a link to nowhere",
    ),
    "a byte order mark": (
        lambda d, t: (d / "config.json").write_bytes(b"\xef\xbb\xbf" + (d / "config.json").read_bytes()),
        r"config\.json begins with a byte order mark",
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("base")
    plain_model("llama", torch.float32).save_pretrained(folder)
    return folder, load_file(folder / SINGLE)


def copied(base: Path, folder: Path) -> Path:
    for file in base.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("name", READ)
def test_the_files_are_those_that_transformers_reads(base: tuple[Path, Tensors], tmp_path: Path, name: str) -> None:
    READ[name](copied(base[0], tmp_path), base[1])
    found = open_source(tmp_path, attach_untrained=True).weights["model.layers.1.mlp.up_proj.weight"].read()
    torch.testing.assert_close(found, base[1]["model.layers.1.mlp.up_proj.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_contradict_each_other(base: tuple[Path, Tensors], tmp_path: Path, name: str) -> None:
    REFUSED[name][0](copied(base[0], tmp_path), base[1])
    with pytest.raises(CheckpointError, match=REFUSED[name][1]):
        load_model(tmp_path, attach_untrained=True)


WRAPPED: dict[str, Callable[[str], str]] = {
    "the base without its prefix": lambda name: name.removeprefix("model.").removeprefix("backbone."),
    "a model inside of one": lambda name: f"model.{name}",
    "a compiled one": lambda name: f"_orig_mod.{name}",
    "one of several processes": lambda name: f"module.{name}",
}


@pytest.mark.parametrize("family", ["llama", "lfm2", "mamba2", "granitemoehybrid"])
@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_of_a_wrapped_model_are_the_models(family: str, wrapper: str, tmp_path: Path) -> None:
    """transformers reads the first two."""
    model = plain_model(family, torch.float32) if family == "llama" else linear_model(family)
    model.save_pretrained(tmp_path)
    attach = family == "llama"
    right = open_source(tmp_path, attach_untrained=attach).weights
    named = {WRAPPED[wrapper](name): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    save_file(named, tmp_path / SINGLE, {"format": "pt"})
    found = open_source(tmp_path, attach_untrained=attach).weights
    assert found.keys() == right.keys()
    assert all(torch.equal(value_of(found[name]), value_of(right[name])) for name in right)


def test_one_file_of_any_name_is_the_models(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "maps.safetensors")
    assert ModelFolder(tmp_path).weights == [tmp_path / "maps.safetensors"]


def test_faults_of_a_configuration_are_not_the_tokenizers(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": "many"}))
    with pytest.raises(Exception, match=r"config\.json") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer" not in str(caught.value)


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [5, 6]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [5]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_qalora": True}, "use_qalora"),
        ({"of_next_year": 0.5}, "of_next_year"),
        ({"of_next_year": 0}, "of_next_year"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"init_lora_weights": "corda"}, "corda"),
        ({"peft_type": "VERA", "r": 0}, "VERA"),
    ],
)
def test_an_adapter_of_what_is_not_understood(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**LORA, **more}))
    with pytest.raises(UnsupportedModelError, match=said):
        read_adapter_config(Files(path.parent))


def test_an_adapter_of_what_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    off = {
        "use_dora": False,
        "lora_bias": False,
        "loftq_config": {},
        "of_next_year": None,
        "init_lora_weights": "gaussian",
    }
    path.write_text(json.dumps({**LORA, **off, "alpha_pattern": {"q_proj": 32}, "rank_pattern": {"q_proj": 2}}))
    adapter = read_adapter_config(Files(path.parent))
    assert lora_scale(adapter, "model.layers.0.self_attn.q_proj", 2) == 16
    assert lora_scale(adapter, "model.layers.0.self_attn.v_proj", 4) == 4
    assert lora_scale({**adapter, "use_rslora": True}, "model.layers.0.self_attn.v_proj", 4) == 8
    path.write_text(json.dumps({name: value for name, value in LORA.items() if name != "lora_alpha"}))
    assert (
        lora_scale(read_adapter_config(Files(path.parent)), "model.layers.0.self_attn.q_proj", 4) == 2
    )  # PEFT's own lora_alpha


@pytest.mark.parametrize("theirs", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("own", ["model.", "model.language_model.", "language_model.model."])
def test_an_adapter_of_the_language_model_alone_or_of_the_whole(own: str, theirs: str, tmp_path: Path) -> None:
    """Trained by AutoModelForCausalLM, it has other prefixes than by the class of the folder, and its patterns are of its own names."""
    linear_model("qwen3_5_text").save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / SINGLE
    tensors = load_file(path)
    save_file({name.replace("model.", own, 1): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    module = next(n for n in tensors if n.endswith("mlp.up_proj.weight")).removesuffix(".weight")
    norm = module.replace("mlp.up_proj", "input_layernorm.weight")
    rows, columns = tensors[f"{module}.weight"].shape
    a, b, trained = torch.randn(4, columns), torch.randn(rows, 4), torch.randn_like(tensors[norm])
    name, saved = (f"base_model.model.{part.replace('model.', theirs, 1)}" for part in (module, norm))
    (tmp_path / "lora").mkdir()
    pair = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b, saved: trained}
    save_file(pair, tmp_path / "lora" / "adapter_model.safetensors")
    pattern = {f"{module.replace('model.', theirs, 1)}": 8}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({**LORA, "alpha_pattern": pattern}))
    weights = open_source(tmp_path / "base", overlays=[tmp_path / "lora"]).weights
    torch.testing.assert_close(value_of(weights[f"{module}.weight"]), tensors[f"{module}.weight"] + 2 * b @ a)
    assert torch.equal(value_of(weights[norm]), trained)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6, "top_p": 0.95},
        {"do_sample": False, "temperature": 0.0, "top_k": 20},
        {"num_beams": 1, "early_stopping": True, "length_penalty": 0.8},
        {"bos_token_id": [1], "pad_token_id": [2, 3], "eos_token_id": [2, 3]},
    ],
    ids=str,
)
def test_settings_with_a_warning_are_kept(tmp_path: Path, settings: dict[str, Any]) -> None:
    read_generation(settings).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    single = {n: v[0] for n, v in settings.items() if isinstance(v, list) and n != "eos_token_id"}
    assert {**settings, **single}.items() <= saved.items()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}, "repetition_penalty=1.1, no_repeat_ngram_size=3"),
        ({"suppress_tokens": [5], "min_new_tokens": 2}, r"suppress_tokens=\[5\], min_new_tokens=2"),
        ({"repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": [], "temperature": 0.6, "eos_token_id": 2}, ""),
    ],
)
def test_settings_that_no_program_here_applies_are_said(
    settings: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_settings(read_generation(settings))
    assert bool(re.search(f"sets {said}: the package keeps it", caplog.text)) == bool(said)


def test_settings_that_are_wrong() -> None:
    for wrong in ({"max_new_tokens": -1}, {"early_stopping": "perhaps"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read_generation(wrong)


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_negative_ids_stand_for_none(place: str, tmp_path: Path) -> None:
    """As in the first Llama's config.json."""
    linear_model("lfm2").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    if not (path := tmp_path / place).is_file():
        path.write_text("{}")
    for ends, known in ((-1, []), ([5, -1], [5])):
        edit_json(path, eos_token_id=ends, pad_token_id=-1, bos_token_id=-1)
        assert describe_model(load_model(tmp_path))["eos_token_ids"] == known


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "nemotron_h"])
def test_a_model_whose_tokens_see_those_behind_is_refused(family: str, tmp_path: Path) -> None:
    """transformers computes it with masks of both directions."""
    model = linear_model(family) if family in LINEAR_FAMILIES else plain_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", is_causal=False)
    with pytest.raises(UnsupportedModelError, match="is_causal=false"):
        load_model(tmp_path, attach_untrained=family not in LINEAR_FAMILIES)


@pytest.mark.parametrize("family", ["llama", "mistral", "phi3", "qwen2"])
def test_fields_of_outputs_and_of_other_classes_change_nothing(family: str, tmp_path: Path) -> None:
    """transformers' classes of the first three ignore layer_types."""
    model = plain_model(family, torch.float32)
    model.save_pretrained(tmp_path)
    given = dict(layer_types=["full_attention"] * 3, return_dict=False, torchscript=True, output_hidden_states=True)
    edit_json(tmp_path / "config.json", **given)
    found = load_model(tmp_path, attach_untrained=True)(ids := random_ids(1, 12)).logits
    torch.testing.assert_close(found, model(ids).logits)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("lfm2", "conv_L_cache", -1),
        ("lfm2", "rope_parameters", {"rope_type": "default", "rope_theta": None}),
        ("qwen3_5_text", "linear_num_value_heads", -1),
        ("granitemoehybrid", "embedding_multiplier", None),
        ("granitemoehybrid", "logits_scaling", "x"),
        ("nemotron_h", "time_step_limit", []),
    ],
)
def test_values_that_no_model_has_are_errors_of_the_configuration(
    family: str, field: str, value: Any, tmp_path: Path
) -> None:
    linear_model(family).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **{field: value})
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


def test_padding_beyond_the_vocabulary_is_named(tmp_path: Path) -> None:
    plain_model("llama", torch.float32).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", pad_token_id=read_json(tmp_path / "config.json")["vocab_size"])
    with pytest.raises(ConfigError, match=r"pad_token_id=\d+ in config.json is no token of the"):
        load_model(tmp_path, attach_untrained=True)


BY_MODULES = (
    "nemotron_h",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "falcon_h1",
    "bamba",
)


@pytest.mark.parametrize("family", BY_MODULES)
def test_adapters_by_names_of_modules_or_of_files(family: str, tmp_path: Path) -> None:
    """PEFT writes names of modules; files of a family may have others. Its pairs change the weights that they are trained for."""
    model = expert_model(family) if family in SPARSE else linear_model(family)
    model.save_pretrained(tmp_path / "m")
    stored = load_file(tmp_path / "m" / SINGLE)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    linear = {name: module for name, module in linear.items() if "lm_head" not in name and "expert" not in name}
    plain = open_source(tmp_path / "m")
    before = {name: value_of(weight) for name, weight in plain.weights.items()}
    kept = {id(module.weight): module.weight.detach().clone() for module in linear.values()}

    def changed(names: dict[str, torch.nn.Linear]) -> dict[str, Tensor]:
        pairs, generator = {}, torch.Generator().manual_seed(0)
        for name, module in names.items():
            outputs, inputs = module.weight.shape
            pairs[f"base_model.model.{name}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
            pairs[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
        (tmp_path / "a").mkdir(exist_ok=True)
        save_file(pairs, tmp_path / "a/adapter_model.safetensors")
        (tmp_path / "a/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
        found = open_source(tmp_path / "m", overlays=[tmp_path / "a"]).weights
        return {name: value_of(weight) - before[name] for name, weight in found.items()}

    deltas = changed(linear)
    assert sum(bool(delta.any()) for delta in deltas.values()) == len(linear)
    of_files = {
        name.removesuffix(".weight"): module
        for name, tensor in stored.items()
        for module in linear.values()
        if tensor.shape == module.weight.shape and torch.equal(tensor, kept[id(module.weight)])
    }
    ordered = {
        next(n for n, m in of_files.items() if m is module): module
        for module in linear.values()
        if module in of_files.values()
    }
    if len(ordered) == len(linear):
        again = changed(ordered)
        assert all(torch.equal(again[name], delta) for name, delta in deltas.items())
