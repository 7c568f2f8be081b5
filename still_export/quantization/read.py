"""The weights that a quantized package computes with, read back from its graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from still_export.models.blocks import BlockWeight
from still_export.models.weights import Deferred, Weight
from still_export.package.files import MODEL
from still_export.quantization.graph import ROWS

if TYPE_CHECKING:
    from still_export.export.onnx_package import ExportOptions
    from still_export.models.load import Source


def held_model(options: ExportOptions, folder: Path, manifest: dict[str, Any], rounded: bool = False) -> Any:
    """The PyTorch model with the weights of the package in `folder`, which is the original where that is not quantized.

    Args:
        options: What was exported; its `dtype` is the model's.
        folder, manifest: The package.
        rounded: Products round what they read to 8 bits, as the runtime's do on CPUs.
    """
    from still_export.export.onnx_package import find_source

    model = with_held_weights(find_source(options), folder, manifest).read()
    if rounded:
        round_activations(model, held_names(folder), manifest["quantization"]["block_size"])
    return model


def with_held_weights(source: Source, folder: Path, manifest: dict[str, Any]) -> Source:
    """The model `source` with the weights of the package in `folder`, where those are quantized: what its runtime computes with.

    Args:
        source: What was exported, in any type.
        folder: A package of it.
        manifest: Its manifest.
    """
    if manifest.get("quantization") is None:
        return source
    held = _held_weights(folder / MODEL, manifest["quantization"]["block_size"])
    weights: dict[str, Weight] = dict(source.weights)
    for name, read in held.items():
        known = weights[name]
        weights[name] = Deferred(known.shape, known.dtype, partial(_as_type, read, known.dtype))
    return replace(source, weights=weights)


def held_names(folder: Path) -> set[str]:
    """The weights in blocks of the package in `folder`, by the model's names."""
    import onnx_ir as ir

    return {n.removesuffix(".scales") for n in ir.load(folder / MODEL).graph.initializers if n.endswith(".scales")}


def _as_type(read: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return read().to(dtype)


def _held_weights(path: Path, block_size: int) -> dict[str, Callable[[], Tensor]]:
    """Readers of the quantized weights of a graph by the model's names; float32."""
    import onnx_ir as ir

    parts = {name: value.const_value for name, value in ir.load(path).graph.initializers.items()}

    def values(name: str, part: str) -> np.ndarray | None:
        tensor = parts.get(f"{name}.{part}")
        return None if tensor is None else tensor.numpy()

    def blocks(name: str) -> Tensor | int:
        scales = values(name, "scales")
        if scales is None:  # a weight that is its LoRA pairs alone
            return 0
        codes = values(name, "blocks")
        codes = values(name, ROWS) if codes is None else codes
        assert codes is not None
        packed = codes.reshape(*scales.shape, -1)
        bits, offsets = packed.shape[-1] * 8 // block_size, values(name, "offsets")
        transposed = None if offsets is None else offsets.T.astype(np.float32)
        weight = BlockWeight(packed, scales, values(name, "zero_points"), bits, transposed)
        return torch.from_numpy(weight.dequantized())

    def whole(name: str) -> Tensor:
        total = blocks(name)
        for i in count():
            a, b = values(name, f"lora_a{i}"), values(name, f"lora_b{i}")
            if a is None or b is None:
                break
            total = total + torch.from_numpy((a.astype(np.float32) @ b.astype(np.float32)).T)
        assert isinstance(total, Tensor), name
        return total

    def half(name: str) -> Tensor:
        value = parts[f"{name}.half"]
        assert value is not None
        return torch.from_numpy(value.numpy().copy()).float()

    readers: dict[str, Callable[[], Tensor]] = {}
    for part in parts:
        name, _, kind = part.rpartition(".")
        if kind in ("scales", "half", "lora_a0"):
            readers[name] = partial(half if kind == "half" else whole, name)
    return readers


def round_activations(model: nn.Module, names: Iterable[str], block_size: int) -> None:
    """Let the products with the weights `names` round what they read to 8 bits, block by block, as MatMulNBits does on CPUs."""
    weights = dict(model.named_parameters())
    rounded = {id(weights[name]) for name in names}

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return eight_bits(inputs[0], block_size)

    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in rounded:
            module.register_forward_pre_hook(hook)


def eight_bits(x: Tensor, block_size: int) -> Tensor:
    """x [..., K] with each block of K rounded to the 255 steps between minus and plus its largest value."""
    blocks = x.unflatten(-1, (-1, block_size))
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    return ((blocks / step).round() * step).flatten(-2)
