"""The model's files by another reader: families of every kind are read alike, and what a loader does wrong is seen."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from still_export.folders.model import ModelFolder
from still_export.graph.options import ExportOptions
from still_export.models import load
from still_export.models.read.source import find_source
from still_export.models.read.weights import value_of
from still_export.proof import other_readers
from still_export.proof.source_reader import check_source
from still_export.proof.verdict import Verdict
from tests.still_export.expert_models import expert_model
from tests.still_export.files import edit_json
from tests.still_export.linear_models import linear_model
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.radlads_models import FORMS
from tests.still_export.tiny import CHUNK, plain_model, still_model

STILL = {"chunk_size": CHUNK, "salient_per_chunk": 3}
SIZES: dict[str, Any] = dict(hidden_size=64, head_dim=16, num_attention_heads=4)
"""Heads as transformers takes them of GGUF files."""


def asked(path: Path, *overlays: Path, attach: bool = True, **still: Any) -> Verdict:
    options = ExportOptions(
        str(path),
        attach_untrained=attach,
        dtype="float32",
        overlays=tuple(map(str, overlays)),
        still={**(STILL if attach else {}), **still},
    )
    return check_source(find_source(options), options, path, overlays)


def wrong(verdict: Verdict) -> str:
    assert not verdict.passed, verdict
    return " ".join(map(str, verdict.checks))


@pytest.mark.parametrize("family", ["qwen2", "phi3", "qwen3_moe", "gemma3_text"])
def test_softmax_families_are_read_alike(family: str, tmp_path: Path) -> None:
    """Fused and stacked weights among them; logits as transformers has them."""
    plain_model(family, torch.float32).save_pretrained(tmp_path)
    verdict = asked(tmp_path)
    assert verdict.passed and len(verdict.checks) == 2, verdict
    assert verdict.checks[1].value is not None and verdict.checks[1].value < 1e-5


def test_a_folder_that_wants_outputs_without_names_is_read_alike(tmp_path: Path) -> None:
    """transformers' own layers fail where config.json says return_dict false."""
    linear_model("lfm2").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", return_dict=False, torchscript=True)
    verdict = asked(tmp_path, attach=False)
    assert verdict.passed and len(verdict.checks) == 2 and not verdict.not_asked, verdict


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_adapters_of_models_with_images_are_read_alike(prefix: str, tmp_path: Path) -> None:
    """PEFT leaves out what has other names, and only warns."""
    model = linear_model("qwen3_5_text")
    model.save_pretrained(tmp_path / "base")
    name = next(name for name, _ in model.named_parameters() if name.endswith("mlp.up_proj.weight"))
    rows, columns = dict(model.named_parameters())[name].shape
    module = "base_model.model." + name.removesuffix(".weight").replace("model.", prefix, 1)
    (tmp_path / "lora").mkdir()
    pair = {f"{module}.lora_A.weight": torch.randn(4, columns), f"{module}.lora_B.weight": torch.randn(rows, 4)}
    save_file(pair, tmp_path / "lora" / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(said))
    verdict = asked(tmp_path / "base", tmp_path / "lora", attach=False)
    assert verdict.passed and len(verdict.checks) == 2 and not verdict.not_asked, verdict


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "kimi_linear"])
def test_linear_families_are_read_alike(family: str, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path)
    verdict = asked(tmp_path, attach=False)
    assert verdict.passed and len(verdict.checks) == 2 and not verdict.not_asked, verdict


@pytest.mark.parametrize("still", [{"cache": "int8"}, {"capacity_tokens": 32}], ids=str)
def test_choices_of_running_are_no_part_of_what_is_read(still: dict[str, Any], tmp_path: Path) -> None:
    """Codes of a small cache alone move logits further than two readers may differ."""
    linear_model("qwen3_5_text").save_pretrained(tmp_path)
    verdict = asked(tmp_path, attach=False, **still)
    assert verdict.passed and len(verdict.checks) == 2 and not verdict.not_asked, verdict


@pytest.mark.parametrize("name", ["qwen3_5_moe", "lfm2_moe"])
@pytest.mark.parametrize("zero", [True, False])
def test_experts_with_equal_router_rows_are_read_alike(
    name: str, zero: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing defines which of them is taken; a fault of reading is still seen."""
    model = expert_model(name)
    with torch.no_grad():
        for _, router in [(n, w) for n, w in model.named_parameters() if n.endswith(".gate.weight")]:
            router.mul_(0) if zero else router[3:].copy_(router[1].expand_as(router[3:]))
    model.save_pretrained(tmp_path)
    verdict = asked(tmp_path, attach=False)
    assert verdict.passed and len(verdict.checks) == 2, verdict
    assert any("equal rows" in line for line in verdict.not_asked), verdict
    monkeypatch.setattr("still_export.proof.source_reader._check_tensors", lambda *_: Verdict())
    real = other_readers.other_reading

    def shifted(*given: Any) -> Any:
        found = real(*given)
        next(w for n, w in found.tensors.items() if n.endswith("lm_head.weight"))[0].add_(1)
        return found

    monkeypatch.setattr("still_export.proof.source_reader.other_reading", shifted)
    assert "logits differ" in wrong(asked(tmp_path, attach=False))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text"])
def test_what_does_not_fit_into_memory_is_streamed(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = family == "qwen3_moe"
    (plain_model(family, torch.float32) if attach else linear_model(family)).save_pretrained(tmp_path)
    monkeypatch.setattr(other_readers, "ROOM", 1e-9)
    verdict = asked(tmp_path, attach=attach)
    assert verdict.passed and verdict.checks[1].value is not None and verdict.checks[1].value < 1e-5, verdict
    monkeypatch.setattr(other_readers, "find_spec", lambda _: None)
    said = asked(tmp_path, attach=attach)
    assert said.passed and any("pip install accelerate" in line for line in said.not_asked), said


@pytest.mark.parametrize("family", ["gla", "flux_qwen3", "mirrorla", "rwkv7"])
def test_families_without_a_class_say_so(family: str, tmp_path: Path) -> None:
    linear_model(family).save_pretrained(tmp_path)
    verdict = asked(tmp_path, attach=False)
    assert verdict.passed and any("logits by another program" in line for line in verdict.not_asked), verdict


def test_a_folder_of_this_project_is_read_by_safetensors(tmp_path: Path) -> None:
    still_model("llama", torch.float32).save_pretrained(tmp_path)
    verdict = asked(tmp_path, attach=False)
    assert verdict.passed and len(verdict.checks) == 1 and len(verdict.not_asked) == 1, verdict


def test_no_more_is_left_out_than_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that does not read nine of its tensors a tenth one is seen."""
    family, sizes = FORMS["three"]
    linear_model(family, **sizes).save_pretrained(tmp_path)
    assert asked(tmp_path, attach=False).passed
    read = other_readers._read_safetensors
    more = {"model.layers.1.self_attn.decay.weight": torch.ones(3, 5)}
    monkeypatch.setattr(other_readers, "_read_safetensors", lambda path: read(path) | more)
    assert "is in the file and no part of the model" in wrong(asked(tmp_path, attach=False))


def test_weights_of_another_file_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_model("llama", torch.float32).save_pretrained(tmp_path)
    other = {name: tensor + 1 for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(other, tmp_path / "older.safetensors")
    monkeypatch.setattr(ModelFolder, "weights", property(lambda folder: [folder.path / "older.safetensors"]))
    assert "transformers" in wrong(asked(tmp_path))


@pytest.mark.parametrize("part", ["bias", "scale"])
def test_what_is_lost_of_an_adapter_is_seen(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained biases, and the scale of rank-stabilized LoRA."""
    import peft

    plain_model("qwen2", torch.float32).save_pretrained(tmp_path / "base")
    form = {"bias": "lora_only"} if part == "bias" else {"use_rslora": True}
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "v_proj"], **form)  # type: ignore[arg-type]
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
    model.save_pretrained(tmp_path / "adapter")
    right = asked(tmp_path / "base", tmp_path / "adapter")
    assert right.passed and "PEFT" in right.checks[0].name, right
    if part == "bias":
        read: Callable[..., Any] = load.open_tensors

        def without(files: list[Path], *more: Any) -> dict[str, Any]:
            found = read(files, *more)
            lost = [n for n in found if n.endswith(".bias") and "adapter" in files[0].name]
            return {name: tensor for name, tensor in found.items() if name not in lost}

        monkeypatch.setattr(load, "open_tensors", without)
    else:
        merge = load.convert.merge_lora

        def plain(tensors: Any, adapter: Mapping[str, Any] | None, *more: str) -> Any:
            return merge(tensors, None if adapter is None else {**adapter, "use_rslora": False}, *more)

        monkeypatch.setattr(load.convert, "merge_lora", plain)
    assert "PEFT" in wrong(asked(tmp_path / "base", tmp_path / "adapter"))
    monkeypatch.undo()
    monkeypatch.setattr(other_readers, "ROOM", 1e-9)
    large = asked(tmp_path / "base", tmp_path / "adapter")
    assert large.passed and any("adapters are merged" in line for line in large.not_asked), large


def test_kernels_of_installed_packages_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes those of fla and mamba-ssm wherever they can be imported; on a CPU they fail."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

    def of_a_gpu(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("cannot be accessed from Triton (cpu tensor?)")

    installed = ModuleType("planted_kernels")
    installed.doubled = of_a_gpu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_kernels", installed)

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    chosen = use_kernel_func_from_hub_with_fallback("doubled", "planted_kernels")(doubled)
    model = plain_model("llama")
    model.model.norm.register_forward_hook(lambda module, inputs, output: chosen(output))
    ids = torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError):
        model(input_ids=ids)
    assert other_readers.logits_of(model)(ids).shape == (3, model.config.vocab_size)


@pytest.mark.parametrize("fault", ["", "positions", "heads"])
def test_faults_of_reading_gguf_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that are not scaled, and rows of heads that stay in the file's order."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", plain_model("llama", torch.float32, **SIZES))
    if not fault:
        verdict = asked(tmp_path / "m.gguf")
        assert verdict.passed and len(verdict.checks) == 2, verdict
        return
    read: Callable[..., Any] = load.read_gguf

    def other(*given: Any, **more: Any) -> Any:
        kind, config, generation, tensors = read(*given, **more)
        if fault == "positions":
            return (
                kind,
                {**config, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
                generation,
                tensors,
            )
        name = "model.layers.1.self_attn.q_proj.weight"
        moved = replace(tensors[name], read=lambda: value_of(tensors[name]).roll(1, 0))
        return kind, config, generation, {**tensors, name: moved}

    monkeypatch.setattr(load, "read_gguf", other)
    said = wrong(asked(tmp_path / "m.gguf"))
    assert ("q_proj" in said) if fault == "heads" else ("logits" in said), said


def test_a_scaled_gguf_file_is_read_by_its_own_keys(tmp_path: Path) -> None:
    """transformers leaves the scaling out; another architecture than those that are read alike says so."""
    add = lambda writer: writer.add_float32("llama.rope.scaling.factor", 4.0)  # noqa: E731
    write_gguf(tmp_path / "m.gguf", plain_model("llama", torch.float32, **SIZES), extra=add)
    verdict = asked(tmp_path / "m.gguf")
    assert verdict.passed and len(verdict.checks) == 2, verdict
    write_gguf(tmp_path / "g.gguf", plain_model("gemma3_text", torch.float32))
    verdict = asked(tmp_path / "g.gguf")
    assert verdict.passed and not verdict.checks and "gemma3" in verdict.not_asked[0], verdict


def test_exchanged_layers_of_a_family_without_a_class_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear_model("gla").save_pretrained(tmp_path)
    read: Callable[..., Any] = load.open_tensors

    def exchanged(*given: Any) -> dict[str, Any]:
        found = read(*given)
        first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight"
        found[first], found[second] = found[second], found[first]
        return found

    monkeypatch.setattr(load, "open_tensors", exchanged)
    assert "gate_proj" in wrong(asked(tmp_path, attach=False))
