"""Check every row of the embedding: the graph is cut after its embedding and reads every token id.

Prompts reach a few thousand tokens; a row that the graph reads from another place would be seen by luck alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from still_export.package.files import MODEL
from still_export.package.folder import Package
from still_export.proof.held_weights import stored_weights
from still_export.proof.layerwise import EMBEDDING
from still_export.proof.verdict import Check, Verdict
from still_export.runtime.ort_session import allow_opset

if TYPE_CHECKING:
    import onnx

    from still_export.models.load import Source

TOGETHER = 4096
"""Tokens of one call."""
IDS = "input_ids"
NAME = "the graph reads every token's own row of the embedding"
OFF = 2.0**-9
"""Allowed difference of a row computed in half precision, relative to its largest number. `held_weights` compares the row itself."""


def check_rows(package: Package, source: Source) -> Verdict:
    """Compare the rows that a package's graph looks up for each token with the stored ones."""
    import onnx
    import onnxruntime

    from still_export.graph.weights_file import resolve_weights

    graph = onnx.load(package.path / MODEL, load_external_data=False)
    folder = resolve_weights(graph, package.path / MODEL)
    stored = stored_weights(package.path / MODEL, package.manifest, source.weights)
    node = next((n for n in graph.graph.node if _reads(n)), None)
    cut = None if node is None else _cut(graph, node.output[0])
    if node is None or cut is None or EMBEDDING not in stored:
        return Verdict(not_asked=["each token's embedding by itself: the graph computes it of more than tokens"])
    allow_opset(package.manifest)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        session = onnxruntime.InferenceSession(cut, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime's own types, which have no common base
        return Verdict.of([Check(NAME, False, f"{' '.join(str(error).split())[:200]}", MODEL)])
    kind = np.int32 if session.get_inputs()[0].type == "tensor(int32)" else np.int64  # engines count in int32
    count, wrong, worst, first = int(source.weights[EMBEDDING].shape[0]), 0, 0.0, ""
    for start in range(0, count, TOGETHER):
        rows = slice(start, min(start + TOGETHER, count))
        (found,) = session.run(None, {IDS: np.arange(rows.start, rows.stop, dtype=kind)[None]})
        right = stored[EMBEDDING].rows(rows).float().numpy()
        off = np.abs(found.reshape(right.shape).astype(np.float32) - right).max(-1)
        off /= np.maximum(np.abs(right).max(-1), np.finfo(np.float32).tiny)
        bad = ~(off <= OFF)
        wrong += int(bad.sum())
        if bad.any() and not first:
            first, worst = f"token {rows.start + int(bad.argmax())}", float(off[bad.argmax()])
    what = f"{wrong:,} of {count:,} rows are others', by a part of the largest number" if wrong else ""
    return Verdict.of([Check(NAME, not wrong, what, first, worst if wrong else None, OFF if wrong else None)])


def _reads(node: onnx.NodeProto) -> bool:
    return node.op_type.startswith("Gather") and any(name.startswith(EMBEDDING) for name in node.input)


def _cut(graph: onnx.ModelProto, output: str) -> bytes | None:
    """The part of a graph that computes `output` from token ids; None: it has further inputs."""
    import onnx

    made: dict[str, Any] = {name: node for node in graph.graph.node for name in node.output}
    produced: dict[str, None] = {}
    needed, pending = set[str](), [output]
    while pending:
        name = pending.pop()
        if name in needed or not name:
            continue
        needed.add(name)
        if name in made:
            produced[made[name].output[0]] = None
            pending += made[name].input
    inputs = [value for value in graph.graph.input if value.name in needed]
    if [value.name for value in inputs] != [IDS]:
        return None
    part = onnx.ModelProto()
    part.CopyFrom(graph)
    nodes = [node for node in graph.graph.node if node.output and node.output[0] in produced]
    weights = [tensor for tensor in graph.graph.initializer if tensor.name in needed]
    for field in ("node", "initializer", "input", "output", "value_info"):
        part.graph.ClearField(field)
    part.graph.node.extend(nodes)
    part.graph.initializer.extend(weights)
    part.graph.input.extend(inputs)
    part.graph.output.append(onnx.ValueInfoProto(name=output))
    serialized: bytes = part.SerializeToString()
    return serialized
