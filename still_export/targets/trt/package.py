"""Files of a package for TensorRT or TensorRT-RTX besides the graph: kernels, plugin libraries, the runner."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from still_export.graph.options import Progress
from still_export.package.files import ARCHIVE
from still_export.package.programs import write_programs
from still_export.package.trust import trust
from still_export.targets.ort.options import OrtOptions
from still_export.targets.target import Lowering
from still_export.targets.trt.options import TrtOptions
from still_export.targets.trt.plugins import build_plugins, compile_archive, find_tensorrt_headers
from still_graphs.states import AHEAD


def finish(lowering: Lowering, graph: Any, *, plugins: bool) -> None:
    """Write the runner, and with `plugins` the kernels and plugin libraries. Engines come from `build`."""
    from still_graphs.ops import OPS

    manifest, trt = lowering.manifest, lowering.options
    write_programs(lowering.folder, ["tensorrt"])
    config = asdict(trt)
    del config["cuda_include"]  # a path on this machine
    manifest.update(
        target=trt.target,
        config={**manifest["config"], **OrtOptions().config()},
        prefill_tokens=trt.prefill_tokens,
        trt={**{k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}, "passes": lowering.passes},
        plugin_layers=(nodes := _plugin_nodes(graph)),
        ops={**manifest["ops"], **{name: OPS[name].version for name in nodes}},
        value_types=_value_types(graph) if plugins else {},
        engines=[],
    )
    manifest["states"] = [
        state for state in manifest["states"] if not state["name"].startswith(AHEAD)
    ]  # the graph has no head
    for state in manifest["states"]:
        state["in_place"] = plugins  # kernels use one buffer for past and present; bodies do not
    if plugins and lowering.holes is None:
        manifest["plugins"] = _write_plugins(graph, lowering.folder, trt, lowering.say)


def _plugin_nodes(graph: Any) -> dict[str, int]:
    """Number of nodes of each op that must become plugin layers."""
    from still_graphs.ops import DOMAIN

    return dict(Counter(node.op_type for node in graph.graph if node.domain == DOMAIN))


def _value_types(graph: Any) -> dict[str, str]:
    """Element type of each computed floating-point value; builders without strong typing are forced to use it."""
    import onnx
    import onnx_ir as ir

    from still_graphs.passes.lower_plugin_nodes import TYPE_NAMES

    inferred = onnx.shape_inference.infer_shapes(ir.to_proto(graph)).graph
    types = {v.name: ir.DataType(v.type.tensor_type.elem_type).name for v in (*inferred.value_info, *inferred.output)}
    return {name: TYPE_NAMES[kind] for name, kind in types.items() if kind in TYPE_NAMES}


def _write_plugins(graph: Any, folder: Path, trt: TrtOptions, say: Progress) -> dict[str, str]:
    """Compile the kernels, and a plugin library for each set of headers; returns library files by major version of TensorRT."""
    variants = kernel_variants(graph)
    say(f"compiling kernels for {', '.join(trt.architectures)}")
    archive = compile_archive(variants, trt.architectures, folder / ARCHIVE)
    libraries = {}
    for include in find_tensorrt_headers(trt.tensorrt_include):
        say(f"compiling the plugin library for the headers in {include}")
        build = folder / ".build"
        build_plugins(
            build,
            archive=archive,
            tensorrt_include=include,
            cuda_include=trt.cuda_include,
            runner=True,
            cpu=trt.cpu,
        )
        for library in sorted((build / "tensorrt").glob("libstill_tensorrt*.so")):
            shutil.copyfile(library, folder / library.name)
            trust(library)
            if not library.stem.endswith("_static"):
                major = library.stem.removeprefix("libstill_tensorrt")
                libraries[major] = library.name
                shutil.copy2(build / "runner/still_run", folder / f"still_run{major}")
        shutil.rmtree(build)
    return libraries


def kernel_variants(graph: Any) -> dict[str, list[Any]]:
    """The kernels that a lowered graph needs, by op: one variant for each set of choices.

    Raises:
        UnsupportedError: No kernel covers a node; the message names the node and the available kernels.
    """
    from still_kernels.registry import variants_of

    return variants_of(
        _plugin_calls(graph), "no TensorRT kernel covers", "Export with --to onnx, which runs every layer."
    )


def _plugin_calls(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Plugin nodes with the known facts of their calls: constant dimensions, attributes, types, present inputs."""
    from still_graphs.edits import attribute, known_sizes
    from still_graphs.ops import DOMAIN, OPS
    from still_graphs.passes.lower_plugin_nodes import ABSENT_INPUTS, ACTIVATION_TYPE
    from still_kernels.plan import Call

    for node in graph.graph:
        if node.domain != DOMAIN or node.op_type not in OPS:
            continue
        spec, absent = OPS[node.op_type], attribute(node, ABSENT_INPUTS)
        attributes = {a.name: attribute(node, a.name, a.default) for a in spec.attributes}
        names = [name for i, name in enumerate(spec.resolve(attributes).input_names()) if not absent >> i & 1]
        shapes = {name: tuple(known_sizes(value)) for name, value in zip(names, node.inputs, strict=True)}
        yield node, Call.of(spec, shapes, attributes, attribute(node, ACTIVATION_TYPE), "int32")
