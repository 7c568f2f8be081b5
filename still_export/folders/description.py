"""Summary of a model's or adapter's folder, from its small files and the headers of its weights; its phrases are GGUF files', too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from still_export.discovery import recognised
from still_export.errors import CheckpointError, StillExportError
from still_export.folders.adapter_config import ADAPTER_CONFIG, lora_scale, read_adapter_config
from still_export.folders.codes import Codes
from still_export.folders.families import AHEAD, AHEAD_FIELDS, IMAGES, NOT_LANGUAGE, SOFTMAX, TEXT_OF, whole_config
from still_export.folders.model import ModelFolder
from still_export.folders.remote_tokenizer import describe_remote, remote_class
from still_export.folders.weights import METHODS, PICKLE_SUFFIXES, TYPES, Head, heads_of
from still_export.package.refusals import RunError
from still_export.package.tokenizer_bounds import guarded

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d{1,6})\.")
_EMBEDDING = re.compile(r"(embed_tokens|embeddings?|wte|word_embeddings)\.weight$")
_BLOCKS = {"M": "mamba", "*": "full", "-": "feed-forward", "E": "experts"}
"""Letters of Nemotron-H's hybrid_override_pattern."""
_KNOWN_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges\.txt"
    r"|chat_template\.(jinja|json)|quantize_config\.json|quant_config\.json|hf_quant_config\.json|recipe\.yaml|\.git.*|README.*|LICENSE.*"
    r"|model\.safetensors\.index\.json"
)
_ARGUMENTS = ("tools", "documents", "enable_thinking", "reasoning_content", "add_generation_prompt")


def describe_folder(source: str | Path | ModelFolder) -> dict[str, str]:
    """Summary of a model's folder, a line each: model, weights, tokenizer, template, adapter, and what is ignored.

    Raises:
        CheckpointError: config.json or the weights are damaged or incomplete.
    """
    folder = ModelFolder.open(source)
    try:
        return _described(folder)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(
            f"the JSON files of {folder} have values of unexpected types: {type(error).__name__}: {error}. "
            "Fetch the model again."
        ) from error


def _described(folder: ModelFolder) -> dict[str, str]:
    whole = whole_config(folder, folder.json("config.json"))
    model_type, config = language_config(whole)
    files = folder.weights
    heads = heads_of(folder, files)
    others = {name: what for name in heads if (what := _purpose(name, config))}
    own = {name: head for name, head in heads.items() if name not in others}
    quantized = whole.get("quantization_config") or config.get("quantization_config")
    if quantized is None and (optimizer := folder.json("hf_quant_config.json")):
        quantized = {"quant_method": "modelopt", **optimizer.get("quantization", {})}
    codes = Codes(quantized if isinstance(quantized, dict) else {})
    size = config.get("vocab_size")
    return {
        "model": _model(model_type, config, own, codes, len(files)),
        **context_of(config),
        "weights": _weights(own, codes),
        "tokenizer": _tokenizer(folder, size if isinstance(size, int) else None),
        "template": template_of(templates_of(folder)),
        "adapter": _adapter(folder),
        "ignored": _ignored(folder, files, others, model_type),
    }


def language_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """model_type and values of the language model in config.json."""
    kind = recognised(dict(config))
    text = config.get("text_config")
    if not kind:
        raise CheckpointError("config.json names no model_type, so the family is unknown. Fetch the model again.")
    return (TEXT_OF[kind], text) if kind in TEXT_OF and isinstance(text, dict) else (kind, config)


def _purpose(name: str, config: Mapping[str, Any]) -> str:
    """Purpose of a tensor outside the language model; "": it belongs to it."""
    for begin, what in NOT_LANGUAGE.items():
        if name.startswith(begin):
            return what
    count, layer = config.get("num_hidden_layers"), _LAYER.search(name)
    ahead = any(config.get(field) for field in AHEAD_FIELDS)
    return AHEAD if ahead and layer and isinstance(count, int) and int(layer[1]) >= count else ""


def _model(model_type: str, config: Mapping[str, Any], heads: Mapping[str, Head], codes: Codes, files: int) -> str:
    name = model_type.removeprefix("still_")
    layers = {int(m[1]) for tensor in heads if (m := _LAYER.search(tensor))}
    count = config.get("num_hidden_layers")
    still = config.get("still_config")
    kinds = (still or {}).get("layer_types") or config.get("layer_types") or config.get("layers_block_type") or ()
    if not kinds and isinstance(pattern := config.get("hybrid_override_pattern"), str):
        kinds = [_BLOCKS.get(letter, letter) for letter in pattern]
    numbers = sum(count for *_, count in codes.counted(heads))
    how = ""
    if model_type.startswith("still_"):
        how = "; linearized"
    elif name in SOFTMAX:
        how = "; softmax layers, which linearize replaces"
    parts = f", in {files} files" if files > 1 else ""
    layout = layers_of(count if isinstance(count, int) else len(layers), map(str, kinds))
    return f"{name}, {layout}, {numbers / 1e6:,.1f} M parameters{parts}{how}"


def _weights(heads: Mapping[str, Head], codes: Codes) -> str:
    if codes.method and codes.method not in METHODS:
        return f"not read: quantized by {codes.method}; {', '.join(METHODS)} are"
    found: dict[str, Counter[str]] = {}
    for name, head, type_name, _ in codes.counted(heads):
        if len(head.shape) > 1 and "lora_" not in name:
            place = "embedding" if _EMBEDDING.search(name) else "head" if name.endswith("lm_head.weight") else "layers"
            found.setdefault("experts" if ".experts." in name else place, Counter())[type_name] += 1
    parts = []
    for kind, types in found.items():
        named = ", ".join(
            f"{count} in {type_name}" if len(types) > 1 else f"in {type_name}"
            for type_name, count in types.most_common()
        )
        parts.append(f"{kind} {named}")
    return "; ".join(parts)


def _tokenizer(folder: ModelFolder, vocabulary: int | None) -> str:
    from tokenizers import Tokenizer

    path = folder.path / "tokenizer.json"
    if not path.is_file():
        if name := remote_class(folder):
            return describe_remote(name)
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if folder.has(name)]
        return f"{others[0]}, which transformers converts" if others else "none, so a package accepts token ids only"
    try:
        folder.check_tokenizer()
        with guarded(path.name):
            read = Tokenizer.from_file(str(path))
    except (StillExportError, RunError) as error:
        return f"not read: {error}"
    config = folder.json("tokenizer_config.json")
    size = read.get_vocab_size()
    summary = f"{type(read.model).__name__}, {size:,} tokens"
    for name in ("bos", "eos"):
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        summary += f", {name} {text!r}" if text else ""
    off = [name for name, value in (("truncation", read.truncation), ("padding", read.padding)) if value is not None]
    summary += f"; {' and '.join(off)} switched off" if off else ""
    beyond = vocabulary is not None and sum(number >= vocabulary for number in read.get_vocab().values())
    return summary + (f"; {beyond} tokens beyond the model's vocabulary, texts with them are refused" if beyond else "")


def templates_of(folder: ModelFolder) -> dict[str, str]:
    """Chat templates by name, found as transformers does."""
    found: dict[str, str] = {}
    config = folder.json("tokenizer_config.json")
    entry = config.get("chat_template")
    if isinstance(entry, str):
        found["default"] = entry
    elif isinstance(entry, list):
        found |= {str(one.get("name")): str(one.get("template")) for one in entry if isinstance(one, dict)}
    single, more = folder.path / "chat_template.jinja", folder.path / "additional_chat_templates"
    if single.is_file() or more.is_dir():
        found = {"default": single.read_text("utf-8")} if single.is_file() else {}
        found |= {path.stem: path.read_text("utf-8") for path in sorted(more.glob("*.jinja"))}
    return found


def _adapter(folder: ModelFolder) -> str:
    try:
        values = folder.adapter
    except StillExportError as error:
        return f"not read: {error}"
    files = [f for f in [folder.path / "adapter_model.safetensors"] if f.is_file()]
    return "none" if values is None else lora_of(values, heads_of(folder, files))


def _ignored(folder: ModelFolder, files: Iterable[Path], others: Mapping[str, str], model_type: str) -> str:
    flags = {AHEAD: "--speculate", IMAGES: "--vision"}
    unused = [
        f"{count} tensors of {what} ({flags[what]} exports them)" for what, count in Counter(others.values()).items()
    ]
    adapter = [folder.path / "adapter_model.safetensors"] if folder.has(ADAPTER_CONFIG) else []
    return ", ".join([*unused, *other_files(folder.path, [*files, *adapter])]) or "nothing"


def describe_adapter(source: str | Path | ModelFolder) -> dict[str, str]:
    """Summary of an adapter's folder: adapter, base, weights, and what is ignored.

    Raises:
        CheckpointError: A file is damaged.
        UnsupportedModelError: It has an unknown setting.
    """
    folder = ModelFolder.open(source)
    values, files = read_adapter_config(folder), folder.weights
    heads = heads_of(folder, files)
    others = [name for name in heads if "lora_" not in name]
    maps = f", and {len(others)} tensors of its own" if others else ""
    return {
        "adapter": lora_of(values, heads) + maps,
        "base": str(values.get("base_model_name_or_path") or "unnamed"),
        "weights": ", ".join(
            f"{n} tensors in {TYPES.get(t, t)}" for t, n in Counter(h.dtype for h in heads.values()).items()
        ),
        "ignored": ", ".join(other_files(folder.path, files)) or "nothing",
    }


def lora_of(values: Mapping[str, Any], heads: Mapping[str, Head]) -> str:
    pairs = {name.partition(".lora_A")[0]: head.shape[0] for name, head in heads.items() if ".lora_A" in name}
    ranks = sorted(set(pairs.values()))
    modules = sorted({name.rpartition(".")[2] for name in pairs})
    scales = (
        sorted({round(lora_scale(values, name, rank), 4) for name, rank in pairs.items()})
        if values.get("lora_alpha")
        else []
    )
    kind = "of linearize, with " if values.get("still_config") else ""
    if not pairs:
        return f"{kind}no LoRA pairs"
    many = ", ".join(map(str, ranks))
    scale = f", times {', '.join(map(str, scales))}" if scales else ""
    return f"{kind}LoRA of rank {many} in {len(pairs)} layers ({', '.join(modules)}){scale}"


def other_files(folder: Path, read: Iterable[Path]) -> Iterator[str]:
    names = {path.name for path in read}
    for path in sorted(folder.iterdir()):
        if path.name in names or _KNOWN_FILES.fullmatch(path.name) or path.name == "additional_chat_templates":
            continue
        if path.suffix == ".py":
            yield f"{path.name} (code is never run)"
        elif path.suffix in PICKLE_SUFFIXES:
            yield f"{path.name} (a pickle)"
        else:
            yield path.name


def layers_of(count: int, kinds: Iterable[str]) -> str:
    counted = Counter(kind.removesuffix("_attention").replace("_", " ") for kind in kinds)
    mixed = ", ".join(f"{number} {kind}" for kind, number in counted.items())
    return f"{count} layers" + (f" ({mixed})" if mixed else "")


def template_of(templates: Mapping[str, str]) -> str:
    """Chat templates by name, with the usual arguments that they use."""
    if not templates:
        return "none, so that there are no chats"
    entries = []
    for name, text in templates.items():
        named = [word for word in _ARGUMENTS if re.search(rf"\b{word}\b", text)]
        thinks = ["<think>"] if "<think>" in text else []
        known = f", with {', '.join(named + thinks)}" if named or thinks else ""
        entries.append(f"{'' if name == 'default' else f'{name}: '}{len(text):,} characters{known}")
    return "; ".join(entries)


def context_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The entry "context" of a summary: its length, and windows of layers with them; empty if config.json states neither."""
    length, window = (config.get(name) for name in ("max_position_embeddings", "sliding_window"))
    kinds = list(config.get("layer_types") or ())
    parts = [f"{length:,} tokens"] if isinstance(length, int) else []
    windowed = kinds.count("sliding_attention")
    if isinstance(window, int) and config.get("use_sliding_window", True) and (windowed or not kinds):
        parts.append(f"windows of {window:,} tokens" + (f" in {windowed} of {len(kinds)} layers" if windowed else ""))
    return {"context": ", ".join(parts)} if parts else {}
