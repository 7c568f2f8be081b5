"""Did both runtimes select the same salient tokens, and where not, was it a near tie? Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from still_export.package.calls import Arrays, next_feed
from still_export.proof.excuses import Choices, Leads, Pairs

KEY = "present_salient_key."
SCORE = "window_score"


class SelectionExcuse:
    """The salient cache of still::HybridAttention. Leads are those of the last selected score over the first rejected, [B, HS, chunks].

    Args:
        manifest: Of the package.
    """

    score = SCORE

    def __init__(self, manifest: dict[str, Any]) -> None:
        still = manifest["still"]
        self.chunk, self.salient = int(still["chunk_size"]), int(still["salient_per_chunk"])
        self.scope, self.kv_heads = str(still["select_scope"]), int(manifest["model"]["kv_heads"])

    def compare(self, pairs: Pairs, leads: Callable[[], Leads], tie: float) -> Choices:
        """Compare the salient caches of two runtimes row by row; ties in logits."""
        found = Choices()
        for expected, actual in pairs:
            for layer in _layers(expected):
                differs, excused = self._differing(expected, actual, layer, leads, tie)
                found.compared += int(np.abs(expected[KEY + layer]).any(-1).sum())
                found.near_ties += int(excused.sum())
                found.wrong += int((differs & ~excused).sum())
        return found

    def settle(self, pairs: Pairs, leads: Callable[[], Leads], tie: float) -> Pairs:
        """PyTorch's token in every slot where the target took another one on a near tie: both are right there."""
        settled = []
        for expected, actual in pairs:
            outputs = dict(actual)
            for layer in _layers(expected):
                _, excused = self._differing(expected, actual, layer, leads, tie)
                for name in (n for n in expected if n.startswith("present_salient_") and n.endswith(f".{layer}")):
                    mask = excused.reshape(*excused.shape, *[1] * (expected[name].ndim - 3))
                    outputs[name] = np.where(mask, expected[name], actual[name])
            settled.append((expected, outputs))
        return settled

    def leads(self, reference: Any, tokens: np.ndarray, counts: np.ndarray) -> Leads:
        """The ring holds the scores of the two latest chunks, so feeding two chunks at a time shows every score once."""
        feed = reference.empty_feed(tokens.shape[0], tokens.shape[1])
        parts: dict[int, list[np.ndarray]] = {}
        for start in range(0, tokens.shape[1], 2 * self.chunk):
            piece = tokens[:, start : start + 2 * self.chunk]
            feed = {**feed, "input_ids": piece, "new_tokens": np.clip(counts - start, 0, piece.shape[1])}
            outputs = reference.infer(feed)
            for name, score in outputs.items():
                if name.startswith(f"present_{SCORE}."):
                    parts.setdefault(int(name.rsplit(".", 1)[1]), []).append(self._lead(score))
            feed = next_feed(outputs, piece)
        return {layer: np.concatenate(part, axis=2) for layer, part in parts.items()}

    def closest(self, leads: Leads, counts: np.ndarray) -> float:
        """Over the chunks that have been promoted."""
        last = np.maximum(-(-counts // self.chunk) - 2, 0)[:, None, None]
        found = [lead[np.broadcast_to(np.arange(lead.shape[2]) < last, lead.shape)] for lead in leads.values()]
        return min((float(lead.min()) for lead in found if lead.size), default=float("inf"))

    def _differing(
        self, expected: Arrays, actual: Arrays, layer: str, leads: Callable[[], Leads], tie: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots [B, HS, N] that hold other tokens, and those of them whose chunk has a near tie."""
        a, b = (outputs[KEY + layer].astype(np.float32) for outputs in (expected, actual))
        differs = ~(np.abs(a - b).max(-1, initial=0) <= 0.1 * np.abs(a).max(-1, initial=0) + 1e-6)
        if not differs.any():
            return differs, differs
        lead = leads()[int(layer)]
        chunk = np.arange(differs.shape[2]) // self.salient
        known = chunk < lead.shape[2]
        close = np.zeros_like(differs)
        close[..., known] = lead[..., chunk[known]] <= tie
        return differs, differs & close

    def _lead(self, score: np.ndarray) -> np.ndarray:
        """[B, HS, 2] from the ring's scores [B, H, 2C]."""
        if self.scope != "q_head":
            grouped = score.reshape(score.shape[0], self.kv_heads, -1, score.shape[2])
            score = grouped.max(2) if self.scope == "kv_group_max" else grouped.mean(2)
        ranked = -np.sort(-score.reshape(*score.shape[:2], 2, self.chunk), axis=-1)
        if not 0 < self.salient < self.chunk:
            return np.full(ranked.shape[:3], np.inf)
        return ranked[..., self.salient - 1] - ranked[..., self.salient]


def _layers(outputs: Arrays) -> list[str]:
    """Numbers of the layers that have a salient cache."""
    return [name.removeprefix(KEY) for name in outputs if name.startswith(KEY)]
