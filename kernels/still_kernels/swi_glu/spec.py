"""still::SwiGlu: the gate of a feed-forward layer, for runtimes that compile and launch the ops between two products separately."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

SWI_GLU = OpSpec(
    # output = silu(gate) * up, gate and up the halves of input, `width` numbers of a token each.
    name="SwiGlu",
    torch_name="swi_glu",
    inputs=(TensorSpec("input", ("B", "T", "2*width"), "T", "activation"),),
    outputs=(TensorSpec("output", ("B", "T", "width"), "T", "activation"),),
    attributes=(AttributeSpec("width", 0),),
    traced=False,
)
