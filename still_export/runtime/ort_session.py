"""Sessions of ONNX Runtime over a package. Version, kernels and weights are checked before, inputs and outputs of the graph after opening.

Exports copy this file into the package, for run_ort.py.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.package.external import StoredTensor, listed_weights, stored_tensors
from still_export.package.files import MODEL, RECORDED, check_hash, recorded_text
from still_export.package.installed import KERNELS, kernels_for
from still_export.package.refusals import CheckError
from still_export.package.trust import UNTRUSTED, native_file
from still_export.runtime.sampling import RunError
from still_graphs.states import rows_after

CUDA = "CUDAExecutionProvider"

LEAST_VERSION = (1, 25)
"""Of ONNX Runtime: older ones lack ops of function bodies, and 1.23 ends by SIGSEGV in the native kernels."""

BODIES_ON_CUDA = (
    "this package has no kernels for CUDA: function bodies run, at 10 times the time a token or more. "
    "Export with --native --arch sm_90 (or what your GPU is) for kernels"
)

OWN_KERNELS = "plugin"
"""Nodes of quantized weights (quantization/policy.py) that the native library computes on GPUs only."""

UNPACKED_MOST = 400_000_000
"""Up to so many parameters, function bodies' weights are unpacked when the session opens. That needs 9 bytes a parameter at the peak and
makes a step of SmolLM2 take 0.02 s instead of 0.6. Larger models unpack in every call."""

NEW_OPSET = 27
"""Opset of ai.onnx for whose ops ONNX Runtime 1.31 has kernels, but which it loads only if the environment allows it."""

NUMPY_TYPES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 10: "float16"}
"""Of onnx.proto's numbers."""

MOST_THREADS = 1024
"""More than any machine has for one session; ONNX Runtime ends the process if it cannot start the requested number."""


def default_threads() -> int:
    """OMP_NUM_THREADS, as in other runtimes; 0, ONNX Runtime's choice, where it is not set or no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(first), MOST_THREADS) if first.isdecimal() else 0


def native_library(folder: Path, manifest: dict[str, Any], provider: str = "cpu") -> Path | None:
    """The package's native kernels, or those of the installed still-export-kernels in place of ones that this machine cannot load.

    Returns:
        None: there are none for this machine or provider; one line on stderr gives the reason.

    Raises:
        RunError: The library is not the file that was exported.
    """
    native = manifest.get("native")
    if provider == "cuda" and not (native and native.get("archs")):
        print(BODIES_ON_CUDA, file=sys.stderr)
        return None
    if native is None:
        return None
    quantized = (manifest.get("quantization") or {}).get("nodes") == OWN_KERNELS
    if provider == "cpu" and quantized and native.get("archs"):
        print("the native kernels of this package's linear layers are for GPUs: running without them", file=sys.stderr)
        return None
    if (native["system"], native["machine"]) != (platform.system(), platform.machine()):
        path, reason = None, f"is for {native['system']} {native['machine']}"
    else:
        path, reason = native_file(folder, manifest, native["library"]), UNTRUSTED
    if path is None and provider == "cpu" and (installed := kernels_for(manifest)):
        return installed.path
    if path is None:
        install = f" (pip install {KERNELS} brings one)" if platform.system() == "Linux" and provider == "cpu" else ""
        print(f"the native kernel {folder / native['library']} {reason}: running without it{install}", file=sys.stderr)
    return path


def allow_opset(manifest: dict[str, Any]) -> None:
    """Let ONNX Runtime load graphs of the package's opset, which may be newer than the ones it counts as released."""
    config = manifest.get("config")
    if isinstance(config, dict) and config.get("opset") == NEW_OPSET:
        os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")


def keeps_codes(manifest: dict[str, Any], graph: str | bytes) -> bool:
    """Whether function bodies unpack low-bit weights in every call, because unpacking once would need too much memory: in models beyond
    UNPACKED_MOST, and in graphs other than the package's own (opened by proofs only), which need 34 bytes a parameter. Proofs also widen
    half precision weights (`still_export.proof.widen`)."""
    coded = (manifest.get("quantization") or {}).get("nodes") == OWN_KERNELS
    large = manifest["model"].get("parameters", 0) > UNPACKED_MOST
    if manifest.get("widened"):
        return large
    return coded and (graph != MODEL or large)


def keep_codes(options: Any) -> None:
    """Disable constant folding, and free memory early: an arena would keep the largest layer's memory, twice if shapes vary."""
    options.add_session_config_entry("optimization.disable_specified_optimizers", "ConstantFolding")
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False


NEWEST_NODES = (1, 31)
"""ONNX Runtime before it refuses experts of few bits: its QMoE has no input for the router's weights."""


def version_of(onnxruntime: Any) -> tuple[int, int]:
    """Major and minor version of the module."""
    major, minor = onnxruntime.__version__.split(".")[:2]
    return int(major), int(minor)


def open_session(
    folder: Path,
    manifest: dict[str, Any],
    options: Any,
    provider: str = "cpu",
    native: Path | None = None,
    replay: bool = False,
    graph: str | bytes = MODEL,
) -> Any:
    """An onnxruntime session of the package's model, or of another `graph` of it.

    Args:
        options: onnxruntime.SessionOptions, completed here.
        provider: "cpu" or "cuda".
        native: Library of kernels to load, from `native_library`.
        replay: Let the CUDA provider capture calls into CUDA graphs.
        graph: The file's name, or a graph in memory over the same weights.

    Raises:
        RunError: The model or the kernel cannot be loaded.
    """
    import onnxruntime

    if native:
        options.add_session_config_entry("still.provider", provider)  # which kernels the library registers
        try:
            options.register_custom_ops_library(str(native.resolve()))
        except Exception as error:  # onnxruntime's own types, which have no common base
            raise RunError(
                f"{native} cannot be loaded: {error}. Export the model again, on this machine or without --native."
            ) from error
    # float32 is float32: its GEMMs would be rounded to 10 bits otherwise
    cuda = [(CUDA, {"use_tf32": "0", "enable_cuda_graph": str(int(replay))})] if provider == "cuda" else []
    path = folder / (graph if isinstance(graph, str) else MODEL)
    allow_opset(manifest)
    if isinstance(graph, bytes):
        real = str((folder / MODEL).resolve().parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", real)
    shared = _share_weights(folder, graph if isinstance(graph, bytes) else path, options) if provider == "cpu" else []
    try:
        session = onnxruntime.InferenceSession(
            graph if isinstance(graph, bytes) else str(path), options, providers=[*cuda, "CPUExecutionProvider"]
        )
    except Exception as error:
        dtype = manifest["model"]["dtype"]
        advice = (
            " Its CPU provider has no bfloat16: use --provider cuda, or export float32." if dtype == "bfloat16" else ""
        )
        if native and provider == "cuda" and "archive" in str(error):
            advice = " Export again with --native --arch and the name of this GPU."
        if "INVALID_GRAPH" in str(error) and version_of(onnxruntime) < NEWEST_NODES:
            least = ".".join(map(str, NEWEST_NODES))
            advice = f" onnxruntime {onnxruntime.__version__} is too old for its nodes: install {least} or newer."
        weights = "".join(f" with {name}" for name in manifest["files"] if name.endswith(".data"))
        raise RunError(
            f"ONNX Runtime cannot load {path}{weights}: {' '.join(str(error).split()).rstrip('.')}.{advice}"
        ) from error
    if cuda and CUDA not in session.get_providers():  # it goes on without a provider whose libraries it cannot open
        raise RunError(
            "ONNX Runtime's CUDA provider cannot start: its libraries or the driver are missing, or of another CUDA than this "
            "onnxruntime-gpu was made for. Install the nvidia-* packages that it names, or run with --provider cpu."
        )
    session.shared_weights = shared  # ONNX Runtime keeps pointers alone
    return session


def _share_weights(folder: Path, graph: Path | bytes, options: Any) -> list[Any]:
    """Map weights that are the same bytes of a file, such as an embedding used as the head, only once.

    Returns:
        Values that must live as long as the session.
    """
    import onnxruntime

    data = graph if isinstance(graph, bytes) else graph.read_bytes() if graph.is_file() else b""
    try:
        stored = stored_tensors(data, MODEL)
    except CheckError:  # ONNX Runtime's own message is more precise
        return []
    places: dict[tuple[str, int, int], list[StoredTensor]] = {}
    for tensor in stored:
        places.setdefault((tensor.file, tensor.offset, tensor.size), []).append(tensor)
    values = []
    for (name, offset, size), tensors in places.items():
        file = folder / name
        whole = all(x.type in NUMPY_TYPES and _size(x) == size for x in tensors)
        inside = offset >= 0 and file.is_file() and offset + size <= file.stat().st_size
        if len(tensors) == 1 or size <= 0 or not whole or not inside:
            continue
        mapped = np.memmap(file, np.uint8, "c", offset, (size,))
        for x in tensors:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(mapped.view(NUMPY_TYPES[x.type]).reshape(x.shape))
            options.add_initializer(x.name, value)
            values.append(value)
    return values


def _size(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * np.dtype(NUMPY_TYPES[tensor.type]).itemsize


def check_version(version: str) -> None:
    """Raise RunError for an ONNX Runtime that packages do not run in; some older ones end the process by SIGSEGV."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        raise RunError(
            f"onnxruntime {version} is installed, and packages need {least} or later, which needs Python 3.11: "
            f"pip install -U 'onnxruntime>={least}'."
        )


def check_cuda(providers: Sequence[str]) -> None:
    """Raise RunError where ONNX Runtime has other `providers` than CUDA's alone."""
    if CUDA not in providers:
        raise RunError(f"this onnxruntime has no {CUDA}. Install onnxruntime-gpu, or run with --provider cpu.")


def weight_files(folder: Path, manifest: dict[str, Any], graph: str = MODEL) -> list[str]:
    """Names of the weight files of a graph of the package; the graph itself is checked.

    Raises:
        RunError: The graph is not the one that was exported, or names a file that the manifest does not list.
    """
    return listed_weights(check_hash(folder, manifest, graph), manifest)


def check_graph(session: Any, manifest: dict[str, Any], source: Path, *others: Any) -> None:
    """Raise RunError if the manifest differs from the sessions' graphs in states, vocabulary, capacity or quantization."""
    inputs = {i.name: i for each in (session, *others) for i in each.get_inputs()}
    outputs = {o.name: o for each in (session, *others) for o in each.get_outputs()}
    types = {
        "tensor(float)": "float32",
        "tensor(float16)": "float16",
        "tensor(bfloat16)": "bfloat16",
        "tensor(int32)": "int32",
        "tensor(int64)": "int64",
    }

    def differs(field: str, here: Any, there: Any) -> CheckError:
        return CheckError(
            f"{source}: {field} is {here}, in {MODEL} it is {there}. Copy the package again, or export it again."
        )

    for i, state in enumerate(manifest["states"]):
        if not state["op"]:
            continue
        found = inputs.get(f"past_{state['name']}")
        if found is None or f"present_{state['name']}" not in outputs:
            raise differs(f"states[{i}].name", state["name"], "not there")
        if types.get(found.type) != state["dtype"]:
            raise differs(f"states[{i}].dtype", state["dtype"], found.type)
        # What a call decides has a name in the graph; rows that do not depend on the tokens are a number there. States without rows have
        # a name, or 0 in older packages.
        growth: dict[str, Any] | None = state["growth"]
        rows: int | str = ""
        if growth is not None and growth["rows"] and growth["fixed"]:
            rows = rows_after(growth, 0, manifest["capacity"]["capacity_tokens"])
        sizes = [d if isinstance(d, int) and d else "" for d in found.shape]
        if sizes != [d if isinstance(d, int) else "" if d == "batch" else rows for d in state["shape"]]:
            raise differs(f"states[{i}].shape", state["shape"], found.shape)
    for name in inputs:
        if (
            name.startswith("past_")
            and name != "past_length"
            and name[5:] not in {s["name"] for s in manifest["states"]}
        ):
            raise differs("states", f"without {name[5:]}", "with it")
    vocabulary = outputs["logits"].shape[-1] if "logits" in outputs else None
    if vocabulary != manifest["model"]["vocab_size"]:
        raise differs("model.vocab_size", manifest["model"]["vocab_size"], vocabulary)
    recorded = session.get_modelmeta().custom_metadata_map
    for name, field in RECORDED.items():
        here, there = json.loads(recorded_text(manifest, field)), _value(recorded.get(name, "null"))
        if name in recorded and here != there:
            if isinstance(here, dict) and isinstance(there, dict):  # the first part that differs says enough
                keys = sorted({*here, *there})
                part = next(k for k in keys if (k in here) != (k in there) or here.get(k) != there.get(k))
                field, here, there = f"{field}.{part}", here.get(part), there.get(part)
            raise differs(field, json.dumps(here), json.dumps(there))


def _value(text: str) -> Any:
    """The value of JSON, or a damaged text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
