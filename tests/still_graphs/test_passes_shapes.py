"""Passes that rewrite shapes: constants in the place of computed ones, heads side by side at the plugin."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from still_export.targets.trt8.merge_heads import merge_heads
from still_graphs.errors import UnsupportedError
from still_graphs.ops import DOMAIN
from still_graphs.passes.fix_shapes import fix_shapes
from tests.still_graphs.passes import applied
from tests.still_graphs.protos import Rewriter, attribute, value_names
from tests.still_graphs.small_graph import SIZES, small_graph, split_heads
from tests.still_graphs.test_passes_trt import assert_same, rollout
from tests.still_graphs.written import parsed


@pytest.fixture(scope="module")
def expected() -> list[dict[str, np.ndarray]]:
    return rollout(small_graph())


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
    assert_same(model, expected, 0)
    assert applied(fix_shapes, model) == 5
    values = {n.output[0]: attribute(n, "value") for n in model.graph.node if n.op_type == "Constant"}
    shapes = {
        n.output[0]: onnx.numpy_helper.to_array(values[n.input[1]]).tolist()
        for n in model.graph.node
        if n.op_type == "Reshape"
    }
    assert shapes["query"] == [0, 0, 6, 4] and shapes["key"] == [0, 0, 3, 4] and shapes["mixed_flat"] == [0, 0, 24]
    assert not {n.op_type for n in model.graph.node} & {"Shape", "Concat"}, "nothing computes a shape any more"
    onnx.checker.check_model(model, full_check=True)
    assert_same(model, expected, 0)
    assert applied(fix_shapes, model) == 0


def test_shapes_that_move_a_free_dimension_stay() -> None:
    model = parsed("g (float[n,4] a) => (float[2,n,2] b) <int64[3] shape = {2, -1, 2}> { b = Reshape (a, shape) }")
    assert applied(fix_shapes, model) == 0 and model.graph.node[0].input[1] == "shape"


def test_heads_lie_side_by_side_at_the_plugin(expected: list[dict[str, np.ndarray]]) -> None:
    model = small_graph()
    info = helper.make_tensor_value_info("turned", TensorProto.FLOAT, ["batch", "tokens", 6, 4])
    model.graph.value_info.append(info)
    attention = next(i for i, n in enumerate(model.graph.node) if n.domain == DOMAIN)
    model.graph.node.insert(attention, helper.make_node("Neg", ["query"], ["turned"]))  # as a rotation: on single heads
    model.graph.node[attention + 1].input[0] = "turned"
    turned = rollout(model)
    assert applied(merge_heads, model) == 2, "in front for query; behind it"
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
    assert_same(model, turned, 0)


def test_views_are_made_where_they_are_used() -> None:
    model = parsed("""
    g (float[n,m,6] a) => (float[n,m,1,6] c) <int64[1] axis = {2}, float[n,m,1,6] view, float[n,m,1,6] b> {
        view = Unsqueeze (a, axis)
        b = Mul (view, view)
        c = Add (b, view)
    }""")
    assert applied(merge_heads, model) == 3 and applied(merge_heads, model) == 0
    assert not [n for n in model.graph.node if n.op_type == "Unsqueeze"]
    uses = [name for n in model.graph.node for name in n.input if name.startswith("view") and "shape" not in name]
    assert len(uses) == len(set(uses)) == 3
    onnx.checker.check_model(model, full_check=True)


def test_what_is_key_and_value_for_all_heads_is_handed_over_as_it_is() -> None:
    """Keys of latents: two reshapes of one tensor to its own shape are two outputs of a part, which TensorRT 8.6 cannot compile."""
    state = "float[n,1,capacity,6]"
    model = parsed(f"""
    g (float[n,m,2,6] query, float[n,m,6] latent, int32[n] new_tokens, int32[n] past_length, {state} past_k, {state} past_v)
    => (float[n,m,2,6] mixed, {state} next_k, {state} next_v) <int64[1] axis = {{2}}, float[n,m,1,6] view> {{
        view = Unsqueeze (latent, axis)
        mixed, next_k, next_v = {DOMAIN}.Attention (query, view, view, new_tokens, past_length, past_k, past_v)
    }}""")
    assert applied(merge_heads, model) == 2, "in front for query; behind it"
    (node,) = [n for n in model.graph.node if n.domain == DOMAIN]
    assert list(node.input[1:3]) == ["latent", "latent"]
    assert [n.op_type for n in model.graph.node if n.op_type != "Constant"] == ["Reshape", "Attention", "Reshape"]


@pytest.mark.parametrize(
    ("given", "axes", "view"),
    [("n,1,6", "0", "1,n,1,6"), ("n,6", "0, 2", "1,n,1,6"), ("n,6", "1, 2", "n,1,1,6"), ("6", "0, 1, 2", "1,1,1,6")],
)
def test_other_views_stay(given: str, axes: str, view: str) -> None:
    model = parsed(f"""
    g (float[{given}] a) => (float[{view}] b) <int64[{axes.count(",") + 1}] axes = {{{axes}}}, float[{view}] view> {{
        view = Unsqueeze (a, axes)
        b = Neg (view)
    }}""")
    assert applied(merge_heads, model) == 0 and [n.op_type for n in model.graph.node] == ["Unsqueeze", "Neg"]


def test_names_that_others_know_stay() -> None:
    """A reshape there and back is an output of the graph, or read by a graph inside."""
    then, other = (f"{name} () => (float[n,6] inner) {{ inner = Neg (back) }}" for name in ("yes", "no"))
    for last in ("Neg (back)", f"If (right) <then_branch = {then}, else_branch = {other}>"):
        model = parsed(
            f"""
        g (float[n,6] a, bool right) => (float[n,6] c)
        <int64[3] wide = {{0, 2, 3}}, int64[2] flat = {{0, 6}}, float[n,2,3] b, float[n,6] back> {{
            b = Reshape (a, wide)
            back = Reshape (b, flat)
            c = {last}
        }}""",
            opset=17,
        )
        applied(merge_heads, model)
        kept = {name for n in model.graph.node for name in n.output}
        assert ("back" in kept) == last.startswith("If")
        onnx.checker.check_model(model, full_check=True)


def test_unknown_heads_are_refused() -> None:
    model = small_graph()
    del model.graph.value_info[:]
    with pytest.raises(UnsupportedError, match="node attention: the heads of query are unknown"):
        applied(merge_heads, model)
