"""Calls of a model as named arrays, in the names of the exported graph; without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from still_graphs.states import GIVEN

Arrays = dict[str, np.ndarray]


def next_feed(outputs: Arrays, tokens: np.ndarray, new_tokens: np.ndarray | None = None) -> Arrays:
    """The feed that continues a call's `outputs` with `tokens` [B, T]."""
    feed = {name.replace("present_", "past_", 1): x for name, x in outputs.items() if name.startswith("present_")}
    feed["input_ids"] = tokens
    feed["new_tokens"] = np.full(tokens.shape[0], tokens.shape[1], np.int64) if new_tokens is None else new_tokens
    return feed


def given_of(feed: Arrays) -> Arrays:
    """What a feed has of images."""
    return {name: feed[name] for name in GIVEN if name in feed}


def typed_states(arrays: Arrays, manifest: dict[str, Any]) -> Arrays:
    """`arrays` with every `past_*` and `present_*` state in the type that the package gives it."""
    types = {f"{side}_{s['name']}": s["dtype"] for s in manifest["states"] for side in ("past", "present")}
    return {name: array.astype(types[name], copy=False) if name in types else array for name, array in arrays.items()}


def last_logits(logits: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Each row's logits after its last new token, [B, 1, V], of a call's `logits` [B, 1 or T, V]."""
    if logits.shape[1] == 1:
        return logits
    return np.take_along_axis(logits, np.maximum(counts - 1, 0)[:, None, None], axis=1)
