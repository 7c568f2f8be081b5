"""What other exporters themselves write of small random models, held to the model: what is right passes, their known faults are found."""

from __future__ import annotations

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


def test_the_builder_of_genai(tmp_path: Path) -> None:
    """Its Llama is right but for padding on the left, which is said."""
    pytest.importorskip("onnxruntime_genai")
    llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(tmp_path / "model")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "genai"), "-p", "fp32", "-e", "cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = ForeignProof(tmp_path / "genai", str(tmp_path / "model")).run()
    assert report.passed and len(report.checks) >= 11, [c for c in report.checks if not c.passed]
    assert any("padding on the left does not hold" in line for line in report.unseen)
