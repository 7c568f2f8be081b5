"""The definition: one token after the other. Readable, not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from still_graphs.ops.linear_attention import DELTA
from still_kernels.linear_attention.inputs import Inputs


def naive_linear_attention(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention by its recurrence, in at least float32.

    With S the state, g the decay, b beta, per head and token, `linear` without the gate, `delta` rules with the correction:

        S := exp(g) S,  S := S + k (v)^T  or  S + b k (v - S^T k)^T,  output = scale * S^T q

    Args:
        state: What the sequences have seen, [B, H, D, V].

    Returns:
        output [B, T, H, G, V], dtype of query, 0 at padding, which enters nothing; and the state after the call.

    Raises:
        ShapeError: A tensor does not fit, or the rule lacks one.
    """
    sizes = inputs.check(state)
    query, key, value, decay, beta = inputs.spread()
    outputs = [query.new_zeros(sizes.B, 0, sizes.H, sizes.G, sizes.V)]
    for t in range(sizes.T):
        k, update = key[:, t, :, :, None], value[:, t, :, None]  # [B, H, D, 1], [B, H, 1, V]
        if decay is not None:
            state = decay[:, t, :, :, None].exp() * state
        if inputs.update_rule in DELTA:
            assert beta is not None
            update = beta[:, t, :, None, None] * (update - k.transpose(2, 3) @ state)
        state = state + k * update
        outputs.append((query[:, t] @ state)[:, None])
    return torch.cat(outputs, dim=1).to(inputs.query.dtype), state
