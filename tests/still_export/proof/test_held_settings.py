"""Settings of nodes held to PyTorch's calls: right packages pass; another setting of any op, function or number fails with its name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from still_export.graph.options import ExportOptions
from still_export.models.load import Source
from still_export.models.read.source import find_source
from still_export.package.folder import open_package
from still_export.proof.held_settings import _numbers, check_settings
from still_export.proof.torch_calls import TorchCalls, torch_calls
from still_export.proof.verdict import Check, Verdict
from still_graphs.ops import OPS
from tests.kept import kept
from tests.still_export.conftest import Exporter
from tests.still_export.linear_models import linear_model
from tests.still_export.systems.test_allmem import attached
from tests.still_export.tiny import MIXED, still_model

Change = Callable[[onnx.ModelProto], None]
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: still_model("qwen3_moe", torch.float32),
    "allmem": lambda: attached(dtype=torch.float32),
}
HELD = {
    op: model
    for model, ops in {
        "lfm2": "Attention CausalConv",
        "minicpm_sala": "BlockAttention LinearAttention SelectBlocks",
        "rat": "StridedAttention",
        "qwen3_moe": "Experts HybridAttention Route",
        "neural_attention_search_linear_attn_gdn": "KeptAttention RoutedAttention",
        "routing_transformer": "ClusterTokens",
        "llama_with_landmark": "LandmarkAttention",
        "allmem": "TestTimeMemory",
    }.items()
    for op in ops.split()
}
"""A model with each op that has attributes."""


def held(folder: Path, changes: Change | None = None, place: Path | None = None) -> Verdict:
    """What is said of a package's graph, or of a copy of it with changes."""
    manifest = open_package(folder, check_hashes=False).manifest
    if changes is not None and place is not None:
        graph = onnx.load(folder / "model.onnx", load_external_data=False)
        changes(graph)
        place.mkdir()
        onnx.save(graph, place / "model.onnx")
        folder, manifest = place, manifest | {"files": {"model.onnx": {}}}
    options = replace(ExportOptions.from_manifest(manifest), dtype="float32")
    return check_settings(folder, manifest, find_source(options))


def called(name: str) -> tuple[Source, TorchCalls]:
    """A model, and what PyTorch calls of it; made once."""
    folder = kept(
        f"settings of {name}", lambda folder: MODELS.get(name, partial(linear_model, name))().save_pretrained(folder)
    )
    source = find_source(ExportOptions(str(folder), dtype="float32"))
    return source, torch_calls(source)


def other(value: Any, choices: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        return next((c for c in choices if c != value), "another")
    return value + 1 if isinstance(value, int) else value * 1.01 + 0.01


def set_to(node: onnx.NodeProto, name: str, value: Any = None) -> None:
    """None: left out."""
    others = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, *([] if value is None else [helper.make_attribute(name, value)])])


def test_every_op_with_attributes_is_held() -> None:
    own = {name for name, spec in OPS.items() if spec.traced and spec.attributes and not spec.home}
    assert own == set(HELD)


@pytest.mark.parametrize("op", HELD)
def test_another_setting_of_any_op_fails(op: str, tmp_path: Path) -> None:
    """In a graph of these nodes alone: those of exported models are asked by every verify."""
    source, calls = called(HELD[op])

    def said(last: Mapping[str, Any]) -> list[Check]:
        given = {name: [*each[:-1], last if name == op else each[-1]] for name, each in calls.ops.items()}
        nodes = [
            helper.make_node(name, ["x"], [f"{name}.{number}"], domain=OPS[name].domain, **attributes)
            for name, each in given.items()
            for number, attributes in enumerate(each)
        ]
        onnx.save(helper.make_model(helper.make_graph(nodes, "g", [], [])), tmp_path / "model.onnx")
        manifest = {"target": "onnx", "files": {"model.onnx": {}}}
        return [check for check in check_settings(tmp_path, manifest, source).checks if not check.passed]

    right = calls.ops[op][-1]
    assert not said(right)
    for spec in OPS[op].attributes:
        failed = said({**right, spec.name: other(right[spec.name], spec.choices)})
        assert failed and failed[0].where == f"{spec.name} of {op} {len(calls.ops[op]) - 1}", (spec.name, failed)


def nodes(model: onnx.ModelProto, op: str) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type == op]


def renamed(of: str, to: str) -> Change:
    return lambda model: setattr(nodes(model, of)[0], "op_type", to)


def other_gelu(model: onnx.ModelProto) -> None:
    (said,) = {a.s for a in nodes(model, "Gelu")[0].attribute if a.name == "approximate"} or {b"none"}
    set_to(nodes(model, "Gelu")[0], "approximate", "none" if said == b"tanh" else "tanh")


def other_number(model: onnx.ModelProto) -> None:
    """The number that scores are divided by, or any other single one, is off by the last bits of float16."""
    names = {name for node in model.graph.node if node.op_type in ("Mul", "Add", "Div") for name in node.input}
    for tensor in model.graph.initializer:
        if tensor.name in names and tensor.data_type == onnx.TensorProto.FLOAT16 and set(tensor.dims) <= {1}:
            value = onnx.numpy_helper.to_array(tensor) * 1.002
            tensor.CopyFrom(onnx.numpy_helper.from_array(value.astype("float16"), tensor.name))
            return
    raise AssertionError("no single number")


PLANTS: dict[str, tuple[str, str, Change]] = {
    "what no rounding of float16 tells from a Sigmoid": ("llama", "HardSigmoid", renamed("Sigmoid", "HardSigmoid")),
    "a layer whose op another one answers for": ("llama", "HybridAttention", renamed("HybridAttention", "Identity")),
    "the op's default": (
        "llama",
        "mix_epsilon of",
        lambda model: set_to(nodes(model, "HybridAttention")[0], "mix_epsilon"),
    ),
    "another Gelu": ("gemma3_text", "approximate of Gelu", other_gelu),
    "no Gelu": ("gemma3_text", "LeakyRelu", renamed("Gelu", "LeakyRelu")),
    "another number": ("gemma3_text", "input 1 of", other_number),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_node_is_named(fault: str, export_tiny: Exporter, tmp_path: Path) -> None:
    family, where, change = PLANTS[fault]
    package = export_tiny(family, "float16", options={"native": False}).path
    assert held(package).passed
    failed = [check for check in held(package, change, tmp_path / "planted").checks if not check.passed]
    assert failed and failed[0].where.startswith(where), failed


@pytest.mark.parametrize("final", ["trt", "trt8", "genai"])
def test_other_targets_pass(final: str, export_tiny: Exporter) -> None:
    found = held(export_tiny("llama", "float32" if final == "genai" else "float16", {}, final).path)
    assert found.passed and int(found.checks[0].name.partition(" ")[0]) > 10, found


def test_settings_of_a_model_with_softmax_layers_are_held(export_tiny: Exporter, tmp_path: Path) -> None:
    """Whose ops share names of attributes."""
    package = export_tiny("llama", "float32", {"native": False}, layer_types=MIXED).path

    def other_overflow(model: onnx.ModelProto) -> None:
        """What no prompt within the capacity asks."""
        set_to(nodes(model, "HybridAttention")[-1], "overflow", "drop")

    assert held(package).passed and not held(package, other_overflow, tmp_path / "planted").passed


def test_a_graph_with_bodies_in_the_place_of_nodes_says_so(export_tiny: Exporter, tmp_path: Path) -> None:
    package = export_tiny("llama", "float16", options={"native": False}).path

    def inlined(model: onnx.ModelProto) -> None:
        for node in nodes(model, "HybridAttention"):
            node.op_type, node.domain = "Attention", ""

    found = held(package, inlined, tmp_path / "planted")
    assert any("HybridAttention in model.onnx" in line for line in found.not_asked)


def test_a_weight_of_one_number_is_no_number_of_the_graph() -> None:
    """Weights are held to the model's by themselves."""
    value = onnx.numpy_helper.from_array(np.array([0.37], np.float32), "model.layers.0.gate")
    node = helper.make_node("Mul", ["x", value.name], ["y"])
    graph = helper.make_graph([node], "g", [], [], [value])
    assert not any(what for _, what in _numbers(graph, [node], TorchCalls(tensors=frozenset([value.name]))))
    assert [what for _, what in _numbers(graph, [node], TorchCalls())] == [
        "is 0.37, and PyTorch computes with no such number"
    ]
