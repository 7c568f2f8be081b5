"""The interface of a mixer: its ops, sizes of their states, its cache layer, the module that replaces a family's; for evaluation, its
parts."""

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
    """An op of a layer, with its attributes.

    symbols: Sizes of the symbols in the shapes of its states, but B and N.
    """

    spec: OpSpec
    attributes: Mapping[str, AttributeValue]
    symbols: Mapping[str, int]


class Mixer(Protocol):
    """Base class of mixers: the computation of one layer on tokens and state.

    `config` is a STILL family configuration, `index` a layer of it.
    """

    name: str
    """Its name in `layer_types`."""

    parts: tuple[str, ...] = ()
    """Variants of a model that `without` makes."""

    settings: tuple[str, ...] = ()
    """Fields of the model's STILL configuration that configure its layers."""

    of_families: bool = False
    """Families have such layers from the start; softmax layers are not converted to it."""

    by_prompts: bool = False
    """Its layers can depend on a whole prompt's length (`whole_prompts` of the deployment)."""

    trained: type | None = None
    """Class of its trainable modules; None: they are not trained."""

    def ops(self, config: Any, index: int) -> tuple[LayerOp, ...]:
        """The ops of the layer; their states have different names."""

    def cache_layer(self, config: Any, index: int) -> StillCacheLayer:
        """The layer's part of an empty cache."""

    def module(self, base: nn.Module, config: Any, index: int) -> nn.Module:
        """The module that replaces the family's module `base`, which mixes the layer's tokens.

        Raises:
            UnsupportedModelError: `base` is of a family, or a variant, that the mixer does not cover.
        """

    def paged(self, config: Any, index: int, ranks: int, rank: int) -> PagedLayer | None:
        """The layer for a serving engine, one of `ranks` that share its heads; None: the engine's own softmax attention computes it.

        Raises:
            UnsupportedModelError: It is not served so, or its heads cannot be shared so.
        """
        raise UnsupportedModelError(
            f"layers of type {self.name} are not served by this plugin: vLLM has the family itself. Serve the model that was exported."
        )

    def trainable(self, module: Any, learn_window_factors: bool) -> Trainable | None:
        """Convert the layer's `module`, in place, to a form that can be teacher and student; None: the layer is not trained.

        Args:
            learn_window_factors: Where the softmax terms have a weight, it can be trained.
        """
        if self.trained is None:
            return None
        module.__class__ = self.trained  # wrapping would rename the parameters
        return module

    def without(self, model: nn.Module, part: str) -> AbstractContextManager[None]:
        """Inside the block `model` has one of `parts` of these layers disabled."""
        return nullcontext()

    def restore_base(self, model: nn.Module) -> None:
        """Restore the base model's attention in these layers, permanently; nothing to do if they already compute it."""
        return None
