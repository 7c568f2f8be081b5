"""The kernels in an ONNX package: the library for CPUs, with GPU kernels if architectures are named."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from still_export.package.files import MODEL
from still_export.targets.ort.library import LIBRARY, SYSTEM, build_with_archive, this_cpu
from still_export.targets.trt.plugins import compile_archive


def add_native(
    folder: Path, library: Path | None, cpu: str | None = None, include: Path | None = None, archs: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Add the library to a package folder with a graph. Returns the manifest's entry.

    Args:
        library: Library for processors `cpu`; not read if `archs` are given, because the library is then linked for this package.
        cpu: None: this machine's.
        include: Folder of ONNX Runtime's C headers; None: search the usual places, or fetch them.
        archs: GPUs to compile kernels for, such as "sm_90"; (): CPU kernels only.

    Raises:
        PluginBuildError: It cannot be built here.
        UnsupportedError: No GPU kernel covers a layer.
    """
    if archs or library is None:
        # Inside the folder, so that it is removed with it if this process is killed.
        with tempfile.TemporaryDirectory(prefix=".build.", dir=folder) as build:
            variants = kernel_variants(folder / MODEL)
            archive = compile_archive(variants, archs, Path(build) / "kernels.bin")
            build_with_archive(archive, folder / LIBRARY, include)
    else:
        shutil.copyfile(library, folder / LIBRARY)
    described = {"library": LIBRARY, "system": SYSTEM, "machine": cpu or this_cpu()}
    return {**described, "archs": list(archs)} if archs else described


def kernel_variants(model: Path) -> dict[str, list[Any]]:
    """The GPU kernels that a graph needs, by op: one variant for each set of choices.

    Raises:
        UnsupportedError: No kernel covers a node; the message names the node and the available kernels.
    """
    import onnx_ir as ir

    from still_kernels.registry import variants_of

    return variants_of(
        _calls(ir.load(model)), "no CUDA kernel covers", "Export without --arch: bodies run every layer."
    )


def _calls(model: Any) -> Iterator[tuple[Any, Any]]:
    """Nodes of still ops with the known facts of their calls: constant dimensions, attributes, types, present inputs."""
    from still_graphs.edits import attribute, known_sizes
    from still_graphs.ops import DOMAIN, OPS
    from still_graphs.passes.lower_plugin_nodes import TYPE_NAMES
    from still_kernels.plan import Call

    for node in model.graph:
        if node.domain != DOMAIN or node.op_type not in OPS:
            continue
        spec = OPS[node.op_type]
        named = zip(spec.input_names(), spec.all_inputs(), node.inputs, strict=False)
        named_inputs = {name: (t, value) for name, t, value in named if value is not None}
        shapes = {name: tuple(known_sizes(value) or [0] * len(t.shape)) for name, (t, value) in named_inputs.items()}
        types = {v.dtype.name for t, v in named_inputs.values() if t.dtype == "T" and v.dtype is not None}
        dtypes = {TYPE_NAMES[name] for name in types if name in TYPE_NAMES}
        attributes = {a.name: attribute(node, a.name, a.default) for a in spec.attributes}
        yield node, Call.of(spec, shapes, attributes, dtypes.pop() if dtypes else None, "int64")
