"""What the words in capitals and the file names of the guide stand for in a test: small things under exactly these names."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

from still_export.mixers.config import StillConfig
from still_export.models.load import load_model
from tests.docs.pages import ROOT
from tests.still_export.training import byte_tokenizer, make_base, make_text

CONTEXT = 1200
"""Tokens of the models' context: enough for the shortest length that the commands of the guide measure."""
SHORT_CONTEXT = 400
"""Where no command names a length, as in README: rows of training are as long as the context."""

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"

RECIPE = """
base: BASE
texts: [corpus.txt]
chunk_size: 16
salient_per_chunk: 2
sequence_length: 64
batch_size: 2
transfer_steps: 2
finetune_steps: 2
validation_rows: 2
device: cpu
"""


def make_stand_ins(folder: Path, context: int = CONTEXT, small: bool = True) -> None:
    """Write them: MODEL, BASE, TASK, texts, a recipe of a few steps, and links to the folders of a clone that commands name.

    small: MODEL is assets/small with a chat template, whose lines the guide shows; else an untrained one of two layers.
    """
    sizes = dict(hidden_size=96, intermediate_size=64, head_dim=16)  # blocks of 32 divide them
    make_base(folder / "BASE", max_position_embeddings=context, num_hidden_layers=2, **sizes)
    make_text(folder / "corpus.txt", words=13_000)
    make_text(folder / "held_out.txt", seed=1)
    make_text(folder / "letter.txt", words=60)
    (folder / "recipe.yaml").write_text(RECIPE)
    if small:
        shutil.copytree(ROOT / "assets/small", folder / "MODEL")
        (folder / "MODEL/chat_template.jinja").write_text(CHAT)
    else:
        model = load_model(folder / "BASE", attach_untrained=True, still_config=StillConfig(chunk_size=32))
        model.save_pretrained(folder / "MODEL")
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder / "MODEL")
    weight = "model.layers.0.self_attn.q_proj.weight"
    make_adapter(folder / "TASK", weight, load_file(folder / "MODEL/model.safetensors")[weight].float())
    for name in ("tools", "assets", "plugins"):
        (folder / name).symlink_to(ROOT / name)


def make_adapter(folder: Path, name: str, weight: torch.Tensor) -> None:
    """Write TASK as PEFT does: a pair of rank 2 beside one weight."""
    module = f"base_model.model.{name.removesuffix('.weight')}"
    outputs, inputs = weight.shape
    pair = {"lora_A": torch.randn(2, inputs) * 0.1, "lora_B": torch.randn(outputs, 2) * 0.1}
    folder.mkdir()
    save_file({f"{module}.{part}.weight": x for part, x in pair.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))


def make_decoder(folder: Path) -> None:
    """Write DECODER: what transformers' own exporter makes of BASE."""
    base = AutoModelForCausalLM.from_pretrained(folder / "BASE", dtype=torch.float32).eval()
    ids = torch.randint(3, base.config.vocab_size, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    OnnxExporter().export_for_generation(base, inputs, config=OnnxConfig(dynamic=True)).save_pretrained(
        folder / "DECODER"
    )
