"""still::DenseMatMul: a product with a weight of 16-bit numbers whose sums are in float32, for runtimes that sum in half precision."""

from __future__ import annotations

from still_graphs.ops.spec import AttributeSpec, OpSpec, TensorSpec

DENSE_MATMUL = OpSpec(
    # Symbols: I inputs, O outputs. One of the two weights is given: numbers of an output beside each other, as a MatMul has them, or of an
    # input, as an embedding that is the head too. With norm_weight the root mean square of a token is divided out of it first.
    name="DenseMatMul",
    torch_name="dense_matmul",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("weight", ("I", "O"), "T", "weight", optional=True),
        TensorSpec("turned_weight", ("O", "I"), "T", "weight", optional=True),
        TensorSpec("norm_weight", ("I",), "T", "weight", optional=True),
        TensorSpec("residual", ("B", "T", "O"), "T", "activation", optional=True),
    ),
    states=(),
    outputs=(TensorSpec("output", ("B", "T", "O"), "T", "activation"),),
    attributes=(AttributeSpec("norm_epsilon", 1e-5),),
    traced=False,
)
