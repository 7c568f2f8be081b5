"""still::Experts: the feed-forward layers that each token was routed to, summed by their weights."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

EXPERTS = OpSpec(
    # Symbols: I channels, E experts, K of them chosen, M channels inside, R rows of the first matrix: 2 M with "swiglu", whose gate and
    # up projection take turns (g0, u0, g1, u1, ..), M with "relu2". output = sum over the chosen of weight * down f(gate_up input),
    # f = silu(gate) * up or relu(up)^2, summed in at least float32. No expert is chosen twice.
    name="Experts",
    torch_name="experts",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("expert", ("B", "T", "K"), "int32", "activation"),
        TensorSpec("weight", ("B", "T", "K"), "float32", "activation"),
        TensorSpec("gate_up", ("E", "R", "I"), "T", "weight"),
        TensorSpec("down", ("E", "I", "M"), "T", "weight"),
    ),
    outputs=(TensorSpec("output", ("B", "T", "I"), "T", "activation"),),
    attributes=(AttributeSpec("activation", "swiglu", ("swiglu", "relu2")),),
)
