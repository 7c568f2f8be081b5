"""A page of vLLM's memory that holds one request's states of one layer. No vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from still_export.errors import UnsupportedModelError
from still_export.mixers.base import LayerOp, PagedLayer
from still_export.mixers.registry import mixer_of
from still_graphs.states import rows_after

ALIGNMENT = 64
"""Bytes that a page is a multiple of, as kernels read rows in wide pieces."""


@dataclass(frozen=True)
class Page:
    """States of a layer as they follow each other in a page, widest elements first; those without elements take no place.

    Args:
        names, shapes, dtypes: Of the states, then of what fills the page up, "" int8.
        empty: Shapes and types of the states without elements by name.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    empty: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def size_bytes(self) -> int:
        """Bytes of a page."""
        return sum(math.prod(s) * t.itemsize for s, t in zip(self.shapes, self.dtypes, strict=True))

    def memory(self, pages: int, device: torch.device) -> tuple[Tensor, ...]:
        """Cleared memory of `pages` pages, as tensors [pages, *shape] that lie in them as an engine's do."""
        raw, offset, found = torch.zeros(pages, self.size_bytes, dtype=torch.int8, device=device), 0, []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            found.append(raw[:, offset : offset + size].view(dtype).unflatten(1, shape))
            offset += size
        return tuple(found)

    def states(self, tensors: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The states [pages, ...] by name, of what the engine has for `shapes`."""
        found = {name: x for name, x in zip(self.names, tensors, strict=True) if name}
        for name, (shape, dtype) in self.empty.items():
            found[name] = tensors[0].new_empty((tensors[0].shape[0], *shape), dtype=dtype)
        return found


def page_of(op: LayerOp, tokens: int, capacity_tokens: int, dtype: torch.dtype) -> Page:
    """The page of a layer for requests of at most `tokens` tokens.

    Args:
        capacity_tokens: What the model's states are meant to hold.
        dtype: Of activations.
    """
    found, empty = [], {}
    for state in op.spec.states_with(op.attributes):
        rows = 0 if state.growth is None else rows_after(state.growth.resolve(op.attributes), tokens, capacity_tokens)
        shape = state.sizes({**op.symbols, "B": 1, "N": rows})[1:]
        kind = dtype if state.dtype == "T" else torch.float32
        if math.prod(shape):
            found.append((state.name, shape, kind))
        else:
            empty[state.name] = (shape, kind)
    found.sort(key=lambda entry: -entry[2].itemsize)
    size = sum(math.prod(shape) * kind.itemsize for _, shape, kind in found)
    if size % ALIGNMENT:
        found.append(("", (ALIGNMENT - size % ALIGNMENT,), torch.int8))
    names, shapes, dtypes = zip(*found, strict=True)
    return Page(names, shapes, dtypes, empty)


def paged_layers(config: Any, ranks: int = 1, rank: int = 0) -> list[PagedLayer | None]:
    """Each layer of a model with the STILL family configuration `config` on one of `ranks`; None where vLLM's own attention computes it.

    Raises:
        UnsupportedModelError: All are softmax, or one is not served so.
    """
    layers = [mixer_of(config, i).paged(config, i, ranks, rank) for i in range(config.num_hidden_layers)]
    if not any(layers):
        raise UnsupportedModelError(
            "no layer of this STILL model is linearized: still_config.layer_types in config.json says softmax for each. Serve the "
            "base model, which vLLM has itself."
        )
    return layers


def common_page(config: Any, tokens: int, dtype: torch.dtype, ranks: int = 1) -> Page:
    """The page of every layer that has one; the engine knows one size.

    Raises:
        UnsupportedModelError: They differ, or as of `paged_layers`.
    """
    capacity = config.still.capacity(config)
    pages = [page_of(layer.op, tokens, capacity, dtype) for layer in paged_layers(config, ranks) if layer is not None]
    if any(page != pages[0] for page in pages):
        raise UnsupportedModelError(
            "the states of this model's layers differ in size; vLLM is given one page size for all."
        )
    return pages[0]
