"""Lara-Mini (since transformers 5.24): gated delta rule, softmax in a window, softmax of all tokens without positions, experts.

Published folders have one fused input projection for the delta rule.
"""

from __future__ import annotations

from functools import partial

import torch

from still_export.errors import CheckpointError
from still_export.mixers.layers import FULL, WINDOWED
from still_export.models.families.fused import rows_of
from still_export.models.families.linear_mixins import LinearConfigMixin, LinearModelMixin, Place, newer_families
from still_export.models.families.softmax_families import Published
from still_export.models.families.support import SLIDING
from still_export.models.read.weights import Deferred, Weight

_FUSED = ".linear_attn.in_proj.weight"


class LaraModelMixin(LinearModelMixin):
    """Softmax layers without a window have no positions."""

    def swap_mixers(self) -> None:
        for layer, kind in zip(self.model.layers, self.config.layer_types, strict=True):
            if kind == "full_attention":
                layer.self_attn.use_rope = False
        super().swap_mixers()


def tensors(found: dict[str, Weight]) -> dict[str, Weight]:
    """Split input projections into rows of queries, keys and values, of the output gate, of beta, and of the decay.

    Raises:
        CheckpointError: A projection has an unexpected number of rows.
    """
    result: dict[str, Weight] = {}
    for name, weight in found.items():
        if not name.endswith(_FUSED):
            result[name] = weight
            continue
        module = name.removesuffix(".in_proj.weight")
        mixed, heads = found[f"{module}.conv1d.weight"].shape[0], found[f"{module}.A_log"].shape[0]
        sizes = {"qkv": mixed, "z": heads * found[f"{module}.norm.weight"].shape[0], "b": heads, "a": heads}
        if weight.shape[0] != sum(sizes.values()):
            raise CheckpointError(
                f"{name} has {weight.shape[0]} rows, {sum(sizes.values())} are expected. Fetch the model again."
            )
        begin = 0
        for part, size in sizes.items():
            shape = torch.Size((size, *weight.shape[1:]))
            read = partial(rows_of, weight, begin, begin + size)
            result[f"{module}.in_proj_{part}.weight"] = Deferred(shape, weight.dtype, read)
            begin += size
    return result


PLACES = {
    "linear_attention": Place("gated_delta_net", ("linear_attn",)),
    "full_attention": Place(FULL, ("self_attn",)),
    SLIDING: Place(WINDOWED, ("self_attn",)),
}
FAMILIES = newer_families(
    __name__,
    "LaraMini",
    PLACES,
    (LinearConfigMixin, LaraModelMixin),
    published=Published(names=((".linear_attn.out_norm.", ".linear_attn.norm."),), tensors=tensors),
)
