"""Phrases shared by summaries of GGUF files and folders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

_ARGUMENTS = ("tools", "documents", "enable_thinking", "reasoning_content", "add_generation_prompt")


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
