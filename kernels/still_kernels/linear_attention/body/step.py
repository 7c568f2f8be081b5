"""A call of one token: the recurrence itself."""

from __future__ import annotations

from still_graphs.functions.builder import Scope
from still_kernels.linear_attention.body.layer import Layer, Tensors


def write_step(
    b: Scope, layer: Layer, x: Tensors, output: str, present: str, state: str = "past_recurrent_state"
) -> None:
    """Write `output` [B, 1, H, G, V] and the state `present` after the token; `state` is that before it.

    In place: the last read of the past state is the sum that writes the present one.
    """
    key = b("Transpose", x.key, perm=[0, 1, 3, 2])  # [B, H, D, 1]
    if x.decay is not None:
        state = b("Mul", state, b("Transpose", b("Exp", x.decay), perm=[0, 1, 3, 2]))
    update = x.value  # [B, H, 1, V]
    if x.beta is not None:
        update = b("Mul", x.beta, b("Sub", update, b("MatMul", x.key, state)))
    b("Add", state, b("Mul", key, update), out=present)
    query = b.reshape(x.query, 0, layer.heads, layer.shared, layer.dim)
    b("Unsqueeze", b("MatMul", query, present), [1], out=output)
