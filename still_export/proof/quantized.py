"""What quantized weights and activations cost compared with the original model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError
from still_export.graph.options import ExportOptions
from still_export.graph.quantization.policy import rounds_activations
from still_export.graph.quantization.read import quantized_names, round_activations, with_package_weights
from still_export.models.load import Source, load_tokenizer
from still_export.models.read.source import find_source
from still_export.proof.chains import Chain, nothing
from still_export.proof.layerwise import LayerwiseModel

LOSS_TOKENS = 2048
"""Tokens of a text, from its beginning."""
RANDOM_TOKENS = 64


@dataclass(frozen=True)
class QuantizationLoss:
    """What quantization costs against the original in float32, teacher-forced: mean KL in nats, and bits a byte of a text or None.

    `kl` and `bits_per_byte` are of the package's weights, `kl_rounded` of those with activations rounded to 8 bits, where its linear
    layers round them, else None.
    """

    text: str | None
    tokens: int
    kl: float
    kl_rounded: float | None
    bits_per_byte: float | None
    original_bits_per_byte: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.tokens:,} {'tokens of ' + self.text if self.text else 'random tokens'}"
        line = f"quantization loss on {where}: KL {self.kl:.4f} nats"
        if self.kl_rounded is not None:
            line += f" ({self.kl_rounded:.4f} with activations rounded to 8 bits)"
        if self.bits_per_byte is None or self.original_bits_per_byte is None:
            return line
        change = 100 * (self.bits_per_byte / self.original_bits_per_byte - 1)
        return f"{line}; bits per byte {self.bits_per_byte:.4f}, unquantized {self.original_bits_per_byte:.4f} ({change:+.2f}%)"


def quantization_loss_of(
    options: ExportOptions, folder: Path, manifest: dict[str, Any], text: Path | None = None, device: str = "cpu"
) -> QuantizationLoss:
    """The quantization loss of a package.

    Args:
        text: UTF-8 text; None: random tokens, which no model expects.

    Raises:
        ConfigError: The text cannot be read, or has too few tokens.
    """
    tokens, size = _tokens(options, manifest, text)
    source = find_source(options)
    quantized = with_package_weights(source, folder, manifest, device)

    def round_inputs(model: Any) -> None:
        quantization = manifest["quantization"]
        round_activations(model, quantized_names(folder), quantization["block_size"], quantization["scheme"])

    original, weights = (_log_probabilities(each, tokens, device) for each in (source, quantized))
    bits = [None if text is None else _bits(p, tokens) / size for p in (weights, original)]
    kl, kl_rounded = _kl(original, weights), None
    if rounds_activations(manifest):
        del weights
        kl_rounded = _kl(original, _log_probabilities(quantized, tokens, device, round_inputs))
    return QuantizationLoss(None if text is None else str(text), tokens.shape[1], kl, kl_rounded, *bits)


def _tokens(options: ExportOptions, manifest: dict[str, Any], text: Path | None) -> tuple[Tensor, int]:
    """Tokens [1, T], and the bytes of all but the first."""
    capacity = manifest["capacity"]
    most = capacity["capacity_tokens"] if capacity["bounded"] else LOSS_TOKENS
    if text is None:
        count, vocabulary = min(RANDOM_TOKENS, most), manifest["model"]["vocab_size"]
        return torch.from_numpy(np.random.default_rng(0).integers(0, vocabulary, (1, count))), 0
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text: {error}.") from error
    tokenizer = load_tokenizer(options.model, options.revision)
    ids = tokenizer(content, add_special_tokens=False)["input_ids"][: min(LOSS_TOKENS, most)]
    if len(ids) < 2:
        raise ConfigError(f"--text {text} has {len(ids)} tokens; two at least are needed.")
    return torch.tensor([ids]), len(tokenizer.decode(ids[1:]).encode())


def _log_probabilities(
    source: Source, tokens: Tensor, device: str, prepare: Callable[[Any], None] | None = None
) -> Tensor:
    """Of every token after each position, [T, V]; one layer's weights are in memory at a time."""
    layers = LayerwiseModel({"model": {"all_logits": True}}, source, prepare=prepare, device=device)
    feed = layers.empty_feed(1, tokens.shape[1])
    feed |= {"input_ids": tokens.numpy(), "new_tokens": np.array([tokens.shape[1]])}
    logits = torch.from_numpy(layers.run([Chain.of(feed, nothing)])[0][0]["logits"][0])
    for row in logits:
        row -= row.logsumexp(-1)
    return logits


def _kl(original: Tensor, other: Tensor) -> float:
    rows = [float((a.exp() * (a - b)).sum()) for a, b in zip(original, other, strict=True)]
    return sum(rows) / len(rows)


def _bits(log_probabilities: Tensor, tokens: Tensor) -> float:
    """Bits of all tokens but the first."""
    return -float(log_probabilities[:-1].gather(1, tokens[0, 1:, None]).sum()) / math.log(2)
