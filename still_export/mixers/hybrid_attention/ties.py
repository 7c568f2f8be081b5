"""Did both runtimes select the same salient tokens, and where not, was it a near tie? Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from still_export.mixers.ties import Choices, Leads, Pairs, Ties
from still_export.package.calls import Arrays, next_feed

KEY = "present_salient_key."
SCORE = "window_score"
SMALLEST = float(np.finfo(np.float32).tiny)


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

    def compare(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Choices:
        """Compare the salient caches of two runtimes row by row; ties in logits."""
        found = Choices()
        for expected, actual in pairs:
            for layer in _layers(expected):
                differs, share = self._differing(expected, actual, layer, leads, ties)
                found.compared += int(np.abs(expected[KEY + layer]).any(-1).sum())
                found.near_ties += int((differs & (share <= 1)).sum())
                found.wrong += int((differs & (share > 1)).sum())
                found.widest = max(found.widest, float(share.max(where=differs & np.isfinite(share), initial=0)))
        return found

    def settle(self, pairs: Pairs, leads: Callable[[], Leads], ties: Ties) -> Pairs:
        """PyTorch's token in every slot where the target took another one on a near tie: both are right there."""
        settled = []
        for expected, actual in pairs:
            outputs = dict(actual)
            for layer in _layers(expected):
                differs, share = self._differing(expected, actual, layer, leads, ties)
                excused = differs & (share <= 1)
                for name in (n for n in expected if n.startswith("present_salient_") and n.endswith(f".{layer}")):
                    mask = excused.reshape(*excused.shape, *[1] * (expected[name].ndim - 3))
                    outputs[name] = np.where(mask, expected[name], actual[name])
            settled.append((expected, outputs))
        return settled

    def alike(self, expected: Arrays, actual: Arrays) -> bool:
        """Whether the salient caches hold the same tokens."""
        return not any(_differs(expected, actual, layer).any() for layer in _layers(expected))

    def chooses(self, lengths: np.ndarray) -> bool:
        """The first token of a chunk promotes the chunk before the one before it."""
        return bool(np.any((lengths % self.chunk == 0) & (lengths >= 2 * self.chunk)))

    def near_ties(self, leads: Leads, ties: Ties) -> int:
        """Of all chunks, promoted or not."""
        return sum(int((lead <= _tie(layer, ties)).sum()) for layer, lead in leads.items())

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
        self, expected: Arrays, actual: Arrays, layer: str, leads: Callable[[], Leads], ties: Ties
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots [B, HS, N] that hold other tokens, and for those the lead of their chunk in parts of a tie; up to 1 it is one."""
        differs = _differs(expected, actual, layer)
        share = np.full(differs.shape, np.inf)
        if differs.any():
            lead = leads()[int(layer)]
            chunk = np.arange(differs.shape[2]) // self.salient
            known = chunk < lead.shape[2]
            share[..., known] = lead[..., chunk[known]] / max(_tie(layer, ties), SMALLEST)
        return differs, share

    def _lead(self, score: np.ndarray) -> np.ndarray:
        """[B, HS, 2] from the ring's scores [B, H, 2C]."""
        if self.scope != "q_head":
            grouped = score.reshape(score.shape[0], self.kv_heads, -1, score.shape[2])
            score = grouped.max(2) if self.scope == "kv_group_max" else grouped.mean(2)
        ranked = -np.sort(-score.reshape(*score.shape[:2], 2, self.chunk), axis=-1)
        if not 0 < self.salient < self.chunk:
            return np.full(ranked.shape[:3], np.inf)
        return ranked[..., self.salient - 1] - ranked[..., self.salient]


def _tie(layer: int | str, ties: Ties) -> float:
    """The lead in `layer` that is a tie."""
    return ties.get(f"present_{SCORE}.{layer}", ties[""])


def _differs(expected: Arrays, actual: Arrays, layer: str) -> np.ndarray:
    """Slots [B, HS, N] that hold other tokens."""
    a, b = (outputs[KEY + layer].astype(np.float32) for outputs in (expected, actual))
    return ~(np.abs(a - b).max(-1, initial=0) <= 0.1 * np.abs(a).max(-1, initial=0) + 1e-6)


def _layers(outputs: Arrays) -> list[str]:
    """Numbers of the layers that have a salient cache."""
    return [name.removeprefix(KEY) for name in outputs if name.startswith(KEY)]
