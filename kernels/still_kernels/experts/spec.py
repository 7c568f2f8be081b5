"""still::Experts: weighted sum of the feed-forward experts that each token is routed to."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

EXPERTS = OpSpec(
    # Symbols: I channels, E experts, K chosen experts, M inner channels, R rows of the first matrix: 2 M for "swiglu", with gate and up
    # rows interleaved (g0, u0, g1, u1, ..), M for "relu2". output = sum over the chosen experts of weight * down f(gate_up input), with
    # f = silu(gate) * up or relu(up)^2, summed in at least float32. The chosen experts are distinct.
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
