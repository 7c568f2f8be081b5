"""Options of a TensorRT package. In their own file, so that building and running do not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from still_export.errors import ConfigError
from still_export.options import check_options, check_types, option
from still_export.targets.trt.plugins import CPUS

PREFILL_TOKENS = 2048
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
RTX_ARCHS = ("sm_86", "sm_89", "sm_120")
RTX = "trt-rtx"
GPUS = "GPUs to compile kernels for."
"""The help text of ONNX Runtime's targets as well."""
WORKAROUND = "norm_in_place"
"""A pass that only graphs for TensorRT 8.6 went through."""
QUANTIZED_MAJOR = 10
"""First TensorRT that reads weights in blocks of 4 bits with half-precision scales. 8.6 has only 8 bits, with float32 scales and weakly
typed, which no engine here has been proven with."""


@dataclass(frozen=True)
class TrtOptions:
    """Options of a TensorRT package.

    Args:
        archs: Architectures to compile kernels (trt) or engines (trt-rtx) for; (): the target's defaults.
        optimization_level: Effort of TensorRT's builder, 0 to 5.

    module: Python module of the builder. engine: File of the engine. builds_here: Built for this machine's GPU with this project's kernels.
    """

    module: ClassVar[str] = "tensorrt"
    engine: ClassVar[str] = "engine.plan"
    builds_here: ClassVar[bool] = True
    usual: ClassVar[tuple[str, ...]] = ARCHS

    target: str = field(default="trt", metadata={"choices": ("trt",)})
    archs: tuple[str, ...] = option((), GPUS, flag="--arch", commas=True, shown=",".join(ARCHS))
    prefill_tokens: int = option(PREFILL_TOKENS, "Tokens of one prefill call.", least=2)
    batch: int = option(1, "Most sequences at once; 8.6 builds for one in half the time.", least=1)
    version_compatible: bool = option(False, "Build engines that later versions run, too.")
    strip_weights: bool = option(False, "Build engines without weights (TensorRT 10 and later).")
    workspace_mib: int = option(0, "Limit of TensorRT's workspace, MiB.", flag="--workspace", shown="none", least=0)
    optimization_level: int = field(default=3, metadata={"least": 0, "below": 6})
    tensorrt_include: tuple[str, ...] = option(
        (), "Folder of NvInfer.h to compile the plugin for; repeatable.", shown="the usual places"
    )
    cpu: str | None = option(
        None, "Processors of the plugins and still_run: x86_64 or aarch64.", shown="this machine's", choices=CPUS
    )
    cuda_include: Path | None = option(
        None, "Folder of cuda_runtime_api.h, which NvInfer.h includes.", shown="the usual places, NVIDIA's packages"
    )

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any], **changes: Any) -> Self:
        """The options recorded in a manifest of this target (another's: the defaults), with `changes`.

        Raises:
            ConfigError: It has options that this version does not know.
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
        """The requested architectures, or the target's defaults."""
        return self.archs or self.usual


@dataclass(frozen=True)
class RtxOptions(TrtOptions):
    """Options of a TensorRT-RTX package."""

    module = "tensorrt_rtx_bindings"
    engine = "engine-rtx.plan"
    builds_here = False
    usual = RTX_ARCHS

    target: str = field(default=RTX, metadata={"choices": (RTX,)})
    archs: tuple[str, ...] = option((), GPUS, flag="--arch", commas=True, shown=",".join(RTX_ARCHS))
