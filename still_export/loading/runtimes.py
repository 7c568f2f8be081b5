"""The list of runtimes. A target names its runtime; the record here opens packages; other code asks the record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import ConfigError, unknown
from still_export.package.files import MODEL
from still_export.runtime.base import Runner
from still_export.targets.registry import target_of

if TYPE_CHECKING:
    import onnx

PROVIDERS = ("cpu", "cuda")


@dataclass(frozen=True)
class Opening:
    """A request to open a package.

    Args:
        provider: ONNX Runtime's, "cpu" or "cuda".
        plugin: TensorRT plugin library to use instead of the package's.
        watch: Ops whose first outputs become graph outputs, if the runtime supports it.
        bodies: Run function bodies even if there are kernels.
        graph: A graph file of the package; all share the weights.
        tensors: Tensors of the graph that become outputs; ONNX Runtime only.
    """

    folder: Path
    manifest: dict[str, Any]
    provider: str = "cpu"
    threads: int = 0
    plugin: Path | None = None
    check: bool = True
    watch: tuple[str, ...] = ()
    bodies: bool = False
    graph: str = MODEL
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Runtime:
    """A runtime for packages.

    Args:
        name: Name in `--runtime` and in target records.
        open: Opens a package; raises RunError if it does not run here.
        repeat: The polygraphy command that repeats a call.
        polygraphy: The runtime's name in polygraphy.
        modules: Required Python modules.
        providers: Values of `--provider` besides cpu.
        engines: Whether it runs engines of `still-export build`, with int32 counts and prompts limited by a profile.
        graphs: Whether it reads ONNX graphs: function bodies, other graphs of the package, and graphs with further outputs.
    """

    name: str
    title: str
    open: Callable[[Opening], Runner]
    repeat: Callable[[Opening], list[str]]
    polygraphy: str
    modules: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    engines: bool = False
    graphs: bool = False


def open_ort(opening: Opening) -> Runner:
    from still_export.runtime.ort import OrtModel

    changed = opening.watch or opening.tensors or opening.graph != MODEL or _unpacks(opening)
    watched = watched_graph(opening) if changed else None
    return OrtModel(
        opening.folder, opening.threads, opening.provider, check=opening.check, watched=watched, bodies=opening.bodies
    )


def watched_graph(opening: Opening) -> tuple[bytes, list[str]]:
    """Returns (graph with the requested outputs, names of these: the first output, int32, of each watched node, and `tensors`)."""
    import onnx

    from still_export.graph.weights_file import resolve_weights

    path = opening.folder / opening.graph
    model = onnx.load(path, load_external_data=False)
    resolve_weights(model, path)
    names = [node.output[0] for node in model.graph.node if node.op_type in opening.watch]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.INT32, None) for n in names)
    there, tensors = {value.name for value in model.graph.output}, list(opening.tensors)
    for place, name in enumerate(tensors):
        if name in there:  # a runner binds each output once
            tensors[place] = f"{name}/watched"
            model.graph.node.append(onnx.helper.make_node("Identity", [name], [tensors[place]]))
    # ONNX Runtime infers their types: Mamba's residual is float32 in half precision.
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in tensors)
    return (_weights_first(model) if _unpacks(opening) else model).SerializeToString(), [*names, *tensors]


def _unpacks(opening: Opening) -> bool:
    """Whether function bodies unpack weights in each call."""
    from still_export.runtime.ort_session import keeps_codes

    return opening.bodies and keeps_codes(opening.manifest, opening.graph)


def _weights_first(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with inlined functions and with nodes that read only weights first."""
    # ONNX Runtime computes the later one of a product's inputs first. So it unpacks each weight right before its product, instead of all of
    # them (4 bytes a parameter) before the first.
    from onnx.inliner import inline_local_functions

    whole = inline_local_functions(model)
    known = {x.name for x in whole.graph.initializer}
    first: list[onnx.NodeProto] = []
    others: list[onnx.NodeProto] = []
    for node in whole.graph.node:
        alone = known.issuperset(filter(None, node.input)) and not any(a.HasField("g") for a in node.attribute)
        (first if alone else others).append(node)
        known.update(node.output if alone else ())
    del whole.graph.node[:]
    whole.graph.node.extend([*first, *others])
    return whole


def repeat_ort(opening: Opening) -> list[str]:
    """Polygraphy's command. It runs the bodies, because polygraphy loads no custom op library."""
    providers = ["--providers", "cuda"] if opening.provider == "cuda" else []
    return ["polygraphy", "run", str(opening.folder / MODEL), "--onnxrt", *providers]


def open_trt(opening: Opening) -> Runner:
    """Open the engine of a built package."""
    from still_export.runtime.tensorrt import TrtModel

    return TrtModel(opening.folder, opening.plugin)


def repeat_trt(opening: Opening) -> list[str]:
    entry = opening.manifest["engines"][0]
    library = opening.plugin or opening.folder / opening.manifest["plugins"][entry["tensorrt"].split(".")[0]]
    # Polygraphy only opens libraries, so it needs the variant that registers itself.
    itself = library.with_name(f"{library.stem.removesuffix('_static')}_static.so")
    engine = ["polygraphy", "run", str(opening.folder / entry["file"]), "--model-type", "engine", "--trt"]
    return [*engine, "--plugins", str(itself)]


def open_torch(opening: Opening) -> Runner:
    """Open the exported model in PyTorch, with the package's weights."""
    import torch

    from still_export.graph.options import ExportOptions
    from still_export.graph.quantization.read import package_model
    from still_export.loading.torch import TorchModel

    if opening.threads:
        torch.set_num_threads(opening.threads)
    model = package_model(ExportOptions.from_manifest(opening.manifest), opening.folder, opening.manifest)
    return TorchModel(opening.manifest, model, opening.folder)


ORT = Runtime(
    "ort", "ONNX Runtime", open_ort, repeat_ort, "onnxrt", modules=("onnxruntime",), providers=("cuda",), graphs=True
)
TENSORRT = Runtime("trt", "TensorRT", open_trt, repeat_trt, "trt", engines=True)
TORCH = Runtime("torch", "PyTorch's runner", open_torch, repeat_ort, "torch")
"""Runs packages of every target."""

RUNTIMES = {runtime.name: runtime for runtime in (ORT, TENSORRT, TORCH)}


def runtime_of(target: str, name: str | None) -> Runtime:
    """The runtime of packages for `target`.

    Args:
        name: Value of --runtime: the target's own runtime, torch, or None: the target's own.

    Raises:
        ConfigError: The runtime does not run such packages, or none here does.
    """
    own = target_of(target).runtime
    if own is None:
        raise ConfigError(
            f"a package for {target} is built here, but not run: its engines are for your own programs. "
            "Export with --to onnx or --to trt for one that runs here."
        )
    if name not in (None, own, TORCH.name):
        raise ConfigError(
            f"a package for {target} does not run with --runtime {name}; it runs with {own}, and with {TORCH.name}."
        )
    return RUNTIMES[name or own]


def runtime_named(name: str) -> Runtime:
    """The runtime named `name` in `--runtime`.

    Raises:
        ConfigError: The name is unknown.
    """
    if name not in RUNTIMES:
        raise unknown(name, RUNTIMES, f"--runtime {name}")
    return RUNTIMES[name]


def open_runner(folder: Path, manifest: dict[str, Any], runtime: str, provider: str = "cpu", **how: Any) -> Runner:
    """Open the package at `folder`.

    Args:
        runtime: Name of one of the package's runtimes.
        how: Further fields of Opening.

    Raises:
        ConfigError: The provider is unknown, or belongs to another runtime.
        RunError: The package does not run here.
    """
    record = runtime_named(runtime)
    if provider not in PROVIDERS:
        raise unknown(provider, PROVIDERS, f"--provider {provider}")
    if provider not in ("cpu", *record.providers):
        raise ConfigError(f"--provider {provider} is ONNX Runtime's; this package runs with {runtime}.")
    return record.open(Opening(folder, manifest, provider, **how))
