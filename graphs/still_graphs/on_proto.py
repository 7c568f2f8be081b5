"""Passes and conditions over protobuf among steps over onnx_ir, until none is left."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import onnx

from still_graphs.later_ir import ir

Result = TypeVar("Result", int, str)
LAZY = "lazy:"


def on_proto(run: Callable[..., Result]) -> Callable[..., Result]:
    """`run`, over a protobuf model, for an onnx_ir.Model too, in place; its weights are neither read nor copied."""

    @functools.wraps(run)
    def adapted(model: Any, *arguments: Any, **named: Any) -> Result:
        if isinstance(model, onnx.ModelProto):
            return run(model, *arguments, **named)
        lazy: dict[str, Any] = {}
        folders = {}
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                folders[os.fspath(tensor.location)] = tensor.base_dir
            if isinstance(tensor, ir.LazyTensor):
                place = f"{LAZY}{value.name}"
                lazy[place] = tensor
                value.const_value = ir.ExternalTensor(
                    place, None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=str(value.name)
                )
        proto = ir.to_proto(model)
        result = run(proto, *arguments, **named)
        if isinstance(result, int):
            replace_content(model, proto)
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                place = os.fspath(tensor.location)
                tensor.base_dir = folders.get(place, "")
                value.const_value = lazy.get(place, tensor)
        return result

    return adapted


def replace_content(model: Any, proto: onnx.ModelProto) -> None:
    """Give `model`, an onnx_ir.Model, what `proto` has."""
    new = ir.from_proto(proto)
    model.graph = new.graph
    model.functions.clear()
    model.functions.update(new.functions)
    model.metadata_props.clear()
    model.metadata_props.update(new.metadata_props)
    model.ir_version = new.ir_version
