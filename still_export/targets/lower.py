"""From a portable package to the package of a target, without torch or the checkpoint; weights are streamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from still_export.errors import ConfigError, PackageError
from still_export.graph.options import ExportOptions, Progress, silent
from still_export.graph.weights_file import load_graph, place_weights, save_streaming
from still_export.options import flag_of
from still_export.package.files import (
    COMPONENT,
    DATA,
    FOLD,
    HEAD,
    MANIFEST,
    MODEL,
    PORTABLE,
    WEIGHTS_HASH,
    recorded_text,
)
from still_export.package.folder import GENERATED, Package, open_package, staged_folder, write_manifest
from still_export.package.programs import PROGRAMS
from still_export.targets import registry
from still_export.targets.portable.narrow import demand_narrow, narrow_package
from still_export.targets.registry import target_of, targets_of
from still_export.targets.target import FLOAT_WEIGHTS, SPECULATION, Lowering, Target
from still_graphs.edits import drop_idle_weights
from still_graphs.pipelines import Dump, run_passes

SMALL_BYTES = 1024
"""Constants up to this size remain in dumped graphs."""


def dumper(folder: Path) -> Dump:
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []

    def dump(name: str, model: ir.Model) -> None:
        bare = _without_weights(model)
        for tensor in bare.graph.initializer:
            if len(tensor.raw_data) > SMALL_BYTES:
                tensor.ClearField("raw_data")
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        written.append(name)
        onnx.save(bare, folder / f"{len(written):02d}_{name}.onnx")

    return dump


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The graph with references to a missing file instead of its weights, which are not read."""
    tensors = {value: value.const_value for value in model.graph.initializers.values()}
    for value, tensor in tensors.items():
        if tensor is not None and tensor.nbytes > SMALL_BYTES:
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                "none", 0, tensor.nbytes, tensor.dtype, shape=shape, name=value.name or ""
            )
    try:
        return ir.to_proto(model)
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor


PORTABLE_FOLDER = ".portable.part"
"""A name outside manifests."""


def lower(
    package: str | Path,
    to: str,
    output: str | Path,
    *,
    options: Any = None,
    dtype: str | None = None,
    force: bool = False,
    command: str = "",
    progress: Progress = silent,
    dump_dir: Path | None = None,
) -> Package:
    """Lower a portable package to a target; bits and capacity stay as exported.

    Args:
        package: Folder that `still-export MODEL` wrote; its files are checked against their hashes.
        to: Target named as in `--to`, or a record's name, such as trt8.
        dtype: float16 or bfloat16, for a package in float32; None: unchanged.

    Raises:
        StillExportError: The package is not portable, the target does not support it, or a tool is missing.
    """
    source = open_package(Path(package))
    options = targets_of(to)[0].options() if options is None else options
    target = target_of(to, options)
    export_options = ExportOptions.from_manifest(source.manifest)
    if dtype is not None:
        demand_narrow(source.manifest, dtype)
    demand(target, export_options if dtype is None else replace(export_options, dtype=dtype), options)
    target.ready(options, progress)
    dump = None if dump_dir is None else dumper(dump_dir)
    with staged_folder(Path(output), force) as folder:
        if dtype is None:
            lower_into(source.path, folder, target, options, progress, shutil.copyfile, dump, command)
        else:
            hub = folder / PORTABLE_FOLDER
            hub.mkdir()
            narrow_package(demand_portable(source), hub, dtype, progress)
            lower_into(hub, folder, target, options, progress, os.replace, dump, command)
            shutil.rmtree(hub)
    return open_package(Path(output), check_hashes=False)


def demand(target: Target, export_options: ExportOptions, options: Any) -> None:
    """Raise ConfigError, before anything is read, if `target` with `options` does not support `export_options`."""
    target.demand(export_options, options)
    if export_options.dtype != "auto":
        target.check_dtype(export_options.dtype)
    if export_options.speculate and not target.speculates:
        known = ", ".join(t.name for t in registry.TARGETS if t.speculates)
        raise ConfigError(f"--speculate is for {known}, not for {target.name}. Export without it.")
    if export_options.vision and not target.sees:
        known = ", ".join(t.name for t in registry.TARGETS if t.sees)
        raise ConfigError(
            f"--vision is for {known}, not for {target.name}. Export without it for the language model alone."
        )
    cache = export_options.still.get("cache")
    if not any(cache in t.caches for t in registry.TARGETS) or cache in target.caches:
        return  # an unknown type is refused later, with the known ones
    if here := [t.name for t in targets_of(target.to) if cache in t.caches]:
        raise ConfigError(f"--cache {cache} is for {', '.join(here)}: {target.name} stores states in --dtype.")
    known = " and ".join(dict.fromkeys(t.to for t in registry.TARGETS if cache in t.caches))
    raise ConfigError(f"--cache {cache} is for --to {known}, not for --to {target.to}; states there are in --dtype.")


def refuse_flags_of_others(target: Target, set_flags: Mapping[str, Any]) -> None:
    """Raise ConfigError for flags (by field name) of other targets."""
    for name in set_flags:
        others = [t for t in registry.TARGETS if name in t.flags]
        if others and name not in target.flags:
            known = " and ".join(dict.fromkeys(t.to for t in others))
            raise ConfigError(f"{flag_of(others[0].options, name)}: for --to {known}, not for --to {target.to}.")


def lower_into(
    source: Path,
    folder: Path,
    target: Target,
    options: Any,
    say: Progress = silent,
    transfer: Callable[[Path, Path], Any] = shutil.copyfile,
    dump: Dump | None = None,
    command: str = "",
    holes: set[str] | None = None,
    portable: str | None = None,
) -> bool:
    """Lower the portable package `source` into the existing, empty `folder`.

    Args:
        transfer: Copies or moves an unchanged file. It must not link: onnx refuses weights with two names.
        dump: Called with the graph after each pass.
        command: Replaces the export's command in the manifest.
        holes: As of `Lowering`.
        portable: The identity of the portable package, if its weights are holes.

    Returns:
        Whether the target wrote the weights anew.
    """
    manifest = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
    files = manifest["files"]
    demand_portable(Package(source, manifest))
    native = manifest.pop("native", None)  # ONNX Runtime's kernel
    content = {k: v for k, v in manifest.items() if k not in GENERATED}
    content |= {"portable": portable or portable_identity(files), **({"command": command} if command else {})}
    content.setdefault("state_identity", state_identity(content))
    target.check_model(content, options)
    say(f"lowering for {target.to}")
    traits = {*target.traits(options), *(() if content.get("quantization") else (FLOAT_WEIGHTS,))}
    traits |= {SPECULATION} if content.get("speculate") else set()
    lowering = Lowering(folder, content, options, say, dump, holes=holes)
    graph, rewritten = _lowered(source, lowering, target, traits)
    skip = {
        MODEL,
        FOLD,
        HEAD,
        MANIFEST,
        COMPONENT,
        *PROGRAMS.values(),
        *([DATA] if rewritten else []),
        *([native["library"]] if native else []),
    }
    skip |= set() if target.portable else {PORTABLE}
    transferred = [path for path in source.iterdir() if path.is_file() and path.name in files and path.name not in skip]
    for path in transferred:
        transfer(path, folder / path.name)
    target.finish(lowering, graph)
    say("hashing")
    write_manifest(folder, content, {p.name: files[p.name] for p in transferred if p.name not in lowering.changed})
    return rewritten


def demand_portable(package: Package) -> Package:
    """Return `package`; PackageError if it is not portable."""
    if not (package.path / PORTABLE).is_file():
        raise PackageError(
            f"{package.path} was lowered for {package.manifest['target']}: targets are made from the portable package. "
            f"Export it with `still-export MODEL -o DIR`, which writes {PORTABLE}."
        )
    return package


def portable_identity(files: dict[str, Any]) -> str:
    """Identity of a portable package: hash of its weights, or of the graph that contains them."""
    return str(files.get(DATA, files[PORTABLE])["sha256"])


def state_identity(content: dict[str, Any]) -> str:
    """Hash of the portable package's weights, layers and states. Packages with equal hashes can continue from each other's states."""
    identity = [content[name] for name in ("portable", "model", "still", "states")]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _lowered(source: Path, lowering: Lowering, target: Target, traits: set[str]) -> tuple[ir.Model, bool]:
    """Run the target's passes and write the graph, and the weights if passes changed them; returns (graph, whether weights changed)."""
    path, model = lowering.folder / MODEL, load_graph(source / PORTABLE)
    lowering.passes |= run_passes(model, target.passes, lowering.dump, traits)
    drop_idle_weights(model.graph)
    model.metadata_props[WEIGHTS_HASH] = recorded_text(lowering.manifest, "portable")
    rewritten = any(isinstance(value.const_value, ir.LazyTensor) for value in model.graph.initializers.values())
    if rewritten:
        save_streaming(
            model, path, DATA, lambda done, total: lowering.say("writing the weights", done, total), lowering.holes
        )
    else:
        place_weights(model, lowering.folder, DATA)
        ir.save(model, path)
    return model, rewritten
