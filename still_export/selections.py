"""Did both runtimes select the same salient tokens, and where not, was it a near tie?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.calls import Arrays, next_feed

Leads = dict[int, np.ndarray]
"""By layer, the lead of the last selected score over the first rejected one, [B, HS, chunks]."""


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
        for name in expected:
            if not name.startswith("present_salient_key."):
                continue
            a, b = expected[name].astype(np.float32), actual[name].astype(np.float32)
            differs = ~(np.abs(a - b).max(-1, initial=0) <= 0.1 * np.abs(a).max(-1, initial=0) + 1e-6)  # [B, HS, N]
            found.compared += int(np.abs(a).any(-1).sum())
            if not differs.any():
                continue
            of_layer = leads()[int(name.rsplit(".", 1)[1])]
            for row, head, slot in np.argwhere(differs):
                chunk = slot // salient
                excused = chunk < of_layer.shape[2] and of_layer[row, head, chunk] <= tie
                found.near_ties += int(excused)
                found.wrong += int(not excused)
    return found


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
