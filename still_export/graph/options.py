"""Options of an export; separate from the export, so that lowering a package needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from still_export.errors import ConfigError
from still_export.graph.quantization.policy import (
    DEFAULT_LORA,
    DEFAULT_METHOD,
    GPTQ,
    Layout,
    Quantization,
    parse_budget,
)
from still_export.mixers.choices import MODEL
from still_export.options import check_options, check_types, option
from still_export.package.files import MANIFEST

if TYPE_CHECKING:
    from still_export.mixers.config import StillConfig


class Progress(Protocol):
    """Called with each step; for steps that count bytes, with the bytes done and in all."""

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None: ...


def silent(step: str, done: int = 0, total: int = 0) -> None: ...


BITS = "Quantization"
"""Group of flags."""


@dataclass(frozen=True)
class ExportOptions:
    """What is exported of a model, for any target. A manifest's `config` records it, and `--config manifest.json` repeats it.

    Args:
        still: Fields of the STILL configuration: those of DEPLOYMENT for any model, others for models without a configuration.

    The others are flags of `still-export export`; see its help. `dtype`: type of the weights; "auto": as stored, but bfloat16 as float32.
    `all_logits`: logits of all tokens; otherwise of each sequence's last new token. `quantize`: scheme of low-bit weights
    (quantization/policy.py); None: weights have type `dtype`.
    """

    model: str
    attach_untrained: bool = option(False, "Give a plain softmax model untrained STILL attention.")
    dtype: str = option(
        "auto",
        "float32, float16, bfloat16, or auto: as stored, but bfloat16 as float32.",
        shown="auto, of engines float16, for browsers float32",
    )
    all_logits: bool = option(False, "Logits of every position, not of the last token.", panel=MODEL)
    overlays: tuple[str, ...] = option(
        (),
        "Adapter to add: any LoRA in PEFT's form, or what `linearize` trained; repeatable.",
        flag="--overlay",
        panel=MODEL,
    )
    revision: str | None = option(None, "Revision of a hub id.", panel=MODEL)
    still: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = option(
        None,
        "Weights in int8, int4 or fp8, by a policy; none: floats.",
        shown="none, of a GGUF file to onnx its own bits",
    )
    quantize_method: str | None = option(
        None, "Who rounds to 4 bits: rtn, or gptq, which reads text.", shown=DEFAULT_METHOD, panel=BITS
    )
    calibrate: tuple[str, ...] = option(
        (), "Text to round by, for gptq and budgets; repeatable.", shown="Python's documentation", panel=BITS
    )
    quantize_budget: str | None = option(
        None, "What bits per byte may grow by, such as +1%; weights that lose most get 8 bits for 4.", panel=BITS
    )
    quantize_block: int | None = option(
        None, "Weights that share a scale: 16 to 256, of engines 64 or 128.", shown="32, of engines 64", panel=BITS
    )
    lora: str | None = option(None, "LoRA pairs of an --overlay: apart or merged.", shown=DEFAULT_LORA, panel=BITS)
    speculate: int = option(
        0, "Tokens that may be guessed in one step, at most a chunk.", shown="none", least=0, panel=MODEL
    )
    vision: bool = option(
        False, "Of a model that sees images: their encoder, vision.onnx, and embeddings as an input.", panel=MODEL
    )
    adapters: bool = option(False, "`run --adapter` may add a LoRA adapter.", panel=BITS)

    def __post_init__(self) -> None:
        if self.quantize == "none":
            object.__setattr__(self, "quantize", None)
        check_options(self)
        if self.speculate and self.all_logits:
            raise ConfigError("--all-logits is not for --speculate, which has logits of the last tokens of a call.")
        if self.vision and (self.speculate or self.calibrates):
            raise ConfigError("--vision is not for --speculate and for rounding by text; export without one of them.")
        if self.quantize is None and (self.quantize_method or self.quantize_block or self.lora or self.adapters):
            raise ConfigError("--quantize-method, --quantize-block, --lora and --adapters are for --quantize.")
        if self.quantize_budget is not None:
            parse_budget(self.quantize_budget)
        if self.calibrates and self.quantize != "int4":
            raise ConfigError(f"--quantize-method {GPTQ} and --quantize-budget are for --quantize int4.")
        if self.calibrate and not self.calibrates:
            raise ConfigError(f"--calibrate is for --quantize-method {GPTQ} and --quantize-budget.")

    @property
    def calibrates(self) -> bool:
        """Whether calibration text is read before weights are rounded."""
        return self.quantize_method == GPTQ or self.quantize_budget is not None

    def still_config(self) -> StillConfig | None:
        from still_export.mixers.config import DEPLOYMENT, StillConfig

        trained = {name: value for name, value in self.still.items() if name not in DEPLOYMENT}
        return StillConfig.from_dict(trained) if trained else None

    def quantization(self, layout: Layout, to: str) -> Quantization | None:
        """How weights are quantized, None: not.

        Raises:
            ConfigError: The scheme, method or block size is unknown, or not one of the target.
        """
        if self.quantize is None:
            return None
        method, lora = self.quantize_method or DEFAULT_METHOD, self.lora or DEFAULT_LORA
        return Quantization(self.quantize, method, self.quantize_block or 0, lora, layout, self.adapters, to)

    def deployment(self) -> dict[str, Any]:
        """Deployment fields of the STILL configuration."""
        from still_export.mixers.config import DEPLOYMENT

        return {name: value for name, value in self.still.items() if name in DEPLOYMENT}

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> ExportOptions:
        """The options that a manifest records.

        Raises:
            ConfigError: It records none.
        """
        try:
            recorded = dict(manifest["config"])  # with the target's choices
            check_types(cls, recorded, f"{MANIFEST}: config", ConfigError)
            values = {entry.name: recorded[entry.name] for entry in fields(cls) if entry.name in recorded}
            return cls(**{**values, **{name: tuple(values.get(name, ())) for name in ("overlays", "calibrate")}})
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{MANIFEST}: config is no export configuration that this version reads: {error}. "
                "Export the model again: still-export MODEL -o DIR"
            ) from error
