"""`still-export inspect` of a model's files: what was understood, in few lines, without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.folders.description import context_of, describe_adapter, describe_folder
from still_export.folders.families import LINEAR, NEWER, NOT_COVERED
from still_export.folders.model import check_model, is_known
from still_export.folders.sources import demand_model
from still_export.models import load

QWEN = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": 5,
    },
}
TENSORS = {
    "model.language_model.embed_tokens.weight": (5, 8),
    "model.language_model.layers.0.linear_attn.out_proj.weight": (8, 8),
    "model.language_model.layers.1.self_attn.q_proj.weight": (8, 8),
    "model.language_model.layers.1.input_layernorm.weight": (8,),
    "model.visual.patch_embed.proj.weight": (3, 3),
    "mtp.fc.weight": (8, 16),
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any], **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {n: np.zeros(v, np.float16) if isinstance(v, tuple) else v for n, v in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_model_of_text_and_images(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}<think>{% endif %}{{ tools }}"
    folder = write(tmp_path, QWEN, TENSORS, chat_template__jinja=template, pytorch_model__bin="", modeling_x__py="")
    assert describe_folder(folder) == {
        "model": "qwen3_5_text, 2 layers (1 linear, 1 full), 0.0 M parameters",
        "weights": "embedding in float16; layers in float16",
        "tokenizer": "none, so a package accepts token ids only",
        "template": f"{len(template)} characters, with tools, enable_thinking, <think>",
        "adapter": "none",
        "ignored": "1 tensors of images (--vision exports them), 1 tensors of layers that guess tokens ahead (--speculate exports them), "
        "modeling_x.py (code is never run), pytorch_model.bin (a pickle)",
    }


@pytest.mark.parametrize(
    "config, tensors, said",
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
            {"qweight": np.zeros((1, 8), np.int32), "qzeros": np.zeros((1, 1), np.int32), "scales": (1, 8)},
            "layers in 4 bits (gptq, groups of 8)",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            {"weight": np.zeros((8, 8), np.int8), "weight_scale": (8, 1)},
            "layers in 8 bits (compressed-tensors)",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            {"weight": np.zeros((32, 1), np.uint8), "weight.absmax": (1,), "weight.quant_map": (16,)},
            "layers in 4 bits (bitsandbytes)",
        ),
        ({"quant_method": "hqq"}, {"weight": (8, 8)}, "not read: quantized by hqq; gptq, awq"),
    ],
)
def test_bits_of_quantized_folders(config: dict[str, Any], tensors: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": config}
    found = describe_folder(
        write(tmp_path, values, {f"model.layers.0.mlp.up_proj.{name}": value for name, value in tensors.items()})
    )
    assert found["weights"].startswith(said)
    assert found["model"].startswith("llama, 1 layers, 0.0 M parameters; softmax layers")


def test_a_tokenizer_that_training_changed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 7}, unk_token="a"))
    made.enable_truncation(4)
    folder = write(tmp_path, QWEN, TENSORS, tokenizer_config__json={"eos_token": {"content": "b"}})
    made.save(str(folder / "tokenizer.json"))
    assert describe_folder(folder)["tokenizer"] == (
        "WordLevel, 3 tokens, eos 'b'; truncation switched off; 1 tokens beyond the model's vocabulary, texts with them are refused"
    )
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}, "added_tokens": 3}')
    assert describe_folder(folder)["tokenizer"].startswith("not read: ")


def test_adapters(tmp_path: Path) -> None:
    pair = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{n}.weight": (4, 8) for n in "AB"}
    folder = write(tmp_path, {}, {})
    save_file({name: np.zeros(shape, np.float32) for name, shape in pair.items()}, folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    assert describe_adapter(folder) == {
        "adapter": "LoRA of rank 4 in 1 layers (q_proj), times 2.0",
        "base": "org/base",
        "weights": "2 tensors in float32",
        "ignored": "nothing",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**values, "use_dora": True}))
    with pytest.raises(UnsupportedModelError, match="use_dora"):
        describe_adapter(folder)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN, TENSORS)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:40])
    with pytest.raises(CheckpointError, match=r"model\.safetensors .*truncated or damaged"):
        describe_folder(folder)

    data = data.replace(b'"shape":[5,8]', b'"shape":[5,{}]')[:-1]
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        describe_folder(folder)
    write(folder, {"model_type": "lfm2", "layer_types": 5}, TENSORS)
    with pytest.raises(CheckpointError, match="of unexpected types"):
        describe_folder(folder)


def test_what_others_linearized_is_refused(tmp_path: Path) -> None:
    """Its config.json names the base, whose tensors the folder has not."""
    folder = write(tmp_path, {"model_type": "gemma2"}, {})
    (folder / "hybrid_config.json").write_text("{}")
    for read in (describe_folder, load.open_source, check_model):
        with pytest.raises(UnsupportedModelError, match=r"hybrid_config\.json, beside a gemma2 model; covered: llama"):
            read(folder)
    with pytest.raises(UnsupportedModelError, match="is a zebra_llama model, and linearize needs a softmax model"):
        demand_model(str(folder), "linearize")


def test_names_of_families_are_those_of_the_models() -> None:
    from still_export.discovery import systems
    from still_export.models.families.linear_families import LINEAR_FAMILIES

    own = [name for name, family in LINEAR_FAMILIES.items() if not family.still_model.__module__.startswith(systems())]
    assert sorted(LINEAR) == sorted({*own} - {"lara_mini"}) and set(LINEAR) & set(NOT_COVERED) <= set(NEWER)
    assert is_known("still_llama") and is_known("lfm2") and not is_known("bert")


def test_no_slow_library_is_imported(tmp_path: Path) -> None:
    """They take seconds, as does a tokenizer of many merges."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{name}")(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(1)
    writer.add_value_length(1)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("llama"), writer.add_token_list(["<s>", "a"]), writer.add_token_scores([0.0, 1.0])
    for name in ("token_embd", *(f"blk.{layer}.attn_{part}" for layer in range(2) for part in "qk")):
        writer.add_tensor(f"{name}.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write(tmp_path / "folder", QWEN, TENSORS)
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "if 'm.gguf' in sys.argv[2]: sys.modules['tokenizers'] = None\n"
        "from still_export.cli.main import main; main()"
    )
    for path, said in (("m.gguf", "qwen3 (architecture qwen3), 2 layers"), ("folder", "qwen3_5_text, 2 layers")):
        done = subprocess.run(
            [sys.executable, "-c", program, "inspect", str(tmp_path / path), "--json"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["model"].startswith(said)


@pytest.mark.parametrize(
    "config, said",
    [
        ({"max_position_embeddings": 32768}, "32,768 tokens"),
        (
            {
                "max_position_embeddings": 4096,
                "sliding_window": 512,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "4,096 tokens, windows of 512 tokens in 1 of 2 layers",
        ),
        ({"max_position_embeddings": 64, "sliding_window": 8}, "64 tokens, windows of 8 tokens"),
        ({"max_position_embeddings": 64, "sliding_window": 8, "use_sliding_window": False}, "64 tokens"),
        ({"max_position_embeddings": 64, "sliding_window": 8, "layer_types": ["full_attention"]}, "64 tokens"),
        ({}, None),
    ],
    ids=str,
)
def test_context_and_windows(config: dict[str, Any], said: str | None) -> None:
    assert context_of(config).get("context") == said


@pytest.mark.parametrize("model_type, command", [("llama", "linearize"), ("lfm2", "--to onnx -o")])
def test_inspect_ends_with_the_next_command(model_type: str, command: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"model_type": model_type, "max_position_embeddings": 77}, {"a": (2, 2)})
    words = [sys.executable, "-m", "still_export.cli.main", "inspect", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("next: still-export ") and command in last and str(folder) in last
    assert "context: 77 tokens" in done.stdout
