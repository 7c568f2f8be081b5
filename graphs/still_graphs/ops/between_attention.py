"""still::BetweenAttention: what lies between a layer's attention and the next one's, for one token of a small model, in one launch."""

from __future__ import annotations

from still_graphs.ops.spec import AttributeSpec, OpSpec, TensorSpec

BETWEEN_ATTENTION = OpSpec(
    # Symbols: A numbers of a layer's attention, I of a token, M between the products of the feed-forward layer, O that the next attention
    # reads. x = residual + attention @ output_weight; output = x + (silu(gate) * up) @ down, gate and up the halves of norm(x) @ gate_up;
    # next = next_norm(output) @ next_weight, and next_gate the same with next_gate_weight; without it gate_width is 0.
    name="BetweenAttention",
    torch_name="between_attention",
    inputs=(
        TensorSpec("attention", ("B", "T", "A"), "T", "activation"),
        TensorSpec("residual", ("B", "T", "I"), "T", "activation"),
        TensorSpec("output_weight", ("A", "I"), "T", "weight"),
        TensorSpec("norm_weight", ("I",), "T", "weight"),
        TensorSpec("down", ("M", "I"), "T", "weight"),
        TensorSpec("gate_up", ("I", "2*M"), "T", "weight"),
        TensorSpec("next_norm_weight", ("I",), "T", "weight"),
        TensorSpec("next_weight", ("I", "O"), "T", "weight"),
        TensorSpec("next_gate_weight", ("I", "gate_width"), "T", "weight", optional=True),
    ),
    states=(),
    outputs=(
        TensorSpec("output", ("B", "T", "I"), "T", "activation"),
        TensorSpec("next", ("B", "T", "O"), "T", "activation"),
        TensorSpec("next_gate", ("B", "T", "gate_width"), "T", "activation", optional=True),
    ),
    attributes=(AttributeSpec("norm_epsilon", 1e-5), AttributeSpec("gate_width", 0)),
    traced=False,
)


def in_one_launch(attended: int, width: int, middle: int, outputs: int, gate: int = 0) -> bool:
    """Whether a GPU holds all that a token is multiplied with at a time, 16 outputs of a GEMM in a block. Sizes A, I, M, O, gate_width."""
    aligned = all(size % 16 == 0 for size in (attended, width, middle, outputs, gate))
    fits = (2 * width + middle + outputs + gate) // 16 <= MOST_BLOCKS and max(
        attended, middle, 2 * width
    ) <= MOST_INPUTS
    return aligned and fits and width <= MOST_WIDTH


MOST_BLOCKS, MOST_INPUTS, MOST_WIDTH = 264, 3456, 1536
"""Two blocks for each of the 132 multiprocessors of an H100, whose weights fit into its shared memory side by side, and four numbers of a
token for a thread. SmolLM2-135M has 264 blocks."""
