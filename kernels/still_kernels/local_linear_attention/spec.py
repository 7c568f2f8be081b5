"""still::LocalLinearAttention: softmax attention with values corrected by keys."""

from __future__ import annotations

from collections.abc import Collection

from still_graphs.spec import OpSpec, TensorSpec
from still_kernels.attention.spec import COUNTS, HEADS, KEY_AND_VALUE, OUTPUT

LOCAL_LINEAR_ATTENTION = OpSpec(
    # With p the weights of softmax attention, k_mean = sum of p k, C = sum of p (k - k_mean) (k - k_mean)^T and l the
    # logarithm of the sum of the exponentials before normalization:
    #   output = sum of p (1 - r (k - k_mean)) v,  r = `correction`, or without it (C + ridge exp(-l) I)^-1 (k_mean - query).
    # The latter is a ridge regression of values on keys, weighted by the exponentials, evaluated at the query; `ridge` times the squared
    # slope is added to its squared error. Conjugate gradients with a diagonal preconditioner solve it in float64, until the residual is
    # NEAR of the first one; float32 loses 1e-3 of the output at a condition of 1e4. A system that is not solved after MOST steps gives
    # NaN. The rest is in float32 with a correction, in float64 with a ridge.
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
"""Bound of the exponent of the term added to C; beyond it the correction is 0 in float32."""


NEAR, MOST = 1e-20, 4096
"""Squared residual, relative to the first, of a converged solution: the output errs 1e-8 at a condition of 1e4. Most steps."""


def fault_of(present: Collection[str]) -> str | None:
    """The fault of a node with the inputs `present`; None: no fault."""
    both = [name for name in ("correction", "ridge") if name in present]
    if len(both) != 1:
        return f"it has {' and '.join(both) or 'neither correction nor ridge'}; it takes one of correction and ridge"
    return None
