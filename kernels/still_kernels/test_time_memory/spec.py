"""still::TestTimeMemory: a SwiGLU network for each head, trained at run time on the tokens, a chunk at a time (LaCT)."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec
from still_kernels.attention.spec import COUNTS

_KEYS, _WEIGHTS = ("B", "T", "H", "D"), ("B", "H", 3, "M", "D")

TEST_TIME_MEMORY = OpSpec(
    # H memories, each read by G queries, with M hidden channels. Its weights gate, up and down [M, D] are `initial` + `memory_step`:
    #   f(x) = (silu(gate x) * up x)^T down.
    # The output is f(query) with the weights before the token's chunk of `chunk_size` tokens. The weights change at the chunk's last token.
    # For each matrix let g be the sum over the chunk's tokens of `rate` times the gradient of value . f(key) at these weights:
    #   m := g + mean(momentum) m,  weights := weights + (m, orthogonalized if `memory_update` is "muon").
    # Each output row of a matrix (a row of gate or up, a column of down) is then scaled to its norm in `initial`.
    # The sums of an open chunk are states, so a call may end anywhere. All in float32.
    # Source: Test-Time Training Done Right, arXiv:2505.23884, and its authors' code, a1600012888/LaCT.
    name="TestTimeMemory",
    torch_name="test_time_memory",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "G", "D"), "T", "activation"),
        TensorSpec("key", _KEYS, "T", "activation"),
        TensorSpec("value", _KEYS, "T", "activation"),
        TensorSpec("rate", ("B", "T", "H", 3), "float32", "activation"),  # of gate, up and down
        TensorSpec("momentum", ("B", "T", "H"), "float32", "activation"),
        TensorSpec("initial", ("H", 3, "M", "D"), "float32", "weight"),
        *COUNTS,
    ),
    # In place: writes to a state come after all reads of every state.
    states=(
        StateSpec("memory_step", _WEIGHTS, "float32"),
        StateSpec("memory_momentum", _WEIGHTS, "float32"),
        StateSpec("memory_gradient", _WEIGHTS, "float32"),  # of the open chunk
        StateSpec("momentum_sum", ("B", "H"), "float32"),  # the same
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "G", "D"), "T", "activation"),),
    attributes=(AttributeSpec("chunk_size", 64), AttributeSpec("memory_update", "muon", ("gradient", "muon"))),
)

ROW_EPSILON, MATRIX_EPSILON = 1e-5, 1e-7
"""Added to the norms by which rows, and matrices to be orthogonalized, are divided."""
ORTHOGONALIZE = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Newton-Schulz steps X := a X + (b X X^T + c (X X^T)^2) X of LaCT's code, after which singular values of at least 2e-3 are near 1."""
