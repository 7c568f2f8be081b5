"""Read back the weights that a quantized package computes with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from still_export.graph.quantization.forms import CODES, FLOAT8_CODES, K_QUANT, LEAST, MIDDLE, ORDER, ROWS, SUMS
from still_export.graph.quantization.policy import FLOAT8
from still_export.mixers.experts.module import Stacked
from still_export.models.ahead import weight_name
from still_export.models.read.blocks import BlockWeight, Float8Weight, unpack
from still_export.models.read.super_blocks import from_tiles
from still_export.models.read.weights import TOGETHER, Deferred, Pair, Weight, value_of
from still_export.package.files import HEAD, MODEL
from still_kernels.matmul_nbits.spec import TILE

if TYPE_CHECKING:
    from still_export.models.load import Source
    from still_export.models.read.source import ModelOptions


WHOLE = slice(None)
TOGETHER_READ = 1 << 22
"""Numbers that one thread decodes at a time."""


def package_model(
    options: ModelOptions,
    folder: Path,
    manifest: dict[str, Any],
    rounded: bool = False,
) -> Any:
    """The PyTorch model with the quantized weights of the package in `folder`, if there are any.

    Args:
        options: Those of the export; the model has their `dtype`.
        rounded: Matrix products round their inputs to 8 bits, as on CPUs in the runtime.
    """
    model = package_source(options, folder, manifest).read()
    if rounded:
        round_activations(
            model, quantized_names(folder), manifest["quantization"]["block_size"], manifest["quantization"]["scheme"]
        )
    return model


def package_source(
    options: ModelOptions,
    folder: Path,
    manifest: dict[str, Any],
    pairs: Mapping[str, tuple[Pair, ...]] = MappingProxyType({}),
    device: str = "cpu",
    rounded: torch.dtype | None = None,
) -> Source:
    """The source of `package_model`; it reads weights lazily.

    Args:
        pairs: LoRA pairs of an adapter loaded at run time, by weight.
        device: Device of quantized weights.
        rounded: Round scale * zero point to this type, as ONNX Runtime's CUDA provider does; None: do not round.
    """
    from still_export.models.read.source import find_source

    source = _with_blocks(find_source(options), folder / MODEL, manifest, device, rounded)
    weights: dict[str, Weight] = dict(source.weights)
    for name, own in pairs.items():
        weight = weights[name]
        weights[name] = Deferred(weight.shape, weight.dtype, partial(_with_pairs, weight, own))
    return replace(source, weights=weights)


def with_package_weights(source: Source, folder: Path, manifest: dict[str, Any], device: str = "cpu") -> Source:
    """`source` with the package's quantized weights, if there are any."""
    return _with_blocks(source, folder / MODEL, manifest, device)


def with_package_head(source: Source, folder: Path, manifest: dict[str, Any]) -> Source:
    """The same for the MTP head of `source`, if the package has one."""
    assert source.ahead is not None
    return _with_blocks(source.ahead(), folder / HEAD, manifest)


def _with_blocks(
    source: Source, graph: Path, manifest: dict[str, Any], device: str = "cpu", rounded: torch.dtype | None = None
) -> Source:
    if manifest.get("quantization") is None:
        return source
    names = {weight_name(name, graph.name == HEAD): name for name in source.weights}
    sizes = {name: int(source.weights[own].shape[0]) for name, own in names.items() if source.weights[own].shape}
    readers = row_readers(graph, manifest["quantization"]["block_size"], sizes, device, rounded)
    weights: dict[str, Weight] = dict(source.weights)
    for name, read in readers.items():
        known = weights[names[name]]
        rows = partial(_as_type, read, known.shape, known.dtype, device)
        weights[names[name]] = Deferred(known.shape, known.dtype, rows, rows=rows)
    return replace(source, weights=weights)


def quantized_names(folder: Path, graph: str = MODEL) -> dict[str, np.ndarray | None]:
    """Names of a graph's quantized weights, with the order of their inputs in the blocks; None: unchanged."""
    from still_export.graph.weights_file import load_graph

    parts = {name: value.const_value for name, value in load_graph(folder / graph).graph.initializers.items()}
    joined = [n.rpartition(".")[0] for n in parts if n.endswith((".scales", *K_QUANT.values()))]
    orders = {names: None if (o := parts.get(f"{names}.{ORDER}")) is None else o.numpy().copy() for names in joined}
    return {name: order for names, order in orders.items() for name in names.split(TOGETHER)}


def _with_pairs(weight: Weight, pairs: tuple[Pair, ...]) -> Tensor:
    value = value_of(weight)
    added = [pair.scale * value_of(pair.b).float() @ value_of(pair.a).float() for pair in pairs]
    return (value.float() + sum(x.to(value.device) for x in added)).to(value.dtype)


def _as_type(
    read: Callable[[slice], Tensor],
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    rows: slice = WHOLE,
) -> Tensor:
    """Rows of a weight of this shape in `dtype`, decoded by as many threads as PyTorch has."""
    first, last, _ = rows.indices(shape[0])
    found = torch.empty((last - first, *shape[1:]), dtype=dtype, device=device)
    size = max(1, TOGETHER_READ * shape[0] // max(1, math.prod(shape)))

    def fill(start: int) -> None:
        part = slice(start, min(start + size, last))
        found[part.start - first : part.stop - first] = read(part)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for _ in pool.map(fill, range(first, last, size)):
            pass
    return found


def row_readers(
    path: Path,
    block_size: int,
    sizes: Mapping[str, int],
    device: str = "cpu",
    rounded: torch.dtype | None = None,
) -> dict[str, Callable[[slice], Tensor]]:
    """Readers of rows (float32) of a graph's quantized weights, by the model's names.

    `sizes`: outputs of each weight. Plain blocks are decoded on `device`, `rounded` as in `package_source`.
    """
    import onnx_ir as ir

    from still_export.graph.weights_file import load_graph

    parts = {name: value.const_value for name, value in load_graph(path).graph.initializers.items()}
    loading = Lock()  # a tensor maps its file once, at the first access

    def array(name: str) -> np.ndarray:
        with loading:
            return parts[name].numpy()  # type: ignore[union-attr]

    def values(names: str, part: str, axis: int, rows: slice) -> np.ndarray | None:
        tensor = parts.get(f"{names}.{part}")
        if tensor is None:
            return None
        whole = array(f"{names}.{part}")
        if tensor.dtype == ir.DataType.UINT4:  # two numbers a byte, in the order of MatMulNBits
            whole = np.frombuffer(tensor.tobytes(), np.uint8).reshape(len(whole), -1)
        found = whole[(slice(None),) * axis + (rows,)]
        return np.ascontiguousarray(found).view(np.uint8) if found.dtype == np.int32 else found  # words of bytes

    def summed(names: str, start: int, size: int, wanted: slice) -> Tensor:
        rows = slice(*(start + place for place in wanted.indices(size)[:2]))
        total: np.ndarray | int = 0
        signed, floats = values(names, CODES, 1, rows), values(names, FLOAT8_CODES, 0, rows)
        scales = values(names, "scales", 0, rows) if signed is None and floats is None else None
        if floats is not None:
            own = values(names, "scales", 1, rows)
            assert own is not None
            total = Float8Weight(floats.reshape(*own.T.shape, -1), own.T, None, 8).dequantized()
        if signed is not None:
            steps = array(f"{names}.scales").astype(np.float32)
            steps = steps.reshape(-1, steps.shape[-1])[:, None, rows]  # [blocks, 1, N]
            total = signed.astype(np.float32).reshape(len(steps), -1, steps.shape[-1]) * steps
            total = total.reshape(signed.shape).T
        for bits, part in K_QUANT.items():
            if f"{names}.{part}" in parts:
                tiles = slice(rows.start // TILE * TILE, -(-rows.stop // TILE) * TILE)
                numbers = values(names, "numbers", 0, tiles)
                assert numbers is not None
                total = from_tiles(np.ascontiguousarray(array(f"{names}.{part}")[tiles]), numbers, bits)
                total = total[rows.start - tiles.start : rows.stop - tiles.start]
        if scales is not None:
            codes = values(names, "blocks", 0, rows)
            codes = values(names, ROWS, 0, rows) if codes is None else codes
            assert codes is not None
            whole, scales = (
                scales.shape,
                scales.reshape(-1, scales.shape[-1]),
            )  # of experts in a stack as one below another
            packed = codes.reshape(*scales.shape, -1)
            zero_points = values(names, "zero_points", 0, rows)
            zero_points = None if zero_points is None else zero_points.reshape(len(scales), -1)
            blocks = BlockWeight(packed, scales, zero_points, packed.shape[-1] * 8 // block_size)
            plain = not any(f"{names}.{part}" in parts for part in (ORDER, LEAST, "offsets", "outer"))
            if plain and (device != "cpu" or rounded is not None):
                return _dequantized(blocks, device, rounded).reshape(*whole[:-1], -1)
            total = blocks.dequantized().reshape(*whole[:-1], -1)
        if (order := values(names, ORDER, 0, slice(None))) is not None:
            assert isinstance(total, np.ndarray)
            total = total[:, np.argsort(order)]
        offsets, least = values(names, "offsets", 0, rows), values(names, LEAST, 0, rows)
        if least is not None:
            assert scales is not None
            offsets = least.astype(np.float32) + MIDDLE * scales.astype(np.float32)
        if offsets is not None:
            assert isinstance(total, np.ndarray)
            total = total + offsets.astype(np.float32).repeat(block_size, axis=1)
        outer = values(names, "outer", 1, rows)
        if outer is not None:
            inner = values(names, "inner", 0, slice(None))
            if inner is None:
                assert isinstance(total, np.ndarray)
                inner = values(SUMS, str(total.shape[1]), 0, slice(None))
            assert inner is not None
            total = total + outer.astype(np.float32).T @ inner.astype(np.float32).T
        assert isinstance(total, np.ndarray), names
        return torch.from_numpy(np.ascontiguousarray(total))

    def half(name: str, rows: slice) -> Tensor:
        return torch.from_numpy(array(f"{name}.half")[rows].copy()).float()

    readers: dict[str, Callable[[slice], Tensor]] = {}
    for part in parts:
        names, _, kind = part.rpartition(".")
        if kind == "half":
            readers[names] = partial(half, names)
        if kind in ("scales", "outer", *K_QUANT.values()):
            start = 0
            for name in names.split(TOGETHER):
                readers[name] = partial(summed, names, start, sizes[name])
                start += sizes[name]
    return readers


def _dequantized(blocks: BlockWeight, device: str | torch.device, rounded: torch.dtype | None = None) -> Tensor:
    """`BlockWeight.dequantized` on a device, bit for bit unless products with zero points are `rounded`."""
    packed, scales = (
        torch.from_numpy(np.require(x, requirements=("C", "W"))).to(device) for x in (blocks.packed, blocks.scales)
    )
    values = packed if blocks.bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    zero: Tensor | int = 1 << (blocks.bits - 1)
    if blocks.zero_points is not None:
        points = unpack(blocks.zero_points, blocks.bits)[:, : packed.shape[1], None]
        zero = torch.from_numpy(np.ascontiguousarray(points)).to(device)
    steps = scales[..., None].float()
    if rounded is None or not isinstance(zero, Tensor):
        return ((values.float() - zero) * steps).flatten(1)
    return (values.float() * steps - (zero * steps).to(rounded).float()).flatten(1)


def round_activations(
    model: nn.Module,
    names: Mapping[str, np.ndarray | None],
    block_size: int,
    scheme: str = "",
    head: bool = False,
) -> None:
    """Round the inputs of products with the weights `names` to 8 bits: by block like MatMulNBits on CPUs, or by token to e4m3.

    Args:
        names: With the inputs as the blocks have them, None: in order.
        head: The model is a head that guesses tokens ahead.
    """
    eight_bits_of = in_e4m3 if scheme == FLOAT8 else partial(eight_bits, block_size=block_size)
    weights = {weight_name(name, head): weight for name, weight in model.named_parameters()}
    rounded = {id(weights[name]): order for name, order in names.items()}

    def hook(order: np.ndarray | None, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        if order is None:
            return eight_bits_of(inputs[0])
        places = torch.from_numpy(order).to(inputs[0].device)
        return eight_bits_of(inputs[0][..., places])[..., places.argsort()]

    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in rounded:
            module.register_forward_pre_hook(partial(hook, rounded[id(module.weight)]))
        elif isinstance(module, Stacked) and id(module.gate_up) in rounded:
            module.rounded = eight_bits_of


def in_e4m3(x: Tensor) -> Tensor:
    """x [..., K] with each token rounded to e4m3 with its own scale."""
    from still_kernels.dense_matmul.plan import rounded_tokens

    codes, scales = rounded_tokens(x)
    return (codes.float() * scales).to(x.dtype)


def eight_bits(x: Tensor, block_size: int) -> Tensor:
    """x [..., K] with each block of K rounded to 255 steps between plus and minus its largest magnitude."""
    blocks = x.unflatten(-1, (-1, block_size))
    step = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(torch.finfo(x.dtype).tiny)
    return ((blocks / step).round() * step).flatten(-2)
