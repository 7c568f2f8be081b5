"""What was understood of a GGUF file, in few lines."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from still_export.errors import ModelNotFoundError, StillExportError
from still_export.models.gguf.container import Container, open_gguf
from still_export.models.gguf.model import read_gguf
from still_export.models.gguf.quants import BLOCKS
from still_export.models.gguf.shared import BLOCK
from still_export.models.gguf.tensors import bits_of
from still_export.models.gguf.tokenizer import read_tokenizer
from still_export.models.read.super_blocks import FORMS

_KEPT = {*BLOCKS, *FORMS}
"""Types whose blocks packages keep (docs/reference/quantization.md)."""


def quantize_policy(file: Container) -> str | None:
    """The policy of --quantize that keeps most of a file's blocks: by the bits that most of its numbers have; None: they are floats."""
    counts: Counter[int] = Counter()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            counts[bits_of(tensor.tensor_type.name)] += int(tensor.n_elements)
    bits = counts.most_common(1)[0][0] if counts else 0
    return None if bits == 0 else "int4" if bits <= 4 else "int8"


def describe(path: Path) -> dict[str, str]:
    """What a file is: model, weights, tokenizer, template, and what is left out; a line each.

    Raises:
        StillExportError: The model cannot be read.
    """
    file = open_gguf(path)
    model_type, config, _ = read_gguf(path)
    return {
        "model": _model(file, model_type, config),
        "weights": _weights(file),
        "tokenizer": _tokenizer(path),
        "template": _template(file),
        "left out": _left_out(file, config),
    }


def _model(file: Container, model_type: str, config: dict[str, Any]) -> str:
    kinds = Counter(config.get("layer_types") or config.get("layers_block_type") or ())
    mixed = ", ".join(f"{count} {kind.removesuffix('_attention').replace('_', ' ')}" for kind, count in kinds.items())
    layers = f"{config['num_hidden_layers']} layers" + (f" ({mixed})" if mixed else "")
    numbers = sum(int(tensor.n_elements) for tensor in file.tensors.values())
    parts = f", in {len(file.parts)} files" if len(file.parts) > 1 else ""
    return f"{model_type} (architecture {file.architecture}), {layers}, {numbers / 1e6:,.1f} M parameters{parts}"


def _weights(file: Container) -> str:
    """Types by kind of tensor."""
    found: dict[str, Counter[str]] = {}
    for name, tensor in file.tensors.items():
        match = BLOCK.fullmatch(name)
        part = match[2] if match else name
        kind = "experts" if "_exps" in part else "layers" if match else part.removesuffix(".weight")
        if len(tensor.shape) > 1:
            found.setdefault(kind, Counter())[tensor.tensor_type.name] += 1
    said = []
    for kind, types in found.items():
        named = ", ".join(f"{count} {name}" if len(types) > 1 else name for name, count in types.most_common())
        said.append(f"{kind} in {named}")
    coded = {name for types in found.values() for name in types if bits_of(name)}
    lost = sorted(coded - _KEPT)
    said.append(f"dequantized, as no kernel reads them: {', '.join(lost)}" if lost else "")
    return "; ".join(part for part in said if part)


def _tokenizer(path: Path) -> str:
    try:
        tokenizer = read_tokenizer(path)
    except ModelNotFoundError as error:
        return f"none: {error}"
    except StillExportError as error:
        return f"not read: {error}"
    file = open_gguf(path)
    rule = file.value("tokenizer.ggml.pre", None)
    names = ", ".join(f"{name} {token!r}" for name in ("bos", "eos") if (token := getattr(tokenizer, f"{name}_token")))
    first = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] if tokenizer.bos_token else False
    return (
        f"{file.value('tokenizer.ggml.model')}{f' ({rule})' if rule else ''}, {len(tokenizer)} tokens, {names}"
        f"{', texts begin with bos' if first else ''}"
    )


def _template(file: Container) -> str:
    template = file.value("tokenizer.chat_template", None)
    others = file.value("tokenizer.chat_templates", [])
    if template is None and not others:
        return "none"
    return f"{len(str(template or '')):,} characters" + (f", and {', '.join(map(str, others))}" if others else "")


def _left_out(file: Container, config: dict[str, Any]) -> str:
    behind = config["num_hidden_layers"]
    ahead = {int(m[1]) for name in file.tensors if (m := BLOCK.fullmatch(name)) and int(m[1]) >= behind}
    return f"{len(ahead)} layers that guess tokens ahead, which --speculate exports" if ahead else "nothing"
