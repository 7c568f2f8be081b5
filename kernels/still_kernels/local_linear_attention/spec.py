"""still::LocalLinearAttention: softmax attention whose values are corrected by keys (Parallax, local linear attention)."""

from __future__ import annotations

from collections.abc import Collection

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LOCAL_LINEAR_ATTENTION = OpSpec(
    # All in float32. With p the weights of softmax attention, k_mean = sum of p k, C = sum of p (k - k_mean) (k - k_mean)^T and l the
    # logarithm of the sum of the exponentials that p are shares of:
    #   output = sum of p (1 - r (k - k_mean)) v,  r = `correction`, or where that is absent (C + ridge exp(-l) I)^-1 (k_mean - query).
    # The latter is the value at the query of the line through keys and values that has the least squared error, weighted by the
    # exponentials, with `ridge` times its squared slope added: `ridge_steps` steps of conjugate gradients, preconditioned by the diagonal.
    name="LocalLinearAttention",
    torch_name="local_linear_attention",
    inputs=(
        *HEADS,
        TensorSpec("correction", ("B", "T", "H", "D"), "T", "activation", optional=True),
        TensorSpec("ridge", ("H",), "float32", "weight", optional=True),
        *COUNTS,
    ),
    # In place, as of still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
    attributes=(AttributeSpec("ridge_steps", 0),),
)

LARGEST = 60.0
"""Where the exponent of what is added to C ends: beyond, the correction is 0 in float32 whatever it is."""


def fault_of(given: Collection[str], ridge_steps: int) -> str | None:
    """What is wrong with `ridge_steps` for a node with the inputs `given`; None where nothing is."""
    both = [name for name in ("correction", "ridge") if name in given]
    if len(both) != 1:
        return f"it has {' and '.join(both) or 'neither correction nor ridge'}; it takes one of correction and ridge"
    if (ridge_steps < 1) if both == ["ridge"] else (ridge_steps != 0):
        return f"ridge_steps={ridge_steps} beside {both[0]}; it must be {'at least 1' if both == ['ridge'] else '0'}"
    return None
