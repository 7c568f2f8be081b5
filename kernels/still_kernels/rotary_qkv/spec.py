"""still::RotaryQkv: the ops between the first product of a layer and its attention, for runtimes that launch each separately."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

ROTARY_QKV = OpSpec(
    # Symbols: F numbers of a token, those of query, key, value and gate in a row; D head dim. Heads of query and key are rotated:
    # x * cos + (-x[D/2:], x[:D/2]) * sin; the gate is sigmoid(x + gate_bias). A layer without a gate has gate_width 0. If another
    # product makes the gate's numbers, they are gate_input and not among the F.
    name="RotaryQkv",
    torch_name="rotary_qkv",
    inputs=(
        TensorSpec("input", ("B", "T", "F"), "T", "activation"),
        TensorSpec("cos", ("B", "T", "D"), "T", "activation"),
        TensorSpec("sin", ("B", "T", "D"), "T", "activation"),
        TensorSpec("gate_bias", ("gate_width",), "T", "weight", optional=True),
        TensorSpec("gate_input", ("B", "T", "gate_width"), "T", "activation", optional=True),
    ),
    outputs=(
        TensorSpec("query", ("B", "T", "query_width"), "T", "activation"),
        TensorSpec("key", ("B", "T", "key_width"), "T", "activation"),
        TensorSpec("value", ("B", "T", "value_width"), "T", "activation"),
        TensorSpec("gate", ("B", "T", "gate_width"), "T", "activation", optional=True),
    ),
    attributes=tuple(AttributeSpec(name, 0) for name in ("query_width", "key_width", "value_width", "gate_width")),
    traced=False,
)
