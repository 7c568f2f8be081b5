"""Options of a TensorRT package; separate from the export, so that building and running need no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from still_export.errors import ConfigError
from still_export.options import check_options, check_types, option

PREFILL_TOKENS = 2048
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
RTX_ARCHS = ("sm_86", "sm_89", "sm_120")
RTX = "trt-rtx"
GPUS = "GPUs to compile kernels for."
"""Help text shared with targets of ONNX Runtime."""
WORKAROUND = "norm_in_place"
"""A pass that only graphs for TensorRT 8.6 have."""
QUANTIZED_MAJOR = 10
"""First TensorRT that reads weights in blocks of 4 bits and half precision scales. 8.6 has 8 bits alone, with scales in float32 and weakly
typed, which no engine here has shown."""


@dataclass(frozen=True)
class TrtOptions:
    """What a TensorRT package is asked for beyond the model.

    Args:
        archs: Architectures that kernels (trt) or engines (trt-rtx) are compiled for; empty = the defaults of the target.
        optimization_level: Effort of TensorRT's builder, 0 to 5.

    module: Python module of the builder. engine: File of the engine. builds_here: For the GPU of this machine, by kernels of this project.
    """

    module: ClassVar[str] = "tensorrt"
    engine: ClassVar[str] = "engine.plan"
    builds_here: ClassVar[bool] = True
    usual: ClassVar[tuple[str, ...]] = ARCHS

    target: str = field(default="trt", metadata={"choices": ("trt",)})
    archs: tuple[str, ...] = option((), GPUS, flag="--arch", commas=True, shown=",".join(ARCHS))
    prefill_tokens: int = option(PREFILL_TOKENS, "Tokens of one prefill call.", least=2)
    batch: int = option(1, "Most sequences at once; 8.6 builds for one in half the time.", least=1)
    version_compatible: bool = option(False, "Engines that later versions run too.")
    strip_weights: bool = option(False, "Engines without weights (TensorRT 10 and later).")
    workspace_mib: int = option(0, "Limit of TensorRT's workspace, MiB.", flag="--workspace", shown="none", least=0)
    optimization_level: int = field(default=3, metadata={"least": 0, "below": 6})
    tensorrt_include: tuple[str, ...] = option(
        (), "Folder of NvInfer.h to compile the plugin for; repeatable.", shown="the usual places"
    )
    cuda_include: Path | None = option(
        None, "Folder of cuda_runtime_api.h, which NvInfer.h includes.", shown="the usual places, NVIDIA's packages"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> Self:
        """The options that a manifest of this target records, the defaults of another's, with `changes`.

        Raises:
            ConfigError: It records options that this version does not know.
        """
        of_this = manifest.get("target") == cls.target
        recorded = {k: v for k, v in manifest.get("trt", {}).items() if k != "passes"} if of_this else {}
        check_types(cls, recorded, "manifest.json: trt", ConfigError)
        try:
            return cls(**{**{k: tuple(v) if isinstance(v, list) else v for k, v in recorded.items()}, **changes})
        except TypeError as error:
            raise ConfigError(
                f"the manifest has TensorRT options that this version does not know: {error}. Export again."
            ) from error

    @property
    def architectures(self) -> tuple[str, ...]:
        """The architectures asked for, or the target's defaults."""
        return self.archs or self.usual


@dataclass(frozen=True)
class RtxOptions(TrtOptions):
    """Options of TensorRT-RTX."""

    module = "tensorrt_rtx_bindings"
    engine = "engine-rtx.plan"
    builds_here = False
    usual = RTX_ARCHS

    target: str = field(default=RTX, metadata={"choices": (RTX,)})
    archs: tuple[str, ...] = option((), GPUS, flag="--arch", commas=True, shown=",".join(RTX_ARCHS))
