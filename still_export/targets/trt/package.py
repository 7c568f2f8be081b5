"""The export verb for TensorRT and TensorRT-RTX: from a model to a package whose engines can be built here or on another machine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from still_export.errors import UnsupportedError
from still_export.graph.quantization.policy import LAYOUTS, PLUGIN
from still_export.package.folder import MANIFEST, MODEL, Package, open_package, staged_folder, write_manifest
from still_export.package.trust import trust
from still_export.runtime.bundle import PROGRAMS, write_programs
from still_export.targets.portable.package import ExportOptions, Progress, export_onnx, silent
from still_export.targets.trt.options import GENERATED, QUANTIZED_MAJOR, TrtOptions
from still_export.targets.trt.plugins import build_plugins, compile_archive, find_tensorrt_headers, tensorrt_major

KERNELS = "kernels.bin"
SMALL_BYTES = 1024
"""Constants up to this size stay in dumped graphs."""


def export_trt(
    options: ExportOptions,
    trt: TrtOptions,
    target: Path,
    *,
    force: bool = False,
    command: str = "",
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> Package:
    """Export a model to a package for TensorRT: lowered graph, kernels, plugin libraries, runners; engines come from `build`.

    Args:
        options: The model.
        trt: The target.
        target: The package folder; written whole or not at all.
        force: Replace `target`.
        command: The command line, for the manifest.
        progress: Told each step.
        dump_dir: Gets the graph after each pass, without its weights.

    Raises:
        StillExportError: The model cannot be exported, no kernel covers it, or the package cannot be written.
    """
    say = progress or silent
    layout = weight_layout(trt)
    if trt.target == "trt":  # what is wrong is refused before minutes of work
        find_tensorrt_headers(trt.tensorrt_include)
    if options.quantize and LAYOUTS[layout].nodes == PLUGIN and options.dtype != "float16":
        raise UnsupportedError(
            f"--quantize {options.quantize} beside --dtype {options.dtype}: {LAYOUTS[layout].form} multiplies with float16. "
            "Export with --dtype float16, or name the headers of TensorRT 10 or later alone with --tensorrt-include."
        )
    with staged_folder(target, force) as folder:
        portable = folder / ".portable"
        export_onnx(options, portable, command=command, progress=progress, final=layout)
        say(f"lowering for {trt.target}")
        _fill(portable, folder, trt, say, os.replace, dump_dir)
        shutil.rmtree(portable)
        say("hashing")
        manifest = json.loads((folder / MANIFEST).read_text())
        write_manifest(folder, {k: v for k, v in manifest.items() if k not in GENERATED})
    return open_package(target, check_hashes=False)


def weight_layout(trt: TrtOptions) -> str:
    """How weights in few bits are held (policy.LAYOUTS): where a library is for a TensorRT that reads none, a plugin reads them."""
    headers = find_tensorrt_headers(trt.tensorrt_include) if trt.target == "trt" else []
    old = any(tensorrt_major(include) < QUANTIZED_MAJOR for include in headers)
    return f"{trt.target}-8" if old else trt.target


def lower_package(source: Package, trt: TrtOptions, folder: Path, progress: Progress | None = None) -> Package:
    """Make a TensorRT package in the existing, empty `folder` from an ONNX package, whose weights are copied."""
    _fill(source.path, folder, trt, progress or silent, shutil.copyfile)
    manifest = json.loads((folder / MANIFEST).read_text())
    write_manifest(folder, {k: v for k, v in manifest.items() if k not in GENERATED})
    return open_package(folder, check_hashes=False)


def _fill(
    source: Path,
    folder: Path,
    trt: TrtOptions,
    say: Progress,
    bring: Callable[[Path, Path], Any],
    dump_dir: Path | None = None,
) -> None:
    import onnx

    from still_graphs.ops import OPS
    from still_graphs.pipelines import TARGETS, run_pipeline

    manifest = json.loads((source / MANIFEST).read_text())
    graph = onnx.load(source / MODEL, load_external_data=False)  # no pass reads a weight: their file stays as it is
    target = TARGETS[trt.target]
    if manifest["model"]["dtype"] not in target.dtypes:
        raise UnsupportedError(f"--to {trt.target} takes {', '.join(target.dtypes)}, not {manifest['model']['dtype']}.")
    dump = None if dump_dir is None else _dumper(dump_dir)
    passes = run_pipeline(graph, trt.target, dump, one_row=trt.batch == 1)
    onnx.save(graph, folder / MODEL)
    skip = {MODEL, MANIFEST, *PROGRAMS.values()}
    if native := manifest.pop("native", None):  # ONNX Runtime's kernel
        skip.add(native["library"])
    for path in source.iterdir():
        if path.is_file() and path.name not in skip:
            bring(path, folder / path.name)  # no links: onnx refuses weights that have two names
    write_programs(folder, ["tensorrt"])
    config = asdict(trt)
    manifest.update(
        target=trt.target,
        prefill_tokens=trt.prefill_tokens,
        trt={**{k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}, "passes": passes},
        plugin_layers=(nodes := _plugin_nodes(graph)),
        ops={**manifest["ops"], **{name: OPS[name].version for name in nodes}},
        value_types=_value_types(graph) if target.plugins else {},
        engines=[],
    )
    for state in manifest["states"]:
        state["in_place"] = target.plugins  # the kernels take one buffer for past and present; bodies do not
    if target.plugins:
        manifest["plugins"] = _write_plugins(graph, folder, trt, say)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _dumper(folder: Path) -> Callable[[str, Any], None]:
    """Writes graphs to `folder`, numbered, without their weights: for eyes and for netron, not for a runtime."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []

    def dump(name: str, model: Any) -> None:
        bare = onnx.ModelProto()
        bare.CopyFrom(model)
        for tensor in bare.graph.initializer:
            if len(tensor.raw_data) > SMALL_BYTES:
                tensor.ClearField("raw_data")
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        written.append(name)
        onnx.save(bare, folder / f"{len(written):02d}_{name}.onnx")

    return dump


def _plugin_nodes(graph: Any) -> dict[str, int]:
    """Number of nodes of each op that must become plugin layers."""
    from still_graphs.ops import DOMAIN

    counts: dict[str, int] = {}
    for node in graph.graph.node:
        if node.domain == DOMAIN:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def _value_types(graph: Any) -> dict[str, str]:
    """Element type of every floating point value that a node computes; builders without strong typing are held to them."""
    import onnx

    names = {
        onnx.TensorProto.FLOAT: "float32",
        onnx.TensorProto.FLOAT16: "float16",
        onnx.TensorProto.BFLOAT16: "bfloat16",
    }
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    values = (*inferred.value_info, *inferred.output)
    return {v.name: names[kind] for v in values if (kind := v.type.tensor_type.elem_type) in names}


def _write_plugins(graph: Any, folder: Path, trt: TrtOptions, say: Progress) -> dict[str, str]:
    """Compile the kernels and, for each set of headers, a plugin library; library file by major version of TensorRT."""
    demand_kernels(graph)
    say(f"compiling kernels for {', '.join(trt.architectures)}")
    archive = compile_archive(kernel_variants(graph), trt.architectures, folder / KERNELS)
    libraries = {}
    for include in find_tensorrt_headers(trt.tensorrt_include):
        say(f"compiling the plugin library for the headers in {include}")
        build = folder / ".build"
        build_plugins(build, archive=archive, tensorrt_include=include, runner=True)
        for library in sorted((build / "tensorrt").glob("libstill_tensorrt*.so")):
            shutil.copyfile(library, folder / library.name)
            trust(library)
            if not library.stem.endswith("_static"):
                major = library.stem.removeprefix("libstill_tensorrt")
                libraries[major] = library.name
                shutil.copy2(build / "runner/still_run", folder / f"still_run{major}")
        shutil.rmtree(build)
    return libraries


def demand_kernels(graph: Any) -> None:
    """Raise UnsupportedError naming a layer of a lowered graph that no kernel covers, and what the kernels have."""
    from still_kernels.registry import kernels_of

    for node, call in _plugin_calls(graph):
        reasons = kernels_of(node.op_type).refusals(call, ahead=True)
        if reasons:
            raise UnsupportedError(
                f"no TensorRT kernel covers {node.name}: {' '.join(reasons)} Export with --to onnx, which runs every layer."
            )


def kernel_variants(graph: Any) -> dict[str, list[Any]]:
    """The kernels that a lowered graph needs, by op: one variant for each set of choices."""
    from still_kernels.registry import kernels_of

    variants: dict[str, list[Any]] = {}
    for node, call in _plugin_calls(graph):
        variant, known = kernels_of(node.op_type).variant_of(call), variants.setdefault(node.op_type, [])
        if variant not in known:
            known.append(variant)
    return variants


def _plugin_calls(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Plugin nodes with what is known of their calls: dimensions that are numbers, attributes, types, which inputs there are."""
    from still_graphs.ops import DOMAIN, OPS
    from still_graphs.passes.lower_plugin_nodes import ABSENT_INPUTS, ACTIVATION_TYPE
    from still_graphs.passes.walk import attribute
    from still_kernels.plan import Call

    known = {i.name: list(i.dims) for i in graph.graph.initializer}
    for info in (*graph.graph.input, *graph.graph.value_info):
        known[info.name] = [d.dim_value for d in info.type.tensor_type.shape.dim]
    for node in graph.graph.node:
        if node.domain != DOMAIN or node.op_type not in OPS:
            continue
        spec, absent = OPS[node.op_type], attribute(node, ABSENT_INPUTS)
        given = {a.name: attribute(node, a.name) for a in spec.attributes}
        attributes = {a.name: a.default if given[a.name] is None else given[a.name] for a in spec.attributes}
        names = [name for i, name in enumerate(spec.resolve(attributes).input_names()) if not absent >> i & 1]
        shapes = {name: tuple(known[value]) for name, value in zip(names, node.input, strict=True)}
        yield node, Call.of(spec, shapes, attributes, attribute(node, ACTIVATION_TYPE), "int32")
