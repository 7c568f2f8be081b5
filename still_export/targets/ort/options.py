"""Options of a package for ONNX Runtime. In their own file, so that lowering does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import demand_float8
from still_export.options import check_options, check_types, option
from still_export.package.files import MANIFEST
from still_export.targets.ort.library import CPUS
from still_graphs.ops import FUSED_OPSET, OPSET


@dataclass(frozen=True)
class OrtOptions:
    """Options of a package for ONNX Runtime.

    Args:
        native: Include kernels for CPUs. True: build them if missing; None: include them if they exist.
        opset: ai.onnx opset of the graph: 23, or 27, which has ops for linear attention and its convolution. With 27 the graph has no other
            ops but still's, which have bodies.
    """

    native: bool | None = option(
        None,
        "Include kernels for CPUs, built (cmake, g++) if missing, or leave them out.",
        flag="--native/--no-native",
        shown="include, if they exist",
    )
    cpu: str | None = option(
        None, "Processors of the kernels: x86_64 or aarch64.", shown="this machine's", choices=CPUS
    )
    archs: tuple[str, ...] = option((), "GPUs to compile kernels for.", flag="--arch", commas=True, shown="none")
    opset: int = option(
        OPSET,
        f"ai.onnx opset: {OPSET}, or {FUSED_OPSET} for hosts with its linear attention.",
        choices=(OPSET, FUSED_OPSET),
    )
    prefill_tokens: int | None = option(
        None, "Tokens of one prefill call.", shown="512, of low-bit weights 128, with --arch 2048 to 8192", least=1
    )
    onnxruntime_include: Path | None = option(
        None, "Folder of onnxruntime_c_api.h to build kernels with.", shown="the usual places, else fetched"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.native is False and (self.archs or self.cpu):
            raise ConfigError(
                "--no-native leaves out the kernels that --arch and --cpu are for; give one or the other."
            )
        if self.archs and self.cpu:
            raise ConfigError("--arch compiles kernels for this kind of machine only: leave out --cpu.")

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> Self:
        """The options recorded in a manifest (an empty one: the defaults), with `changes`.

        Raises:
            ConfigError: It has options that this version does not know.
        """
        recorded = manifest.get("config", {})
        check_types(cls, recorded, f"{MANIFEST}: config", ConfigError)
        known = {f.name: recorded[f.name] for f in fields(cls) if f.init and f.name in recorded}
        return cls(**{**known, **({"archs": tuple(known["archs"])} if "archs" in known else {}), **changes})

    def config(self) -> dict[str, Any]:
        config = asdict(self)
        del config["onnxruntime_include"]
        return {**config, "archs": list(self.archs)}


@dataclass(frozen=True)
class GenaiOptions(OrtOptions):
    """Those options that onnxruntime-genai supports; it runs on the CPU and reads one opset."""

    archs: tuple[str, ...] = field(default=(), init=False)
    opset: int = field(default=OPSET, init=False)


def demand(export_options: ExportOptions, options: OrtOptions) -> None:
    """Raise ConfigError if an export contradicts `options`, UnsupportedError for GPUs that cannot multiply its weights."""
    demand_float8(export_options.quantize, options.archs)
    if options.opset != OPSET and export_options.quantize:
        raise ConfigError(f"--opset {options.opset} is not for --quantize, whose products are ONNX Runtime's own op.")
