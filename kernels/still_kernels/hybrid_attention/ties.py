"""Compares the salient tokens that two runtimes selected, and finds near ties. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import numpy as np

from still_kernels.ties import CHOSEN, SAME_TOKEN, TIE, Arrays, Choices, Leads, Pairs, Scores, overruled

KEY = "present_salient_key."
VALUE = "present_salient_value."
SCORE = "window_score"
ALIKE = 0.1
"""Keys of one token differ by at most this part of the key's largest number."""
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Selected:
    """How a layer selects: `salient` of the `chunk` tokens of a chunk, for each of `heads` (HS); layers may differ in all three."""

    chunk: int
    salient: int
    heads: int

    def chunks_after(self, counts: np.ndarray) -> np.ndarray:
        """Number of promoted chunks after `counts` tokens."""
        return np.maximum(-(-counts // self.chunk) - 2, 0)

    def promoted(self, counts: np.ndarray, chunks: int) -> np.ndarray:
        """Whether each chunk is promoted after `counts` [B] tokens, [B, 1, chunks]."""
        return np.asarray(np.arange(chunks) < self.chunks_after(counts)[:, None, None])

    def by_chunk(self, slots: np.ndarray) -> np.ndarray:
        """Whether any slot of a chunk is true, [B, HS, chunks], of slots [B, HS, N]."""
        padded = np.pad(slots, ((0, 0), (0, 0), (0, -slots.shape[2] % self.salient)))
        return np.asarray(padded.reshape(*slots.shape[:2], -1, self.salient).any(-1))


class SelectionTies:
    """The salient cache of still::HybridAttention. A choice is a chunk of a head. A lead is that of the last selected score over the first
    rejected one, [B, HS, chunks]. If another selection was followed it is negative: the lead of the worst token that was added over the
    best that was dropped.

    Args:
        select_scope: See `HybridAttentionConfig`.
        layers: By layer that selects.
    """

    score = SCORE
    watched = ""
    unseen = False

    def __init__(self, select_scope: str, layers: Mapping[int, Selected]) -> None:
        self.scope, self.layers = select_scope, {str(layer): each for layer, each in layers.items()}

    def compare(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> Choices:
        """Compare the salient caches of two runtimes, chunk by chunk for each head. A sequence is compared no more in layers above one that
        chose otherwise at a near tie: they read other numbers."""
        found, turned = overruled(lead for layer, lead in leads.items() if layer >= 0), np.zeros(0)
        for (expected, actual), errors in self._with_own(pairs, own):
            for layer in sorted(self._layers(expected), key=int):
                differs, lead = self._differing(expected, actual, layer, leads, errors)
                turned = (
                    turned if turned.size else np.full(len(differs), np.inf)
                )  # the lowest layer that did, by sequence
                alike = (turned >= int(layer))[:, None, None]
                there = self.layers[layer].by_chunk(np.asarray(np.abs(expected[KEY + layer]).any(-1)))
                near, wrong = differs & alike & (lead <= 1), differs & alike & (lead > 1)
                found.compared += int((there & alike).sum())
                found.near_ties += int(near.sum())
                found.wrong += int(wrong.sum())
                found.widest = max(found.widest, float(lead.max(where=(near | wrong) & np.isfinite(lead), initial=0)))
                turned = np.where(near.any((1, 2)), np.minimum(turned, int(layer)), turned)
        return found

    def turned(self, pairs: Pairs, leads: Leads, own: Sequence[Arrays] = ()) -> list[dict[int, np.ndarray]]:
        found: list[dict[int, np.ndarray]] = []
        for (expected, actual), errors in self._with_own(pairs, own):
            found.append({})
            for layer in self._layers(expected):
                differs, lead = self._differing(expected, actual, layer, leads, errors)
                found[-1][int(layer)] = np.asarray((differs & (lead <= 1)).any((1, 2)))
        return found

    def selected(self, calls: Sequence[Arrays]) -> dict[int, np.ndarray]:
        """The salient keys [B, HS, N, D] that each of the calls adds; zeros where none is, or where other tokens may have taken slots."""
        found: dict[int, np.ndarray] = {}
        for layer in self._layers(calls[-1]):
            selected: np.ndarray = np.zeros(calls[-1][KEY + layer].shape, np.float32)
            slot, before = np.arange(selected.shape[2]), np.zeros(len(selected), np.int64)
            for call in calls:
                keys, of = call[KEY + layer], self.layers[layer]
                count = of.salient * of.chunks_after(call["present_length"])
                fresh: np.ndarray = (slot >= before[:, None]) & (slot < count[:, None]) & (count <= len(slot))[:, None]
                fresh = fresh[:, None, : keys.shape[2]]
                part = selected[:, :, : keys.shape[2]]
                part[...] = np.where(fresh[..., None], keys, part)
                before = count
            found[int(layer)] = selected
        return found

    def chooses(self, lengths: np.ndarray) -> bool:
        """Whether the next token begins a chunk, which promotes the second chunk before it."""
        chunks = {each.chunk for each in self.layers.values()}
        return any(bool(np.any((lengths % chunk == 0) & (lengths >= 2 * chunk))) for chunk in chunks)

    @property
    def span(self) -> int:
        """The ring has the scores of the two latest chunks."""
        return min(2 * each.chunk for each in self.layers.values())

    def scores(self, looks: Sequence[tuple[np.ndarray, Arrays]]) -> Scores:
        """[B, HS, chunks, 2, C]: each token's score, and 1 if its selection was followed; zeros for tokens without a look."""
        most = max(int(outputs["present_length"].max(initial=0)) for _, outputs in looks)
        found: Scores = {}
        for past, outputs in looks:
            last = outputs["present_length"][:, None] - 1
            for layer, of in self.layers.items():
                if (ring := outputs.get(f"present_{SCORE}.{layer}")) is None:
                    continue
                size = 2 * of.chunk
                position = last - (last - np.arange(size)) % size  # the latest position of each slot, [B, 2C]
                sequence, slot = np.nonzero(position >= past[:, None])
                score = self._grouped(ring.astype(np.float64), of.heads)
                whole = np.zeros((*score.shape[:2], 2, -(-most // of.chunk) * of.chunk))
                all_of = found.setdefault(int(layer), whole)
                all_of[sequence, :, 0, position[sequence, slot]] = score[sequence, :, slot]
                chosen = outputs.get(f"present_{CHOSEN}.{layer}", np.zeros((0, 0, 0, 0), np.int64))
                row, head, *at = np.nonzero(chosen >= 0)
                all_of[row, head, 1, chosen[row, head, *at]] = 1
        return {layer: _by_chunk(x, self.layers[str(layer)].chunk) for layer, x in found.items()}

    def leads(self, scores: Scores, own: Scores, counts: np.ndarray) -> Leads:
        """A tie is TIE times the larger of two errors of PyTorch's own run: of the two compared scores, which may be small by chance, and
        of all scores of the head's chunk (root mean square)."""
        found = {}
        for layer, (exact, chosen) in ((layer, np.moveaxis(x, -2, 0)) for layer, x in scores.items()):
            of = self.layers[str(layer)]
            if of.salient == of.chunk:
                continue
            other = own[layer][..., 0, :]
            infinite = np.isinf(exact) & (exact == other)  # position 0
            error = np.abs(np.where(infinite, 0, exact) - np.where(infinite, 0, other))
            order = np.argsort(-exact, axis=-1, kind="stable")
            reference = np.zeros(exact.shape, bool)
            np.put_along_axis(reference, order[..., : of.salient], True, -1)
            turned = ((chosen > 0).sum(-1) == of.salient) & (reference != (chosen > 0)).any(-1)
            selection = np.where(turned[..., None], chosen > 0, reference)
            worst = np.where(selection, exact, np.inf).argmin(-1)
            best = np.where(selection, -np.inf, exact).argmax(-1)
            places = np.stack([worst, best], -1)
            last, first = np.moveaxis(np.take_along_axis(exact, places, -1), -1, 0)
            least = np.maximum(np.sqrt(np.square(error).mean(-1)), np.take_along_axis(error, places, -1).max(-1))
            lead = (last - first) / (TIE * np.maximum(least, SMALLEST))
            lead = np.where(turned, np.minimum(lead, -SMALLEST), lead)  # equal scores are not PyTorch's choice either
            found[layer] = np.where(of.promoted(counts, lead.shape[2]), lead, np.inf)
        return found

    def closest(self, scores: Scores, counts: np.ndarray) -> float:
        """Over the promoted chunks."""
        found = []
        for layer, exact in ((self.layers[str(layer)], x[..., 0, :]) for layer, x in scores.items()):
            if layer.salient < layer.chunk:
                ranked = -np.sort(-exact, axis=-1)
                lead = ranked[..., layer.salient - 1] - ranked[..., layer.salient]
                found.append(lead[np.broadcast_to(layer.promoted(counts, lead.shape[2]), lead.shape)])
        return min((float(lead.min()) for lead in found if lead.size), default=float("inf"))

    @staticmethod
    def _with_own(pairs: Pairs, own: Sequence[Arrays]) -> Iterator[tuple[tuple[Arrays, Arrays], Arrays]]:
        """Each pair and the errors of PyTorch's own run there, none behind the last that are known."""
        return zip(pairs, chain(own, repeat({})), strict=False)

    def _layers(self, outputs: Arrays) -> list[str]:
        """Numbers of the layers in `outputs` that make choices."""
        return [layer for layer in self.layers if KEY + layer in outputs]

    def _differing(
        self, expected: Arrays, actual: Arrays, layer: str, leads: Leads, own: Arrays
    ) -> tuple[np.ndarray, np.ndarray]:
        """Chunks [B, HS, chunks] with different tokens, and the leads of those choices; up to 1 it is a tie."""
        differs = self.layers[layer].by_chunk(_differs(expected, actual, layer, own))
        lead = np.full(differs.shape, np.inf)
        known = leads.get(int(layer))
        if known is not None:
            count = min(differs.shape[2], known.shape[2])
            lead[..., :count] = np.abs(known[..., :count])
        return differs, lead

    def _grouped(self, score: np.ndarray, heads: int) -> np.ndarray:
        """[B, HS, 2C] from the ring's scores [B, H, 2C]."""
        grouped = score.reshape(score.shape[0], heads, -1, score.shape[2])
        return np.asarray(grouped.mean(2) if self.scope == "kv_group_mean" else grouped.max(2))


def _differs(expected: Arrays, actual: Arrays, layer: str, own: Arrays | None = None) -> np.ndarray:
    """Slots [B, HS, N] with different tokens; `own`: errors of PyTorch's own run."""
    a, b = (outputs[KEY + layer].astype(np.float32) for outputs in (expected, actual))
    least = ALIKE * np.abs(a).max(-1, initial=0)
    if own and KEY + layer in own:
        least = np.maximum(least, SAME_TOKEN * np.nan_to_num(own[KEY + layer][0], posinf=0))
    return ~(np.abs(a - b).max(-1, initial=0) <= least + 1e-6)


def _by_chunk(tokens: np.ndarray, chunk: int) -> np.ndarray:
    """[B, HS, chunks, 2, C] of [B, HS, 2, chunks * C]."""
    return tokens.reshape(*tokens.shape[:3], -1, chunk).swapaxes(2, 3)


def ties_of(manifest: Mapping[str, Any]) -> SelectionTies | None:
    """The ties of a package; None if its layers of this op select nothing, such as windows, whose salient caches have no rows."""
    begin, layers = KEY.removeprefix("present_"), {}
    for state in manifest["states"]:
        if state["name"].startswith(begin) and state["growth"]["rows"]:
            growth = state["growth"]
            layers[int(state["name"].removeprefix(begin))] = Selected(growth["per"], growth["rows"], state["shape"][1])
    return SelectionTies(manifest["still"]["select_scope"], layers) if layers else None
