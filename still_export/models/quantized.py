"""Quantized checkpoints of others: GPTQ, AWQ, AutoRound, compressed-tensors, FP8, NVFP4 and NF4, their codes and scales as they are.

A weight's tensors show its format:

| maker | tensors of a linear layer [N outputs, K inputs] |
|---|---|
| GPTQ, AutoRound | `qweight` int32 [K * bits / 32, N], `qzeros` int32 [G, N * bits / 32], `scales` [G, N], `g_idx` [K] |
| AWQ, AutoRound | `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], eight outputs in the order of AWQ_ORDER, `scales` [G, N] |
| compressed-tensors | `weight_packed` int32 [N, K * bits / 32] or `weight` int8 [N, K], `weight_scale` [N, G], `weight_zero_point` |
| FP8 | `weight` float8_e4m3fn [N, K], `weight_scale` or `weight_scale_inv`: one, [N, 1], or of blocks [N / b, K / c] |
| NVFP4 | `weight_packed` or `weight` uint8 [N, K / 2], `weight_scale` float8_e4m3fn [N, K / 16], one more scale for all |
| MXFP4 | the same, `weight_scale` uint8 [N, K / 32], exponents |
| bitsandbytes | `weight` (bytes, in any type), `weight.absmax`, `weight.quant_map`, `weight.quant_state.bitsandbytes__nf4` or `__fp4` |

A weight is scale * (code - zero point), G groups of K / G inputs sharing both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError, UnsupportedError
from still_export.folders.weights import AUTO_ROUND, METHODS
from still_export.models.read.blocks import BlockWeight, Float8Weight, pack
from still_export.models.read.weights import Deferred, SourceBlocks

OTHERS = "Use another form of the model: one that is read (docs/reference/files.md), float32, float16 or bfloat16, or a GGUF file."
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each group of eight at each place of a word, lowest four bits first."""
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of e2m1 codes."""
FP4_GROUP = 16
"""Inputs of a group of NVFP4."""
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))

Parts = Mapping[str, Tensor]


class _UnreadError(Exception):
    """A valid format that is not supported."""


@dataclass(frozen=True)
class Grouped:
    """Codes of a weight [N, K] in groups along the inputs.

    Args:
        codes: Makes them, uint8 [N, K].
        scales: Makes them, [N, G].
        zero_points: Makes them, uint8 [N, G]; None: the middle, 2^(bits - 1).
        of_input: Group of each input [K], where they are not in order (act-order).
    """

    shape: tuple[int, int]
    bits: int
    groups: int
    codes: Callable[[], Tensor]
    scales: Callable[[], Tensor]
    zero_points: Callable[[], Tensor] | None
    of_input: Tensor | None = None

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.groups

    @cached_property
    def order(self) -> np.ndarray | None:
        """Inputs sorted by group [K]; None: already in order."""
        return None if self.of_input is None else torch.argsort(self.of_input, stable=True).numpy()

    @property
    def stored_bits(self) -> int:
        """Bits of a code in blocks: 4 or 8."""
        return 4 if self.bits <= 4 else 8

    def blocks(self) -> BlockWeight:
        """The weight in blocks, inputs in `order`; codes have `stored_bits`."""
        bits, codes = self.stored_bits, self.codes()
        if self.zero_points is None:
            codes = codes + ((1 << (bits - 1)) - (1 << (self.bits - 1)))
        ordered = codes if self.order is None else codes[:, self.order]
        zero = None if self.zero_points is None else pack(self.zero_points().numpy(), bits)
        packed = pack(ordered.reshape(self.shape[0], self.groups, self.size).numpy(), bits)
        return BlockWeight(packed, self.scales().float().numpy(), zero, bits)

    def values(self) -> Tensor:
        """The weight, float32."""
        group = torch.arange(self.shape[1]) // self.size if self.of_input is None else self.of_input.long()
        zero = 1 << (self.bits - 1) if self.zero_points is None else self.zero_points().float()[:, group]
        return (self.codes().float() - zero).mul_(self.scales().float()[:, group])


def dequantizing(tensors: Mapping[str, Tensor], config: Mapping[str, Any], origin: str) -> dict[str, Tensor | Deferred]:
    """Tensors of a quantized checkpoint by the model's names: low-bit ones as lazy float32, with codes if a graph can store them.

    Raises:
        CheckpointError: Tensors of a weight are missing or do not fit each other; the message names it.
        UnsupportedError: The method, or a weight's form, is not read.
    """
    method = config.get("quant_method", "unknown")
    if method not in METHODS:
        raise UnsupportedError(
            f"{origin} says that its weights are quantized by {method}; {', '.join(METHODS)} are read. {OTHERS}"
        )
    config = _as_packed(config)
    if (what := _further_processing(config)) is not None:
        raise UnsupportedError(
            f"{origin} says that its weights {what}. This form of {method} is not supported. {OTHERS}"
        )
    found: dict[str, Tensor | Deferred] = {}
    taken: set[str] = set()
    for module, parts in _modules(tensors).items():
        reader = next((read for end, read in READERS.items() if end in parts), None)
        if reader is None:
            continue
        unknown = ", ".join(sorted(parts.keys() - PARTS))
        try:
            weight = reader(parts, config)
            if weight is not None and unknown:
                raise _UnreadError(f"{unknown}, which no form that is read has")
        except _UnreadError as error:
            raise _unsupported(module, origin, method, str(error)) from error
        except (KeyError, ValueError, RuntimeError, TypeError, IndexError, AttributeError) as error:
            if unknown:  # another format, with other tensor shapes
                raise _unsupported(module, origin, method, f"{unknown}, which no form that is read has") from error
            lacks = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{module} in {origin} is no layer of {method}: {lacks}. The files are damaged or incomplete; fetch them again."
            ) from error
        if weight is not None:
            found[f"{module}.weight"] = weight
            taken.update(f"{module}.{part}" for part in parts if part != "bias")
    if not found:
        raise CheckpointError(
            f"config.json of {origin} says that weights are quantized ({method}), and none of them is. If they were dequantized, take "
            "quantization_config out of it; else fetch the model again."
        )
    return {**{name: tensor for name, tensor in tensors.items() if name not in taken}, **found}


def _as_packed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """AutoRound's configuration in the terms of the format that it packs in; others as they are."""
    if config["quant_method"] not in AUTO_ROUND:
        return config
    packing = str(config.get("packing_format") or config.get("backend") or "auto_gptq")
    if "awq" in packing:
        return {**config, "quant_method": "awq", "version": "gemm"}
    one_less = "gptq" in packing and "gptqmodel" not in packing
    return {**config, "quant_method": "gptq", "checkpoint_format": "gptq" if one_less else "gptq_v2"}


def _further_processing(config: Mapping[str, Any]) -> str | None:
    """A processing step besides rounding that config.json declares and tensors may not show; None: none."""
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        return f"are sparse ({sparse}, in sparsity_config), where dense ones are read"
    if (config.get("transform_config") or {}).get("config_groups"):
        return "were rotated, and what they multiply is to be (transform_config)"
    if config.get("rotation_config"):
        return "were rotated, and what they multiply is to be (rotation_config)"
    kind = config.get("checkpoint_format") or "gptq"
    if config["quant_method"] == "gptq" and kind not in ("gptq", "gptq_v2"):
        return f"are in the format {kind}, where gptq and gptq_v2 are read"
    return None


def _unsupported(module: str, origin: str, method: str, has: str) -> UnsupportedError:
    return UnsupportedError(f"{module} in {origin} has {has}. This form of {method} is not supported. {OTHERS}")


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors of each module by their names in it."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module = name.rpartition(".weight." if ".weight." in name else ".")[0]
        found.setdefault(module, {})[name.removeprefix(f"{module}.")] = tensor
    return found


def _deferred(shape: tuple[int, ...], read: Callable[[], Tensor], bits: int) -> Deferred:
    return Deferred(torch.Size(shape), torch.float32, read, bits=bits)


def _grouped(weight: Grouped) -> Deferred:
    """Lazy values, with blocks if a graph can store them."""
    outputs, inputs = weight.shape
    if weight.groups < 1 or weight.groups > inputs:
        raise ValueError(f"{weight.groups} groups do not divide {inputs} inputs")
    ragged = inputs % weight.groups or weight.size % 8
    if ragged and weight.of_input is None:
        raise _UnreadError(f"{weight.groups} groups of {inputs} inputs, where groups of equal multiples of 8 are read")
    blocks, of_input, order = None, weight.of_input, weight.order
    if not ragged and (
        of_input is None or torch.equal(torch.bincount(of_input), torch.full((weight.groups,), weight.size))
    ):
        kind = (weight.stored_bits, False, False, weight.blocks, weight.size, weight.zero_points is not None)
        blocks = SourceBlocks(*kind, order)
    return Deferred(torch.Size((outputs, inputs)), torch.float32, weight.values, blocks, weight.bits)


def _check(name: str, tensor: Tensor, *shape: int) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, and {list(shape)} is expected")
    return tensor


def _of_input(parts: Parts, name: str, needed: bool, inputs: int, groups: int) -> Tensor | None:
    """Group of each input; None: in order."""
    stored = parts[name] if needed else parts.get(name)
    if stored is None or not 0 < groups <= inputs:
        return None  # `_grouped` reports too many groups or none
    _check("g_idx", stored, inputs)
    if name == "weight_g_idx" and bool((stored == -1).all()):
        return None  # what compressed-tensors begins with: groups are in order
    if int(stored.min()) < 0 or int(stored.max()) >= groups:
        raise ValueError(f"g_idx names groups outside 0..{groups - 1}")
    named = len(torch.unique(stored))
    if not needed and groups > named == 1:
        return None  # some writers leave it at zero: groups are in order
    if named < groups:
        raise ValueError(f"g_idx names {named} of {groups} groups")
    return None if torch.equal(stored.long(), torch.arange(inputs) // (inputs // groups)) else stored


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned `bits`-bit numbers in int32 words [..., W], lowest first: uint8 [..., W * 32 / bits]."""
    raw = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 8:
        return torch.from_numpy(raw.copy())
    if 8 % bits:  # they cross words
        stream = np.unpackbits(raw, axis=-1, bitorder="little").reshape(*raw.shape[:-1], -1, bits)
        return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little")[..., 0])
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    fields = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return torch.from_numpy(fields.reshape(*raw.shape[:-1], raw.shape[-1] * len(shifts)))


def _gptq(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    # A layer may have its own number of bits, which shows in its zero points.
    mixed = config.get("dynamic") or config.get("extra_config")
    bits = zeros.shape[1] * 32 // packed.shape[1] if mixed else int(config["bits"])
    kind = config.get("checkpoint_format") or "gptq"
    if not 2 <= bits <= 8:
        raise _UnreadError(f"{bits} bits, where 2 to 8 are read")
    inputs, outputs, groups = packed.shape[0] * 32 // bits, packed.shape[1], scales.shape[0]
    _check("scales", scales, groups, outputs)
    _check("qzeros", zeros, groups, outputs * bits // 32)
    of_input = _of_input(parts, "g_idx", bool(config.get("desc_act")), inputs, groups)
    size = int(config.get("group_size") or 0)
    if of_input is None and size > 0 and inputs % size and groups == -(-inputs // size):
        of_input = torch.arange(inputs, dtype=torch.int32) // size  # the last group is shorter
    # The first format stores each zero point minus one. Where fields fill words, it was subtracted from whole words: a zero point of 0
    # borrows from the next.
    one = int(kind == "gptq")
    if config.get("sym") is True and bool((_fields(zeros, bits) == 1 << (bits - 1)).all()):
        one = 0  # symmetric, and stored as in the second format, whatever checkpoint_format says

    def zero_points() -> Tensor:
        if 32 % bits:
            return ((_fields(zeros, bits) + one) & ((1 << bits) - 1)).t().contiguous()
        ones = one * sum(1 << place for place in range(0, 32, bits))
        words = torch.from_numpy((zeros.numpy().view(np.uint32) + np.uint32(ones)).view(np.int32))
        return _fields(words, bits).t().contiguous()

    middle = bool((zero_points() == 1 << (bits - 1)).all())
    return _grouped(
        Grouped(
            (outputs, inputs),
            bits,
            groups,
            lambda: _fields(packed.t(), bits),
            lambda: scales.t().contiguous(),
            None if middle else zero_points,
            of_input,
        )
    )


def _awq(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    packed, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    bits, kind = (
        int(config.get("bits", config.get("w_bit", 4))),
        str(config.get("version", config.get("format", "gemm"))),
    )
    if bits != 4 or kind.lower() != "gemm":
        raise _UnreadError(f"{bits} bits in the format {kind}, where 4 in gemm are read")
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
        whole = _of_fp4(scales)
        return _fp4(packed, whole if scales.dtype == torch.uint8 else whole / parts["weight_global_scale"].float())
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    per_word = inputs / packed.shape[1]
    bits = {8: 4, 4: 8, 16: 2}.get(int(per_word) if per_word == int(per_word) else 0, 0)
    if not bits:
        raise _UnreadError(
            f"{packed.shape[1]} words in weight_packed for {inputs} inputs, where those of 2, 4 and 8 bits are read"
        )
    widths = ((group.get("weights") or {}).get("num_bits") for group in (config.get("config_groups") or {}).values())
    if bits == 8 and 7 in widths:  # a word has four codes of either
        raise _UnreadError("7 bits, where 2, 4 and 8 are read")
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
    of_input = _of_input(parts, "weight_g_idx", False, inputs, groups)
    codes = partial(_fields, packed, bits)
    return _grouped(Grouped((outputs, inputs), bits, groups, codes, lambda: scales, zero, of_input))


def _stored(parts: Parts, config: Mapping[str, Any]) -> Deferred | None:
    """A narrow `weight` with separate scales; None: it has none."""
    weight = parts["weight"]
    if state := next((name for name in STATES if name in parts), None):
        return _table(parts, json.loads(bytes(parts[state].numpy()).decode()))
    scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
    if scale is None:
        if "SCB" in parts:
            raise _UnreadError("8 bits of LLM.int8 (SCB), where those of 4 are read")
        if weight.dtype in (torch.int8, torch.uint8) or weight.dtype.itemsize == 1:
            raise KeyError("weight_scale")
        return None
    if weight.dtype.itemsize > 1:  # compressed-tensors' "dense" format
        raise _UnreadError(
            f"a weight in {str(weight.dtype).removeprefix('torch.')} beside its scale, where codes of 4 or 8 bits have one"
        )
    if weight.dtype == torch.uint8:
        return _fp4(weight, _of_fp4(scale) * parts["weight_scale_2"].float())
    outputs, inputs = weight.shape
    high, wide = _block(scale, outputs, inputs, config)

    def spread(values: Tensor) -> Tensor:
        """Repeat blocks' values for each output, [N, G]."""
        return values.reshape(-(-outputs // high), -1).repeat_interleave(high, 0)[:outputs]

    if weight.dtype == torch.int8:
        signed = parts.get("weight_zero_point")
        zero = None
        if signed is not None and bool(signed.any()):
            _check("weight_zero_point", signed, *scale.shape)
            zero = lambda: (spread(signed).short() + 128).to(torch.uint8)  # noqa: E731
        codes = lambda: (weight.short() + 128).to(torch.uint8)  # noqa: E731
        return _grouped(Grouped((outputs, inputs), 8, -(-inputs // wide), codes, lambda: spread(scale), zero))
    values = lambda: weight.float() * spread(_numbers(scale)).repeat_interleave(wide, 1)[:, :inputs]  # noqa: E731
    if inputs % wide or weight.dtype != torch.float8_e4m3fn:
        return _deferred((outputs, inputs), values, 8)

    def blocks() -> BlockWeight:
        codes = weight.contiguous().view(torch.uint8).reshape(outputs, -1, wide).numpy()
        return Float8Weight(codes, spread(_numbers(scale)).numpy(), None, 8)

    source = SourceBlocks(8, False, False, blocks, wide, float8=True)
    return Deferred(torch.Size((outputs, inputs)), torch.float32, values, source, 8)


def _block(scale: Tensor, outputs: int, inputs: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Outputs and inputs that share a scale."""
    if scale.numel() == 1:
        return outputs, inputs
    size = config.get("weight_block_size") or _block_size(config)
    if size and list(scale.shape) == [-(-outputs // size[0]), -(-inputs // size[1])]:
        return int(size[0]), int(size[1])
    if scale.dim() == 1 or scale.shape[0] == outputs:  # of outputs, or of groups of their inputs
        groups = 1 if scale.dim() == 1 else scale.shape[1]
        if inputs % groups:
            raise _UnreadError(f"{groups} groups of {inputs} inputs, where groups of equal size are read")
        _check("weight_scale", scale, *(outputs, groups)[: scale.dim()])
        return 1, inputs // groups
    if not size:
        raise KeyError("weight_block_size, in quantization_config")
    raise ValueError(
        f"scales of blocks of {size[0]} x {size[1]} have shape {list(scale.shape)} for {outputs} x {inputs} weights"
    )


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Block size as compressed-tensors declares it; None: not declared."""
    for group in config.get("config_groups", {}).values():
        if isinstance(size := (group.get("weights") or {}).get("block_structure"), list) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


def _numbers(scale: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _of_fp4(scale: Tensor) -> Tensor:
    """Scales of e2m1 codes in float32; distinguishes their bytes from integers'."""
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"weight_scale has {scale.dtype}, where e2m1 codes have float8_e4m3fn or exponents in uint8")
    return _numbers(scale)


def _fp4(packed: Tensor, scales: Tensor) -> Deferred:
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    groups = scales.shape[-1]
    _check("weight_scale", scales, outputs, groups)
    size = inputs // groups
    if size not in (FP4_GROUP, 2 * FP4_GROUP) or inputs % groups:
        raise ValueError(f"weight_scale has {groups} groups for {inputs} inputs, where those of 16 and 32 are read")

    def codes() -> Tensor:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()

    def values() -> Tensor:
        return FP4[codes()] * scales.repeat_interleave(size, 1)

    def blocks() -> BlockWeight:
        """Twice the numbers, which are integers, in 8 bits."""
        whole = (2 * FP4 + 128).to(torch.uint8)[codes()]
        return BlockWeight(whole.reshape(outputs, groups, size).numpy(), (scales / 2).numpy(), None, 8)

    return Deferred(
        torch.Size((outputs, inputs)),
        torch.float32,
        values,
        SourceBlocks(8, False, False, blocks, size),
        4,
    )


def _table(parts: Parts, state: Mapping[str, Any]) -> Deferred:
    """bitsandbytes' table of 16 arbitrary numbers."""
    packed = parts["weight"].flatten().view(torch.uint8)  # in any type (bnb_4bit_quant_storage)
    table, most = parts["weight.quant_map"].float(), parts["weight.absmax"]
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

    return _deferred(shape, values, 4)


def _words(parts: Parts, config: Mapping[str, Any]) -> Deferred:
    for name in ("qweight", "qzeros"):
        if parts[name].dtype != torch.int32:
            raise _UnreadError(
                f"{name} in {str(parts[name].dtype).removeprefix('torch.')}, where words of int32 are read"
            )
    return (_awq if config["quant_method"] == "awq" else _gptq)(parts, config)


READERS: dict[str, Callable[[Parts, Mapping[str, Any]], Deferred | None]] = {
    "qweight": _words,
    "weight_packed": _packed,
    "weight": _stored,
}
"""Readers by the tensor that every low-bit weight of the format has."""
PARTS = {
    *("weight", "bias", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("weight_scale_inv", "weight_scale_2", "input_scale", "input_global_scale", "k_scale", "v_scale", "output_scale"),
    *(f"weight.{end}" for end in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")),
    *STATES,
}
"""Suffixes of tensors after a layer's name."""
