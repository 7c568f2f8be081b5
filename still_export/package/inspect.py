"""What is in a package: state sizes by context length, operators, files."""

from __future__ import annotations

from collections import Counter
from typing import Any

from still_export.errors import PackageError
from still_export.package.folder import Package
from still_graphs.states import ITEM_BYTES, StateTable

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


def state_bytes(manifest: dict[str, Any], tokens: int) -> int:
    """Bytes of one row's state after `tokens` tokens; beyond the capacity of a folding package it no longer grows."""
    table = StateTable.of(manifest)
    return table.size_bytes(1, table.rows(tokens))


def cache_bytes(manifest: dict[str, Any], tokens: int) -> int:
    """Bytes of the key/value cache of the same model with full attention."""
    model = manifest["model"]
    return 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * tokens * ITEM_BYTES[model["dtype"]]


def inspect(package: Package) -> dict[str, Any]:
    """Sizes, operator counts of the graph (function bodies apart) and files of `package`."""
    import onnx

    try:
        graph = onnx.load(package.model_path, load_external_data=False)
    except Exception as error:  # protobuf's own, and what its parts raise
        raise PackageError(
            f"{package.model_path} is no ONNX model ({' '.join(str(error).split())}). Copy the package again."
        ) from error
    nodes = Counter(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in graph.graph.node)
    manifest = package.manifest
    return {
        "model": manifest["model"],
        "still": manifest["still"],
        "command": manifest["command"],
        "state": [
            {
                "tokens": n,
                "state_bytes": state_bytes(manifest, n),
                "full_attention_cache_bytes": cache_bytes(manifest, n),
            }
            for n in CONTEXTS
        ],
        "opset": {o.domain or "ai.onnx": o.version for o in graph.opset_import},
        "ir_version": graph.ir_version,
        "nodes": dict(nodes.most_common()),
        "functions": [f"{f.domain}::{f.name}{':' + f.overload if f.overload else ''}" for f in graph.functions],
        "files": {name: entry["size_bytes"] for name, entry in manifest["files"].items()},
    }
