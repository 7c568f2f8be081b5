"""Summary of an adapter, and files in a folder that are not read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from still_export.folders.adapter_config import lora_scale, read_adapter_config
from still_export.folders.model import ModelFolder
from still_export.folders.weights import PICKLE_SUFFIXES, TYPES, Head, heads_of

_KNOWN_FILES = re.compile(
    r"config\.json|generation_config\.json|adapter_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab.*|merges\.txt"
    r"|chat_template\.(jinja|json)|quantize_config\.json|quant_config\.json|hf_quant_config\.json|recipe\.yaml|\.git.*|README.*|LICENSE.*"
    r"|model\.safetensors\.index\.json"
)


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
