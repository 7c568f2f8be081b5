"""Models of one still:: node, made from its OpSpec, and their sessions over IOBinding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from still_graphs.ops import DOMAIN, FUSED_OPSET, OpSpec
from tests.still_graphs.steps import attach_functions
from tests.still_graphs.test_functions import ELEMENT, session, value

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
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node with its body; inputs and outputs have the op's own names, states those that the attributes ask for.

    kept: Of what may be narrower than activations.
    """
    set_ = {a.name: a.default for a in spec.attributes} | attributes
    there = {state.name for state in spec.states_with(set_)}
    sides = ("past", "present")
    absent = (*absent, *(f"{side}_{s.name}" for s in spec.states if s.name not in there for side in sides))
    spec = spec.resolve(set_)
    kinds = {
        "T": ELEMENT[dtype],
        "float32": TensorProto.FLOAT,
        "int64": TensorProto.INT64,
        "int32": TensorProto.INT32,
    }

    def infos(names: tuple[str, ...], tensors: Any) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(
                name, ELEMENT[kept] if kept and t.narrow else kinds[t.dtype], [sizes.get(d, d) for d in t.shape]
            )
            for name, t in zip(names, tensors, strict=True)
            if name not in absent
        ]

    names = ["" if name in absent else name for name in spec.input_names()]
    outputs = ["" if name in absent else name for name in spec.output_names()]
    node = helper.make_node(spec.name, names, outputs, domain=DOMAIN, **attributes)
    given, made = infos(spec.input_names(), spec.all_inputs()), infos(spec.output_names(), spec.all_outputs())
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], "still", given, made), opset_imports=imports, ir_version=10)
    assert attach_functions(model, onnxruntime) == 1
    return model


class StatefulNode:
    """Runs a node with one state; with `in_place` past and present are one buffer, else present starts as NaN."""

    def __init__(
        self, spec: OpSpec, model: onnx.ModelProto, state: torch.Tensor, in_place: bool, **options: Any
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "ALLOW_RELEASED_ONNX_OPSET_ONLY", "0"
            )  # ONNX Runtime 1.31 has ops of opset 27 and refuses their models
            self.session, self.in_place = session(model, **options), in_place
        self.name, self.past = spec.states[0].name, value(state)
        self.dtype = state.dtype

    def __call__(self, feeds: Mapping[str, torch.Tensor], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, which has shape and type of `like`, and the state after the call."""
        binding = self.session.io_binding()
        held = [value(x) for x in feeds.values()]
        for name, given in zip(feeds, held, strict=True):
            binding.bind_ortvalue_input(name, given)
        binding.bind_ortvalue_input(f"past_{self.name}", self.past)
        output = value(torch.full_like(like, torch.nan))
        present = self.past if self.in_place else value(torch.full_like(tensor(self.past, self.dtype), torch.nan))
        binding.bind_ortvalue_output("output", output)
        binding.bind_ortvalue_output(f"present_{self.name}", present)
        self.session.run_with_iobinding(binding)
        self.past = present
        return tensor(output, like.dtype), tensor(present, self.dtype)


class NodeOfStates:
    """The same of a node with several states, by name; `others` are the latest call's outputs beside `first`."""

    def __init__(
        self, model: onnx.ModelProto, states: Mapping[str, torch.Tensor], in_place: bool, first: str = "output"
    ) -> None:
        self.session, self.in_place, self.first = session(model), in_place, first
        self.past = {name: value(x) for name, x in states.items()}
        self.kinds = {name: x.dtype for name, x in states.items()}

    def __call__(self, feeds: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Output, which has shape and type of `like`; states go on."""
        binding = self.session.io_binding()
        held = [value(x) for x in feeds.values()]
        for name, given in zip(feeds, held, strict=True):
            binding.bind_ortvalue_input(name, given)
        output = value(torch.full_like(like, torch.nan if like.is_floating_point() else -7))
        made = {}
        for name, past in self.past.items():
            binding.bind_ortvalue_input(f"past_{name}", past)
            nothing = torch.full_like(
                tensor(past, self.kinds[name]), torch.nan if self.kinds[name].is_floating_point else -7
            )
            made[name] = past if self.in_place else value(nothing)
            binding.bind_ortvalue_output(f"present_{name}", made[name])
        binding.bind_ortvalue_output(self.first, output)
        every = [o.name for o in self.session.get_outputs()]
        others = [name for name in every if name != self.first and not name.startswith("present_")]
        for name in others:
            binding.bind_output(name)
        self.session.run_with_iobinding(binding)
        self.past = made
        bound = binding.get_outputs()[len(made) + 1 :]
        self.others = {name: torch.from_numpy(x.numpy().copy()) for name, x in zip(others, bound, strict=True)}
        return tensor(output, like.dtype)

    def states(self) -> dict[str, torch.Tensor]:
        """After the latest call."""
        return {name: tensor(x, self.kinds[name]) for name, x in self.past.items()}


def tensor(found: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy of what a session wrote."""
    if dtype == torch.bfloat16:
        return torch.utils.dlpack.from_dlpack(found._ortvalue.to_dlpack()).clone()
    return torch.from_numpy(found.numpy().copy())
