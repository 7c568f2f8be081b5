"""Passes for TensorRT and TensorRT-RTX: each keeps the meaning, and leaves nothing that the target does not read."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_export.targets.trt.sum_products_in_float32 import products_sum_in_float32, sum_products_in_float32
from still_export.targets.trt8.opset import lower_opset
from still_export.targets.trt_rtx.replace_nonzero import replace_nonzero
from still_export.targets.trt_rtx.take_general_branches import take_general_branches
from still_graphs.conditions import plugin_nodes
from still_graphs.errors import UnsupportedError
from still_graphs.ops import DOMAIN
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lowering
from still_graphs.passes.lower_plugin_nodes import lower_plugin_nodes
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.spec import CACHE
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from tests.still_graphs.passes import applied
from tests.still_graphs.protos import attribute, dimensions, opset_version, walk_nodes
from tests.still_graphs.small_graph import HYBRID, VOCABULARY, small_graph
from tests.still_graphs.written import outputs_of, outputs_of_calls, parsed

SLOTS = 20
SPLITS = (13, 1, 1, 1, 8, 1, 17, 1, 1)
"""Prefill, steps, a piece that ends a chunk, a step that promotes, and a piece over several chunks."""


def rollout(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Outputs of each call of SPLITS for two rows; row 1 brings one token fewer where it can."""
    random = np.random.default_rng(1)
    calls = [(random.integers(0, VOCABULARY, (2, n)), np.array([n, max(1, n - 1)])) for n in SPLITS]
    found = outputs_of_calls(model, calls, SLOTS)
    for outputs, (ids, new) in zip(found, calls, strict=True):
        some = np.arange(ids.shape[1])[None, :, None] < new[:, None, None]
        outputs["logits"] = np.where(some, outputs["logits"], 0)
    return found


def assert_same(model: onnx.ModelProto, expected: list[dict[str, np.ndarray]], tolerance: float) -> None:
    for step, (got, wanted) in enumerate(zip(rollout(model), expected, strict=True)):
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, atol=tolerance, rtol=tolerance, err_msg=f"call {step}, {name}")


@pytest.fixture(scope="module")
def expected() -> list[dict[str, np.ndarray]]:
    return rollout(small_graph())


def test_replace_nonzero_keeps_every_output(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    assert applied(inline_functions, model) == 1
    assert applied(replace_nonzero, model) == 1
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "NonZero" or n.domain == DOMAIN]
    assert not model.functions and [o.domain for o in model.opset_import] == [""]
    assert_same(model, expected, 0)
    assert applied(replace_nonzero, model) == 0


def test_general_branches_hold_for_every_call(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    applied(inline_functions, model)
    assert applied(take_general_branches, model) == 1
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "If"]
    onnx.checker.check_model(model)
    assert_same(model, expected, 1e-5)
    assert applied(take_general_branches, model) == 0


def test_replace_nonzero_refuses_other_uses() -> None:
    model = parsed("g (bool[r,c] mask) => (int64[1,1] total) { where = NonZero (mask) total = ReduceSum (where) }")
    with pytest.raises(UnsupportedError, match="ReduceSum of what NonZero chose"):
        applied(replace_nonzero, model)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 4e-3)])
def test_lower_opset_keeps_every_output(dtype: str, tolerance: float) -> None:
    model = small_graph(dtype)
    expected = rollout(model)
    applied(inline_functions, model)
    assert applied(lower_opset, model) > 5
    assert opset_version(model) == 17 and model.ir_version == 8
    onnx.checker.check_model(model, full_check=True)
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "RMSNormalization"]
    assert_same(model, expected, tolerance)
    assert applied(lower_opset, model) == 0


def demand_lowered(model: onnx.ModelProto, feeds: dict[str, np.ndarray], tolerance: float = 1e-6) -> None:
    """Its one node is written out for opset 17 and computes the same."""
    before = outputs_of(model, feeds)["y"]
    assert applied(lower_opset, model) == 1
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(outputs_of(model, feeds)["y"], before, atol=tolerance)


@pytest.mark.parametrize("node", ["Gelu (x)", 'Gelu <approximate = "tanh"> (x)', "ReduceMax (x, axes)"])
def test_lower_opset_single_operators(node: str) -> None:
    axes = "axes = Constant <value = int64[1] {1}> ()" if "axes" in node else ""
    model = parsed(f"g (float[a,b] x) => (float[c,d] y) {{ {axes} y = {node} }}")
    demand_lowered(model, {"x": np.linspace(-4, 4, 15).reshape(3, 5)})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_opset_21_has_no_workaround_of_a_host(dtype: str) -> None:
    """Norms are written out plainly, and what 21 has is left as it is."""
    model = small_graph(dtype)
    expected = rollout(model)
    applied(inline_functions, model)
    kinds = [n.op_type for n in walk_nodes(model.graph)]
    lower, lowered = lowering(21)
    assert applied(lower, model) == kinds.count("RMSNormalization") > 0
    assert opset_version(model) == 21 and model.ir_version == 10 and not applied(lowered, model)
    onnx.checker.check_model(model, full_check=True)
    left = [n.op_type for n in walk_nodes(model.graph)]
    for kind in ("Where", "Greater", "Shape", "Split", "ReduceMax"):
        assert left.count(kind) == kinds.count(kind), kind
    assert_same(model, expected, 1e-6 if dtype == "float32" else 4e-3)


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_products_of_16_bits_sum_in_float32(dtype: int) -> None:
    """Weights and activations alike; not what dequantizes, nor float32."""
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="first"),
        helper.make_node("DequantizeLinear", ["codes", "scale"], ["d"], axis=1),
        helper.make_node("MatMul", ["y", "d"], ["z"], name="second"),
        helper.make_node("Cast", ["z"], ["wide"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["wide", "f"], ["end"], name="third"),
    ]
    held = [
        helper.make_tensor("w", dtype, [3, 4], [1.0] * 12),
        helper.make_tensor("codes", TensorProto.INT8, [4, 5], [2] * 20),
        helper.make_tensor("scale", dtype, [5], [0.5] * 5),
        helper.make_tensor("f", TensorProto.FLOAT, [5, 2], [1.0] * 10),
    ]
    inner = [info("y", dtype, [2, 4]), info("d", dtype, [4, 5]), info("z", dtype, [2, 5])]
    ends = [info("x", dtype, [2, 3])], [info("end", TensorProto.FLOAT, [2, 2])]
    graph = helper.make_graph(nodes, "g", *ends, held, value_info=[*inner, info("wide", TensorProto.FLOAT, [2, 5])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert "first" in applied(products_sum_in_float32, model)
    assert applied(sum_products_in_float32, model) == 1
    onnx.checker.check_model(model, full_check=True)
    assert [n.op_type for n in model.graph.node[:5]] == ["Cast", "Cast", "MatMul", "Cast", "DequantizeLinear"]
    assert attribute(model.graph.node[3], "to") == dtype and model.graph.node[3].output[0] == "y"
    assert not applied(products_sum_in_float32, model) and applied(sum_products_in_float32, model) == 0


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(1, 3, [5, 7]), (-2, -1, [5]), (0, None, [3, 5, 7]), (0, 1, [3])]
)
def test_parts_of_shapes_are_picked_from_the_whole(start: int, end: int | None, expected: list[int]) -> None:
    until = "" if end is None else f", end = {end}"
    model = parsed(f"g (float[a,b,c] x) => (int64[n] y) {{ y = Shape <start = {start}{until}> (x) }}")
    applied(lower_opset, model)
    assert not [n for n in model.graph.node if n.op_type == "Shape" and attribute(n, "end") is not None]
    assert outputs_of(model, {"x": np.zeros((3, 5, 7))})["y"].tolist() == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("float", 1e-6), ("float16", 2e-3)])
def test_full_attention_is_written_out(dtype: str, tolerance: float) -> None:
    model = parsed(
        f"g ({dtype}[2,3,5,4] q, {dtype}[2,3,7,4] k, {dtype}[2,3,7,4] v, {dtype}[2,1,5,7] mask) => ({dtype}[2,3,5,4] y)"
        " { y = Attention <scale = 0.5, is_causal = 0> (q, k, v, mask) }"
    )
    feeds = drawn(model)
    feeds["mask"] = np.where(feeds["mask"] > 0, 0, np.finfo("float32" if dtype == "float" else dtype).min)
    feeds["mask"][..., 0] = 0
    demand_lowered(model, feeds, tolerance)


def drawn(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random inputs."""
    random, shapes = np.random.default_rng(0), dimensions(model.graph)
    return {i.name: random.standard_normal(shapes[i.name]) for i in model.graph.input}  # type: ignore[arg-type]


def rotary(attributes: str = "") -> onnx.ModelProto:
    return parsed(
        "g (float[2,3,5,8] x, float[2,5,4] cos, float[2,5,4] sin) => (float[2,3,5,8] y)"
        f" {{ [turn] y = RotaryEmbedding <num_heads = 3{attributes}> (x, cos, sin) }}"
    )


def test_rotary_embedding_is_written_out() -> None:
    demand_lowered(rotary(), drawn(rotary()))


@pytest.mark.parametrize("what", ["interleaved", "rotary_embedding_dim", "positions", "flat"])
def test_other_rotary_embeddings_are_refused(what: str) -> None:
    model = rotary(
        {"interleaved": ", interleaved = 1", "rotary_embedding_dim": ", rotary_embedding_dim = 4"}.get(what, "")
    )
    if what == "positions":
        model.graph.node[0].input.append("positions")
    if what == "flat":
        del model.graph.input[0].type.tensor_type.shape.dim[1]
    with pytest.raises(
        UnsupportedError, match="node turn: RotaryEmbedding cannot be written in opset 17: it is handled for"
    ):
        applied(lower_opset, model)


def test_lower_opset_names_what_it_cannot_write() -> None:
    model = parsed(
        "g (float[1,2,3,4] q, float[1,2,3,4] k, float[1,2,3,4] v) => (float[1,2,3,4] y)"
        " { [attend] y = Attention <is_causal = 1> (q, k, v) }"
    )
    with pytest.raises(UnsupportedError, match="node attend: Attention cannot be written in opset 17"):
        applied(lower_opset, model)


def test_lower_integers_keeps_every_output(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    assert applied(lower_integers, model) == 4
    onnx.checker.check_model(model)
    ends = {i.name: i.type.tensor_type.elem_type for i in (*model.graph.input, *model.graph.output)}
    assert TensorProto.INT64 not in ends.values()
    assert {n for n, kind in ends.items() if kind == TensorProto.INT32} == {
        "input_ids",
        "new_tokens",
        "past_length",
        "present_length",
    }
    assert_same(model, expected, 0)
    assert applied(lower_integers, model) == 0


def test_counts_are_added_in_int32() -> None:
    model = small_graph()
    applied(lower_integers, model)
    (made,) = [n for n in model.graph.node if "present_length" in n.output]
    assert made.op_type == "Add" and set(made.input) == {"past_length", "new_tokens"}
    model = small_graph()
    model.graph.node.append(helper.make_node("Mul", ["present_length", "new_tokens"], ["read"]))  # in int64
    applied(lower_integers, model)
    (made,) = [n for n in model.graph.node if "present_length" in n.output]
    assert made.op_type == "Cast"
    onnx.checker.check_model(model)


def test_lower_integers_passes_an_input_through() -> None:
    model = parsed("g (int64[n] a) => (int64[n] b) { b = Identity (a) }")
    applied(lower_integers, model)
    onnx.checker.check_model(model, full_check=True)


def test_strip_functions_leaves_bare_nodes() -> None:
    model = small_graph()
    assert applied(strip_functions, model) == 1 and not model.functions
    assert applied(strip_functions, model) == 0


def test_plugin_nodes_say_all_that_the_plugin_needs() -> None:
    model = small_graph("float16", functions=False)
    applied(lower_integers, model)
    assert applied(lower_plugin_nodes, model) == 1
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    assert "" not in [*node.input, *node.output]
    assert attribute(node, "plugin_namespace") == "still" and attribute(node, "plugin_version") == "1"
    assert attribute(node, "activation_type") == "float16"
    names = HYBRID.input_names()
    absent = {n for i, n in enumerate(names) if attribute(node, "absent_inputs") >> i & 1}
    assert absent == {"window_factor"}
    assert len(node.input) == len(names) - 1 and len(node.output) == len(HYBRID.output_names())
    assert all(attribute(node, declared.name) is not None for declared in HYBRID.attributes)
    assert attribute(node, CACHE.name) == CACHE.default
    position = [n for n in names if n not in absent].index("new_tokens")
    assert list(node.input[position : position + 2]) == ["new_tokens", "past_length"], "the graph's own inputs, int32"
    before = model.SerializeToString(deterministic=True)
    assert applied(lower_plugin_nodes, model) == 0 and model.SerializeToString(deterministic=True) == before
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    node.attribute.remove(next(a for a in node.attribute if a.name == CACHE.name))
    assert "without the attributes of plugins" in applied(plugin_nodes, model)


def test_counts_that_the_graph_computes_are_cast_for_the_plugin() -> None:
    model = small_graph("float16", functions=False)
    applied(lower_integers, model)
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    position = HYBRID_ATTENTION.input_names().index("past_length")
    assert node.input[position] == "past_length.int64"
    later = helper.make_node("Add", ["past_length.int64", "new_tokens.int64"], ["later"])
    model.graph.node.insert(list(model.graph.node).index(node), later)
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    node.input[position] = "later"
    applied(lower_plugin_nodes, model)
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    kinds = {n.output[0]: attribute(n, "to") for n in model.graph.node if n.op_type == "Cast"}
    assert "later" not in node.input and kinds["later.int32"] == TensorProto.INT32 and "later.int32" in node.input


def test_plugin_nodes_need_a_known_type_and_op() -> None:
    model = small_graph(functions=False)
    del model.graph.value_info[:]
    del model.graph.input[3:]
    for tensor in list(model.graph.initializer):
        if tensor.name.startswith("feature"):
            model.graph.initializer.remove(tensor)
    with pytest.raises(UnsupportedError, match="node attention: the type of its activations is unknown"):
        applied(lower_plugin_nodes, model)
    model = small_graph(functions=False)
    next(n for n in model.graph.node if n.domain == DOMAIN).op_type = "HybridMixer"
    with pytest.raises(
        UnsupportedError,
        match=r"still::HybridMixer is unknown; known: AddRmsNorm, .*HybridAttention",
    ):
        applied(lower_plugin_nodes, model)


def test_greedy_token_is_the_best_logit() -> None:
    model = small_graph()
    assert applied(add_greedy_token, model) == 1 and applied(add_greedy_token, model) == 0
    onnx.checker.check_model(model)
    for outputs in rollout(model)[:4]:
        tokens = outputs["logits"].shape[1]
        expected = outputs["logits"].argmax(-1)
        assert (outputs["next_token"][0] == expected[0]).all() and outputs["next_token"].shape == (2, tokens)
