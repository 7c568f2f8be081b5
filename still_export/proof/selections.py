"""Did both runtimes select the same salient tokens, and where not, was it a near tie?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, next_feed

Leads = dict[int, np.ndarray]
"""By layer, the lead of the last selected score over the first rejected one, [B, HS, chunks]."""

KEY = "present_salient_key."


@dataclass
class Selections:
    """Counts of salient rows: compared, different where scores nearly tie, different without that excuse."""

    compared: int = 0
    near_ties: int = 0
    wrong: int = 0

    def add(self, other: Selections) -> None:
        """Add the counts of `other`."""
        self.compared += other.compared
        self.near_ties += other.near_ties
        self.wrong += other.wrong


def compare_selections(pairs: list[tuple[Arrays, Arrays]], leads: Any, salient: int, tie: float) -> Selections:
    """Compare the salient caches of two runtimes row by row.

    Args:
        pairs: Outputs of each call, (PyTorch, target).
        leads: Gives PyTorch's Leads; asked only where rows differ.
        salient: Tokens selected per chunk.
        tie: Lead, in logits, below which either selection is right.
    """
    found = Selections()
    for expected, actual in pairs:
        for layer in _layers(expected):
            differs, excused = _differing(expected, actual, layer, leads, salient, tie)
            found.compared += int(np.abs(expected[KEY + layer]).any(-1).sum())
            found.near_ties += int(excused.sum())
            found.wrong += int((differs & ~excused).sum())
    return found


def without_ties(
    pairs: list[tuple[Arrays, Arrays]], leads: Any, salient: int, tie: float
) -> list[tuple[Arrays, Arrays]]:
    """The pairs with PyTorch's token in every slot where the target took another one on a near tie: both are right there.

    Args:
        pairs, leads, salient, tie: As in `compare_selections`.
    """
    settled = []
    for expected, actual in pairs:
        outputs = dict(actual)
        for layer in _layers(expected):
            _, excused = _differing(expected, actual, layer, leads, salient, tie)
            for name in (n for n in expected if n.startswith("present_salient_") and n.endswith(f".{layer}")):
                mask = excused.reshape(*excused.shape, *[1] * (expected[name].ndim - 3))
                outputs[name] = np.where(mask, expected[name], actual[name])
        settled.append((expected, outputs))
    return settled


def _layers(outputs: Arrays) -> list[str]:
    """Numbers of the layers that have a salient cache."""
    return [name.removeprefix(KEY) for name in outputs if name.startswith(KEY)]


def _differing(
    expected: Arrays, actual: Arrays, layer: str, leads: Any, salient: int, tie: float
) -> tuple[np.ndarray, np.ndarray]:
    """Slots [B, HS, N] that hold other tokens, and those of them whose chunk has a near tie."""
    a, b = (outputs[KEY + layer].astype(np.float32) for outputs in (expected, actual))
    differs = ~(np.abs(a - b).max(-1, initial=0) <= 0.1 * np.abs(a).max(-1, initial=0) + 1e-6)
    if not differs.any():
        return differs, differs
    lead = leads()[int(layer)]
    chunk = np.arange(differs.shape[2]) // salient
    known = chunk < lead.shape[2]
    close = np.zeros_like(differs)
    close[..., known] = lead[..., chunk[known]] <= tie
    return differs, differs & close


def selection_leads(reference: Any, manifest: dict[str, Any], tokens: np.ndarray, counts: np.ndarray) -> Leads:
    """Leads of PyTorch's selections.

    The ring holds the scores of the two latest chunks, so feeding two chunks at a time shows every score once.

    Args:
        reference: The TorchRunner.
        manifest: Of the package.
        tokens, counts: The sequences, [B, T] and [B].
    """
    chunk = int(manifest["capacity"]["chunk_size"])
    feed = reference.empty_feed(tokens.shape[0], tokens.shape[1])
    parts: dict[int, list[np.ndarray]] = {}
    for start in range(0, tokens.shape[1], 2 * chunk):
        piece = tokens[:, start : start + 2 * chunk]
        feed = {**feed, "input_ids": piece, "new_tokens": np.clip(counts - start, 0, piece.shape[1])}
        outputs = reference.infer(feed)
        for name, score in outputs.items():
            if name.startswith("present_window_score."):
                parts.setdefault(int(name.rsplit(".", 1)[1]), []).append(_lead(score, manifest))
        feed = next_feed(outputs, piece)
    return {layer: np.concatenate(part, axis=2) for layer, part in parts.items()}


def _lead(score: np.ndarray, manifest: dict[str, Any]) -> np.ndarray:
    """[B, HS, 2] from the ring's scores [B, H, 2C]."""
    scope, kv_heads = manifest["still"]["select_scope"], int(manifest["model"]["kv_heads"])
    chunk, salient = int(manifest["capacity"]["chunk_size"]), int(manifest["capacity"]["salient_per_chunk"])
    if scope != "q_head":
        grouped = score.reshape(score.shape[0], kv_heads, -1, score.shape[2])
        score = grouped.max(2) if scope == "kv_group_max" else grouped.mean(2)
    ranked = -np.sort(-score.reshape(*score.shape[:2], 2, chunk), axis=-1)
    if not 0 < salient < chunk:
        return np.full(ranked.shape[:3], np.inf)
    return ranked[..., salient - 1] - ranked[..., salient]
