"""Compares a runtime's choice of experts with PyTorch's, which follows it, and finds near ties. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from still_kernels.route.spec import ROUTE
from still_kernels.ties import TIE, Arrays, Choices, Leads, Look, Pairs, Scores, overruled

MARGINS = "margins"
"""Key of PyTorch's margins for each token (`meaning.margins`), followed by 1 at the experts used."""
SMALLEST = float(np.finfo(np.float32).tiny)


class RoutingTies:
    """The experts of each token, [B, N]. A lead is that of the last chosen expert, or group, over the next. If a runtime's choice was
    followed and differs, it is negative: the lead of the best rejected expert over the worst chosen one."""

    score = MARGINS
    watched = ROUTE.name
    heads = 1
    """Choices of a token in one layer."""
    span = 1 << 30

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        """Compares all tokens, whatever the pairs."""
        found = Choices()
        for lead in (lead for key, lead in leads.items() if key < 0):
            found.compared += int(np.isfinite(lead).sum())
            found.add(overruled([lead]))
        return found

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        """Empty: no state shows it."""
        return [{} for _ in pairs]

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        """Nothing: no state shows it."""
        return {}

    def chooses(self, lengths: np.ndarray) -> bool:
        """Always true: every step chooses, and no state shows it."""
        return False

    def scores(self, looks: Sequence[Look]) -> Scores:
        """Margins [B, N, 2 or 3, E]; zeros for tokens without a look."""
        most = max(int(outputs["present_length"].max(initial=0)) for _, outputs in looks)
        found: Scores = {}
        for past, outputs in looks:
            for name, margins in outputs.items():
                if name.startswith(f"present_{MARGINS}."):
                    shape = len(margins), most, *margins.shape[2:]
                    whole = found.setdefault(~int(name.rpartition(".")[2]), np.zeros(shape, np.float32))
                    for row, (begin, end) in enumerate(zip(past, outputs["present_length"], strict=True)):
                        whole[row, begin:end] = margins[row, : end - begin]
        return found

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        """A tie is TIE times the larger of two errors of PyTorch's own run: of the difference between the two candidates, and of all
        margins (root mean square)."""
        found = {}
        for key, exact in scores.items():
            margins, chosen, other = exact[:, :, :-1], exact[:, :, -1] > 0, own[key][:, :, :-1]
            with np.errstate(invalid="ignore"):  # rejected groups are at infinity
                error = np.where(np.isfinite(margins) & np.isfinite(other), other - np.float64(margins), 0)
            usual = self.usual(error, np.isfinite(margins) & np.isfinite(other))
            first, second = _natural(margins)
            lead = _relative(margins, error, usual, first, second).min(-1)
            turned_before = np.zeros(lead.shape, bool)
            for rank in range(margins.shape[2]):  # groups, then experts where groups are the same
                best, taken = margins[:, :, rank] > 0, margins[:, :, rank]
                last = rank == margins.shape[2] - 1
                dropped = np.where(best & ~chosen, taken, -np.inf) if last else np.where(best, -taken, -np.inf)
                added = np.where(chosen & ~best & np.isfinite(taken), -taken, -np.inf)
                turned = np.isfinite(added).any(-1) & ~turned_before
                turned_before |= turned
                places = dropped.argmax(-1)[..., None], added.argmax(-1)[..., None]
                row = slice(rank, rank + 1)
                gap = _relative(margins[:, :, row], error[:, :, row], usual[:, :, row], *places)[..., 0]
                lead = np.where(turned, -np.abs(gap), lead)
            found[key] = np.where(np.arange(lead.shape[1]) < counts[:, None], lead, np.inf)
        return found

    def open_tokens(self, leads: Leads) -> dict[int, np.ndarray]:
        tied = {~key: np.abs(lead) <= 1 for key, lead in leads.items() if key < 0}
        return {layer: np.asarray(x.reshape(len(x), -1, self.heads).any(-1)) for layer, x in tied.items()}

    def usual(self, error: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Root mean square of errors minus their mean; `known` selects finite margins."""
        return np.sqrt(np.square(error - error.mean(-1, keepdims=True)).mean(-1))

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Over all tokens."""
        found = []
        for margins in (x[:, :, :-1] for x in scores.values()):
            one = np.full(margins.shape[:3], 1 / TIE)
            lead = _relative(margins, np.zeros(margins.shape), one, *_natural(margins)).min(-1)
            found.append(lead[np.arange(lead.shape[1]) < counts[:, None]])
        return min((float(lead.min()) for lead in found if lead.size), default=float("inf"))


def _natural(margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the last chosen one and of the next."""
    last = np.where(margins > 0, margins, np.inf).argmin(-1)
    return last, np.where(margins > 0, -np.inf, margins).argmax(-1)


def _relative(
    margins: np.ndarray, error: np.ndarray, usual: np.ndarray, one: np.ndarray, other: np.ndarray
) -> np.ndarray:
    """Lead of `one` over `other`, in units of the lead that is a tie; infinity if all are chosen, 0 if two are equal."""

    def between(x: np.ndarray) -> np.ndarray:
        first, second = (np.take_along_axis(x, place[..., None], -1)[..., 0] for place in (one, other))
        return first.astype(np.float64) - second

    with np.errstate(invalid="ignore"):  # rejected groups
        lead = np.where((margins > 0).all(-1), np.inf, between(margins))
    lead = np.where((margins == 0).any(-1), 0.0, lead)
    return np.asarray(lead / (TIE * np.maximum(np.maximum(usual, np.abs(between(error))), SMALLEST)))


def ties_of(manifest: Mapping[str, Any]) -> RoutingTies:
    """The ties of a package with such layers."""
    return RoutingTies()
