"""Audit of hybrid attention: what must hold exactly, the norms around NP-Map, and where the salient tokens lie."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError
from still_export.mixers.base import CACHE, Profile
from still_export.mixers.hybrid_attention.modes import TrainableAttention, make_trainable
from still_export.mixers.trainable import SOFTMAX, STUDENT, attention_mode
from still_kernels.hybrid_attention.meaning.features import FEATURE_FLOOR

MASS_TOLERANCE, PASS_THROUGH_TOLERANCE = 1e-3, 1e-3
"""Relative error of z's mass, and largest difference of logits over their spread, that float32 may have."""


@dataclass
class Audit:
    """Results.

    full_selection: Largest difference of logits between k = C and softmax, over the logits' standard deviation.
    linear_mass: Largest relative error of "sum of z over 2 = linear tokens", for k = 0 and the model's k; None for maps whose features
        do not sum to 2.
    window: Largest difference of logits between k = 0 and softmax within the first two chunks, over their standard deviation.
    norms: "queries" and "keys" -> line -> mean norm per layer.
    frequent_tokens: The most often selected token texts, with their share of the selections and of the text.
    """

    full_selection: float
    window: float
    linear_mass: dict[str, float] | None
    norms: dict[str, dict[str, list[float]]]
    frequent_tokens: list[tuple[str, float, float]]
    offsets: np.ndarray = field(repr=False, default_factory=lambda: np.zeros((0, 0)))

    @property
    def passed(self) -> bool:
        """Whether everything that must hold holds."""
        mass = max((self.linear_mass or {"": 0.0}).values())
        return max(self.full_selection, self.window) <= PASS_THROUGH_TOLERANCE and mass <= MASS_TOLERANCE

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        values = asdict(self)
        values["offsets"] = self.offsets.tolist()
        return {**values, "passed": self.passed}

    def lines(self) -> list[str]:
        """What a reader sees first."""
        mass = [f"linear mass, {k}: relative error {v:.1e}" for k, v in (self.linear_mass or {}).items()]
        salient = ", ".join(f"{token!r} {share:.1%}" for token, share, _ in self.frequent_tokens[:6])
        return [
            f"k = C against softmax: {self.full_selection:.1e} of the logits' spread",
            f"k = 0 against softmax within two chunks: {self.window:.1e}",
            *mass,
            f"most often salient: {salient}",
        ]

    def profiles(self) -> dict[str, Profile]:
        """Norms before the map, after it, and after its direction alone."""
        return {"norms": self.norms}

    def shares(self) -> dict[str, np.ndarray]:
        """How often each offset of a chunk is selected, [layers, C]."""
        return {"salient_offsets": self.offsets} if self.offsets.any() else {}


@torch.no_grad()
def audit(model: Any, tokenizer: Any, ids: Tensor) -> Audit:
    """Audit `model` on one text.

    Args:
        model: A STILL model, float32 for tight bounds.
        ids: Token ids of the text, int64 [T].

    Raises:
        ConfigError: The text has four chunks or fewer.
    """
    attentions = make_trainable(model)
    row = ids[None].to(model.device)
    chunk = attentions[0].still.chunk_size
    if len(ids) <= 4 * chunk:
        raise ConfigError(
            f"the text has {len(ids)} tokens; an audit needs more than four chunks of chunk_size={chunk} (config.json)."
        )
    with attention_mode(attentions, SOFTMAX):
        softmax = model(row, use_cache=False).logits
    with attention_mode(attentions, STUDENT):
        full = _with_salient(model, attentions, chunk, row)
        none = _with_salient(model, attentions, 0, row)
    spread = softmax.float().std()
    norms = _norms(model, attentions, row)
    states, offsets, counts = _selections(model, attentions, row)
    mass = None
    if attentions[0].still.feature_map.endswith("_pm"):
        own = sorted({attention.still.salient_per_chunk for attention in attentions})
        mass = {"k = 0": _mass_error(model, attentions, row, 0), f"k = {', '.join(map(str, own))}": states}
    text = Counter(ids.tolist())
    frequent = [
        (tokenizer.decode([token]), count / max(1, sum(counts.values())), text[token] / len(ids))
        for token, count in counts.most_common(20)
    ]
    return Audit(
        full_selection=float((full - softmax).abs().max() / spread),
        window=float((none - softmax)[:, : 2 * chunk].abs().max() / spread),
        linear_mass=mass,
        norms=norms,
        frequent_tokens=frequent,
        offsets=offsets,
    )


def _with_salient(model: Any, attentions: list[TrainableAttention], salient: int, row: Tensor) -> Tensor:
    """Logits with k = `salient`."""
    before = [a.still for a in attentions]
    for attention in attentions:
        attention.still = replace(attention.still, salient_per_chunk=salient)
    try:
        return model(row, use_cache=False).logits
    finally:
        for attention, still in zip(attentions, before, strict=True):
            attention.still = still


def _states(model: Any, row: Tensor) -> list[Any]:
    """State of every hybrid layer after `row`."""
    cache = getattr(model(row, use_cache=True), CACHE)
    return [layer.state for layer in cache.layers if hasattr(layer, "state")]


def _mass_error(model: Any, attentions: list[TrainableAttention], row: Tensor, salient: int | None = None) -> float:
    """Largest relative error of sum_f z_f / 2 = linear tokens, with k = `salient`; None: with each layer's own."""
    before = model.config.still_config
    stills = [a.still for a in attentions]
    if salient is not None:
        model.config.still_config = {**before, "salient_per_chunk": salient, "salient_by_layer": None}
        for attention in attentions:
            attention.still = replace(attention.still, salient_per_chunk=salient)
    kept = torch.tensor([a.still.salient_per_chunk for a in attentions], device=row.device)
    try:
        states = _states(model, row)
    finally:
        model.config.still_config = before
        for attention, still in zip(attentions, stills, strict=True):
            attention.still = still
    chunk = attentions[0].still.chunk_size
    past = max(0, -(-row.shape[1] // chunk) - 2)
    expected = past * (chunk - kept)[:, None, None]
    found = torch.stack([state.z_state.sum(-1) / 2 for state in states])
    return float(((found - expected).abs() / expected.clamp_min(1)).max())


def _norms(model: Any, attentions: list[TrainableAttention], row: Tensor) -> dict[str, dict[str, list[float]]]:
    """Mean norms per layer of queries and keys: themselves, what NP-Map feeds its softmax, and the direction it starts from."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(module: TrainableAttention, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        hidden = arguments[0] if arguments else given["hidden_states"]
        query, key, _, _ = module.project(hidden, given["position_embeddings"])
        seen[module.layer_idx] = (query, key.repeat_interleave(module.still.group_size, dim=2))

    hooks = [a.register_forward_pre_hook(keep, with_kwargs=True) for a in attentions]
    model(row, use_cache=False)
    for hook in hooks:
        hook.remove()
    result: dict[str, dict[str, list[float]]] = {}
    for side, name in enumerate(("queries", "keys")):
        lines: dict[str, list[float]] = {"before the map": [], "after NP-Map": [], "direction alone": []}
        for attention in attentions:
            x = seen[attention.layer_idx][side].float()
            weight = (attention.feature_q_weight, attention.feature_k_weight)[side].float()
            direction = torch.einsum("bthd,hpd->bthp", x, weight.expand(attention.still.num_heads, -1, -1))
            norm = x.norm(dim=-1, keepdim=True)
            mapped = norm / direction.norm(dim=-1, keepdim=True).clamp_min(FEATURE_FLOOR) * direction
            for line, value in zip(lines.values(), (x, mapped, direction), strict=True):
                line.append(float(value.norm(dim=-1).mean()))
        result[name] = lines
    return result


def _selections(
    model: Any, attentions: list[TrainableAttention], row: Tensor
) -> tuple[float, np.ndarray, Counter[int]]:
    """Error of z's mass, selections by offset [layers, C], and by token, at the model's own k.

    The scores of two chunks are in the ring after each piece of two chunks.
    """
    chunk, kept = attentions[0].still.chunk_size, [a.still.salient_per_chunk for a in attentions]
    error = _mass_error(model, attentions, row)
    cache = None
    offsets = np.zeros((len(attentions), chunk))
    counts: Counter[int] = Counter()
    if not any(kept):
        return error, offsets, counts
    for start in range(0, row.shape[1] // (2 * chunk) * 2 * chunk, 2 * chunk):
        piece = row[:, start : start + 2 * chunk]
        cache = getattr(model(piece, use_cache=True, **{CACHE: cache}), CACHE)
        states = [layer.state for layer in cache.layers if hasattr(layer, "state")]
        for index, state in enumerate(states):
            scores = state.window_score[0].unflatten(1, (2, chunk))  # [H, 2, C]
            chosen = scores.topk(kept[index], dim=-1).indices
            offsets[index] += np.bincount(chosen.flatten().tolist(), minlength=chunk)
            tokens = piece[0].unflatten(0, (2, chunk)).expand(scores.shape[0], -1, -1).gather(2, chosen)
            counts.update(tokens.flatten().tolist())
    return error, offsets, counts
