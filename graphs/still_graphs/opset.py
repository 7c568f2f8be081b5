"""The ops of the domain "still": one OpSpec per op, the single source of names, order, shapes, dtypes and attributes.

The torch op, its fake kernel, the ONNX node and function, the plugin's fields and the manifest's state table are generated
from these specs or checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DOMAIN = "still"
VERSION = 1

DType = Literal["T", "float32", "int64"]
"""Element type of a tensor: "T" is the activations' type (float16, bfloat16 or float32)."""

Role = Literal["activation", "weight", "count", "state"]
AttributeValue = int | float | str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. Shape symbols: B batch, T tokens, H query heads, HK key/value heads, HS heads of the salient cache
    (H, or HK with select_scope kv_group_*), D head dim, P rows of a feature projection, F feature dim, C chunk size, N salient slots.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: DType
    role: Role
    optional: bool = False
    grows: bool = False  # the N dimension grows with the context: runners must not copy it per step


@dataclass(frozen=True)
class AttributeSpec:
    """One attribute of a node; `choices` is empty where any value of the type goes."""

    name: str
    default: AttributeValue
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpSpec:
    """One op: `name` in ONNX and TensorRT, `torch_name` in torch, inputs and outputs in order."""

    name: str
    torch_name: str
    inputs: tuple[TensorSpec, ...]
    states: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attributes: tuple[AttributeSpec, ...]
    domain: str = DOMAIN
    version: int = VERSION

    def input_names(self) -> tuple[str, ...]:
        """Names of all inputs in order: activations, weights and counts, then `past_<state>`."""
        return tuple(t.name for t in self.inputs) + tuple(f"past_{s.name}" for s in self.states)

    def output_names(self) -> tuple[str, ...]:
        """Names of all outputs in order: activations, then `present_<state>`."""
        return tuple(t.name for t in self.outputs) + tuple(f"present_{s.name}" for s in self.states)

    def attribute(self, name: str) -> AttributeSpec:
        """The attribute called `name`; KeyError for an unknown one (a bug of the caller)."""
        return {a.name: a for a in self.attributes}[name]

    def state(self, name: str) -> TensorSpec:
        """The state called `name`; KeyError for an unknown one (a bug of the caller)."""
        return {s.name: s for s in self.states}[name]


HYBRID_ATTENTION = OpSpec(
    name="HybridAttention",
    torch_name="hybrid_attention",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("value", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("gate", ("B", "T", "H", "D"), "T", "activation", optional=True),
        TensorSpec("feature_q_weight", ("H", "P", "D"), "T", "weight"),
        TensorSpec("feature_k_weight", ("H", "P", "D"), "T", "weight"),
        TensorSpec("window_factor", ("H",), "float32", "weight", optional=True),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    states=(
        TensorSpec("window_key", ("B", "HK", "2*C", "D"), "T", "state"),
        TensorSpec("window_value", ("B", "HK", "2*C", "D"), "T", "state"),
        TensorSpec("window_score", ("B", "H", "2*C"), "float32", "state"),
        TensorSpec("salient_key", ("B", "HS", "N", "D"), "T", "state", grows=True),
        TensorSpec("salient_value", ("B", "HS", "N", "D"), "T", "state", grows=True),
        # only with overflow="fold_min_score"
        TensorSpec("salient_score", ("B", "HS", "N"), "float32", "state", optional=True, grows=True),
        TensorSpec("kv_state", ("B", "H", "F", "D"), "float32", "state"),
        TensorSpec("z_state", ("B", "H", "F"), "float32", "state"),
    ),
    outputs=(TensorSpec("output", ("B", "T", "H", "D"), "T", "activation"),),
    attributes=(
        AttributeSpec("chunk_size", 64),
        AttributeSpec("salient_per_chunk", 4),
        AttributeSpec("select_scope", "q_head", ("q_head", "kv_group_max", "kv_group_mean")),
        AttributeSpec("saliency", "margin", ("margin", "released_prefill")),
        AttributeSpec(
            "feature_map",
            "np_softmax_pm",
            ("np_softmax_pm", "softmax_pm", "softmax", "relu", "elu_plus_one", "identity"),
        ),
        AttributeSpec("local", "chunked", ("chunked", "sliding")),
        AttributeSpec("window_size", 0),  # tokens of a sliding window; 0 = chunk_size
        AttributeSpec("mix_epsilon", 1e-6),
        AttributeSpec("phantom_first_chunk", 0),
        AttributeSpec("overflow", "error", ("error", "fold_min_score", "fold_oldest")),
    ),
)

OPS: dict[str, OpSpec] = {op.name: op for op in (HYBRID_ATTENTION,)}
"""Every op of the domain by its ONNX name."""
