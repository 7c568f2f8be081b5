"""Narrow a portable package from float32 to 16 bits: weights are rounded one by one, activations retyped. The model is not needed.

The graph equals the trace of an export in that type, except for value names. Positions and their sines stay in float32 until they meet
an activation, ops keep their float32 inputs and states, and logits are float32. A float32 graph does not show other places that the trace
would widen; nodes that may be such places are refused by name.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from still_export.errors import ConfigError, UnsupportedError
from still_export.graph.options import Progress
from still_export.graph.weights_file import VIEW, load_graph, save_streaming
from still_export.package.files import DATA, HEAD, MODEL, PORTABLE
from still_export.package.folder import GENERATED, Package, write_manifest
from still_export.package.programs import PROGRAMS
from still_graphs.edits import add_node, forget, store, typed
from still_graphs.ops import DOMAIN, OPS
from still_graphs.passes.attach_functions import attach_functions
from still_graphs.passes.strip_functions import strip_functions

TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
LOGITS = "logits"
MOVES = ("Unsqueeze", "Squeeze", "Reshape", "Transpose", "Expand")
OF_ANY_TYPE = ("Shape", "Size")
SAME_IN_ANY_TYPE = frozenset(
    "Add Concat Div Erf Expand Flatten Gather GatherElements GatherND Gelu Gemm Identity MatMul Mul Neg Pad Relu Reshape RMSNormalization "
    "Sigmoid Slice Split Squeeze Sub Swish Tanh Transpose Unsqueeze Where".split()
)
"""Ops computed in the model's own type: products, data movement, and functions that no family computes in float32 in half precision."""


def demand_narrow(manifest: dict[str, Any], dtype: str) -> None:
    """Raise ConfigError, before anything is read, for a package that cannot be narrowed to `dtype`."""
    current, config = manifest["model"]["dtype"], manifest["config"]
    if dtype not in TYPES:
        raise ConfigError(
            f"--dtype {dtype}: a package is lowered to {' or '.join(TYPES)}; export the model for others."
        )
    if current != "float32":
        raise ConfigError(f"--dtype {dtype}: the package is in {current} already; only float32 can be narrowed.")
    if manifest.get("quantization"):
        raise ConfigError(
            f"--dtype {dtype}: bits of weights are chosen at export; export the model with --dtype {dtype}."
        )
    if HEAD in manifest["files"]:
        raise ConfigError(
            f"--dtype {dtype}: the package has a head that guesses tokens ahead (MTP); export the model with --dtype {dtype}."
        )
    if manifest.get("vision"):
        raise ConfigError(
            f"--dtype {dtype}: the package has an encoder of images; export the model with --dtype {dtype}."
        )
    if config.get("still", {}).get("cache"):
        raise ConfigError(
            f"--dtype {dtype}: the package stores keys and values in {config['still']['cache']}; export the model with --dtype {dtype}."
        )


def narrow_package(source: Package, folder: Path, dtype: str, say: Progress, holes: set[str] | None = None) -> Package:
    """Write the portable float32 package `source` in 16 bits into the existing, empty `folder`.

    Args:
        source: Its weights are read one at a time.
        holes: As of `save_streaming`.
        folder: Gets a portable package without runtime graph.

    Raises:
        ConfigError: The package cannot be narrowed, or a weight is too large for float16.
        UnsupportedError: The package does not show whether the model computes a node in float32.
    """
    manifest = source.manifest
    demand_narrow(manifest, dtype)
    say(f"narrowing to {dtype}")
    model = load_graph(source.path / PORTABLE)
    strip_functions(model)
    _Narrowing(model.graph, dtype).run()
    attach_functions(model)
    save_streaming(model, folder / PORTABLE, DATA, lambda done, total: say("writing the weights", done, total), holes)
    native = manifest.get("native") or {"library": ""}
    apart = {MODEL, DATA, PORTABLE, *PROGRAMS.values(), native["library"]}
    for name in manifest["files"]:
        if name not in apart and (source.path / name).parent == source.path:
            shutil.copyfile(source.path / name, folder / name)
    types = {value.name: value.dtype for value in model.graph.inputs}
    names: dict[ir.DataType | None, str] = {ir.DataType.FLOAT: "float32", TYPES[dtype]: dtype}
    content = {k: v for k, v in manifest.items() if k not in (*GENERATED, "native", "state_identity")}
    content["model"] = {**manifest["model"], "dtype": dtype}
    content["config"] = {**manifest["config"], "dtype": dtype}
    content["states"] = [{**s, "dtype": names[types[f"past_{s['name']}"]]} for s in manifest["states"]]
    write_manifest(folder, content)
    return Package(folder, {**manifest, **content})


class _Narrowing:
    """A graph being narrowed to 16 bits."""

    def __init__(self, graph: ir.Graph, dtype: str) -> None:
        self.graph, self.dtype, self.type = graph, dtype, TYPES[dtype]
        self.narrow: set[ir.Value] = set()
        self.weights = [
            v
            for v in graph.initializers.values()
            if v.dtype == ir.DataType.FLOAT and isinstance(v.const_value, ir.ExternalTensor)
        ]
        self.narrow.update(self.weights)
        self.copies: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            if node.domain == "" and node.op_type in OF_ANY_TYPE:
                continue
            kinds = self._kinds(node)
            for index, (value, wanted) in enumerate(zip(node.inputs, kinds, strict=True)):
                if value is not None and value.dtype == ir.DataType.FLOAT:
                    node.replace_input_with(index, self._as(node, value, wanted))
            for output, wanted in zip(node.outputs, self._results(node, kinds), strict=True):
                if wanted and output.dtype == ir.DataType.FLOAT:
                    self.narrow.add(output)
        self._widen_logits()
        places: dict[tuple[str, int | None], str] = {}
        for value in self.weights:
            assert isinstance(value.const_value, ir.ExternalTensor) and value.name is not None
            first = places.setdefault((str(value.const_value.path), value.const_value.offset), value.name)
            if first != value.name:
                value.metadata_props[VIEW] = first
            value.const_value = self._rounded(value.const_value)
        for value, copy in self.copies.items():
            if value.const_value is not None and not value.uses():  # small weights inside the graph
                del self.graph.initializers[str(value.name)], self.graph.initializers[str(copy.name)]
                copy.name = value.name
                self.graph.initializers[str(copy.name)] = copy
        for value in self.narrow:
            value.type = ir.TensorType(self.type)

    def _kinds(self, node: ir.Node) -> list[bool]:
        """Whether each input must be narrow, for numeric inputs."""
        if node.domain == DOMAIN:
            return [t.dtype == "T" for t in OPS[node.op_type].all_inputs()][: len(node.inputs)]
        present = [v for v in node.inputs if v is not None]
        narrow = any(v in self.narrow or (v.is_graph_input() and v.dtype == ir.DataType.FLOAT) for v in present)
        if narrow and (node.domain != "" or node.op_type not in SAME_IN_ANY_TYPE):
            raise UnsupportedError(
                f"--dtype {self.dtype}: the package does not show whether the model computes {node.name or node.op_type} ({node.op_type}) "
                f"in float32 beside activations in {self.dtype}. Export the model with --dtype {self.dtype}."
            )
        return [narrow] * len(node.inputs)

    def _results(self, node: ir.Node, kinds: list[bool]) -> list[bool]:
        if node.domain == DOMAIN:
            return [t.dtype == "T" for t in OPS[node.op_type].all_outputs()][: len(node.outputs)]
        return [any(kinds)] * len(node.outputs)

    def _as(self, node: ir.Node, value: ir.Value, wanted: bool) -> ir.Value:
        """`value` in the type that `node` expects."""
        if wanted == (value in self.narrow):
            return value
        if not wanted:
            raise UnsupportedError(
                f"--dtype {self.dtype}: {node.op_type} {node.name} reads {value.name} in float32, and the package does not show how "
                f"the model would compute it. Export the model with --dtype {self.dtype}."
            )
        if value.is_graph_input() and node.domain == DOMAIN:  # a state
            self.narrow.add(value)
            return value
        before = value.producer()
        if before is not None and before.domain == "" and before.op_type in MOVES and before.inputs[0] is not None:
            before.replace_input_with(
                0, self._as(before, before.inputs[0], True)
            )  # as in the trace: moved values are narrow
            self.narrow.add(value)
            return value
        if value not in self.copies:
            name = f"{value.name}.{self.dtype}"
            if value.const_value is not None:
                array = self._round(value.const_value.numpy(), value.name)
                self.copies[value] = store(self.graph, ir.tensor(array, dtype=self.type, name=name))
            else:
                cast = add_node(self.graph, node, "Cast", [value], value.name or "", {"to": int(self.type)})
                self.copies[value] = typed(cast, list(value.shape or ()), self.type)
        return self.copies[value]

    def _widen_logits(self) -> None:
        """Convert the logits to float32."""
        for index, value in enumerate(self.graph.outputs):
            node = value.producer()
            if value not in self.narrow or node is None or value.name != LOGITS:
                continue
            name, shape = value.name, list(value.shape or ())
            value.name = f"{name}.{self.dtype}"
            cast = ir.node("Cast", [value], {"to": int(ir.DataType.FLOAT)}, name=f"{name}.float32")
            cast.outputs[0].name = name
            self.graph.insert_after(node, cast)
            self.graph.outputs[index] = typed(cast.outputs[0], shape, ir.DataType.FLOAT)

    def _round(self, wide: np.ndarray, name: str | None) -> np.ndarray:
        with np.errstate(over="ignore"):
            array: np.ndarray = wide.astype(self.type.numpy())
        if not np.isfinite(array).all() and np.isfinite(wide).all():
            raise ConfigError(
                f"--dtype {self.dtype}: {name} has {np.abs(wide).max():.3g}, too large for {self.dtype}; bfloat16 has room."
            )
        return array

    def _rounded(self, weight: ir.ExternalTensor) -> ir.LazyTensor:
        """A weight that is rounded when it is written."""

        def read() -> ir.TensorProtocol:
            array = self._round(weight.numpy(), weight.name)
            forget(weight)
            return ir.tensor(array, dtype=self.type, name=weight.name)

        return ir.LazyTensor(read, self.type, weight.shape, name=weight.name)
