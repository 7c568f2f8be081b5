"""What other exporters themselves write of small random models, held to the model: what is right passes, their known faults are found."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from still_export.proof.foreign import ForeignProof, ForeignReport
from tests.still_export.training import byte_tokenizer

pytestmark = pytest.mark.long
SIZES: dict[str, Any] = dict(
    vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def by_transformers(model: Any, folder: Path) -> ForeignReport:
    """Its graphs of prompts and of steps, traced over 9 tokens with dynamic axes."""
    exporters = pytest.importorskip("transformers.exporters")
    model.save_pretrained(folder / "model")
    ids = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    steps = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=None)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    made = exporters.OnnxExporter().export_for_generation(
        model, given, exporters.OnnxConfig(dynamic=True), generation_config=steps
    )
    made.save_pretrained(folder / "onnx")
    return ForeignProof(folder / "onnx", str(folder / "model")).run()


def test_transformers_llama_is_right(tmp_path: Path) -> None:
    report = by_transformers(llama(), tmp_path)
    assert report.passed and len(report.checks) >= 8, [c for c in report.checks if not c.passed]
    assert any(line.startswith("a prompt in pieces: its graph of steps") for line in report.unseen)


def test_transformers_linear_attention_ends_with_the_traced_chunk(tmp_path: Path) -> None:
    families = pytest.importorskip("transformers.models.qwen3_5")
    torch.manual_seed(0)
    linear = {
        f"linear_{name}": n
        for name, n in (("num_key_heads", 2), ("num_value_heads", 2), ("key_head_dim", 8), ("value_head_dim", 8))
    }
    config = families.Qwen3_5TextConfig(
        **SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"], **linear
    )
    report = by_transformers(families.Qwen3_5ForCausalLM(config).eval(), tmp_path)
    found = {check.name: check.passed for check in report.checks}
    assert not report.passed and not found["a prompt of 131"] and not found["a prompt of 65"], report.checks


def by_genai(model: Any, folder: Path) -> ForeignReport:
    """What its builder makes of `model` in float32."""
    pytest.importorskip("onnxruntime_genai")
    model.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(folder / "model")]
    done = subprocess.run(
        [*command, "-o", str(folder / "genai"), "-p", "fp32", "-e", "cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return ForeignProof(folder / "genai", str(folder / "model")).run()


@pytest.mark.parametrize("scale", [1, 40])
def test_linear_attention_of_genai_forgets_epsilon_and_reads_padding(tmp_path: Path, scale: int) -> None:
    """Queries and keys are divided by their length without the model's 1e-6 under the root: seen where they are short. Padding enters
    the states."""
    families = pytest.importorskip("transformers.models.qwen3_5")
    torch.manual_seed(0)
    linear = {
        f"linear_{name}": n
        for name, n in (("num_key_heads", 2), ("num_value_heads", 2), ("key_head_dim", 16), ("value_head_dim", 16))
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    kinds = {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**rope, "mrope_interleaved": True},
    }
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = families.Qwen3_5Config(text_config={**SIZES, **linear, **kinds, "head_dim": 16}, vision_config=images)
    model = families.Qwen3_5ForConditionalGeneration(config).eval()
    model.model.language_model.layers[0].linear_attn.in_proj_qkv.weight.data.mul_(scale)
    found = {check.name: check.passed for check in by_genai(model, tmp_path).checks}
    padding = {name for name in found if name.startswith("padding")}
    assert len(padding) == 2 and not any(found[name] for name in padding), found
    assert {found[name] for name in set(found) - padding} == {scale == 40}, found


def test_the_builder_of_genai(tmp_path: Path) -> None:
    """Its Llama is right but for padding on the left, which is said."""
    report = by_genai(llama(), tmp_path)
    assert report.passed and len(report.checks) >= 11, [c for c in report.checks if not c.passed]
    assert any("padding on the left does not hold" in line for line in report.unseen)
