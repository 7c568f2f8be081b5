"""A target is one record: allowed types and options, passes, files and runtime. Other code asks the record."""

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
"""Trait of packages without quantized weights."""

SPECULATION = "speculation"
"""Trait of packages exported with --speculate."""


class BuildError(StillExportError):
    """The engine builder is missing, refused the graph, or built a wrong engine."""


class NoBuilderError(BuildError):
    """This machine cannot build the engines. The package is complete, and another machine can."""


@dataclass
class Lowering:
    """A package being lowered to a target.

    Args:
        manifest: The portable package's; it is changed.
        dump: Called with the graph after each pass.
        passes: Number of changes, by pass.
        changed: Files of the portable package that the target rewrote.
        holes: Given, nothing is compiled, and these weights are holes of their files (`save_streaming`).
    """

    folder: Path
    manifest: dict[str, Any]
    options: Any
    say: Progress = silent
    dump: Dump | None = None
    passes: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    holes: set[str] | None = None


def _nothing(*_: Any) -> None: ...


@dataclass(frozen=True)
class Target:
    """A target and how to reach it.

    Args:
        name: Name of the record.
        to: Name in `--to` and the manifest; records with the same name are distinguished by `takes`.
        dtypes: Supported activation types.
        layout: Form of low-bit weights.
        layouts: Other forms, by activation type.
        own_layouts: Whether options select `layouts`; packages of both kinds can be lowered.
        caches: Types of keys and values besides the activation type.
        lacks: Ops without a form for this target, or without a proven one.
        options: Class of deployment options; its fields with a help text are flags. `from_manifest` reads those in a manifest.
        passes: From the portable graph to the target's, in order. They read no weights, but may define replacements for them.
        finish: Writes the target's own files and completes the manifest; called with the graph.
        traits: Traits of a package with these options, which select passes.
        demand: Raises ConfigError if the target with its options does not support an export.
        check: Raises if the target does not support a model, by its manifest and the options.
        ready: Prepares the tools that the options need; raises if one is missing.
        takes: Whether options of `to` mean this record.
        portable: Whether other targets can be lowered from the package.
        dtype: Default of --dtype.
        runtime: Name of its runtime here (still_export.loading.runtimes); None: there is none.
        host: Python module of the program that users run it with, if not `runtime`; verify runs it too.
        built: Whether `still-export build` builds engines into a package (still_export.engines).
        sees: Whether packages may have images.
        speculates: Whether packages may have steps with guessed tokens.
        decode_steps: Greedy decoding steps that verify compares.
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
        """Raise UnsupportedError if the target does not compute in `dtype`."""
        if dtype not in self.dtypes:
            raise UnsupportedError(
                f"--to {self.to} supports {', '.join(self.dtypes)}, not {dtype}. Export the model with --dtype {self.dtypes[0]}."
            )

    def has_form(self, manifest: dict[str, Any]) -> bool:
        """Whether the target computes with low-bit weights in the form of a package; true of float weights."""
        dtype, quantization = manifest["model"]["dtype"], manifest.get("quantization")
        layout = self.layout_for(dtype)
        return quantization is None or quantization["nodes"] in (layout.nodes, self.layouts.get(dtype, layout).nodes)

    def check_model(self, manifest: dict[str, Any], options: Any) -> None:
        """Check that the target supports a model.

        Raises:
            UnsupportedError, ConfigError: Its type, an op of its layers, or the form of its quantized weights is not supported.
        """
        dtype, quantization = manifest["model"]["dtype"], manifest.get("quantization")
        self.check_dtype(dtype)
        feeding = manifest.get("feeding") or {}
        inserted = feeding.get("inserted")
        if feeding and (not self.portable or manifest.get("speculate")):
            what = "--speculate" if self.portable else f"--to {self.to}"
            wanted = f"an extra token after every {inserted['every']}" if inserted else "a prompt in one call"
            raise UnsupportedError(
                f"{what}: this {manifest['model']['family']} model needs {wanted}, which only the runner of --to onnx feeds. Export with "
                "--to onnx, without --speculate."
            )
        if lacking := [op for op in manifest["ops"] if op in self.lacks]:
            raise UnsupportedError(
                f"--to {self.to} has no {' and '.join(lacking)} yet, which layers of this {manifest['model']['family']} model need. "
                "Export with --to onnx."
            )
        layout = self.layout_for(dtype)
        if not self.has_form(manifest):
            assert quantization is not None
            plain = f", or with --to onnx --no-native --quantize {quantization['scheme']} and lower that"
            raise ConfigError(
                f"the package has {quantization['scheme']} weights as {quantization['nodes']}, {self.name} needs {layout.nodes} "
                f"({layout.form}): bits and their form are chosen at export. Export the model with --to {self.to} --quantize "
                f"{quantization['scheme']}{plain if layout.nodes == RUNTIME else ''}, or lower a package whose weights are not quantized."
            )
        self.check(manifest, options)
