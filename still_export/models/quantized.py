"""Quantized checkpoints of others: GPTQ, AWQ, compressed-tensors, FP8, NVFP4 and bitsandbytes' NF4, their codes and scales as they are.

What lies beside a weight in the file tells its form:

| maker | tensors of a linear layer [N outputs, K inputs] |
|---|---|
| GPTQ | `qweight` int32 [K * bits / 32, N], `qzeros` int32 [G, N * bits / 32], `scales` [G, N], `g_idx` [K] |
| AWQ | `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], eight outputs in the order of AWQ_ORDER, `scales` [G, N] |
| compressed-tensors | `weight_packed` int32 [N, K * bits / 32] or `weight` int8 [N, K], `weight_scale` [N, G], `weight_zero_point` |
| FP8 | `weight` float8_e4m3fn [N, K], `weight_scale` or `weight_scale_inv`: one, [N, 1], or of blocks [N / b, K / c] |
| NVFP4 | `weight_packed` or `weight` uint8 [N, K / 2], `weight_scale` float8_e4m3fn [N, K / 16], one more scale for all |
| bitsandbytes NF4 | `weight` uint8, `weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4` |

A weight is scale * (code - zero point), G groups of K / G inputs sharing both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError
from still_export.models.blocks import BlockWeight, pack
from still_export.models.weights import Deferred, SourceBlocks

METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "modelopt", "bitsandbytes")
"""Values of quant_method that are read."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each group of eight that lies at a place of a word, the lowest four bits first."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of e2m1 codes."""
NF4_STATE = "quant_state.bitsandbytes__nf4"

Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class Grouped:
    """Codes of a weight [N, K] in groups along the inputs.

    Args:
        codes: Makes them, uint8 [N, K].
        scales: Makes them, [N, G].
        zero_points: Makes them, uint8 [N, G]; None: the middle, 2^(bits - 1).
        order: Group of each input [K], where they are not in order (act-order).
    """

    shape: tuple[int, int]
    bits: int
    groups: int
    codes: Callable[[], Tensor]
    scales: Callable[[], Tensor]
    zero_points: Callable[[], Tensor] | None
    order: Tensor | None = None

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.groups

    def blocks(self) -> BlockWeight:
        """The same in blocks; groups are in order."""
        codes = self.codes().reshape(self.shape[0], self.groups, self.size).numpy()
        zero = None if self.zero_points is None else pack(self.zero_points().numpy(), self.bits)
        return BlockWeight(pack(codes, self.bits), self.scales().float().numpy(), zero, self.bits)

    def values(self) -> Tensor:
        """The weight, float32."""
        group = torch.arange(self.shape[1]) // self.size if self.order is None else self.order.long()
        zero = 1 << (self.bits - 1) if self.zero_points is None else self.zero_points().float()[:, group]
        return (self.codes().float() - zero).mul_(self.scales().float()[:, group])


def dequantizing(tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str) -> dict[str, Tensor | Deferred]:
    """Tensors of a quantized checkpoint by the names that the model has: low-bit ones as float32 that is made when it is read, with their
    codes where a graph can hold them; others as they are.

    Args:
        tensors: As the files have them.
        config: `quantization_config` of config.json.
        origin: The folder, for messages.

    Raises:
        CheckpointError: The method is unknown, or tensors of a weight are missing or do not fit each other; the message names it.
    """
    method = config.get("quant_method", "unknown")
    if method not in METHODS:
        raise CheckpointError(
            f"{origin} says that its weights are quantized by {method}; {', '.join(METHODS)} are read. Use another form of the model: "
            "one of these, float32, float16 or bfloat16, or a GGUF file."
        )
    found: dict[str, Tensor | Deferred] = {}
    taken: set[str] = set()
    for name in tensors:
        for end, read in READERS.items():
            module = name.removesuffix(end)
            if module == name:
                continue
            parts = {key[len(module) + 1 :]: tensors[key] for key in _beside(module, tensors)}
            try:
                weight = read(parts, config)
            except (KeyError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
                lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                raise CheckpointError(
                    f"{module} in {origin} is no layer of {method}: {lacks}. The files are damaged or incomplete; fetch them again."
                ) from error
            if weight is not None:
                found[f"{module}.weight"] = weight
                taken.update(key for key in _beside(module, tensors) if not key.endswith(".bias"))
                break
    if not found:
        raise CheckpointError(
            f"config.json of {origin} says that weights are quantized ({method}), and none of them is. If they were dequantized, take "
            "quantization_config out of it; else fetch the model again."
        )
    return {**{name: tensor for name, tensor in tensors.items() if name not in taken}, **found}


def _beside(module: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    return (f"{module}.{end}" for end in PARTS if f"{module}.{end}" in tensors)


def _deferred(shape: tuple[int, ...], read: Callable[[], Tensor]) -> Deferred:
    return Deferred(torch.Size(shape), torch.float32, read)


def _grouped(weight: Grouped) -> Deferred:
    """Its values, with blocks where a graph can hold them."""
    outputs, inputs = weight.shape
    if weight.groups < 1 or inputs % weight.groups or weight.size % 8:
        raise ValueError(f"{weight.groups} groups do not divide {inputs} inputs into multiples of 8")
    blocks = None
    if weight.order is None and weight.bits in (4, 8) and (weight.bits == 4 or weight.zero_points is None):
        blocks = SourceBlocks(weight.bits, False, False, weight.blocks, weight.size, weight.zero_points is not None)
    return Deferred(torch.Size((outputs, inputs)), torch.float32, weight.values, blocks, weight.bits)


def _check(name: str, tensor: Tensor, *shape: int) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, and {list(shape)} is expected")
    return tensor


def _order(stored: Tensor | None, inputs: int, groups: int) -> Tensor | None:
    """Group of each input; None: they are in order."""
    if stored is None or not 0 < groups <= inputs:
        return None  # of too many groups or none `_grouped` says so
    _check("g_idx", stored, inputs)
    if int(stored.min()) < 0 or int(stored.max()) >= groups:
        raise ValueError(f"g_idx names groups outside 0..{groups - 1}")
    return None if torch.equal(stored.long(), torch.arange(inputs) // (inputs // groups)) else stored


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of `bits` in int32 words [..., W], the lowest first: uint8 [..., W * 32 / bits]."""
    raw = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 8:
        return torch.from_numpy(raw.copy())
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return torch.from_numpy(fields.reshape(*raw.shape[:-1], -1))


def _gptq(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    bits = int(config["bits"])
    if bits not in (2, 4, 8):
        raise ValueError(f"{bits} bits, where 2, 4 and 8 are read")
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    inputs, outputs, groups = packed.shape[0] * 32 // bits, packed.shape[1], scales.shape[0]
    _check("scales", scales, groups, outputs)
    _check("qzeros", zeros, groups, outputs * bits // 32)
    order = _order(parts.get("g_idx"), inputs, groups)
    # The first format of files stores zero points less one; they wrap around.
    more = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def zero_points() -> Tensor:
        return ((_fields(zeros, bits) + more) & ((1 << bits) - 1)).t().contiguous()

    middle = bool(config.get("sym")) and bool((zero_points() == 1 << (bits - 1)).all())
    return _grouped(
        Grouped(
            (outputs, inputs),
            bits,
            groups,
            lambda: _fields(packed.t(), bits),
            lambda: scales.t().contiguous(),
            None if middle else zero_points,
            order,
        )
    )


def _awq(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    if int(config.get("bits", config.get("w_bit", 4))) != 4:
        raise ValueError("other bits than 4, which AWQ's kernels do not have")
    inputs, outputs, groups = packed.shape[0], packed.shape[1] * 8, scales.shape[0]
    _check("scales", scales, groups, outputs)
    _check("qzeros", zeros, groups, outputs // 8)
    places = torch.argsort(torch.tensor(AWQ_ORDER))

    def unpacked(words: Tensor) -> Tensor:
        """[N, rows of words]."""
        return _fields(words, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2).t().contiguous()

    codes, zero = partial(unpacked, packed), partial(unpacked, zeros)
    return _grouped(Grouped((outputs, inputs), 4, groups, codes, lambda: scales.t().contiguous(), zero))


def _packed(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    """compressed-tensors' packed integers, or NVFP4."""
    packed, scales = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype == torch.uint8:
        return _fp4(packed, scales, 1 / parts["weight_global_scale"].float())
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    per_word = inputs / packed.shape[1]
    bits = {8: 4, 4: 8, 16: 2}.get(int(per_word) if per_word == int(per_word) else 0, 0)
    if not bits:
        raise ValueError(
            f"weight_packed has {packed.shape[1]} words for {inputs} inputs, which is no form of 2, 4 or 8 bits"
        )
    _check("weight_packed", packed, outputs, inputs * bits // 32)
    groups = scales.shape[-1]
    _check("weight_scale", scales, outputs, groups)
    zero = None
    if (stored := parts.get("weight_zero_point")) is not None:
        if stored.dtype == torch.int32:
            _check("weight_zero_point", stored, -(-outputs * bits // 32), groups)
            zero = lambda: _fields(stored.t(), bits)[:, :outputs].t().contiguous()  # noqa: E731
        else:
            _check("weight_zero_point", stored, outputs, groups)
            zero = lambda: (stored.short() + (1 << (bits - 1))).to(torch.uint8)  # noqa: E731
    order = _order(parts.get("weight_g_idx"), inputs, groups)
    return _grouped(
        Grouped((outputs, inputs), bits, groups, lambda: _fields(packed, bits), lambda: scales, zero, order)
    )


def _stored(parts: Parts, config: Mapping[str, Any]) -> Deferred | None:
    """A `weight` of a narrow type with scales beside it; None: it has none."""
    weight = parts["weight"]
    if weight.dtype == torch.uint8 and NF4_STATE in {name.removeprefix("weight.") for name in parts}:
        return _nf4(parts)
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if scale is None:
        if weight.dtype in (torch.int8, torch.uint8) or weight.dtype.itemsize == 1:
            raise KeyError("weight_scale")
        return None
    if weight.dtype == torch.uint8:
        return _fp4(weight, scale, parts["weight_scale_2"].float())
    outputs, inputs = weight.shape
    if weight.dtype == torch.int8:
        if parts.get("weight_zero_point") is not None and bool(parts["weight_zero_point"].any()):
            raise ValueError("it has zero points of 8 bits, which are not read")
        scale = scale.reshape(-1, 1).expand(outputs, 1) if scale.numel() in (1, outputs) else scale
        _check("weight_scale", scale, outputs, scale.shape[-1])
        codes = lambda: (weight.short() + 128).to(torch.uint8)  # noqa: E731
        return _grouped(Grouped((outputs, inputs), 8, scale.shape[1], codes, scale.contiguous, None))
    if scale.numel() not in (1, outputs):
        high, wide = config.get("weight_block_size") or _block_size(config)
        _check("scales of blocks", scale, -(-outputs // high), -(-inputs // wide))
    elif scale.numel() == outputs:
        scale, high, wide = scale.reshape(outputs, 1), 1, inputs
    else:
        scale, high, wide = scale.reshape(1, 1), outputs, inputs

    def values() -> Tensor:
        spread = scale.float().repeat_interleave(high, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]
        return weight.float() * spread

    return _deferred((outputs, inputs), values)


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Of FP8 in blocks, as compressed-tensors says it."""
    for group in config.get("config_groups", {}).values():
        if isinstance(size := (group.get("weights") or {}).get("block_structure"), list) and len(size) == 2:
            return int(size[0]), int(size[1])
    raise KeyError("weight_block_size, in quantization_config")


def _fp4(packed: Tensor, scales: Tensor, factor: Tensor) -> Deferred:
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    _check("weight_scale", scales, outputs, inputs // 16)

    def values() -> Tensor:
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
        return FP4[codes.long()] * (scales.float() * factor).repeat_interleave(16, 1)

    return _deferred((outputs, inputs), values)


def _nf4(parts: Parts) -> Deferred:
    state = json.loads(bytes(parts[f"weight.{NF4_STATE}"].numpy()).decode())
    packed, table, most = parts["weight"], parts["weight.quant_map"].float(), parts["weight.absmax"]
    shape, size = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
    count = int(np.prod(shape))
    if packed.numel() * 2 != count + count % 2 or most.numel() != -(-count // size):
        raise ValueError(f"weight and absmax have {packed.numel()} and {most.numel()} numbers for {count} weights")

    def values() -> Tensor:
        scale = most.float()
        if "weight.nested_absmax" in parts:
            spread = parts["weight.nested_absmax"].float().repeat_interleave(int(state["nested_blocksize"]))
            scale = parts["weight.nested_quant_map"].float()[most.long()] * spread[: len(most)] + state["nested_offset"]
        codes = torch.stack([packed >> 4, packed & 15], -1).flatten()[:count]
        return (table[codes.long()] * scale.repeat_interleave(size)[:count]).reshape(shape)

    return _deferred(shape, values)


def _words(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    return (_awq if config["quant_method"] == "awq" else _gptq)(parts, config)


READERS: dict[str, Callable[[Parts, Mapping[str, Any]], Deferred | None]] = {
    ".qweight": _words,
    ".weight_packed": _packed,
    ".weight": _stored,
}
"""By what the tensor is called that a low-bit weight always has."""
PARTS = (
    *("weight", "bias", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("weight_scale_inv", "weight_scale_2", "input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale"),
    *(f"weight.{end}" for end in ("absmax", "quant_map", "nested_absmax", "nested_quant_map", NF4_STATE)),
)
"""Names behind a layer's own."""
