"""Did both runtimes select the same salient tokens, and where not, was it a near tie?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.runners.torch import Arrays, TorchRunner, next_feed


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


class SelectionCheck:
    """Compares the salient caches of two runtimes row by row.

    Args:
        manifest: Of the package.
        reference: The PyTorch model, asked for the scores where rows differ.
        tie: Lead of the last selected score over the first rejected one below which rounding may swap them.
    """

    def __init__(self, manifest: dict[str, Any], reference: TorchRunner, tie: float) -> None:
        capacity = manifest["capacity"]
        self.chunk, self.salient = int(capacity["chunk_size"]), int(capacity["salient_per_chunk"])
        self.scope: str = manifest["still"]["select_scope"]
        self.kv_heads = int(manifest["model"]["kv_heads"])
        self.reference = reference
        self.tie = tie

    def compare(self, pairs: list[tuple[Arrays, Arrays]], tokens: np.ndarray, counts: np.ndarray) -> Selections:
        """Compare the rows of PyTorch's and the target's outputs.

        Args:
            pairs: Outputs of each call, (PyTorch, target).
            tokens, counts: The sequences behind the last call, [B, T] and [B].
        """
        found = Selections()
        leads: dict[int, np.ndarray] | None = None
        for expected, actual in pairs:
            for name in expected:
                if not name.startswith("present_salient_key."):
                    continue
                a, b = expected[name].astype(np.float32), actual[name].astype(np.float32)
                differs = np.abs(a - b).max(-1, initial=0) > 0.1 * np.abs(a).max(-1, initial=0) + 1e-6  # [B, HS, N]
                found.compared += int(np.abs(a).any(-1).sum())
                if not differs.any():
                    continue
                leads = leads or self._leads(tokens, counts)
                of_layer = leads[int(name.rsplit(".", 1)[1])]
                for row, head, slot in np.argwhere(differs):
                    chunk = slot // self.salient
                    excused = chunk < of_layer.shape[2] and of_layer[row, head, chunk] <= self.tie
                    found.near_ties += int(excused)
                    found.wrong += int(not excused)
        return found

    def _leads(self, tokens: np.ndarray, counts: np.ndarray) -> dict[int, np.ndarray]:
        """Lead of the last selected score over the first rejected one, per layer [B, HS, chunks], from PyTorch.

        The ring holds the scores of the two latest chunks, so feeding two chunks at a time shows every score once.
        """
        feed = self.reference.empty_feed(tokens.shape[0], tokens.shape[1])
        pair = 2 * self.chunk
        parts: dict[int, list[np.ndarray]] = {}
        for start in range(0, tokens.shape[1], pair):
            piece = tokens[:, start : start + pair]
            feed = {**feed, "input_ids": piece, "new_tokens": np.clip(counts - start, 0, piece.shape[1])}
            outputs = self.reference.infer(feed)
            for name, score in outputs.items():
                if name.startswith("present_window_score."):
                    parts.setdefault(int(name.rsplit(".", 1)[1]), []).append(self._lead(score))
            feed = next_feed(outputs, piece)
        return {layer: np.concatenate(part, axis=2) for layer, part in parts.items()}

    def _lead(self, score: np.ndarray) -> np.ndarray:
        """[B, HS, 2] from the ring's scores [B, H, 2C]."""
        if self.scope != "q_head":
            grouped = score.reshape(score.shape[0], self.kv_heads, -1, score.shape[2])
            score = grouped.max(2) if self.scope == "kv_group_max" else grouped.mean(2)
        ranked = -np.sort(-score.reshape(*score.shape[:2], 2, self.chunk), axis=-1)
        if not 0 < self.salient < self.chunk:
            return np.full(ranked.shape[:3], np.inf)
        return ranked[..., self.salient - 1] - ranked[..., self.salient]
