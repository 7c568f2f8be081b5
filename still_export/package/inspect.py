"""What is in a package: capacity, state sizes by context length, layers by kind, types, operators, files."""

from __future__ import annotations

import json
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from still_export.errors import PackageError
from still_export.package.folder import Package
from still_graphs.states import ITEM_BYTES, StateTable

CONTEXTS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


def contexts(manifest: dict[str, Any]) -> list[int]:
    """Context lengths to show: those within the capacity, and the capacity itself if it is a limit."""
    capacity = manifest["capacity"]
    if not capacity["bounded"]:
        return sorted({*CONTEXTS, capacity["capacity_tokens"]})
    return [*(n for n in CONTEXTS if n < capacity["capacity_tokens"]), capacity["capacity_tokens"]]


def state_bytes(manifest: dict[str, Any], tokens: int) -> int:
    """Bytes of one row's state after `tokens` tokens; beyond the capacity of a folding package it no longer grows."""
    table = StateTable.of(manifest)
    return table.size_bytes(1, table.rows(tokens))


def cache_bytes(manifest: dict[str, Any], tokens: int) -> int:
    """Bytes of the key/value cache of the same model with full attention."""
    model = manifest["model"]
    return 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * tokens * ITEM_BYTES[model["dtype"]]


def layer_kinds(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers of each kind with their states: their total bytes at the capacity, and which states grow."""
    table = StateTable.of(manifest)
    tokens = manifest["capacity"]["capacity_tokens"]
    layers: dict[str, list[int]] = defaultdict(list)
    for layer, kind in enumerate(manifest["model"]["layer_types"]):
        layers[kind].append(layer)
    found = []
    for kind, members in layers.items():
        own = [state for state in table if state.layer in members]
        part = StateTable(own, tokens, table.bounded)
        names = dict.fromkeys(state.name.rpartition(".")[0] for state in own)
        found.append(
            {
                "kind": kind,
                "layers": members,
                "states": list(names),
                "growing": [name for name in names if any(s.growth and s.name == f"{name}.{s.layer}" for s in own)],
                "counted": any(s.growth and s.growth.get("counted") for s in own),
                "bytes_at_capacity": part.size_bytes(1, part.rows(tokens)),
            }
        )
    return found


def precision(manifest: dict[str, Any]) -> dict[str, str]:
    """Types of weights and states, and bits of quantized roles."""
    states: dict[str, list[str]] = defaultdict(list)
    for state in StateTable.of(manifest):
        name = state.name.rpartition(".")[0]
        if name not in states[state.dtype]:
            states[state.dtype].append(name)
    found = {"weights": manifest["model"]["dtype"]}
    for role, forms in ((manifest.get("quantization") or {}).get("roles") or {}).items():
        bits = (f"{form['weights']} in " + (f"{form['bits']} bits" if form["bits"] else "full") for form in forms)
        found[f"weights of {role}"] = ", ".join(bits)
    return found | {f"states in {dtype}": ", ".join(names) for dtype, names in states.items()}


def spans(layers: list[int]) -> str:
    """Layer numbers as text: "0-3, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def state_sizes(manifest: dict[str, Any]) -> list[dict[str, int]]:
    """Bytes of a row's state and of full attention's cache, by tokens."""
    sizes = [(n, state_bytes(manifest, n), cache_bytes(manifest, n)) for n in contexts(manifest)]
    return [{"tokens": n, "state_bytes": state, "full_attention_cache_bytes": cache} for n, state, cache in sizes]


def summary(package: Package, machine: str) -> dict[str, str]:
    """The main facts about a package, one sentence each: model, size, capacity and speed.

    Args:
        machine: This machine's name, as in bench.json.
    """
    manifest = package.manifest
    model, capacity = manifest["model"], manifest["capacity"]
    made_of = (manifest.get("config") or {}).get("model")
    name = Path(made_of).name if made_of else package.path.name
    scheme = (manifest.get("quantization") or {}).get("scheme")
    bits = f"{scheme}, computing in {model['dtype']}" if scheme else model["dtype"]
    size = sum(entry["size_bytes"] for entry in manifest["files"].values())
    last = state_sizes(manifest)[-1]
    most = "at most " if any(kind["counted"] for kind in layer_kinds(manifest)) else ""
    beyond = "refuses more" if capacity["bounded"] else manifest["still"].get("overflow", "error").replace("_", " ")
    return {
        "what": f"{name}: {model['family']}, {model['layers']} layers, {model['parameters'] / 1e6:,.1f} M parameters, {bits}, for "
        f"{manifest['target']}",
        "size": f"{size / 1e6:,.1f} MB of files, and {most}{last['state_bytes'] / 1e6:,.1f} MB of state a conversation at "
        f"{last['tokens']:,} tokens (full attention: {last['full_attention_cache_bytes'] / 1e6:,.1f} MB)",
        "length": f"{capacity['capacity_tokens']:,} tokens, then {beyond}",
        "speed": _speed(package.path, machine),
    }


def _speed(folder: Path, machine: str) -> str:
    """Results of the last `bench` in its default folder."""
    try:
        bench = json.loads((folder / "bench/bench.json").read_text(encoding="utf-8"))
        rows = [f"{row['decode_ms']:,.1f} ms a token after {row['length']:,}" for row in bench["rows"]]
        where = "here" if bench["machine"] == machine else f"on {bench['machine']}"
        if bench["busy"]:
            return f"measured {where} while the machine was busy; measure again: still-export bench {shlex.quote(str(folder))}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"not measured: still-export bench {shlex.quote(str(folder))}"
    return f"{where} {', '.join(rows)} ({bench['runtime']}, {bench['provider']})"


def inspect(package: Package) -> dict[str, Any]:
    """Capacity, sizes, layers, types, operator counts of the graph (function bodies apart) and files of `package`."""
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
        "target": manifest["target"],
        "model": manifest["model"],
        "still": manifest["still"],
        "command": manifest["command"],
        "capacity": {**manifest["capacity"], "overflow": manifest["still"].get("overflow", "error")},
        "state": state_sizes(manifest),
        "layers": layer_kinds(manifest),
        "precision": precision(manifest),
        "opset": {o.domain or "ai.onnx": o.version for o in graph.opset_import},
        "ir_version": graph.ir_version,
        "nodes": dict(nodes.most_common()),
        "functions": [f"{f.domain}::{f.name}{':' + f.overload if f.overload else ''}" for f in graph.functions],
        "files": {name: entry["size_bytes"] for name, entry in manifest["files"].items()},
    }
