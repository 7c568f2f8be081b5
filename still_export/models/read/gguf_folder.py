"""A GGUF file as a plain Hugging Face folder, for programs that read no other."""

from __future__ import annotations

from pathlib import Path


def write_folder(gguf: Path, folder: Path) -> Path:
    """Write the model of a GGUF file to `folder` in float32, with its tokenizer; returns the folder.

    Read by this project: transformers loads such a file through accelerate, and refuses to save what it loaded.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from still_export.models.read.gguf import read_gguf, read_tokenizer

    family, config, weights = read_gguf(gguf)
    tensors = {name: weight.read() for name, weight in weights.items()}
    described = AutoConfig.for_model(family, **config, dtype="float32")
    described.architectures = [f"{family.capitalize()}ForCausalLM"]
    described.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read_tokenizer(gguf).save_pretrained(folder)
    return folder
