"""Graphs as files, step by step, for eyes and for netron: without their weights, not for a runtime."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from still_graphs.pipelines import Dump

SMALL_BYTES = 1024
"""Constants up to this size stay in dumped graphs."""


def dumper(folder: Path) -> Dump:
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []

    def dump(name: str, model: ir.Model) -> None:
        bare = _without_weights(model)
        for tensor in bare.graph.initializer:
            if len(tensor.raw_data) > SMALL_BYTES:
                tensor.ClearField("raw_data")
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        written.append(name)
        onnx.save(bare, folder / f"{len(written):02d}_{name}.onnx")

    return dump


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The graph with places in no file in the stead of its weights, none of which is read."""
    held = {value: value.const_value for value in model.graph.initializers.values()}
    for value, tensor in held.items():
        if tensor is not None and tensor.nbytes > SMALL_BYTES:
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                "none", 0, tensor.nbytes, tensor.dtype, shape=shape, name=value.name or ""
            )
    try:
        return ir.to_proto(model)
    finally:
        for value, tensor in held.items():
            value.const_value = tensor
