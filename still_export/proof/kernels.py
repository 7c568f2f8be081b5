"""Kernels op by op: each distinct node by its kernel and by its function body, on the same inputs, both against the op's meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from still_export.graph.weights_file import stored_array
from still_export.loading.runtimes import open_runner
from still_export.package.calls import Arrays
from still_export.package.files import MODEL
from still_export.package.refusals import RunError
from still_export.proof.answers import Progress, silent
from still_export.proof.cases import errors_of
from still_export.proof.constants import DISTURBANCES, OP_MOVED, OP_TIMES, OP_UNITS, ROUNDINGS
from still_export.proof.sessions import Subject
from still_export.proof.verdict import Check, Verdict
from still_export.proof.widen import widen
from still_export.runtime.ort_session import native_library, open_session
from still_graphs.ops import DOMAIN, OPS
from still_graphs.spec import CACHE, OpSpec

if TYPE_CHECKING:
    from still_export.proof.runs import Asking

SEQUENCES = 5
"""Rows of the ragged calls."""
DRAWS = 2
"""Draws of inputs in each of which a kernel must be off to fail: one of them may hold a near tie of a selection."""
UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": ROUNDINGS * 2.0**-24}
"""Units of types at 1; a number in float32 is a sum of many."""


@dataclass
class Node:
    """A distinct node of a graph: its op, attributes, and the sizes of its weights.

    Args:
        weights: Its initializers, with their values.
    """

    proto: onnx.NodeProto
    spec: OpSpec
    weights: dict[str, onnx.TensorProto]

    @property
    def title(self) -> str:
        return f"{self.spec.name} ({self.proto.name})" if self.proto.name else self.spec.name

    def attributes(self) -> dict[str, Any]:
        found = {a.name: helper.get_attribute_value(a) for a in self.proto.attribute}
        values = {a.name: found.get(a.name, a.default) for a in self.spec.attributes}
        return {name: x.decode() if isinstance(x, bytes) else x for name, x in values.items()}


def check_kernels(asking: Asking, subject: Subject, progress: Progress = silent) -> Verdict:
    """Compare every kernel that `subject` loads with the op's function body."""
    package = asking.package
    if not subject.record.graphs:
        what = "plugins of the engine by themselves: the engine was compared as a whole"
        return Verdict(not_asked=[what] if subject.record.engines else [])
    native = native_library(package.path, package.manifest, subject.provider)
    if native is None:
        return Verdict()
    seed = asking.ranges(1.0).seed
    return Verdict.of(compare_kernels(package.path, package.manifest, native, subject.provider, seed, progress))


def compare_kernels(
    folder: Path, manifest: dict[str, Any], native: Path, provider: str, seed: int, progress: Progress = silent
) -> Iterator[Check]:
    """One check of all nodes of a package.

    Args:
        native: Library of the kernels.
    """
    model = onnx.load(folder / MODEL, load_external_data=False)
    nodes = distinct_nodes(model, folder)
    wrong: dict[str, str] = {}
    worst = 0.0
    for draw in range(DRAWS):
        left = [node for node in nodes if not draw or node.proto.output[0] in wrong]
        if not left:
            break
        calls = recorded_inputs(folder, manifest, model, left, provider, np.random.default_rng([seed, draw]))
        wrong = {}
        for number, node in enumerate(left):
            progress("kernels by themselves", number, len(left))
            share, what = _compare(folder, manifest, model, node, calls[number], native, provider)
            worst = max(worst, share if share <= 1 else 0.0)
            if what:
                wrong[node.proto.output[0]] = what
    named = {node.proto.output[0]: node.title for node in nodes}
    name = f"{len(nodes)} kernels err no further than their function bodies (nearest: {worst:.2f} of its bound)"
    yield Check.of(name, [(named[output], what) for output, what in wrong.items()])


def distinct_nodes(model: onnx.ModelProto, folder: Path) -> list[Node]:
    """The first node of each op, attributes and sizes."""
    tensors = {t.name: t for t in model.graph.initializer}
    bodies = {(f.domain, f.name) for f in model.functions}
    found: dict[str, Node] = {}
    for node in model.graph.node:
        if node.domain != DOMAIN or (node.domain, node.op_type) not in bodies or node.op_type not in OPS:
            continue
        read = {name: tensors[name] for name in node.input if name in tensors}
        sizes = [[*read[name].dims, read[name].data_type] if name in read else bool(name) for name in node.input]
        attributes = sorted(a.SerializeToString().hex() for a in node.attribute)
        key = json.dumps([node.op_type, attributes, sizes])
        if key not in found:
            values = {n: numpy_helper.from_array(stored_array(t, folder), n) for n, t in read.items()}
            found[key] = Node(node, OPS[node.op_type], values)
    return list(found.values())


def recorded_inputs(
    folder: Path,
    manifest: dict[str, Any],
    model: onnx.ModelProto,
    nodes: Sequence[Node],
    provider: str,
    random: np.random.Generator,
) -> list[list[Arrays]]:
    """What each node reads in the package, call by call: a prompt, a piece and steps of one sequence, then of a ragged batch."""
    inputs = {value.name for value in model.graph.input}
    names = [*dict.fromkeys(n for x in nodes for n in x.proto.input if n and n not in inputs and n not in x.weights)]
    runner: Any = open_runner(folder, manifest, "ort", provider, check=False, tensors=tuple(names))
    vocabulary, table = manifest["model"]["vocab_size"], runner.table
    chunk = table.period if table.period > 1 else 64
    limit = table.capacity_tokens if table.bounded else 1 << 30
    found: list[list[Arrays]] = [[] for _ in nodes]

    def feed(counts: Sequence[int]) -> None:
        new = np.minimum(counts, limit - runner.length)
        if new.max() < 1:
            return
        ids = random.integers(vocabulary, size=(len(new), int(new.max())))
        runner.reserve(int(new.max()))
        states = {f"past_{name}": x for name, x in runner.state_arrays().items()}
        before = {**states, "past_length": runner.length.copy(), "new_tokens": new, "input_ids": ids}
        runner.seen.clear()
        runner.feed(ids, new)
        # A runner may cut a long prompt; a node's inputs in the last part do not fit the states before it.
        if len(runner.seen) != 1:
            return
        read = before | dict(zip(names, runner.seen[-1][2], strict=True))
        for node, calls in zip(nodes, found, strict=True):
            calls.append({n: read[n] for n in node.proto.input if n and n not in node.weights})

    whole = int(random.integers(3 * chunk, 4 * chunk))
    runner.start(1)
    for counts in ([whole], [chunk + 3], [1], [1]):
        feed(counts)
    runner.start(SEQUENCES)
    feed([2 * chunk + 1, 1, chunk, 0, chunk + 1])
    feed([1] * SEQUENCES)
    return found


def _compare(
    folder: Path,
    manifest: dict[str, Any],
    model: onnx.ModelProto,
    node: Node,
    calls: Sequence[Arrays],
    native: Path,
    provider: str,
) -> tuple[float, str]:
    """(Largest error of the kernel in parts of its bound, the finding or "")."""
    dtype = manifest["model"]["dtype"]
    # A GPU multiplies matrices in the type of activations, or in that of features, and sums in float32.
    products = dtype if provider == "cuda" else "float32"
    if products == "float16" and any(state.features for state in node.spec.states):
        products = "bfloat16"
    outputs = [name for name in node.proto.output if name]
    shown = dict(zip(node.proto.output, node.spec.resolve(node.attributes()).output_names(), strict=False))
    kernel, body = (_Alone(folder, manifest, model, node, calls[0], provider, each) for each in (native, None))
    wide = None if node.spec.traced else _Alone(folder, manifest, model, node, calls[0], "cpu", None, wide=True)
    worst, finding = 0.0, ""
    for number, call in enumerate(calls):
        got, own = kernel(call), body(call)
        right = _meaning(node, call) if wide is None else wide(call)
        moved: dict[str, np.ndarray] = {}
        for name in outputs:
            if name not in right or right[name].dtype.kind not in "f":
                continue
            kind = str(got[name].dtype)
            unit = UNITS.get(products if kind == "float32" else kind, UNITS[dtype])
            off, error = (errors_of(right[name], x[name].astype(right[name].dtype))[0][0] for x in (got, own))
            size = np.abs(np.where(np.isfinite(right[name]), right[name], 0))
            usual = float(np.sqrt(np.square(error, where=np.isfinite(error), out=np.zeros_like(error)).mean()))
            rows = size.max(-1, initial=0) if size.ndim > 1 else size
            bound = OP_TIMES * np.fmax(np.nan_to_num(error, posinf=0.0), usual) + OP_UNITS * unit * rows
            bound = np.maximum(bound, UNITS["float32"] * float(size.max(initial=0)))
            off = np.nan_to_num(off, posinf=np.inf)
            if (off > bound).any():
                moved = moved or moved_by_rounding(body, call, UNITS.get(products, UNITS[dtype]))
                bound = np.maximum(bound, OP_MOVED * moved[name])
            share = off / np.maximum(bound, np.finfo(np.float64).tiny)
            if share.size and float(share.max()) > worst:
                worst = float(share.max())
                at = tuple(int(i) for i in np.unravel_index(int(share.argmax()), share.shape))
                if worst > 1:
                    finding = (
                        f"{shown.get(name, name)}, call {number + 1}, row {list(at)}: {off[at]:.2g} off, its body "
                        f"{error[at]:.2g}, bound {bound[at]:.2g}"
                    )
    return worst, finding


def moved_by_rounding(run: Callable[[Arrays], Arrays], call: Arrays, unit: float) -> dict[str, np.ndarray]:
    """How far the rows of each output move, as a mean of squares, if each number that is read errs by up to a unit of the type in which
    kernels multiply. Sums of terms that cancel move by more than a unit of what is left; a row of a state may be one such number."""
    random, before = np.random.default_rng(0), run(call)
    squares: dict[str, np.ndarray] = {}
    for _ in range(DISTURBANCES):
        feed = {
            name: (x * (1 + unit * random.uniform(-1, 1, x.shape))).astype(x.dtype) if x.dtype.kind == "f" else x
            for name, x in call.items()
        }
        for name, x in run(feed).items():
            if x.dtype.kind == "f":
                (rows, _), _ = errors_of(before[name].astype(np.float64), x.astype(np.float64))
                squares[name] = squares.get(name, 0.0) + np.square(np.nan_to_num(rows, posinf=0.0))
    return {name: np.sqrt(total / DISTURBANCES) for name, total in squares.items()}


class _Alone:
    """A graph of one node on ONNX Runtime, by its kernel or its body."""

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        model: onnx.ModelProto,
        node: Node,
        call: Arrays,
        provider: str,
        native: Path | None,
        wide: bool = False,
    ) -> None:
        import onnxruntime

        self.names, self.wide = [name for name in node.proto.output if name], wide
        single = onnx.ModelProto(
            ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
        )
        values = [helper.make_tensor_value_info(n, _kind(x), [None] * x.ndim) for n, x in call.items()]
        results = [onnx.ValueInfoProto(name=name) for name in self.names]
        graph = helper.make_graph([node.proto], "alone", values, results, list(node.weights.values()))
        single.graph.CopyFrom(graph)
        if wide:
            widen(single)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self.session = open_session(folder, manifest, options, provider, native, graph=single.SerializeToString())

    def __call__(self, call: Arrays) -> Arrays:
        """Outputs; RunError if the runtime cannot."""
        feed = {n: x.astype(np.float32) if self.wide and x.dtype == np.float16 else x.copy() for n, x in call.items()}
        try:
            return dict(zip(self.names, self.session.run(self.names, feed), strict=True))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(f"ONNX Runtime cannot run a node by itself: {' '.join(str(error).split())}") from error


def _kind(array: np.ndarray) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype)) if array.dtype != np.uint16 else TensorProto.BFLOAT16


def _meaning(node: Node, call: Mapping[str, np.ndarray]) -> Arrays:
    """The op's outputs by PyTorch in float64."""
    import torch

    from still_kernels.forms import pytorch_forms
    from still_kernels.torch_ops import call as call_op

    for part in ("traced", "call", "meaning"):
        if find_spec(f"{node.spec.package}.{part}") is not None:
            import_module(f"{node.spec.package}.{part}")

    scales = {f"past_{state.name}" for state in node.spec.states if state.only and state.only[0] == CACHE.name}

    def tensor(name: str, own: str) -> torch.Tensor:
        array = call[own] if own in call else numpy_helper.to_array(node.weights[own])
        found = torch.from_numpy(np.array(array))
        # The scales of codes are float32 in whatever type the op computes.
        return found.double() if found.is_floating_point() and name not in scales else found

    attributes = node.attributes()
    names = node.spec.resolve(attributes).input_names()
    by_name = {name: tensor(name, own) for name, own in zip(names, node.proto.input, strict=False) if own}
    with torch.no_grad(), pytorch_forms():
        found = call_op(node.spec, by_name, attributes)
    of = dict(zip(node.spec.resolve(attributes).output_names(), node.proto.output, strict=False))
    return {own: found[name].numpy() for name, own in of.items() if own and name in found}
