"""still::LocalLinearAttention: softmax attention whose values are corrected by keys."""

from __future__ import annotations

from collections.abc import Collection

from still_graphs.spec import OpSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LOCAL_LINEAR_ATTENTION = OpSpec(
    # With p the weights of softmax attention, k_mean = sum of p k, C = sum of p (k - k_mean) (k - k_mean)^T and l the
    # logarithm of the sum of the exponentials that p are shares of:
    #   output = sum of p (1 - r (k - k_mean)) v,  r = `correction`, or where that is absent (C + ridge exp(-l) I)^-1 (k_mean - query).
    # The latter is the value at the query of the line through keys and values that has the least squared error, weighted by the
    # exponentials, with `ridge` times its squared slope added. It is solved by conjugate gradients, preconditioned by the diagonal, in
    # float64 until the residual is NEAR of what it was; float32 loses 1e-3 of the output at a condition of 1e4. A system that is not solved
    # after MOST steps gives NaN. The rest is in float32 beside a correction, in float64 beside a ridge.
    name="LocalLinearAttention",
    torch_name="local_linear_attention",
    inputs=(
        *HEADS,
        TensorSpec("correction", ("B", "T", "H", "D"), "T", "activation", optional=True),
        TensorSpec("ridge", ("H",), "float32", "weight", optional=True),
        *COUNTS,
    ),
    # In place, like still::Attention.
    states=KEY_AND_VALUE,
    outputs=(OUTPUT,),
)

LARGEST = 60.0
"""Where the exponent of what is added to C ends: beyond, the correction is 0 in float32 whatever it is."""


NEAR, MOST = 1e-20, 4096
"""Square of the residual, of what it was, where a solution is near enough: the output errs 1e-8 at a condition of 1e4. Steps to it."""


def fault_of(present: Collection[str]) -> str | None:
    """What is wrong with a node of the inputs `present`; None where nothing is."""
    both = [name for name in ("correction", "ridge") if name in present]
    if len(both) != 1:
        return f"it has {' and '.join(both) or 'neither correction nor ridge'}; it takes one of correction and ridge"
    return None
