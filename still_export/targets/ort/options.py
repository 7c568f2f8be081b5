"""Options of a package for ONNX Runtime; separate from the export, so that lowering needs no torch."""

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
    """What a package for ONNX Runtime is asked for beyond the model.

    Args:
        native: Put the kernels for CPUs into the package: True builds them where they are not there yet, None takes those that are there.
        opset: Of ai.onnx in the graph: 23, or 27, which has linear attention and its convolution as ops of its own; no other domain's
            ops are in the graph then but still's, which have bodies.
    """

    native: bool | None = option(
        None,
        "With kernels for CPUs, built (cmake, g++) where there are none yet, or without.",
        flag="--native/--no-native",
        shown="with, where they are there",
    )
    cpu: str | None = option(None, "CPUs of the kernels: x86_64 or aarch64.", shown="this machine's", choices=CPUS)
    archs: tuple[str, ...] = option((), "GPUs to compile kernels for.", flag="--arch", commas=True, shown="none")
    opset: int = option(
        OPSET,
        f"Of ai.onnx, {OPSET}, or {FUSED_OPSET} for hosts with its linear attention.",
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
                "--no-native leaves the kernels out that --arch and --cpu are for; give one or the other."
            )
        if self.archs and self.cpu:
            raise ConfigError("--arch compiles kernels for this kind of machine alone: leave out --cpu.")

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> Self:
        """The options that a manifest records, the defaults of an empty one, with `changes`.

        Raises:
            ConfigError: It records what this version does not know.
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
    """The options that onnxruntime-genai supports: it runs on the CPU and reads one opset."""

    archs: tuple[str, ...] = field(default=(), init=False)
    opset: int = field(default=OPSET, init=False)


def demand(asked: ExportOptions, options: OrtOptions) -> None:
    """Raise ConfigError if an export contradicts `options`, UnsupportedError if GPUs do not support its weights."""
    demand_float8(asked.quantize, options.archs)
    if options.opset != OPSET and asked.quantize:
        raise ConfigError(f"--opset {options.opset} is not for --quantize, whose products are ONNX Runtime's own op.")
