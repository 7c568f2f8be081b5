"""What a package for ONNX Runtime is asked for beyond the model; apart from the export, so that lowering needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.targets.ort.library import CPUS
from still_graphs.ops import OPSET


@dataclass(frozen=True)
class OrtOptions:
    """What a package for ONNX Runtime is asked for beyond the model; the fields are those of ExportOptions.

    Args:
        native: Put the kernels for CPUs into the package: True builds them where they are not there yet, None takes those that are there.
        cpu: Processors that they are for, of CPUS; None: this machine's.
        archs: GPUs that its library has kernels for too, such as "sm_90".
        opset: Of ai.onnx in the graph, 23 or 27.
        prefill_tokens: Tokens of one prefill call; None: what the target takes.
        onnxruntime_include: Folder of ONNX Runtime's C headers for a native kernel; None: the usual places.
    """

    native: bool | None = None
    cpu: str | None = None
    archs: tuple[str, ...] = ()
    opset: int = OPSET
    prefill_tokens: int | None = None
    onnxruntime_include: Path | None = None

    def __post_init__(self) -> None:
        if self.cpu not in (None, *CPUS):
            raise ConfigError(f"--cpu {self.cpu} is unknown; known: {', '.join(CPUS)}.")

    @classmethod
    def of(cls, options: ExportOptions, include: Path | None = None) -> OrtOptions:
        """What `options` of an export say of ONNX Runtime."""
        return cls(options.native, options.cpu, options.archs, options.opset, options.prefill_tokens, include)

    def config(self) -> dict[str, Any]:
        """The same as a manifest's `config` has it."""
        config = asdict(self)
        del config["onnxruntime_include"]
        return {**config, "archs": list(self.archs)}
