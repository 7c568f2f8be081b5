"""still::Decay, an op that exists in the tests only: each channel's sum of values, halved at every token.

s_t = decay * s_(t-1) + v_t, output_t = s_t
"""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, StateSpec, TensorSpec

DECAY = OpSpec(
    name="Decay",
    torch_name="decay",
    inputs=(
        TensorSpec("value", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    states=(StateSpec("total", ("B", "H", "D"), "float32", in_place=False),),
    outputs=(TensorSpec("output", ("B", "T", "H", "D"), "T", "activation"),),
    attributes=(AttributeSpec("decay", 0.5),),
    home="tests.toy",
)
