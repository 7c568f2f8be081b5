"""A small stateful language model as a portable graph, made without torch: one still node, a norm, a split and a head."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from still_graphs.ops import DOMAIN, OPS
from still_graphs.spec import CACHE, OpSpec
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from still_kernels.round_key_value.spec import ROUND_KEY_VALUE
from tests.still_graphs.passes import attach_functions
from tests.still_graphs.protos import Rewriter

VOCABULARY, HIDDEN = 23, 20
SIZES = {"H": 6, "HK": 3, "HS": 6, "D": 4, "P": 5, "F": 10, "C": 8}
SALIENT = 2
DTYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int32": TensorProto.INT32}
HYBRID = HYBRID_ATTENTION.resolve({})
"""The op as graphs without caches in 8 bits have it."""
CODES = HYBRID_ATTENTION.resolve({CACHE.name: "int8"})
"""The op as graphs with them have it."""


def state_shape(name: str, spec: OpSpec = HYBRID) -> list[str | int]:
    """Shape of a state in the graph; batch and slots stay free."""
    symbols: dict[str, str | int] = {**SIZES, "B": "batch", "N": "slots", "2*C": 2 * SIZES["C"], "D/4": SIZES["D"] // 4}
    return [d if isinstance(d, int) else symbols[d] for d in spec.state(name).shape]


def growth_of(name: str) -> dict[str, int | str | bool] | None:
    """Resolved growth rule of a state, None where its size is fixed."""
    growth = HYBRID_ATTENTION.state(name).growth
    attributes = {"salient_per_chunk": SALIENT, "chunk_size": SIZES["C"], "overflow": "error"}
    return None if growth is None else growth.resolve(attributes)


def states(spec: OpSpec = HYBRID) -> list[str]:
    return [s.name for s in spec.states]


def state_type(name: str, dtype: str, spec: OpSpec = HYBRID) -> int:
    return DTYPES[dtype if (kind := spec.state(name).dtype) == "T" else kind]


def small_graph(
    dtype: str = "float32", seed: int = 0, functions: bool = True, spec: OpSpec = HYBRID
) -> onnx.ModelProto:
    """The graph at opset 23 with random weights. `spec`: HYBRID or CODES."""
    random, kind = np.random.default_rng(seed), DTYPES[dtype]
    heads, kv_heads, dim = SIZES["H"], SIZES["HK"], SIZES["D"]
    kv = "key", "value"
    weights: dict[str, np.ndarray] = {
        "embedding": random.standard_normal((VOCABULARY, HIDDEN)),
        "q": random.standard_normal((HIDDEN, heads * dim)) / 4,
        "kv": random.standard_normal((HIDDEN, 2 * kv_heads * dim)) / 4,
        "g": random.standard_normal((HIDDEN, heads * dim)) / 4,
        "o": random.standard_normal((heads * dim, VOCABULARY)) / 4,
        "scale": random.standard_normal(HIDDEN),
        "feature_q": random.standard_normal((heads, SIZES["P"], dim)),
        "feature_k": random.standard_normal((heads, SIZES["P"], dim)),
    }
    initializers = [
        numpy_helper.from_array(w.astype(dtype if w.dtype == np.float64 else w.dtype), n) for n, w in weights.items()
    ]
    for name, shape in (("wide", (0, 0, heads, dim)), ("narrow", (0, 0, kv_heads, dim)), ("flat", (0, 0, heads * dim))):
        initializers.append(numpy_helper.from_array(np.array(shape, dtype=np.int64), f"shape_{name}"))
    node = helper.make_node
    nodes = [
        node("Gather", ["embedding", "input_ids"], ["x"]),
        node("RMSNormalization", ["x", "scale"], ["hidden"], axis=-1, epsilon=1e-5),
        node("MatMul", ["hidden", "q"], ["q_flat"]),
        node("Reshape", ["q_flat", "shape_wide"], ["query"]),
        node("MatMul", ["hidden", "kv"], ["kv_flat"]),
        node("Split", ["kv_flat"], ["k_flat", "v_flat"], axis=-1, num_outputs=2),
        *(
            node("Reshape", [f"{name[0]}_flat", "shape_narrow"], [f"whole_{name}" if spec == CODES else name])
            for name in kv
        ),
        *([node(ROUND_KEY_VALUE.name, [f"whole_{name}" for name in kv], kv, domain=DOMAIN)] * (spec == CODES)),
        node("MatMul", ["hidden", "g"], ["g_flat"]),
        node("Sigmoid", ["g_flat"], ["g_open"]),
        node("Reshape", ["g_open", "shape_wide"], ["gate"]),
        node(
            HYBRID_ATTENTION.name,
            [
                *("query", "key", "value", "gate", "feature_q", "feature_k", "", "new_tokens", "past_length"),
                *(f"past_{s.name}.0" for s in spec.states),
            ],
            ["mixed", *(f"present_{s.name}.0" for s in spec.states)],
            name="attention",
            domain=DOMAIN,
            **{a.name: a.default for a in HYBRID.attributes if a != CACHE}
            | {"chunk_size": SIZES["C"], "salient_per_chunk": SALIENT}
            | ({CACHE.name: "int8"} if spec == CODES else {}),
        ),
        node("Reshape", ["mixed", "shape_flat"], ["mixed_flat"]),
        node("MatMul", ["mixed_flat", "o"], ["logits"]),
        node("Add", ["past_length", "new_tokens"], ["present_length"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "small",
        [
            info("input_ids", TensorProto.INT64, ["batch", "tokens"]),
            info("new_tokens", TensorProto.INT64, ["batch"]),
            info("past_length", TensorProto.INT64, ["batch"]),
            *(info(f"past_{n}.0", state_type(n, dtype, spec), state_shape(n, spec)) for n in states(spec)),
        ],
        [
            info("logits", kind, ["batch", "tokens", VOCABULARY]),
            *(info(f"present_{n}.0", state_type(n, dtype, spec), state_shape(n, spec)) for n in states(spec)),
            info("present_length", TensorProto.INT64, ["batch"]),
        ],
        initializers,
        value_info=[
            *(info(n, kind, ["batch", "tokens", heads, dim]) for n in ("query", "gate", "mixed")),
            *(info(n, kind, ["batch", "tokens", kv_heads, dim]) for n in ("key", "value")),
            *(info(n, kind, ["batch", "tokens", HIDDEN]) for n in ("x", "hidden")),
            *(info(n, kind, ["batch", "tokens", heads * dim]) for n in ("q_flat", "g_open", "mixed_flat")),
            *(info(n, kind, ["batch", "tokens", kv_heads * dim]) for n in ("k_flat", "v_flat")),
        ],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if functions:
        attach_functions(model)
    return model


def split_heads(node: onnx.NodeProto, rewriter: Rewriter, size: int) -> onnx.NodeProto:
    """Undo merge_heads at a still node with heads of `size`: reshapes in front, appended; the one that belongs behind it."""
    for index, tensor in enumerate(OPS[node.op_type].inputs):
        if len(tensor.shape) == 4 and node.input[index]:
            heads = rewriter.constant([0, 0, -1, size], "int64")
            node.input[index] = rewriter.node("Reshape", [node.input[index], heads])
    joined = node.output[0]
    node.output[0] = rewriter.fresh(f"{joined}.heads")
    shape = rewriter.constant([0, 0, -1], "int64")
    return helper.make_node("Reshape", [node.output[0], shape], [joined], name=f"{joined}/Reshape")
