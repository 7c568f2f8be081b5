"""Summary of a GGUF file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from still_export.errors import ModelNotFoundError, StillExportError
from still_export.folders.description import context_of, layers_of, template_of
from still_export.folders.families import SOFTMAX
from still_export.gguf.architectures import ROPE_TABLE, place, read_config, target_of
from still_export.gguf.container import Container, open_gguf
from still_export.gguf.shared import BLOCK, ENCODERS, GUESSES, Architecture, Config, View, what_of
from still_export.gguf.tokenizer import read_facts, templates
from still_export.gguf.types import BLOCKS, FORMS, bits_of

_PRESERVED = {*BLOCKS, *FORMS}
"""Types whose blocks packages keep (docs/reference/quantization.md)."""


def quantize_policy(file: Container) -> str | None:
    """The --quantize policy that keeps most blocks of a file, by the bits of most of its numbers; None: they are floats.

    int8 if no kernel reads the blocks of most numbers: they are rounded again.
    """
    counts: Counter[int] = Counter()
    kept = 0
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1 and what_of(name) is None:
            bits, count = bits_of(tensor.tensor_type.name), int(tensor.n_elements)
            counts[bits] += count
            kept += count if bits and tensor.tensor_type.name in _PRESERVED and file.scale(name) is None else 0
    bits = counts.most_common(1)[0][0] if counts else 0
    coded = counts.total() - counts[0]
    return None if bits == 0 else "int4" if bits <= 4 and 2 * kept > coded else "int8"


def describe_gguf(path: Path) -> dict[str, str]:
    """Summary of a file, a line each: model, weights, tokenizer, template, adapter, and what is ignored.

    Raises:
        StillExportError: The model cannot be read.
    """
    file = open_gguf(path)
    view, architecture, config = read_config(path)
    _demand_places(view, architecture)
    return {
        "model": _model(file, config),
        **context_of(config),
        "weights": _weights(file),
        "tokenizer": _tokenizer(file),
        "template": template_of(templates(file)),
        "adapter": "none",
        "ignored": _ignored(file, config),
    }


def _demand_places(view: View, architecture: Architecture) -> None:
    """Raise UnsupportedModelError if the family has no place for a tensor."""
    owned = {*architecture.split, *(part for parts in architecture.joined.values() for part in parts)}
    for name in view.file.tensors:
        prefix, part = place(view, name, architecture.stem)
        if name != ROPE_TABLE and not architecture.skips(name) and not (prefix and part in owned):
            target_of(view, architecture, prefix, part, name)


def _model(file: Container, config: Config) -> str:
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    numbers = sum(int(tensor.n_elements) for name, tensor in file.tensors.items() if what_of(name) is None)
    parts = f", in {len(file.parts)} files" if len(file.parts) > 1 else ""
    family = config["model_type"]
    softmax = "; softmax layers, which linearize replaces" if family in SOFTMAX else ""
    return (
        f"{family} (architecture {file.architecture}), {layers_of(config['num_hidden_layers'], kinds)}, "
        f"{numbers / 1e6:,.1f} M parameters{parts}{softmax}"
    )


def _weights(file: Container) -> str:
    found: dict[str, Counter[str]] = {}
    for name, tensor in file.tensors.items():
        if what_of(name) is not None:
            continue
        match = BLOCK.fullmatch(name)
        part = match[2] if match else name
        kind = "experts" if "_exps" in part else "layers" if match else part.removesuffix(".weight")
        if len(tensor.shape) > 1:
            found.setdefault(kind, Counter())[tensor.tensor_type.name] += 1
    parts = []
    for kind, types in found.items():
        named = ", ".join(f"{count} {name}" if len(types) > 1 else name for name, count in types.most_common())
        parts.append(f"{kind} in {named}")
    coded = {name for types in found.values() for name in types if bits_of(name)}
    lost = sorted(coded - _PRESERVED)
    parts.append(f"dequantized, as no kernel reads them: {', '.join(lost)}" if lost else "")
    many = [tensor for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and what_of(name) is None]
    numbers = sum(int(tensor.n_elements) for tensor in many)
    parts.append(f"{8 * sum(int(t.n_bytes) for t in many) / numbers:.1f} bits a weight" if numbers else "")
    return "; ".join(part for part in parts if part)


def _tokenizer(file: Container) -> str:
    try:
        facts = read_facts(file)
    except ModelNotFoundError as error:
        return f"none, so a package accepts token ids only: {error}"
    except StillExportError as error:
        return f"not read: {error}"
    rule = file.value("tokenizer.ggml.pre", None)
    names = "".join(f", {n} {facts.names[f'{n}_token']!r}" for n in ("bos", "eos") if f"{n}_token" in facts.names)
    return (
        f"{file.value('tokenizer.ggml.model')}{f' ({rule})' if rule else ''}, {len(facts.vocabulary.tokens):,} tokens{names}"
        f"{', texts begin with bos' if facts.begins else ''}"
    )


def _ignored(file: Container, config: Config) -> str:
    behind = config["num_hidden_layers"]
    ahead = {int(m[1]) for name in file.tensors if (m := BLOCK.fullmatch(name)) and int(m[1]) >= behind}
    parts = [f"{len(ahead)} layers that guess tokens ahead (--speculate exports them)"] if ahead else []
    others = Counter(what for name in file.tensors if (what := what_of(name)) in (ENCODERS, GUESSES))
    return ", ".join([*parts, *(f"{count} tensors of {what}" for what, count in others.items())]) or "nothing"
