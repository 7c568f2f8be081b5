"""What a TensorRT package is asked for; apart from the export, so that building and running need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from still_export.errors import ConfigError
from still_export.fields import check_types

PREFILL_TOKENS = 2048
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
RTX_ARCHS = ("sm_86", "sm_89", "sm_120")
RTX = "trt-rtx"
"""Name of the target TensorRT-RTX."""
QUANTIZED_MAJOR = 10
"""First TensorRT that reads weights in blocks of 4 bits and half precision scales. 8.6 has 8 bits alone, with scales in float32 and weakly
typed, which no engine here has shown."""


@dataclass(frozen=True)
class TrtOptions:
    """What a TensorRT package is asked for beyond the model.

    Args:
        target: trt, or trt-rtx.
        archs: Architectures that kernels (trt) or engines (trt-rtx) are compiled for; empty = the defaults of the target.
        prefill_tokens: Tokens of one prefill call.
        batch: Largest batch of the engines.
        version_compatible: Engines that later versions of TensorRT run too.
        strip_weights: Engines without weights, to be refitted from the package (TensorRT 10 and later).
        workspace_mib: Limit of TensorRT's workspace, 0 = none.
        optimization_level: Effort of TensorRT's builder, 0 to 5.
        tensorrt_include: Folders of NvInfer.h to compile the plugin library for; empty = the usual places.
    """

    target: str = "trt"
    archs: tuple[str, ...] = ()
    prefill_tokens: int = PREFILL_TOKENS
    batch: int = 1
    version_compatible: bool = False
    strip_weights: bool = False
    workspace_mib: int = 0
    optimization_level: int = 3
    tensorrt_include: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.target not in ("trt", "trt-rtx"):
            raise ConfigError(f"target {self.target!r} is unknown; known: trt, trt-rtx.")
        for name in ("prefill_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; it must be at least 1.")
        if self.prefill_tokens < 2:
            raise ConfigError("prefill_tokens=1 leaves no prefill profile; give at least 2.")
        if self.workspace_mib < 0:
            raise ConfigError(f"workspace_mib={self.workspace_mib}; it must not be negative.")

        if not 0 <= self.optimization_level <= 5:
            raise ConfigError(f"optimization_level={self.optimization_level}; it lies in 0..5.")

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> TrtOptions:
        """The options that a manifest records, none in an empty one, with `changes`.

        Raises:
            ConfigError: It records options that this version does not know.
        """
        check_types(
            cls, {k: v for k, v in manifest.get("trt", {}).items() if k != "passes"}, "manifest.json: trt", ConfigError
        )
        recorded = {
            k: tuple(v) if isinstance(v, list) else v for k, v in manifest.get("trt", {}).items() if k != "passes"
        }
        try:
            return cls(**{**recorded, **changes})
        except TypeError as error:
            raise ConfigError(f"the manifest has TensorRT options that this version does not know: {error}.") from error

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures asked for, or the target's defaults."""
        return self.archs or (ARCHS if self.target == "trt" else RTX_ARCHS)
