"""The native kernels of ONNX packages: a custom op library, compiled at export, which the runner loads on machines like this one.

It holds kernels of the CPU, and where architectures of GPUs were named, kernels of the GPU for ONNX Runtime's CUDA provider.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from still_export.errors import UnsupportedError
from still_export.package.files import MODEL
from still_export.targets.trt.plugins import SOURCE, PluginBuildError, compile_archive, op_list, run_cmake

LIBRARY = "libstill_onnxruntime.so"
HEADER = "onnxruntime_c_api.h"
INCLUDE_VARIABLE = "STILL_ONNXRUNTIME_INCLUDE"
USUAL_INCLUDES = tuple(
    f"{root}/include{tail}"
    for root in ("/usr", "/usr/local", "/opt/onnxruntime")
    for tail in ("/onnxruntime", "", "/onnxruntime/core/session")
)


def find_onnxruntime_headers(asked: Path | None = None) -> Path:
    """Folder of ONNX Runtime's C header: `asked`, or that of STILL_ONNXRUNTIME_INCLUDE, or the first usual place that has it.

    Raises:
        PluginBuildError: It is not there.
    """
    named = asked or os.environ.get(INCLUDE_VARIABLE)
    if named and not (Path(named) / HEADER).is_file():
        raise PluginBuildError(f"{named} has no {HEADER}. Give the folder of ONNX Runtime's C headers.")
    for folder in (named,) if named else USUAL_INCLUDES:
        if (Path(folder) / HEADER).is_file():
            return Path(folder)
    raise PluginBuildError(
        f"the native kernel needs {HEADER}, which no wheel of ONNX Runtime has. Install libonnxruntime-dev, or fetch the headers "
        "(python tools/get_ort_headers.py FOLDER) and give the folder with --onnxruntime-include."
    )


def build_native(build: Path, include: Path, ops: tuple[Path, ...] = (), archive: Path | None = None) -> Path:
    """Compile the library for this kind of machine with CMake; `build` is kept, so that a second call compiles only what changed.

    Args:
        build: Build folder.
        include: Folder of ONNX Runtime's C header.
        ops: Folders of ops beside still-export's own.
        archive: Packed kernels of the GPU to embed.

    Raises:
        PluginBuildError: CMake, the compiler or the sources are missing, or the build fails; carries the tool's output.
    """
    options: dict[str, Path | str | None] = {
        "ONNXRUNTIME_INCLUDE_DIR": include,
        "STILL_OPS": op_list(ops),
        "STILL_ARCHIVE": archive,
    }
    return run_cmake(SOURCE, build, options, "still_onnxruntime") / "onnxruntime" / LIBRARY


def demand_native(include: Path | None = None) -> Path:
    """Folder of ONNX Runtime's C header; asked before minutes of work.

    Raises:
        PluginBuildError: The library cannot be built here.
    """
    if platform.system() != "Linux":
        raise PluginBuildError(
            f"the native kernel is built on Linux, not on {platform.system()}. Export without --native."
        )
    return find_onnxruntime_headers(include)


def add_native(folder: Path, include: Path | None = None, archs: tuple[str, ...] = ()) -> dict[str, Any]:
    """Put the library into the package folder, which has its graph; the manifest's account of it.

    Args:
        folder: The package.
        include: Folder of ONNX Runtime's C headers; None looks in the usual places.
        archs: GPUs to compile kernels for, such as "sm_90"; none: kernels of the CPU alone.

    Raises:
        PluginBuildError: It cannot be built here.
        UnsupportedError: No kernel of the GPU covers a layer.
    """
    headers = demand_native(include)
    with tempfile.TemporaryDirectory(
        prefix=".build.", dir=folder
    ) as build:  # goes with the folder where this process is killed
        archive = None
        if archs:
            archive = compile_archive(kernel_variants(folder / MODEL), archs, Path(build) / "kernels.bin")
        shutil.copyfile(build_native(Path(build), headers, archive=archive), folder / LIBRARY)
    described = {"library": LIBRARY, "system": platform.system(), "machine": platform.machine()}
    return {**described, "archs": list(archs)} if archs else described


def kernel_variants(model: Path) -> dict[str, list[Any]]:
    """The kernels of the GPU that a portable graph needs, by op: one variant for each set of choices.

    Raises:
        UnsupportedError: No kernel covers a node; names it, and what the kernels have.
    """
    import onnx

    from still_kernels.registry import kernels_of

    graph = onnx.load(model, load_external_data=False).graph
    variants: dict[str, list[Any]] = {}
    for node, call in _calls(graph):
        reasons = kernels_of(node.op_type).refusals(call, ahead=True)
        if reasons:
            raise UnsupportedError(
                f"no CUDA kernel covers {node.name or node.op_type}: {' '.join(reasons)} Export without --arch: bodies run every layer."
            )
        variant, known = kernels_of(node.op_type).variant_of(call), variants.setdefault(node.op_type, [])
        if variant not in known:
            known.append(variant)
    return variants


def _calls(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Nodes of still ops with what is known of their calls: dimensions that are numbers, attributes, types, which inputs there are."""
    from still_graphs.ops import DOMAIN, OPS
    from still_graphs.passes.lower_plugin_nodes import TYPE_NAMES
    from still_graphs.passes.walk import attribute, dimensions, element_types
    from still_kernels.plan import Call

    types = element_types(graph)
    known = {name: [d if isinstance(d, int) else 0 for d in dims] for name, dims in dimensions(graph).items()}
    known |= {i.name: list(i.dims) for i in graph.initializer}
    for node in graph.node:
        if node.domain != DOMAIN or node.op_type not in OPS:
            continue
        spec = OPS[node.op_type]
        given = {n: (t, value) for n, t, value in zip(spec.input_names(), spec.all_inputs(), node.input) if value}  # noqa: B905
        shapes = {name: tuple(known.get(value, [0] * len(t.shape))) for name, (t, value) in given.items()}
        dtypes = {TYPE_NAMES.get(types.get(value, 0)) for t, value in given.values() if t.dtype == "T"} - {None}
        values = {a.name: attribute(node, a.name) for a in spec.attributes}
        attributes = {a.name: a.default if values[a.name] is None else values[a.name] for a in spec.attributes}
        yield node, Call.of(spec, shapes, attributes, dtypes.pop() if dtypes else None, "int64")
