"""What an export is asked for; apart from the export, so that lowering a package needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from still_export.errors import ConfigError
from still_export.fields import check_types
from still_export.graph.quantization.policy import DEFAULT_LORA, DEFAULT_METHOD, Layout, Quantization
from still_export.package.files import MANIFEST
from still_graphs.ops import FUSED_OPSET, OPSET

if TYPE_CHECKING:
    from still_export.mixers.config import StillConfig


class Progress(Protocol):
    """Told each step, and of those that count bytes how many are done and how many there are."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None: ...


def silent(step: str, done: int = 0, total: int = 0) -> None:
    """A Progress that tells nobody."""


@dataclass(frozen=True)
class ExportOptions:
    """What an export is asked for; `--config manifest.json` repeats it.

    Args:
        model: Folder, hub id or GGUF file.
        attach_untrained: Give a plain softmax model untrained STILL attention.
        dtype: Of the weights: float32, float16, bfloat16, or auto = as stored, but bfloat16 as float32.
        all_logits: Logits of every position instead of each row's last new token.
        overlays: Adapters or feature maps to add.
        revision: Of a hub id.
        native: Put the kernels for CPUs into the package: True builds them where they are not there yet, None takes those that are there.
        cpu: Processors that they are for, such as "aarch64"; None: this machine's.
        archs: GPUs that its library has kernels for too, such as "sm_90".
        still: Fields of the STILL configuration: those of DEPLOYMENT of any model, others of models that do not carry one.
        prefill_tokens: Tokens of one prefill call; None = what the target takes.
        opset: Of ai.onnx in the graph: 23, or 27, which has linear attention and its convolution as ops of its own; no other domain's
            ops are in the graph then but still's, which have bodies.
        quantize: Scheme of the weights' bits (quantization/policy.py); None: as `dtype` says.
        quantize_method, quantize_block, lora: With it: who rounds, how many weights share a scale, how LoRA pairs are kept.
        adapters: Let products take a LoRA adapter while the package runs (`run --adapter`).
    """

    model: str
    attach_untrained: bool = False
    dtype: str = "auto"
    all_logits: bool = False
    overlays: tuple[str, ...] = ()
    revision: str | None = None
    native: bool | None = None
    cpu: str | None = None
    archs: tuple[str, ...] = ()
    still: dict[str, Any] = field(default_factory=dict)
    prefill_tokens: int | None = None
    opset: int = OPSET
    quantize: str | None = None
    quantize_method: str | None = None
    quantize_block: int | None = None
    lora: str | None = None
    adapters: bool = False

    def __post_init__(self) -> None:
        if self.quantize is None and (self.quantize_method or self.quantize_block or self.lora or self.adapters):
            raise ConfigError("--quantize-method, --quantize-block, --lora and --adapters are for --quantize.")
        if self.prefill_tokens is not None and self.prefill_tokens < 1:
            raise ConfigError(f"prefill_tokens={self.prefill_tokens}; it must be at least 1.")
        if self.opset not in (OPSET, FUSED_OPSET):
            raise ConfigError(f"--opset {self.opset}: graphs are written at opset {OPSET} or {FUSED_OPSET}.")
        if self.opset != OPSET and self.quantize:
            raise ConfigError(f"--opset {self.opset} is not for --quantize, whose products are ONNX Runtime's own op.")
        if self.native is False and (self.archs or self.cpu):
            raise ConfigError(
                "--no-native leaves the kernels out that --arch and --cpu are for; give one or the other."
            )
        if self.archs and self.cpu:
            raise ConfigError("--arch compiles kernels for this kind of machine alone: leave out --cpu.")

    def still_config(self) -> StillConfig | None:
        """The STILL configuration asked for, None where nothing was."""
        from still_export.mixers.config import DEPLOYMENT, StillConfig

        trained = {name: value for name, value in self.still.items() if name not in DEPLOYMENT}
        return StillConfig.from_dict(trained) if trained else None

    def quantization(self, layout: Layout, to: str) -> Quantization | None:
        """How weights are quantized, None: not.

        Args:
            layout: How the target holds them.
            to: The target's name, for messages.

        Raises:
            ConfigError: The scheme, method or block size is unknown, or not one of the target.
        """
        if self.quantize is None:
            return None
        method, lora = self.quantize_method or DEFAULT_METHOD, self.lora or DEFAULT_LORA
        return Quantization(self.quantize, method, self.quantize_block or 0, lora, layout, self.adapters, to)

    def deployment(self) -> dict[str, Any]:
        """What is asked of any model's STILL configuration."""
        from still_export.mixers.config import DEPLOYMENT

        return {name: value for name, value in self.still.items() if name in DEPLOYMENT}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> ExportOptions:
        """The options that a manifest records.

        Raises:
            ConfigError: It records none.
        """
        try:
            values = dict(manifest["config"])
            check_types(cls, values, f"{MANIFEST}: config", ConfigError)
            values |= {name: tuple(values.get(name, ())) for name in ("overlays", "archs")}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{MANIFEST}: config is no export configuration that this version reads: {error}."
            ) from error
