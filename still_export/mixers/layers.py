"""Shared by all mixers: names of layers, head size, deployment choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from still_graphs.errors import ConfigError
from still_kernels.hybrid_attention.config import CACHES, CHOICES, check_choice

HYBRID = "hybrid_attention"
FULL = "full_attention"
WINDOWED = "windowed_attention"
SELECTED = "selected_blocks"
"""Names of layers; still_export.mixers.registry has all."""

MOST_ROWS, MOST_TOKENS = 1 << 16, 1 << 40
"""Limits far above any model: a damaged number beyond would exhaust memory before a shape check could name it."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Choices for running a model that training does not fix; every mixer reads them.

    Args:
        capacity_tokens: T_max, number of tokens that states have room for; None: the family's max_position_embeddings.
        overflow: Behaviour beyond the capacity: "error", or how the salient cache folds.
        cache: Type of cached keys and values, if it has fewer bits than the activations: "float16", "int8" or None.
        whole_prompts: Each prompt is one call, so layers can depend on its length; else they depend on each token's position.
    """

    capacity_tokens: int | None = None
    overflow: str = "error"
    cache: str | None = None
    whole_prompts: bool = False

    def __post_init__(self) -> None:
        check_choice("overflow", self.overflow, CHOICES["overflow"])
        if self.cache is not None:
            check_choice("cache", self.cache, CACHES)
        check_range("capacity_tokens", self.capacity_tokens or 1, MOST_TOKENS)

    @property
    def bounded(self) -> bool:
        """Whether tokens beyond the capacity are errors; otherwise the salient cache folds."""
        return self.overflow == "error"

    def capacity(self, family: Any) -> int:
        """T_max for a model with the family configuration `family`."""
        return self.capacity_tokens or int(family.max_position_embeddings)


@dataclass(frozen=True)
class Linearizer:
    """The type of layer that replaces softmax in a linearization.

    Args:
        name: Name of the mixer in a recipe.
        layer: Name of such a layer in `layer_types`.
        trained: It has parameters of its own, which stage 1 trains.
        options: Of the options of STILL, those that it has too.
    """

    name: str
    layer: str
    trained: bool = True
    options: tuple[str, ...] = ()


class Found(Protocol):
    """The result of a Finder."""

    def fields(self) -> dict[str, Any]:
        """Fields for a STILL configuration."""

    def lines(self) -> list[str]:
        """One line a layer, in words."""

    def write(self, path: Path) -> None:
        """Write the file that `read` of the Finder reads."""

    def check(self, path: str, base: str) -> None:
        """Raise ConfigError if the result in the file `path` belongs to weights with another digest than `base`."""


@dataclass(frozen=True)
class Finder:
    """Measures a mixer's layers before training. `linearize --find-NAME` writes NAME.json for the recipe's option NAME.

    Args:
        text: Help of the flag.
        least_tokens: Least length of a row for a recipe. short: Message for a shorter one, up to the length to use.
        find: Measures a model; arguments: its trainable layers, a row of token ids [1, T], the digest of its weights.
        read: Reads a result file; arguments: path, number of layers. Raises ConfigError.
    """

    name: str
    mixer: str
    text: str
    least_tokens: Callable[[Any], int]
    short: str
    find: Callable[[Any, Sequence[Any], Any, str], Found]
    read: Callable[[Path, int], Found]


def check_range(name: str, value: int, most: int) -> None:
    """Raise ConfigError unless `value` of the field `name` is within 1..most."""
    if value < 1:
        raise ConfigError(f"{name}={value}; it must be at least 1.")
    if value > most:
        raise ConfigError(f"{name}={value} is more than {most}.")


def head_size(family: Any) -> int:
    """D of a family configuration; several leave `head_dim` unset."""
    return int(getattr(family, "head_dim", None) or family.hidden_size // family.num_attention_heads)
