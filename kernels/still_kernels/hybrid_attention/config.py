"""Configuration of one hybrid attention layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from still_graphs.errors import ConfigError, unknown
from still_graphs.spec import CACHE, CODES, AttributeValue
from still_graphs.states import rows_after
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION, SLOTS

CHOICES: dict[str, tuple[str, ...]] = {
    **{a.name: a.choices for a in HYBRID_ATTENTION.attributes if a.choices and a != CACHE},
    "gate": ("channel", "none"),
    "profile": ("still", "released"),
}


CACHES = ("float16", "int8")
"""Storage types of keys and values."""


def cache_attribute(cache: str | None) -> str:
    """The op's attribute for keys and values stored in the type `cache`; float16 shows in the states themselves."""
    return cache if cache == "int8" else str(CACHE.default)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError with the nearest choice if `value` of the field `name` is not in `choices`."""
    if value not in choices:
        raise unknown(value, choices, f"{name}={value!r}")


@dataclass(frozen=True, kw_only=True)
class HybridAttentionSettings:
    """Settings that training fixes for all layers of a model, independent of their geometry.

    Args:
        chunk_size: C, tokens per chunk.
        salient_per_chunk: k, tokens of a chunk that stay in softmax; 0 none, C all (full softmax attention).
        select_scope: One selection per query head, or per key/value head by the max or mean score of its query heads.
        saliency: "margin", or the released training code's score.
        feature_map: phi; the projections may have one head (shared) or H.
        feature_dim: P, output rows of the projections; None = D. F is 2P for the "_pm" maps, else P.
        gate: "channel" requires a gate tensor, "none" requires None.
        local: "chunked" = previous and current chunk; "sliding" = the `window_size` latest tokens; "sliding(W)" sets both.
        window_size: W of "sliding", None = C; with salient tokens W must equal C, else 1 <= W <= C.
        mix_epsilon: Added to the joint denominator.
        phantom_first_chunk: Chunk 0 reads C zero keys with zero values (released training code).
        profile: "released" sets saliency, phantom_first_chunk and mix_epsilon to the values of released checkpoints.
    """

    chunk_size: int = 64
    salient_per_chunk: int = 4
    select_scope: str = "q_head"
    saliency: str = "margin"
    feature_map: str = "np_softmax_pm"
    feature_dim: int | None = None
    gate: str = "channel"
    local: str = "chunked"
    window_size: int | None = None
    mix_epsilon: float = 1e-6
    phantom_first_chunk: bool = False
    profile: str = "still"


@dataclass(frozen=True)
class HybridAttentionConfig(HybridAttentionSettings):
    """A layer's whole configuration except its weights: the settings, and

    Args:
        num_heads: Query heads H.
        num_kv_heads: Key/value heads HK, a divisor of H.
        head_dim: D.
        window_factor: Scalars on the softmax terms (LoLCATs), any sequence of H numbers, or None.
        capacity_tokens: T_max, tokens that the salient cache covers with `capacity_slots` slots.
        overflow: Behaviour beyond T_max.
        cache: Storage type of keys and values if it has fewer bits than the activations: "float16", "int8" (a byte for each number, a scale
            for each row) or None.
        attribute_values: Computed values of `attributes`.
        slot_rule: Computed growth rule of salient slots.

    Raises:
        ConfigError: A value is unknown, out of range, or contradicts another.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_factor: Sequence[float] | None = field(default=None, kw_only=True)
    capacity_tokens: int = field(default=8192, kw_only=True)
    overflow: str = field(default="error", kw_only=True)
    cache: str | None = field(default=None, kw_only=True)
    attribute_values: tuple[AttributeValue, ...] = field(init=False, repr=False, compare=False)
    slot_rule: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if window := re.fullmatch(r"sliding\((\d+)\)", str(self.local)):
            object.__setattr__(self, "local", "sliding")
            object.__setattr__(self, "window_size", int(window[1]))
        if self.window_factor is not None:
            object.__setattr__(self, "window_factor", tuple(float(x) for x in self.window_factor))
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.cache is not None:
            check_choice("cache", self.cache, CACHES)
        for name in ("num_heads", "num_kv_heads", "head_dim", "chunk_size", "capacity_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if self.cache == "int8" and self.head_dim % CODES:
            raise ConfigError(f"cache='int8' with head_dim={self.head_dim}: rows of 8 bits have multiples of {CODES}.")
        if self.feature_dim is not None and self.feature_dim < 1:
            raise ConfigError(f"feature_dim={self.feature_dim}; it must be at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}.")
        if not 0 <= self.salient_per_chunk <= self.chunk_size:
            raise ConfigError(f"salient_per_chunk={self.salient_per_chunk} is outside 0..chunk_size={self.chunk_size}.")
        if self.mix_epsilon < 0:
            raise ConfigError(f"mix_epsilon={self.mix_epsilon}; it must not be negative.")
        if self.window_factor is not None and len(self.window_factor) != self.num_heads:
            raise ConfigError(f"window_factor has {len(self.window_factor)} values for num_heads={self.num_heads}.")
        self._check_window()
        if self.profile == "released":
            if self.local != "chunked":
                raise ConfigError('profile="released" needs local="chunked".')
            for name, value in (("saliency", "released_prefill"), ("phantom_first_chunk", True), ("mix_epsilon", 1e-6)):
                object.__setattr__(self, name, value)
        # Computed here, since compiled code compares them at every call. A first use may be within compiled code, where Python 3.11 would
        # need a lock.
        attributes = self.attributes()
        object.__setattr__(self, "attribute_values", tuple(attributes.values()))
        object.__setattr__(self, "slot_rule", {**SLOTS.resolve(attributes), "fixed": False})

    def _check_window(self) -> None:
        if self.local == "chunked":
            if self.window_size not in (None, 0):
                raise ConfigError(f'window_size={self.window_size} has no meaning with local="chunked"; leave it out.')
            return
        if self.phantom_first_chunk:
            raise ConfigError('phantom_first_chunk needs local="chunked".')
        if not 1 <= self.window <= self.chunk_size:
            raise ConfigError(f"window_size={self.window} is outside 1..chunk_size={self.chunk_size}.")
        if self.salient_per_chunk and self.window != self.chunk_size:
            # A token that left the window before its chunk was complete would have no selection yet.
            raise ConfigError(
                f"window_size={self.window} with salient_per_chunk={self.salient_per_chunk}: salient tokens need "
                f"window_size = chunk_size = {self.chunk_size}."
            )

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def window(self) -> int:
        """W, tokens of a sliding window; C for chunked attention, whose scores use the latest C tokens."""
        return self.window_size or self.chunk_size

    @property
    def projection_dim(self) -> int:
        """P, output rows of the feature projections."""
        return self.feature_dim or self.head_dim

    @property
    def state_features(self) -> int:
        """F, features of the linear state."""
        return self.projection_dim * (2 if self.feature_map.endswith("_pm") else 1)

    @property
    def select_heads(self) -> int:
        """HS, heads of the selection and of the salient cache."""
        return self.num_heads if self.select_scope == "q_head" else self.num_kv_heads

    @property
    def capacity_slots(self) -> int:
        """N, slots of the salient cache for exactly `capacity_tokens`."""
        return self.slots_for(self.capacity_tokens)

    def slots_for(self, tokens: int) -> int:
        """Slots that a sequence of `tokens` tokens fills, without regard to the capacity."""
        return rows_after(self.slot_rule, tokens, self.capacity_tokens)

    def symbols(self) -> dict[str, int]:
        """Sizes of the OpSpec's symbols in the configuration."""
        return {
            "H": self.num_heads,
            "HK": self.num_kv_heads,
            "HS": self.select_heads,
            "D": self.head_dim,
            "P": self.projection_dim,
            "F": self.state_features,
            "C": self.chunk_size,
        }

    def attributes(self) -> dict[str, AttributeValue]:
        """Values of the op's attributes, in the order of its OpSpec."""
        values: dict[str, Any] = {a.name: getattr(self, a.name) for a in HYBRID_ATTENTION.attributes}
        values["window_size"] = self.window_size or 0
        values["phantom_first_chunk"] = int(self.phantom_first_chunk)
        values[CACHE.name] = cache_attribute(self.cache)
        return values

    @classmethod
    def from_attributes(cls, attributes: Mapping[str, AttributeValue], **fields: Any) -> HybridAttentionConfig:
        """The configuration of an op call: its attributes, and the fields that come from its tensors."""
        values: dict[str, Any] = {**attributes, **fields}
        values["phantom_first_chunk"] = bool(values["phantom_first_chunk"])
        values["window_size"] = values["window_size"] or None
        values[CACHE.name] = None if values[CACHE.name] == CACHE.default else values[CACHE.name]
        return cls(**values)
