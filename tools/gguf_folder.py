"""A GGUF file as a plain Hugging Face folder, for programs that read no other."""

from __future__ import annotations

from pathlib import Path


def write_folder(gguf: Path, folder: Path) -> Path:
    """Write the model of a GGUF file to `folder` in float32, with its tokenizer; returns the folder.

    Read by this project: transformers loads such a file through accelerate, and refuses to save what it loaded.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from still_export.gguf.tokenizer import read_tokenizer
    from still_export.models.gguf.model import read_gguf

    family, config, _, weights = read_gguf(gguf)
    values = {name: value for name, value in config.items() if name != "model_type"}
    described = AutoConfig.for_model(family, **values, dtype="float32")
    described.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    described.save_pretrained(folder)
    tensors = {name: weight.read() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read_tokenizer(gguf).save_pretrained(folder)
    return folder
