"""Compares a runtime's choice of blocks with PyTorch's, which follows it, and finds near ties. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from still_kernels.route.spec import ROUTE
from still_kernels.route.ties import MARGINS, RoutingTies
from still_kernels.select_blocks.spec import SELECT_BLOCKS
from still_kernels.ties import Leads, Look, Scores

ENDLESS, EQUAL = 1e30, 1e-30
"""Margin of a block whose choice does not depend on scores; and largest margin of equal scores, such as those of blocks that share a
mean."""


class BlockTies(RoutingTies):
    """The blocks of each token and key/value head, [B, N * HK], as `RoutingTies` has experts of a token. Margins are logarithms of scores.
    A choice of more or fewer blocks is not a near tie."""

    watched = SELECT_BLOCKS.name

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def scores(self, looks: Sequence[Look]) -> Scores:
        """Margins [B, N, 2, blocks * HK]; later calls have more blocks."""
        names = {name for _, outputs in looks for name in outputs if name.startswith(f"present_{MARGINS}.")}
        most = max((outputs[name].shape[-1] for _, outputs in looks for name in names & outputs.keys()), default=0)
        return super().scores(
            [(past, {n: _padded(x, most) if n in names else x for n, x in outputs.items()}) for past, outputs in looks]
        )

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        apart = _finite(self._apart(scores))
        found = super().leads(apart, self._apart(own), counts * self.heads)
        for key, x in apart.items():
            margins, chosen = x[:, :, 0], x[:, :, 1] > 0
            near = np.abs(margins).min(-1, initial=ENDLESS)
            open_ = ((near > EQUAL) & (near < ENDLESS)) | (found[key] < 0)
            other = ((margins > 0).sum(-1) != chosen.sum(-1)) & (np.arange(x.shape[1]) < counts[:, None] * self.heads)
            found[key] = np.where(other, -np.inf, np.where(open_, found[key], np.inf))
        return found

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Over all tokens."""
        return super().closest(_finite(self._apart(scores)), counts * self.heads)

    def usual(self, error: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Root mean square of errors, of blocks chosen by their scores only."""
        count = np.maximum(known.sum(-1, keepdims=True), 1)
        spread = np.where(known, error - error.sum(-1, keepdims=True) / count, 0)
        return np.sqrt(np.square(spread).sum(-1) / count[..., 0])

    def _apart(self, scores: Scores) -> Scores:
        """Scores with heads as separate tokens, [B, N * HK, 2, blocks]."""
        found = {}
        for key, x in scores.items():
            heads = x.reshape(*x.shape[:3], -1, self.heads).transpose(0, 1, 4, 2, 3)
            found[key] = heads.reshape(len(x), -1, *heads.shape[3:])
        return found


def _finite(scores: Scores) -> Scores:
    return {key: np.nan_to_num(x, posinf=ENDLESS, neginf=-ENDLESS) for key, x in scores.items()}


def _padded(margins: np.ndarray, size: int) -> np.ndarray:
    """Margins padded with blocks that do not exist yet, which nothing reads."""
    missing = size - margins.shape[-1]
    more = np.broadcast_to(np.array([[-np.inf], [0.0]]), (*margins.shape[:2], 2, missing))
    return np.concatenate([margins, more.astype(margins.dtype)], axis=-1)


def ties_of(manifest: Mapping[str, Any]) -> BlockTies | None:
    """The ties of a package; None if its layers also have experts, because only one kind of choices per layer is followed."""
    return None if ROUTE.name in manifest["ops"] else BlockTies(manifest["model"]["kv_heads"])
