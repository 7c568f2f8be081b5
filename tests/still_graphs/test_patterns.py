"""The matcher: it finds a pattern however it is written down, refuses what is nearly one, and leaves a graph that runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from still_graphs.patterns import Either, Fusion, Match, Op, Val, fuse, fused

X, BIAS = Val(), Val()
SPLIT = Op("Split", X, ..., outputs=2)
BENT = Op("Sigmoid", Either(Op("Add", SPLIT[0], BIAS), SPLIT[0]))
GATED = Op("Mul", Op("Mul", SPLIT[0], BENT), SPLIT[1])


def keep(match: Match) -> Sequence[ir.Value]:
    """One node that says what it is in the place of."""
    biased = [match.value(BIAS)] if BIAS in match else []
    return match.add("Gate", [match.value(X), *biased], {"found": 1}, name="fused", domain="com.microsoft")


GATE = Fusion((GATED,), keep)
NODES = [
    "first, second = Split <axis = -1, num_outputs = 2> (x)",
    "moved = Add (first, bias)",
    "bent = Sigmoid (moved)",
    "silu = Mul (first, bent)",
    "y = Mul (silu, second)",
]


def model_of(nodes: Sequence[str] = NODES, outputs: Sequence[str] = ("y",)) -> ir.Model:
    given = ", ".join(f"float[B,4] {name}" for name in outputs)
    text = f"""
    <ir_version: 10, opset_import: ["" : 23]>
    g (float[B,8] x, float[B,8] z, float[4] bias) => ({given}) {{ {" ".join(nodes)} }}"""
    return ir.from_proto(onnx.parser.parse_model(text))


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@given(turned=st.sets(st.sampled_from([1, 3, 4])), biased=st.booleans())
def test_factors_and_terms_stand_in_any_order(turned: set[int], biased: bool) -> None:
    nodes = list(NODES)
    for place in turned:
        head, terms = nodes[place].removesuffix(")").split("(")
        nodes[place] = f"{head}({', '.join(reversed(terms.split(', ')))})"
    if not biased:
        nodes[2] = "bent = Sigmoid (first)"
        del nodes[1]
    model = model_of(nodes)
    assert fuse(model, GATE) == 1 and kinds(model) == ["Gate"]
    (node,) = model.graph
    assert [value.name for value in node.inputs if value] == ["x", "bias"][: 1 + biased]
    assert (
        model.graph.outputs[0] is node.outputs[0] and node.outputs[0].name == "y" and node.outputs[0].shape is not None
    )
    assert model.graph.opset_imports["com.microsoft"] == 1 and fuse(model, GATE) == 0


VALUES = ("first", "second", "moved", "bent", "silu")
WRONG = {
    "op": [("Sigmoid", "Tanh"), ("Split <axis = -1, num_outputs = 2>", "Split <axis = -1, num_outputs = 3>")],
    "input": [("(silu, second)", "(silu, first)"), ("(first, bent)", "(second, bent)"), ("(first, bias)", "(second, bias)")],
    "shape": [("= Mul (silu", "= Sub (silu"), ("= Add", "= Sub"), ("(first, bent)", "(bent, bent)"), ("(moved)", "(silu0)")],
}  # fmt: skip


@given(st.data())
def test_what_is_nearly_the_pattern_stays(data: st.DataObject) -> None:
    """One thing is another: an op, what it reads, or who else reads what lies inside."""
    nodes, outputs = list(NODES), ["y"]
    change = data.draw(st.sampled_from([*WRONG, "reader", "output", "domain"]))
    if change in WRONG:
        old, new = data.draw(st.sampled_from(WRONG[change]))
        assert any(old in node for node in nodes)
        nodes = [node.replace(old, new) for node in nodes]
        if "num_outputs = 3" in new:
            nodes[0] = nodes[0].replace("first, second", "first, second, third")
        if new == "(silu0)":
            nodes.insert(0, "silu0 = Neg (bias)")
    elif change == "reader":
        name = data.draw(st.sampled_from(VALUES))
        place = data.draw(st.integers(1 + next(i for i, node in enumerate(NODES) if name in node), len(NODES)))
        nodes.insert(place if name != "silu" else 4, f"other = Neg ({name})")
        outputs.append("other")
    elif change == "output":
        outputs.append(data.draw(st.sampled_from(VALUES)))
    model = model_of(nodes, outputs)
    if change == "domain":
        node = data.draw(st.sampled_from(list(model.graph)))
        node.domain = "other"
    before = kinds(model)
    assert fuse(model, GATE) == 0 and kinds(model) == before


def test_a_reader_in_a_graph_inside_counts() -> None:
    then, other = (f"{name} () => (float[B,4] branch) {{ branch = Neg (silu) }}" for name in ("yes", "no"))
    inner = f"other = If (c) <then_branch = {then}, else_branch = {other}>"
    text = [*NODES, "c = Constant <value = bool {1}> ()", inner]
    model = model_of(text, ["y", "other"])
    assert fuse(model, GATE) == 0


def test_what_others_read_stays_beside_the_fused_node() -> None:
    model = model_of([*NODES, "other = Neg (silu)"], ["y", "other"])
    assert fuse(model, replace(GATE, alone=False)) == 1
    assert kinds(model) == ["Split", "Add", "Sigmoid", "Mul", "Gate", "Neg"]


def test_conditions_are_asked_of_the_whole_and_of_its_parts() -> None:
    asked: list[str] = []

    def refuse(match: Match) -> bool:
        asked.append(str(match.value(X).name))
        return False

    assert fuse(model_of(), replace(GATE, where=refuse)) == 0 and asked == ["x"]
    given = Val(lambda value: value.name != "x")
    split = Op("Split", given, ..., check=lambda node: node.attributes.get_int("axis") == -1)
    assert fuse(model_of(), Fusion((split,), lambda match: pytest.fail("x was refused"))) == 0


def test_the_same_object_is_the_same_value_and_two_are_two_nodes() -> None:
    nodes = ["a = Neg (x)", "b = Neg (x)", "c = Neg (z)", "same = Add (a, b)", "other = Add (a, c)", "one = Add (a, a)"]
    terms = Op("Neg", X, shared=True), Op("Neg", X, shared=True)
    apart = Op("Neg", X), Op("Neg", X)
    for pair, found in ((terms, {"same", "one"}), (apart, {"same"})):
        seen: set[Any] = set()

        def note(match: Match, seen: set[Any] = seen) -> bool:
            seen.add(match.results[0].name)
            return False

        fuse(
            model_of(nodes, ["same", "other", "one"]), Fusion((Op("Add", *pair),), lambda match: [], note, alone=False)
        )
        assert seen == found


def test_several_results_and_readers_before_the_last_one() -> None:
    """One half is read before what the other half takes is made: that comes first, then the node, then its readers."""
    x, shifts = Val(), (Val(), Val())
    split = Op("Split", x, ..., outputs=2)
    lifted, lowered = (Op(op, split[place], shifts[place]) for place, op in enumerate(("Add", "Sub")))

    def both(match: Match) -> Sequence[ir.Value]:
        up, down = (match.value(shift) for shift in shifts)
        back = match.add("Neg", [down], name="back")
        moves = match.add("Concat", [up, *back], {"axis": 0}, name="moves")
        whole = match.add("Add", [match.value(x), *moves], name="whole")
        return match.add("Split", whole, {"axis": -1, "num_outputs": 2}, name="parts", outputs=2)

    nodes = [
        "first, second = Split <axis = -1, num_outputs = 2> (x)",
        "up = Add (first, bias)",
        "early = Neg (up)",
        "late = Neg (bias)",
        "down = Sub (second, late)",
    ]
    model, feeds = model_of(nodes, ["early", "down"]), {"x": np.arange(16, dtype=np.float32).reshape(2, 8)}
    feeds |= {"z": feeds["x"], "bias": np.array([3, 1, 4, 1], np.float32)}
    expected = answers(model, feeds)
    assert fuse(model, Fusion((lifted, lowered), both)) == 1
    onnx.checker.check_model(ir.to_proto(model))
    for got, wanted in zip(answers(model, feeds), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def answers(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    run = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(value) for value in run.run(None, feeds)]


def test_absent_inputs_are_written_as_none() -> None:
    clipped = Op("Clip", X, None, BIAS)
    for node, found in (
        ("y = Clip (x, , z)", 1),
        ("y = Clip (x, z, z)", 0),
        ("y = Clip (x, z)", 0),
        ("y = Clip (x)", 0),
    ):
        fusion = Fusion((clipped,), lambda match: match.add("Min", [match.value(X), match.value(BIAS)], name="m"))
        assert fuse(model_of([node]), fusion) == found, node


def test_what_is_left_is_named() -> None:
    model = model_of()
    model.graph[-1].name = "last"
    assert fused(GATE)(model) == "nodes up to last that could be one"
    fuse(model, GATE)
    assert fused(GATE)(model) == ""
