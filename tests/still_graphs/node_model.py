"""Models of one still:: node, made from its OpSpec, and their sessions over IOBinding."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN, FUSED_OPSET, OpSpec
from tests.still_graphs.passes import attach_functions

ort = pytest.importorskip("onnxruntime")

ELEMENT = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}
fused = pytest.mark.parametrize(
    "domain, asked", [("com.microsoft", {"onnxruntime": True}), ("", {"opset": FUSED_OPSET})], ids=["own", "ai.onnx"]
)
"""Whose op of the same meaning the body stands around, and what asks for it."""


def node_model(
    spec: OpSpec,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    absent: tuple[str, ...] = (),
    opset: int = 23,
    onnxruntime: bool = False,
    kept: torch.dtype | None = None,
    layers: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of nodes with their body; inputs and outputs have the op's own names, states those that the attributes ask for.

    kept: Of what may be narrower than activations.
    layers: Nodes in a row, each of which feeds the next one's query. Names of several end in .0, .1 and so on, but for counts.
    """
    set_ = {a.name: a.default for a in spec.attributes} | attributes
    there = {state.name for state in spec.states_with(set_)}
    sides = ("past", "present")
    absent = (*absent, *(f"{side}_{s.name}" for s in spec.states if s.name not in there for side in sides))
    spec = spec.resolve(set_)
    kinds = {"T": ELEMENT[dtype], "float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "int32": TensorProto.INT32}
    infos: tuple[dict[str, onnx.ValueInfoProto], ...] = ({}, {})
    nodes = []
    for number in range(layers):
        ends: tuple[list[str], list[str]] = ([], [])
        for side, (names, tensors) in enumerate(
            ((spec.input_names(), spec.all_inputs()), (spec.output_names(), spec.all_outputs()))
        ):
            for name, t in zip(names, tensors, strict=True):
                full = name if layers == 1 or t.role == "count" else f"{name}.{number}"
                linked = bool(number) and name == "query"
                ends[side].append("" if name in absent else f"output.{number - 1}" if linked else full)
                if name not in absent and not linked:
                    kind = ELEMENT[kept] if kept and t.narrow else kinds[t.dtype]
                    shape = [sizes.get(d, d) for d in t.shape]
                    infos[side][full] = helper.make_tensor_value_info(full, kind, shape)
        nodes.append(helper.make_node(spec.name, *ends, domain=DOMAIN, **attributes))
    graph = helper.make_graph(nodes, "still", *(list(side.values()) for side in infos))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    assert attach_functions(model, onnxruntime) == 1
    return model


def session(model: onnx.ModelProto, save: str = "", library: str = "", threads: int = 1) -> Any:
    """A session of `model`; with `library` its kernels win over the bodies."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(library)
    options.log_severity_level = 3
    if save:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = save
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def value(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        raw = tensor.contiguous().view(torch.uint16).numpy()
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(tensor.contiguous().numpy())


class NodeOfStates:
    """Runs a node call after call; with `in_place` past and present of a state are one buffer, else present starts as NaN or -7.

    `others` are the latest call's outputs beside `first`.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        states: Mapping[str, torch.Tensor],
        in_place: bool,
        first: str = "output",
        **options: Any,
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # ONNX Runtime 1.31 has ops of opset 27 and refuses their models
            patch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
            self.session, self.in_place, self.first = session(model, **options), in_place, first
        self.state = {name: value(x) for name, x in states.items()}
        self.kinds = {name: x.dtype for name, x in states.items()}

    def __call__(self, feeds: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Output, which has shape and type of `like`; states go on."""
        binding = self.session.io_binding()
        asked = {i.name for i in self.session.get_inputs()}
        held = {name: value(x) for name, x in feeds.items() if name in asked}  # a binding does not keep them alive
        for name, given in held.items():
            binding.bind_ortvalue_input(name, given)
        output = value(blank(like))
        made = {}
        for name, past in self.state.items():
            binding.bind_ortvalue_input(f"past_{name}", past)
            made[name] = past if self.in_place else value(blank(tensor(past, self.kinds[name])))
            binding.bind_ortvalue_output(f"present_{name}", made[name])
        binding.bind_ortvalue_output(self.first, output)
        every = [o.name for o in self.session.get_outputs()]
        others = [name for name in every if name != self.first and not name.startswith("present_")]
        for name in others:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        self.state = made
        bound = binding.get_outputs()[len(made) + 1 :]
        self.others = {name: torch.from_numpy(x.numpy().copy()) for name, x in zip(others, bound, strict=True)}
        return tensor(output, like.dtype)

    def states(self) -> dict[str, torch.Tensor]:
        """After the latest call."""
        return {name: tensor(x, self.kinds[name]) for name, x in self.state.items()}


class StatefulNode(NodeOfStates):
    """The same of a node with one state; a call gives it beside the output."""

    def __init__(
        self, spec: OpSpec, model: onnx.ModelProto, state: torch.Tensor, in_place: bool, **options: Any
    ) -> None:
        super().__init__(model, {spec.states[0].name: state}, in_place, **options)

    def __call__(self, feeds: Mapping[str, torch.Tensor], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().__call__(feeds, like), *self.states().values()


def blank(like: torch.Tensor) -> torch.Tensor:
    """What nothing was written to."""
    return torch.full_like(like, torch.nan if like.is_floating_point() else -7)


def tensor(found: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy of what a session wrote."""
    if dtype == torch.bfloat16:
        return torch.utils.dlpack.from_dlpack(found._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(found.numpy().copy())


def close(found: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    assert found.shape == expected.shape, what
    if found.dtype == torch.int32:  # words of codes
        assert torch.equal(found.view(torch.int8), expected.view(torch.int8)), what
        return
    found, expected = found.float(), expected.float()
    assert torch.equal(found.isinf(), expected.isinf()), what
    finite = ~expected.isinf()
    scale = max(1.0, float(expected[finite].abs().max())) if bool(finite.any()) else 1.0
    error = float((found - expected)[finite].abs().max()) if bool(finite.any()) else 0.0
    assert error <= bound * scale, f"{what}: {error:.2e}"  # NaN fails too


WRONG_COUNTS: list[dict[str, list[int]]] = [
    {"past_length": [0, -1]},
    {"past_length": [-4, 5]},
    {"past_length": [0, -(2**62)]},
    {"past_length": [0, 2**63 - 1]},
    {"past_length": [0, 60]},  # more than the cache has slots for
    {"new_tokens": [5, -1]},
    {"new_tokens": [5, 6]},
    {"new_tokens": [5, 2**31]},
    {"new_tokens": [5, 2**63 - 1]},
    {"past_length": [2**62, 2**62], "new_tokens": [2**62, 2**62]},
]


@contextmanager
def refused() -> Iterator[None]:
    """ONNX Runtime refuses a call because of its counts, and does not print it."""
    ort.set_default_logger_severity(4)
    try:
        with pytest.raises(Exception, match=r"out_of_range|invalid ind"):
            yield
    finally:
        ort.set_default_logger_severity(2)
