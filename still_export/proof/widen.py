"""A package's own graph in float32: where arithmetic is nearly exact, a wrong result is a wrong graph.

Every float16 and bfloat16 tensor, constant, cast, input and output becomes float32, in the graph and in function bodies. Low-bit products
compute in float32. What stays: codes of weights, and 8-bit rows of caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from still_export.package.files import MODEL
from still_export.runtime.ort import OrtModel
from still_export.runtime.ort_session import keep_codes, keeps_codes, open_session
from still_graphs.ops import DOMAIN
from still_graphs.states import StateTable

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
ROUNDED = (*HALVES, *(getattr(TensorProto, name) for name in ("FLOAT8E4M3FN", "FLOAT8E5M2")))
"""Types to which bodies cast; in float32 nothing is cast."""
TYPES = ("to", "dtype", "cast_dtype", "stash_type")
"""Attributes that name a type."""
CONTRIB = "com.microsoft"


def has_bodies(path: Path) -> bool:
    """Whether every node of this project's ops in a graph has a function body."""
    model = onnx.load(path, load_external_data=False)
    known = {(f.domain, f.name, f.overload) for f in model.functions}
    own = {(n.domain, n.op_type, n.overload) for n in _nodes(model.graph.node) if n.domain == DOMAIN}
    return own <= known


def widen(model: onnx.ModelProto) -> None:
    """Change a graph, whose weights may be in a file, to float32."""
    casts = []
    for tensor in model.graph.initializer:
        if tensor.data_type not in HALVES:
            continue
        if tensor.data_location == TensorProto.EXTERNAL:
            casts.append(helper.make_node("Cast", [f"{tensor.name}__half"], [tensor.name], to=TensorProto.FLOAT))
            tensor.name += "__half"
        else:
            _widen_tensor(tensor)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])
    _widen_graph(model.graph)
    for function in model.functions:
        _widen_nodes(function.node)
        _widen_values(function.value_info)
    del model.metadata_props[:]  # they repeat what the manifest says of the package


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g.node)


def _widen_graph(graph: onnx.GraphProto) -> None:
    for values in (graph.input, graph.output, graph.value_info):
        _widen_values(values)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in _nodes(nodes):
        for attribute in node.attribute:
            if attribute.name in TYPES and attribute.type == AttributeProto.INT and attribute.i in ROUNDED:
                attribute.i = TensorProto.FLOAT
            if attribute.name == "accuracy_level":
                attribute.i = 0  # 4 rounds activations to 8 bits
            for tensor in (attribute.t, *attribute.tensors):
                if tensor.data_type in HALVES:
                    _widen_tensor(tensor)
            if attribute.HasField("g"):
                for tensor in attribute.g.initializer:
                    _widen_tensor(tensor)
                for values in (attribute.g.input, attribute.g.output, attribute.g.value_info):
                    _widen_values(values)


def _widen_values(values: Iterable[onnx.ValueInfoProto]) -> None:
    for value in values:
        if value.type.tensor_type.elem_type in HALVES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT


def _widen_tensor(tensor: onnx.TensorProto, folder: Path | None = None) -> None:
    """`folder`: of weights in files; None: `tensor` has its numbers."""
    from still_export.graph.weights_file import stored_array

    if tensor.data_type in HALVES:
        values = (numpy_helper.to_array(tensor) if folder is None else stored_array(tensor, folder)).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


class WideModel(OrtModel):
    """A package's graph in float32, by its function bodies on ONNX Runtime's CPU provider.

    Args:
        manifest: From `widened_manifest`.
        graph: The graph's file.
        watch: Ops whose first outputs are recorded in `seen`.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], graph: str = MODEL, watch: Sequence[str] = ()) -> None:
        self._manifest = manifest
        model = self._read(folder, graph)
        names = [node.output[0] for node in model.graph.node if node.op_type in watch]
        model.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.INT32, None) for n in names)
        super().__init__(folder, check=False, watched=(model.SerializeToString(), names), bodies=True)

    def _open(self, folder: Path) -> None:
        self.folder, self.manifest = Path(folder), self._manifest
        self.table = StateTable.of(self.manifest)

    def _open_graph(self, graph: str) -> Any:
        options = self._session_options(graph)
        if keeps_codes(self.manifest, graph):
            keep_codes(options)
        content = self._read(self.folder, graph).SerializeToString()
        return open_session(self.folder, self.manifest, options, self.device, None, graph=content)

    @staticmethod
    def _read(folder: Path, graph: str) -> onnx.ModelProto:
        from still_export.graph.weights_file import resolve_weights

        path = folder / graph
        model = onnx.load(path, load_external_data=False)
        read = {name for node in _nodes(model.graph.node) if node.domain == CONTRIB for name in node.input}
        for tensor in model.graph.initializer:
            if tensor.name in read and tensor.data_type in HALVES:
                _widen_tensor(tensor, path.parent)  # its products demand constant scales
        resolve_weights(model, path)
        widen(model)
        return model
