"""Linear attention for a layer: on a cache's states, or on whole sequences without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from still_export.mixers.base import LayerOp
from still_export.mixers.fixed import states_of
from still_kernels.linear_attention.call import linear_attention, linear_attention_whole
from still_kernels.linear_attention.meaning import Inputs


def recurrent(inputs: Inputs, cache: Any, index: int, ops: Sequence[LayerOp]) -> Tensor:
    """Output [B, T, H, G, V] of layer `index`; updates the cache's states. `ops`: the layer's ops with states of fixed size.

    Args:
        inputs: Without new_tokens, which come from the cache.
        cache: A StillCache, or None: sequences are new and equally long, with gradients.
    """
    if cache is None:
        return linear_attention_whole(inputs)
    states, new_tokens, layer = states_of(cache, index, ops, inputs.value)
    output, state = linear_attention(replace(inputs, new_tokens=new_tokens), states["recurrent_state"])
    assert layer is not None
    layer.store({"recurrent_state": state})
    return output
