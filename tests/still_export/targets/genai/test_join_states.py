"""The graph for onnxruntime-genai, fed as genai feeds it, against the graph whose states are apart."""

import json
import math
from typing import Any

import numpy as np
import onnx
import pytest

from still_export.targets.genai.join_states import RECURRENT
from still_export.targets.genai.package import PASSES
from still_graphs.errors import UnsupportedError
from still_graphs.functions.joined import part_of
from still_kernels.hybrid_attention.spec import HYBRID_ATTENTION
from tests.still_graphs.genai_host import GenaiHost
from tests.still_graphs.node_model import session
from tests.still_graphs.passes import run_passes
from tests.still_graphs.small_graph import CODES, HYBRID, SIZES, VOCABULARY, small_graph
from tests.still_graphs.written import outputs_of_calls

CAPACITY = 120
COUNTS = np.array([37, 21])
STEPS = 3 * SIZES["C"]
SLOTS = 40
FORMS = {"float32": ("float32", HYBRID), "float16": ("float16", HYBRID), "codes": ("float32", CODES)}
"""Types of activations, and the op with its states."""


Expected = tuple[list[np.ndarray], dict[str, np.ndarray]]
"""Logits of each call; the states at the end, by input name."""


def with_capacity(model: onnx.ModelProto) -> onnx.ModelProto:
    entry = json.dumps({"capacity_tokens": CAPACITY, "bounded": True})
    onnx.helper.set_model_props(model, {"still.capacity": entry})
    return model


def joined(form: str = "float32") -> onnx.ModelProto:
    dtype, spec = FORMS[form]
    model = with_capacity(small_graph(dtype, spec=spec))
    counts = run_passes(model, PASSES)
    assert counts == {
        "join_states": 4,
        "take_lengths_from_mask": 3,
    }  # two tensors, and a small cache that makes genai refuse beams
    onnx.checker.check_model(model)
    return model


def account_of(model: onnx.ModelProto) -> str:
    (node,) = [n for n in model.graph.node if n.op_type == "JoinedHybridAttention"]
    return str(next(a.s.decode() for a in node.attribute if a.name == "states"))


def tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.integers(0, VOCABULARY, (2, 37)), random.integers(0, VOCABULARY, (STEPS, 2, 1))


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    return {form: apart(form) for form in FORMS}


def apart(form: str) -> Expected:
    """Logits of the prompts' last tokens and of every step, lengths given and states handed on; and the states at the end."""
    dtype, spec = FORMS[form]
    prompts, steps = tokens()
    calls = [(prompts, COUNTS), *((ids, np.ones(2, np.int64)) for ids in steps)]
    found = outputs_of_calls(small_graph(dtype, spec=spec), calls, SLOTS)
    logits = [outputs["logits"][np.arange(2), new - 1] for outputs, (_, new) in zip(found, calls, strict=True)]
    return logits, {name.replace("present_", "past_"): value for name, value in found[-1].items()}


def check(host: GenaiHost, expected: Expected, account: str, tolerance: float) -> None:
    """Logits of all calls; and at the end each state, where `account`, the node's attribute `states`, says that it lies."""
    wanted, states = expected
    prompts, steps = tokens()
    logits = host.feed(prompts, COUNTS)[np.arange(2), COUNTS - 1]
    np.testing.assert_allclose(logits, wanted[0], atol=tolerance, rtol=tolerance)
    for number, step in enumerate(steps):
        np.testing.assert_allclose(
            host.feed(step)[:, -1], wanted[number + 1], atol=tolerance, rtol=tolerance, err_msg=str(number)
        )
    left = [host.pasts[f"past_key_values.0.{part}"].numpy().reshape(-1) for part in RECURRENT]
    for entry in account.split(";"):
        name, _, dims = entry.partition(":")
        shape = [2, *map(int, dims.split(","))]
        part = part_of(HYBRID_ATTENTION, name)
        found, left[part] = np.split(left[part], [math.prod(shape)])
        state = states[f"past_{name}.0"]
        if "salient" in name:
            state = state[:, :, : shape[2]]
        assert found.dtype == state.dtype
        bound = {"atol": 0, "rtol": 0} if state.dtype == np.int32 else {"atol": tolerance, "rtol": tolerance}
        np.testing.assert_allclose(found.reshape(shape), state, err_msg=name, **bound)
    assert not any(map(len, left))


@pytest.mark.parametrize("form", ["float32", "codes"])
@pytest.mark.parametrize("in_two", [False, True], ids=["one buffer", "two"])
def test_bodies_of_joined_states(expected: dict[str, Expected], form: str, in_two: bool) -> None:
    """A padded batch, then steps past promotions."""
    model = joined(form)
    check(GenaiHost(model.SerializeToString(), 2, apart=in_two), expected[form], account_of(model), 1e-6)


@pytest.mark.parametrize("form, tolerance", [("float32", 1e-5), ("float16", 5e-3), ("codes", 1e-5)])
@pytest.mark.parametrize("in_two", [False, True], ids=["one buffer", "two"])
def test_kernel_of_joined_states(
    library: str, expected: dict[str, Expected], form: str, tolerance: float, in_two: bool
) -> None:
    model = joined(form)
    check(GenaiHost(model.SerializeToString(), 2, library, in_two), expected[form], account_of(model), tolerance)


def test_a_prompt_in_pieces_equals_the_whole() -> None:
    prompts, _ = tokens()
    graph = joined().SerializeToString()
    whole, pieces = GenaiHost(graph, 1), GenaiHost(graph, 1)
    logits = whole.feed(prompts[:1])[:, -1]
    for begin in range(0, 37, 10):
        last = pieces.feed(prompts[:1, begin : begin + 10])[:, -1]
    np.testing.assert_allclose(last, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_takes_the_joined_node(library: str, tmp_path: Any, form: str) -> None:
    """Not the body: one node stays in the graph that runs."""
    session(joined(form), save=str(tmp_path / "run.onnx"), library=library)
    nodes = [n.op_type for n in onnx.load(tmp_path / "run.onnx").graph.node if n.domain == "still"]
    assert nodes == ["JoinedHybridAttention"]


@pytest.mark.parametrize(
    "states, said",
    [
        ("larger windows", "joined states are"),
        ("window_key:3,16,4", "past_window_value is not optional"),
        ("window_value:3,16,4;window_key:3,16,4", "not in its order"),
        ("window_door:3", "is no state of the op"),
        ("window_key:3,-1,4", 'the dimension "-1"'),
        ("window_key:99999999999,99999999999", "too large"),
        ("window_key:1,1,1,1,1,1,1,1", "too many dimensions"),
        ("", "not optional"),
    ],
)
def test_a_wrong_account_of_the_states_is_an_error(library: str, states: str, said: str) -> None:
    model = joined()
    (node,) = [n for n in model.graph.node if n.domain == "still"]
    account = next(a for a in node.attribute if a.name == "states")
    account.s = account.s.replace(b",16", b",18") if states == "larger windows" else states.encode()
    with pytest.raises(Exception, match=said):
        GenaiHost(model.SerializeToString(), 1, library).feed(tokens()[0][:1])


@pytest.mark.parametrize("entry", range(11))
@pytest.mark.parametrize("change", ["left out", "a row more", "first"])
def test_codes_and_scales_have_one_account(library: str, entry: int, change: str) -> None:
    """Whichever state it does not give, gives larger or elsewhere."""
    model = joined("codes")
    (node,) = [n for n in model.graph.node if n.op_type == "JoinedHybridAttention"]
    account = next(a for a in node.attribute if a.name == "states")
    entries = account.s.decode().split(";")
    assert len(entries) == 11
    said = entries.pop(entry)
    if change == "a row more":
        name, _, dims = said.partition(":")
        heads, _, rest = dims.partition(",")
        entries.insert(entry, f"{name}:{int(heads) + 1},{rest}")
    elif change == "first":
        entries.insert(11 if entry == 0 else 0, said)
    account.s = ";".join(entries).encode()
    with pytest.raises(Exception, match=r"joined states are|not optional|not in its order|expected \["):
        GenaiHost(model.SerializeToString(), 1, library).feed(tokens()[0][:1])


def test_without_a_capacity_there_is_no_size() -> None:
    with pytest.raises(UnsupportedError, match=r"has no still.capacity"):
        run_passes(small_graph(), PASSES)


def test_layers_of_different_sizes_are_refused() -> None:
    """genai has one size for all layers."""
    model = with_capacity(small_graph())
    (first,) = [n for n in model.graph.node if n.domain == "still"]
    second = onnx.NodeProto()
    second.CopyFrom(first)
    count = len(first.input) - len([n for n in first.input if n.startswith("past_") and "." in n])
    infos = {i.name: i for i in model.graph.input}
    for index, name in enumerate(first.input):
        if index >= count - 1 and name.endswith(".0"):
            info = onnx.ValueInfoProto()
            info.CopyFrom(infos[name])
            info.name = second.input[index] = f"{name[:-2]}.1"
            if "salient" not in name:
                info.type.tensor_type.shape.dim[1].dim_value += 1
            model.graph.input.append(info)
    second.output[:] = [f"{name}.other" if name else "" for name in first.output]
    model.graph.node.append(second)
    with pytest.raises(UnsupportedError, match=r"layers 0 and 1 have states of different sizes"):
        run_passes(model, PASSES)
