"""Calls of a model as named arrays, with the exported graph's names. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from still_graphs.states import IMAGE_INPUTS

Arrays = dict[str, np.ndarray]


def next_feed(outputs: Arrays, tokens: np.ndarray, new_tokens: np.ndarray | None = None) -> Arrays:
    """The feed of the next call: `tokens` [B, T] after a call's `outputs`."""
    feed = {name.replace("present_", "past_", 1): x for name, x in outputs.items() if name.startswith("present_")}
    feed["input_ids"] = tokens
    feed["new_tokens"] = np.full(tokens.shape[0], tokens.shape[1], np.int64) if new_tokens is None else new_tokens
    return feed


def image_inputs(feed: Arrays) -> Arrays:
    """The image inputs of a feed."""
    return {name: feed[name] for name in IMAGE_INPUTS if name in feed}


def typed_states(arrays: Arrays, manifest: dict[str, Any]) -> Arrays:
    """`arrays` with every `past_*` and `present_*` state cast to the package's type."""
    types = {f"{side}_{s['name']}": s["dtype"] for s in manifest["states"] for side in ("past", "present")}
    return {name: array.astype(types[name], copy=False) if name in types else array for name, array in arrays.items()}


def last_logits(logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Logits after each row's last new token, [B, 1, V], from `logits` [B, 1 or T, V]."""
    if logits.shape[1] == 1:
        return logits
    return np.take_along_axis(logits, np.maximum(counts - 1, 0)[:, None, None], axis=1)
