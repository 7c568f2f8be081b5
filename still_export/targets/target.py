"""A target is one record: allowed types and options, its passes, files and runtime. Everything else reads the record."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, StillExportError, UnsupportedError
from still_export.graph.options import ExportOptions, Progress, silent
from still_export.graph.quantization.policy import RUNTIME, Layout
from still_export.options import names_of
from still_graphs.pipelines import Dump, Pass

FLOAT_WEIGHTS = "float weights"
"""Trait: the weights are not quantized."""

SPECULATION = "speculation"
"""Trait: exported with --speculate."""


class BuildError(StillExportError):
    """The engine builder is missing, refused the graph, or built another engine than requested."""


class NoBuilderError(BuildError):
    """This machine cannot build the engines; the package is complete and another machine can."""


@dataclass
class Lowering:
    """A package on its way to a target.

    Args:
        manifest: The portable package's, to be changed.
        dump: Gets the graph after each pass.
        passes: Changes by pass.
        changed: Files of the portable package that the target wrote anew.
    """

    folder: Path
    manifest: dict[str, Any]
    options: Any
    say: Progress = silent
    dump: Dump | None = None
    passes: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


def _nothing(*_: Any) -> None: ...


@dataclass(frozen=True)
class Target:
    """A target and the way to it.

    Args:
        name: Of the record.
        to: As `--to` and the manifest have it; records that share one are told apart by `takes`.
        dtypes: Activation types that it computes in.
        layout: Form of its low-bit weights.
        layouts: The same by activation type, where it is another.
        own_layouts: Whether options mean `layouts`; packages of either kind are lowered.
        caches: Types of keys and values beside that of the activations.
        lacks: Ops of models that it has no form of, or none that was proven.
        options: Class of what a deployment chooses; its fields with a help text are flags. `from_manifest` gives what a manifest records.
        passes: From the portable graph to the target's, in order; they read no weight, but may say what is written in its place.
        finish: Writes the target's own files and completes the manifest; called with the graph.
        derived: Texts of files that follow from a package's folder and manifest, by name.
        traits: Of a package and the options, which passes ask for.
        demand: Raises ConfigError for what the target with its options cannot have of an export.
        check: Raises for what it cannot have of a model, given its manifest and the options.
        ready: Makes the tools that the options need ready; raises where one is not here.
        takes: Whether options of `to` mean this record.
        portable: The package stays one that others are lowered from.
        dtype: Default type.
        runtime: Name of what runs it here (still_export.loading.runtimes), None: nothing.
        host: Python module of what people run it with, where that is another than `runtime`; a verification asks it, too.
        built: It has engines, which `still-export build` builds in a package (still_export.engines).
        sees: Its packages may have images.
        speculates: Its packages may have steps of guessed tokens.
        decode_steps: Steps of greedy decoding that a verification compares.
    """

    name: str
    to: str
    dtypes: tuple[str, ...]
    layout: Layout
    options: Any
    passes: tuple[Pass, ...]
    finish: Callable[[Lowering, Any], None]
    layouts: dict[str, Layout] = field(default_factory=dict)
    own_layouts: Callable[[Any], bool] | None = None
    caches: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    derived: Callable[[Path, dict[str, Any]], dict[str, str]] = lambda folder, manifest: {}
    traits: Callable[[Any], Collection[str]] = lambda options: ()
    demand: Callable[[ExportOptions, Any], None] = _nothing
    check: Callable[[dict[str, Any], Any], None] = _nothing
    ready: Callable[[Any, Progress], None] = _nothing
    takes: Callable[[Any], bool] = lambda options: True
    portable: bool = False
    dtype: str = "auto"
    runtime: str | None = None
    host: str | None = None
    built: bool = False
    sees: bool = False
    speculates: bool = False
    decode_steps: int = 72

    @property
    def flags(self) -> tuple[str, ...]:
        return names_of(self.options)

    def layout_for(self, dtype: str, options: Any = None) -> Layout:
        """Form of low-bit weights with activations of `dtype`; `options` None: the plainest."""
        if self.own_layouts is not None and (options is None or not self.own_layouts(options)):
            return self.layout
        return self.layouts.get(dtype, self.layout)

    def check_dtype(self, dtype: str) -> None:
        """Raise UnsupportedError where the target does not compute in `dtype`."""
        if dtype not in self.dtypes:
            raise UnsupportedError(
                f"--to {self.to} takes {', '.join(self.dtypes)}, not {dtype}. Export the model with --dtype {self.dtypes[0]}."
            )

    def check_model(self, manifest: dict[str, Any], options: Any) -> None:
        """Raise for a model that the target does not support.

        Raises:
            UnsupportedError, ConfigError: Its type, an op of its layers, or the form of its quantized weights, is not one of the target's.
        """
        dtype, quantization = manifest["model"]["dtype"], manifest.get("quantization")
        self.check_dtype(dtype)
        feeding = manifest.get("feeding") or {}
        inserted = feeding.get("inserted")
        if feeding and (not self.portable or manifest.get("speculate")):
            what = "--speculate" if self.portable else f"--to {self.to}"
            wanted = f"a token of its own behind every {inserted['every']}" if inserted else "a prompt in one call"
            raise UnsupportedError(
                f"{what}: this {manifest['model']['family']} model wants {wanted}, which the runner of --to onnx alone feeds. Export with "
                "--to onnx, without --speculate."
            )
        if lacking := [op for op in manifest["ops"] if op in self.lacks]:
            raise UnsupportedError(
                f"--to {self.to} holds no {' and '.join(lacking)} yet, which layers of this {manifest['model']['family']} model are. "
                "Export with --to onnx."
            )
        layout = self.layout_for(dtype)
        known = {layout.nodes, self.layouts.get(dtype, layout).nodes}
        if quantization is not None and quantization["nodes"] not in known:
            plain = f", or with --to onnx --no-native --quantize {quantization['scheme']} and lower that"
            raise ConfigError(
                f"the package holds {quantization['scheme']} weights as {quantization['nodes']}, {self.name} as {layout.nodes} "
                f"({layout.form}): bits and their form are chosen at export. Export the model with --to {self.to} --quantize "
                f"{quantization['scheme']}{plain if layout.nodes == RUNTIME else ''}, or lower a package whose weights are not quantized."
            )
        self.check(manifest, options)
