"""What the generic rooms ask of a mixer: its ops, the sizes of their states, its cache layer, the module that takes a family's place;
and, for evaluation, its parts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from still_export.errors import UnsupportedModelError
from still_export.mixers.cache_layer import StillCacheLayer
from still_export.mixers.paged import PagedLayer
from still_graphs.ops import OpSpec
from still_graphs.spec import AttributeValue

if TYPE_CHECKING:
    from still_export.mixers.trainable import Trainable


@dataclass(frozen=True)
class LayerOp:
    """An op of a layer, with its attributes there.

    symbols: Sizes of the symbols in the shapes of its states, but B and N.
    """

    spec: OpSpec
    attributes: Mapping[str, AttributeValue]
    symbols: Mapping[str, int]


class Mixer(Protocol):
    """What one layer does with its tokens and its state; mixers derive from it.

    `config` is a STILL family configuration, `index` a layer of it.
    """

    name: str
    """In `layer_types`."""

    parts: tuple[str, ...] = ()
    """Variants of a model that `without` makes."""

    settings: tuple[str, ...] = ()
    """Fields of the model's STILL configuration that say how its layers are."""

    of_families: bool = False
    """Families have such layers from the start; no softmax layer becomes one."""

    by_prompts: bool = False
    """Its layers can go by a whole prompt's length, `whole_prompts` of the deployment."""

    trained: type | None = None
    """Class of its modules as teacher and student; None: none are trained."""

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        """The ops of the layer; the names of their states differ."""

    def cache_layer(self, config: Any, index: int) -> StillCacheLayer:
        """The layer's part of a cache that has seen nothing."""

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        """The module that takes the place of the family's module `base`, which mixes the tokens of the layer.

        Raises:
            UnsupportedModelError: `base` is of a family, or a variant, that the mixer does not cover.
        """

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLayer | None:
        """The layer for an engine that serves many requests, one of `ranks` that share its heads; None: the engine's own softmax
        attention computes it.

        Raises:
            UnsupportedModelError: It is not served so, or its heads cannot be shared so.
        """
        raise UnsupportedModelError(
            f"layers of type {self.name} are not served by this plugin: vLLM has the family itself. Serve the model that was exported."
        )

    def trainable(self, module: Any, learn_window_factors: bool) -> Trainable | None:
        """The layer's `module`, in place in a form that can be teacher and student; None: the layer stays as it is.

        Args:
            learn_window_factors: Where the softmax terms have a weight, it can be trained.
        """
        if self.trained is None:
            return None
        module.__class__ = self.trained  # wrapping would rename the parameters
        return module

    def without(self, model: nn.Module, part: str) -> AbstractContextManager[None]:
        """`model` with a part of these layers switched off, one of `parts`, inside the block."""
        return nullcontext()

    def restore_base(self, model: nn.Module) -> None:
        """Let these layers compute the attention of the base model, for good; nothing to do where they do."""
        return None
