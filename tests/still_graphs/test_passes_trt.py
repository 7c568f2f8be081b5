"""Passes for TensorRT and TensorRT-RTX: each keeps the meaning, and leaves nothing that the target does not read."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.opset import DOMAIN, HYBRID_ATTENTION
from still_graphs.passes.add_greedy_token import add_greedy_token
from still_graphs.passes.fix_shapes import fix_shapes
from still_graphs.passes.inline_functions import inline_functions
from still_graphs.passes.join_heads import join_heads
from still_graphs.passes.lower_integers import lower_integers
from still_graphs.passes.lower_opset import lower_opset
from still_graphs.passes.lower_plugin_nodes import lower_plugin_nodes
from still_graphs.passes.merge_projections import merge_projections
from still_graphs.passes.replace_nonzero import replace_nonzero
from still_graphs.passes.strip_functions import strip_functions
from still_graphs.passes.take_general_branches import take_general_branches
from still_graphs.passes.walk import Rewriter, attribute, opset_version, value_names, walk_nodes
from tests.still_graphs.small_graph import HIDDEN, SIZES, VOCABULARY, empty_state, small_graph, split_heads

SLOTS = 20
SPLITS = (13, 1, 1, 1, 8, 1, 17, 1, 1)
"""Prefill, steps, a piece that ends a chunk, a step that promotes, and a piece over several chunks."""


def session(model: onnx.ModelProto) -> object:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def rollout(model: onnx.ModelProto, dtype: str = "float32", batch: int = 2) -> list[dict[str, np.ndarray]]:
    """Outputs of each call of SPLITS, the state handed on; row 1 brings one token fewer where it can."""
    run = session(model)
    inputs = {i.name: i.type for i in run.get_inputs()}  # type: ignore[attr-defined]
    count = "int64" if "int64" in inputs["input_ids"] else "int32"
    random, state = np.random.default_rng(1), empty_state(dtype, batch, SLOTS)
    length = np.zeros(batch, dtype=count)
    results = []
    for tokens in SPLITS:
        new = np.array([tokens, max(1, tokens - 1)], dtype=count)
        ids = random.integers(0, VOCABULARY, (batch, tokens)).astype(count)
        names = [o.name for o in run.get_outputs()]  # type: ignore[attr-defined]
        feeds = {"input_ids": ids, "new_tokens": new, "past_length": length, **state}
        outputs = dict(zip(names, run.run(None, feeds), strict=True))  # type: ignore[attr-defined]
        outputs["logits"] = np.where(np.arange(tokens)[None, :, None] < new[:, None, None], outputs["logits"], 0)
        results.append(outputs)
        state = {n.replace("present_", "past_"): v for n, v in outputs.items() if n.startswith("present_") and "." in n}
        length = outputs["present_length"]
    return results


def assert_same(model: onnx.ModelProto, expected: list[dict[str, np.ndarray]], dtype: str, tolerance: float) -> None:
    for step, (got, wanted) in enumerate(zip(rollout(model, dtype), expected, strict=True)):
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, atol=tolerance, rtol=tolerance, err_msg=f"call {step}, {name}")


@pytest.fixture(scope="module")
def expected() -> list[dict[str, np.ndarray]]:
    return rollout(small_graph())


def test_replace_nonzero_keeps_every_output(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    assert inline_functions(model) == 1
    assert replace_nonzero(model) == 1
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "NonZero" or n.domain == DOMAIN]
    assert not model.functions and [o.domain for o in model.opset_import] == [""]
    assert_same(model, expected, "float32", 0)
    assert replace_nonzero(model) == 0


def test_general_branches_hold_for_every_call(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    inline_functions(model)
    assert take_general_branches(model) == 1
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "If"]
    onnx.checker.check_model(model)
    assert_same(model, expected, "float32", 1e-5)
    assert take_general_branches(model) == 0


def test_replace_nonzero_refuses_other_uses() -> None:
    info = helper.make_tensor_value_info
    nodes = [
        helper.make_node("NonZero", ["mask"], ["where"]),
        helper.make_node("ReduceSum", ["where"], ["total"]),
    ]
    graph = helper.make_graph(
        nodes, "g", [info("mask", TensorProto.BOOL, ["r", "c"])], [info("total", TensorProto.INT64, None)]
    )
    with pytest.raises(UnsupportedError, match="ReduceSum of what NonZero chose"):
        replace_nonzero(helper.make_model(graph))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 4e-3)])
def test_lower_opset_keeps_every_output(dtype: str, tolerance: float) -> None:
    model = small_graph(dtype)
    expected = rollout(model, dtype)
    inline_functions(model)
    assert lower_opset(model) > 5
    assert opset_version(model) == 17 and model.ir_version == 8
    onnx.checker.check_model(model, full_check=True)
    assert not [n for n in walk_nodes(model.graph) if n.op_type == "RMSNormalization"]
    assert_same(model, expected, dtype, tolerance)
    assert lower_opset(model) == 0


@pytest.mark.parametrize(
    ("op", "attributes"), [("Gelu", {"approximate": "none"}), ("Gelu", {"approximate": "tanh"}), ("ReduceMax", {})]
)
def test_lower_opset_single_operators(op: str, attributes: dict[str, str]) -> None:
    import onnxruntime

    info = helper.make_tensor_value_info
    axes = helper.make_node("Constant", [], ["axes"], value=helper.make_tensor("axes", TensorProto.INT64, [1], [1]))
    inputs = ["x", "axes"] if op.startswith("Reduce") else ["x"]
    nodes = [*([axes] if len(inputs) > 1 else []), helper.make_node(op, inputs, ["y"], **attributes)]
    ends = [info("x", TensorProto.FLOAT, ["a", "b"])], [info("y", TensorProto.FLOAT, ["c", "d"])]
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends), opset_imports=[helper.make_opsetid("", 23)], ir_version=10
    )
    x = np.linspace(-4, 4, 15, dtype=np.float32).reshape(3, 5)
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    assert lower_opset(model) == 1
    onnx.checker.check_model(model, full_check=True)
    after = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(1, 3, [5, 7]), (-2, -1, [5]), (0, None, [3, 5, 7]), (0, 1, [3])]
)
def test_parts_of_shapes_are_picked_from_the_whole(start: int, end: int | None, expected: list[int]) -> None:
    import onnxruntime

    info = helper.make_tensor_value_info
    attributes = {"start": start} | ({} if end is None else {"end": end})
    node = helper.make_node("Shape", ["x"], ["y"], **attributes)
    ends = [info("x", TensorProto.FLOAT, ["a", "b", "c"])], [info("y", TensorProto.INT64, ["n"])]
    opsets = [helper.make_opsetid("", 23)]
    model = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=10)
    lower_opset(model)
    assert not [n for n in model.graph.node if n.op_type == "Shape" and attribute(n, "end") is not None]
    feeds = {"x": np.zeros((3, 5, 7), np.float32)}
    assert onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0].tolist() == expected


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3)])
def test_full_attention_is_written_out(dtype: str, tolerance: float) -> None:
    import onnxruntime

    info, kind = helper.make_tensor_value_info, helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], scale=0.5, is_causal=0)
    shapes = {"q": (2, 3, 5, 4), "k": (2, 3, 7, 4), "v": (2, 3, 7, 4), "mask": (2, 1, 5, 7)}
    ends = [info(n, kind, shape) for n, shape in shapes.items()], [info("y", kind, (2, 3, 5, 4))]
    opsets = [helper.make_opsetid("", 23)]
    model = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=10)
    random = np.random.default_rng(0)
    feeds = {n: random.standard_normal(shape).astype(dtype) for n, shape in shapes.items()}
    feeds["mask"] = np.where(feeds["mask"] > 0, 0, np.finfo(dtype).min).astype(dtype)
    feeds["mask"][..., 0] = 0
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    assert lower_opset(model) == 1
    onnx.checker.check_model(model, full_check=True)
    after = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(after, before, atol=tolerance)


def rotary(**attributes: int) -> onnx.ModelProto:
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], name="turn", num_heads=3, **attributes)
    shapes = {"x": (2, 3, 5, 8), "cos": (2, 5, 4), "sin": (2, 5, 4)}
    ends = [info(n, kind, shape) for n, shape in shapes.items()], [info("y", kind, (2, 3, 5, 8))]
    opsets = [helper.make_opsetid("", 23)]
    return helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=opsets, ir_version=10)


def test_rotary_embedding_is_written_out() -> None:
    import onnxruntime

    model, random = rotary(), np.random.default_rng(0)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    feeds = {n: random.standard_normal(shape).astype("float32") for n, shape in shapes.items()}
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    assert lower_opset(model) == 1
    onnx.checker.check_model(model, full_check=True)
    after = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)[0]
    np.testing.assert_allclose(after, before, atol=1e-6)


@pytest.mark.parametrize("what", ["interleaved", "rotary_embedding_dim", "positions", "flat"])
def test_other_rotary_embeddings_are_refused(what: str) -> None:
    model = rotary(**({what: 4} if "_" in what else {what: 1} if what == "interleaved" else {}))
    if what == "positions":
        model.graph.node[0].input.append("positions")
    if what == "flat":
        del model.graph.input[0].type.tensor_type.shape.dim[1]
    with pytest.raises(
        UnsupportedError, match="node turn: RotaryEmbedding cannot be written in opset 17: it is handled for"
    ):
        lower_opset(model)


def test_lower_opset_names_what_it_cannot_write() -> None:
    info = helper.make_tensor_value_info
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attend", is_causal=1)
    ends = [info(n, TensorProto.FLOAT, [1, 2, 3, 4]) for n in "qkv"], [info("y", TensorProto.FLOAT, None)]
    model = helper.make_model(helper.make_graph([node], "g", *ends), opset_imports=[helper.make_opsetid("", 23)])
    with pytest.raises(UnsupportedError, match="node attend: Attention cannot be written in opset 17"):
        lower_opset(model)


def test_lower_integers_keeps_every_output(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    assert lower_integers(model) == 4
    onnx.checker.check_model(model)
    ends = {i.name: i.type.tensor_type.elem_type for i in (*model.graph.input, *model.graph.output)}
    assert TensorProto.INT64 not in ends.values()
    assert {n for n, kind in ends.items() if kind == TensorProto.INT32} == {
        "input_ids",
        "new_tokens",
        "past_length",
        "present_length",
    }
    assert_same(model, expected, "float32", 0)
    assert lower_integers(model) == 0


def test_lower_integers_passes_an_input_through() -> None:
    info = helper.make_tensor_value_info
    ends = [info("a", TensorProto.INT64, ["n"])], [info("b", TensorProto.INT64, ["n"])]
    model = helper.make_model(helper.make_graph([helper.make_node("Identity", ["a"], ["b"])], "g", *ends))
    lower_integers(model)
    onnx.checker.check_model(model, full_check=True)


def test_strip_functions_leaves_bare_nodes() -> None:
    model = small_graph()
    assert strip_functions(model) == 1 and not model.functions
    assert strip_functions(model) == 0


def test_plugin_nodes_say_all_that_the_plugin_needs() -> None:
    model = small_graph("float16", functions=False)
    lower_integers(model)
    assert lower_plugin_nodes(model) == 1
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    assert "" not in [*node.input, *node.output]
    assert attribute(node, "plugin_namespace") == "still" and attribute(node, "plugin_version") == "1"
    assert attribute(node, "activation_type") == "float16"
    names = HYBRID_ATTENTION.input_names()
    absent = {n for i, n in enumerate(names) if attribute(node, "absent_inputs") >> i & 1}
    assert absent == {"window_factor", "past_salient_score"}
    assert len(node.input) == len(names) - 2 and len(node.output) == len(HYBRID_ATTENTION.output_names()) - 1
    for declared in HYBRID_ATTENTION.attributes:
        assert attribute(node, declared.name) is not None
    kinds = {n.output[0]: attribute(n, "to") for n in model.graph.node if n.op_type == "Cast"}
    position = [n for n in names if n not in absent].index("new_tokens")
    assert [kinds[n] for n in node.input[position : position + 2]] == [TensorProto.INT32] * 2
    assert lower_plugin_nodes(model) == 1
    assert attribute(node, "absent_inputs") is not None


def test_plugin_nodes_need_a_known_type_and_op() -> None:
    model = small_graph(functions=False)
    del model.graph.value_info[:]
    del model.graph.input[3:]
    for tensor in list(model.graph.initializer):
        if tensor.name.startswith("feature"):
            model.graph.initializer.remove(tensor)
    with pytest.raises(UnsupportedError, match="node attention: the type of its activations is unknown"):
        lower_plugin_nodes(model)
    model = small_graph(functions=False)
    next(n for n in model.graph.node if n.domain == DOMAIN).op_type = "HybridMixer"
    with pytest.raises(UnsupportedError, match="still::HybridMixer has no plugin; known: HybridAttention"):
        lower_plugin_nodes(model)


def test_merged_projections_are_the_same_numbers(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    assert merge_projections(model) == 2, "q, kv and g read one value"
    (product,) = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[0] == "hidden"]
    (weight,) = [i for i in model.graph.initializer if i.name == product.input[1]]
    assert list(weight.dims) == [HIDDEN, 24 + 24 + 24]
    assert not {"q", "kv", "g"} & {i.name for i in model.graph.initializer}, "no weight is held twice"
    onnx.checker.check_model(model, full_check=True)
    assert_same(model, expected, "float32", 1e-6)
    assert merge_projections(model) == 0


def test_projections_that_cannot_be_merged_stay() -> None:
    model = small_graph()
    q = next(n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] == "q")
    q.input[0] = "x"  # another value
    model.graph.node.append(helper.make_node("Transpose", ["kv"], ["used_twice"]))
    assert merge_projections(model) == 0 and q.input[1] == "q"


def compute_shapes(model: onnx.ModelProto) -> None:
    """Let every Reshape of `model` compute its shape from inputs of the model, one dimension from what is left, as exporters do."""
    graph, nodes = model.graph, []
    for name, value in (("zero", 0), ("one", 1)):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([value]), name))
    for name, source, index in (("batch_size", "past_length", "zero"), ("token_count", "input_ids", "one")):
        nodes.append(helper.make_node("Shape", [source], [f"{name}.shape"]))
        nodes.append(helper.make_node("Gather", [f"{name}.shape", index], [name]))
    fixed = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.startswith("shape_")}
    for name, shape in fixed.items():
        tail = np.array([-1, *shape[3:]])
        graph.initializer.remove(next(t for t in graph.initializer if t.name == name))
        graph.initializer.append(onnx.numpy_helper.from_array(tail, f"{name}.tail"))
        nodes.append(helper.make_node("Concat", ["batch_size", "token_count", f"{name}.tail"], [name], axis=0))
    for node in graph.node:
        if node.op_type == "Reshape":
            node.attribute.append(helper.make_attribute("allowzero", 1))
    nodes += list(graph.node)
    del graph.node[:]
    graph.node.extend(nodes)


def test_shapes_become_constants(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    compute_shapes(model)
    assert_same(model, expected, "float32", 0)
    assert fix_shapes(model) == 5
    values = {n.output[0]: attribute(n, "value") for n in model.graph.node if n.op_type == "Constant"}
    shapes = {
        n.output[0]: onnx.numpy_helper.to_array(values[n.input[1]]).tolist()
        for n in model.graph.node
        if n.op_type == "Reshape"
    }
    assert shapes["query"] == [0, 0, 6, 4] and shapes["key"] == [0, 0, 3, 4] and shapes["mixed_flat"] == [0, 0, 24]
    assert not {n.op_type for n in model.graph.node} & {"Shape", "Concat"}, "nothing computes a shape any more"
    onnx.checker.check_model(model, full_check=True)
    assert_same(model, expected, "float32", 0)
    assert fix_shapes(model) == 0


def test_shapes_that_move_a_free_dimension_stay() -> None:
    info = helper.make_tensor_value_info
    ends = [info("a", TensorProto.FLOAT, ["n", 4])], [info("b", TensorProto.FLOAT, [2, "n", 2])]
    shape = onnx.numpy_helper.from_array(np.array([2, -1, 2]), "shape")
    node = helper.make_node("Reshape", ["a", "shape"], ["b"])
    model = helper.make_model(helper.make_graph([node], "g", *ends, [shape]))
    assert fix_shapes(model) == 0 and model.graph.node[0].input[1] == "shape"


def test_heads_lie_side_by_side_at_the_plugin(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    info = helper.make_tensor_value_info("turned", TensorProto.FLOAT, ["batch", "tokens", 6, 4])
    model.graph.value_info.append(info)
    attention = next(i for i, n in enumerate(model.graph.node) if n.domain == DOMAIN)
    model.graph.node.insert(attention, helper.make_node("Neg", ["query"], ["turned"]))  # as a rotation: on single heads
    model.graph.node[attention + 1].input[0] = "turned"
    turned = rollout(model)
    assert join_heads(model) == 2, "in front for query; behind it"
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    assert list(node.input[1:4]) == ["k_flat", "v_flat", "g_open"], "no way there and back"
    assert next(n for n in model.graph.node if n.op_type == "MatMul" and "o" in n.input).input[0] == node.output[0]
    ranks = {i.name: len(i.type.tensor_type.shape.dim) for i in model.graph.value_info}
    assert all(ranks[name] == 3 for name in (*node.input[:4], node.output[0]))
    rewriter = Rewriter(model.graph, value_names(model.graph))
    for each in model.graph.node:
        behind = [split_heads(each, rewriter, SIZES["D"])] if each is node else []
        rewriter.nodes += [each, *behind]
    rewriter.finish()
    assert_same(model, turned, "float32", 0)


def test_views_are_made_where_they_are_used() -> None:
    node, kind = helper.make_node, TensorProto.FLOAT
    nodes = [
        node("Unsqueeze", ["a", "axis"], ["view"]),
        node("Mul", ["view", "view"], ["b"]),
        node("Add", ["b", "view"], ["c"]),
    ]
    axis = onnx.numpy_helper.from_array(np.array([2]), "axis")
    shapes = {"a": ["n", "m", 6], "view": ["n", "m", 1, 6], "b": ["n", "m", 1, 6], "c": ["n", "m", 1, 6]}
    infos = {name: helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(nodes, "g", [infos["a"]], [infos["c"]], [axis], value_info=[infos["view"], infos["b"]])
    model = helper.make_model(graph)
    assert join_heads(model) == 3 and join_heads(model) == 0
    assert not [n for n in model.graph.node if n.op_type == "Unsqueeze"]
    uses = [name for n in model.graph.node for name in n.input if name.startswith("view") and "shape" not in name]
    assert len(uses) == len(set(uses)) == 3
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize(
    ("given", "axes", "view"),
    [
        (["n", 1, 6], [0], [1, "n", 1, 6]),
        (["n", 6], [0, 2], [1, "n", 1, 6]),
        (["n", 6], [1, 2], ["n", 1, 1, 6]),
        ([6], [0, 1, 2], [1, 1, 1, 6]),
    ],
)
def test_other_views_stay(given: list[int | str], axes: list[int], view: list[int | str]) -> None:
    info, kind = helper.make_tensor_value_info, TensorProto.FLOAT
    nodes = [helper.make_node("Unsqueeze", ["a", "axes"], ["view"]), helper.make_node("Neg", ["view"], ["b"])]
    ends = [info("a", kind, given)], [info("b", kind, view)]
    axes_tensor = onnx.numpy_helper.from_array(np.array(axes), "axes")
    model = helper.make_model(
        helper.make_graph(nodes, "g", *ends, [axes_tensor], value_info=[info("view", kind, view)])
    )
    assert join_heads(model) == 0 and [n.op_type for n in model.graph.node] == ["Unsqueeze", "Neg"]


def test_names_that_others_know_stay() -> None:
    """A reshape there and back is an output of the graph, or read by a graph inside."""
    info, kind, node = helper.make_tensor_value_info, TensorProto.FLOAT, helper.make_node
    for last in (
        node("Neg", ["back"], ["c"]),
        node(
            "If",
            ["yes"],
            ["c"],
            **{
                f"{name}_branch": helper.make_graph(
                    [node("Neg", ["back"], ["inner"])], name, [], [info("inner", kind, None)]
                )
                for name in ("then", "else")
            },
        ),
    ):
        nodes = [node("Reshape", ["a", "wide"], ["b"]), node("Reshape", ["b", "flat"], ["back"]), last]
        shapes = {"wide": [0, 2, 3], "flat": [0, 6]}
        tensors = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in shapes.items()]
        tensors.append(onnx.numpy_helper.from_array(np.array(True), "yes"))
        graph = helper.make_graph(
            nodes, "g", [info("a", kind, ["n", 6])], [info("c", kind, ["n", 6])], tensors,
            value_info=[info("b", kind, ["n", 2, 3]), info("back", kind, ["n", 6])],
        )  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        join_heads(model)
        kept = {name for n in model.graph.node for name in n.output}
        assert ("back" in kept) == (last.op_type == "If")
        onnx.checker.check_model(model, full_check=True)


def test_unknown_heads_are_refused() -> None:
    model = small_graph()
    del model.graph.value_info[:]
    with pytest.raises(UnsupportedError, match="node attention: the heads of query are unknown"):
        join_heads(model)


def test_greedy_token_is_the_best_logit() -> None:
    model = small_graph()
    assert add_greedy_token(model) == 1 and add_greedy_token(model) == 0
    onnx.checker.check_model(model)
    for outputs in rollout(model)[:4]:
        tokens = outputs["logits"].shape[1]
        expected = outputs["logits"].argmax(-1)
        assert (outputs["next_token"][0] == expected[0]).all() and outputs["next_token"].shape == (2, tokens)
