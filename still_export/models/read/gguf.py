"""Reading a GGUF file: configuration, dequantized weights, tokenizer."""

from __future__ import annotations

import functools
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from still_export.errors import CheckpointError, UnsupportedModelError
from still_export.models.read.blocks import BlockWeight, pack
from still_export.models.read.checkpoint import checked, in_range
from still_export.models.read.super_blocks import FORMS, SuperBlocks
from still_export.models.read.weights import Deferred, SourceBlocks

BLOCK = 32
K_BYTES = 144
"""Of a Q4_K block: two numbers, 12 bytes of factors, 128 of codes."""
BLOCKS = {"Q4_0": (4, False, True), "Q4_1": (4, True, True), "Q4_K": (4, True, False), "Q8_0": (8, False, True)}
"""Types whose blocks of 32 are scale and offset of codes, with their bits, whether they have offsets, whether scales are half precision.
The blocks of 32 in a Q4_K block of 256 have scales and offsets that are products of two numbers."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def read_gguf(path: Path, dtype: torch.dtype = torch.float32) -> tuple[str, dict[str, Any], dict[str, Deferred]]:
    """A GGUF file as a plain model.

    Returns:
        The family, the values of its configuration, and its tensors by transformers' names as `dtype`, dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged; when a tensor is read, it has a quantization that cannot be undone.
        UnsupportedModelError: Its architecture or rotary scaling is not covered.
    """
    reader = open_gguf(path)
    family = str(_value(reader, "general.architecture"))
    if family not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} has architecture {family!r}; GGUF files of {', '.join(ARCHITECTURES)} are read. "
            "Use the model's Hugging Face folder if its family is covered."
        )
    names = {tensor.name for tensor in reader.tensors}
    scaling = _value(reader, f"{family}.rope.scaling.type", "none")
    if "rope_freqs.weight" in names or scaling not in ("none", ""):
        what = (
            "a table of rotary frequencies (rope_freqs.weight)"
            if scaling in ("none", "")
            else f"rope scaling {scaling!r}"
        )
        raise UnsupportedModelError(
            f"{path} has {what}, which this reader does not map. Use the model's Hugging Face folder."
        )
    config = _config(reader, family, names)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {}
    for tensor in reader.tensors:
        name = _tensor_name(tensor.name, path)
        paired = family == "llama" and (".q_proj." in name or ".k_proj." in name)
        rotated = (heads if ".q_proj." in name else kv_heads) if paired else None
        shape = torch.Size(int(size) for size in reversed(tensor.shape))
        kind = tensor.tensor_type.name
        blocks = None
        if kind in BLOCKS and len(shape) == 2:
            blocks = SourceBlocks(*BLOCKS[kind], partial(_read_blocks, tensor, name, rotated, path))
        super_blocks = None
        if kind in FORMS and len(shape) == 2:
            super_blocks = SuperBlocks(FORMS[kind][0], partial(_read_rows, tensor, name, rotated, path))
        digits = re.match(r"I?Q(\d)", kind)
        tensors[name] = Deferred(
            shape,
            dtype,
            partial(_read_tensor, tensor, name, dtype, rotated, path),
            blocks,
            int(digits[1]) if digits else 0,
            super_blocks=super_blocks,
        )
    return family, config, tensors


def _read_tensor(tensor: Any, name: str, dtype: torch.dtype, rotated: int | None, path: Path) -> Tensor:
    """A tensor of the file as `dtype`; the rows of `rotated` heads are brought into transformers' order."""
    value = in_range(name, _dequantize(tensor, path), dtype, f" in {path}")
    if rotated is not None:
        value = _unpaired(value, rotated)
    return checked(name, value, None, str(path))


@functools.lru_cache(maxsize=1)
def _reader(open_file: type, path: Path, modified_ns: int, size_bytes: int) -> Any:
    """The file as it is now, read once: tokenizer and weights ask for it one after the other, and a vocabulary takes seconds."""

    class Reader(open_file):  # type: ignore[misc, valid-type]
        """Makes plain arrays of fields: a memory map of NumPy for each of half a million takes four times as long."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: str | None = None) -> np.ndarray:
            kind = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            return np.frombuffer(self.data, kind, int(count), int(offset))

    return Reader(path)


def open_gguf(path: Path) -> Any:
    """The reader of the gguf package.

    Raises:
        CheckpointError: The file is no intact GGUF, or the package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"reading {path} needs the package gguf. Run: pip install 'still-export[gguf]'."
        ) from error
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"it starts with {magic!r}, not b'GGUF'")
        stat = path.stat()
        reader = _reader(gguf.GGUFReader, path, stat.st_mtime_ns, stat.st_size)
        _value(reader, "general.architecture")
        return reader
    except (ValueError, IndexError, KeyError, OSError, OverflowError, MemoryError, RecursionError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise CheckpointError(
            f"{path} ({size:,} bytes) is no intact GGUF file: {error}. It is truncated or damaged; fetch it again."
        ) from error


def _value(reader: Any, name: str, *default: Any) -> Any:
    field = reader.get_field(name)
    if field is None:
        if default:
            return default[0]
        raise KeyError(f"it lacks {name}")
    return field.contents()


def _config(reader: Any, family: str, names: set[str]) -> dict[str, Any]:
    def value(name: str, *default: Any) -> Any:
        return _value(reader, f"{family}.{name}", *default)

    try:
        heads = value("attention.head_count")
        width = value("embedding_length")
        config = {
            "hidden_size": width,
            "intermediate_size": value("feed_forward_length"),
            "num_hidden_layers": value("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": value("attention.head_count_kv", heads),
            "max_position_embeddings": value("context_length"),
            # Stored as float32; the shortest decimal that gives it back is the value that was meant.
            "rms_norm_eps": float(str(np.float32(value("attention.layer_norm_rms_epsilon")))),
            "rope_parameters": {"rope_type": "default", "rope_theta": float(value("rope.freq_base", 10000.0))},
            "vocab_size": int(next(t for t in reader.tensors if t.name == "token_embd.weight").shape[1]),
            "tie_word_embeddings": "output.weight" not in names,
        }
    except (KeyError, StopIteration) as error:
        raise CheckpointError(f"the GGUF file is incomplete: {error}. Fetch it again.") from error
    if not isinstance(config["num_key_value_heads"], int) or not isinstance(heads, int):
        raise UnsupportedModelError(
            "the GGUF file has another head count in each layer; one for all layers is covered."
        )
    head_dim = value("attention.key_length", width // heads)
    if value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"the GGUF file rotates {value('rope.dimension_count')} of {head_dim} channels; all are covered."
        )
    if family != "qwen2":
        config["head_dim"] = head_dim
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    elif head_dim * heads != width:
        raise UnsupportedModelError(f"head_dim={head_dim} with {heads} heads of {width} channels is no Qwen2 model.")
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        config[ours] = _value(reader, f"tokenizer.ggml.{theirs}_token_id", None)
    return config


def _tensor_name(name: str, path: Path) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _PARTS:
        raise UnsupportedModelError(
            f"{path} has the tensor {name}, which has no place in the family. This variant is not covered."
        )
    return f"model.layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def _dequantize(tensor: Any, path: Path) -> Tensor:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        raise CheckpointError(
            f"{tensor.name} in {path} is stored as {tensor.tensor_type.name}, which the gguf package cannot undo. "
            "Use a file with Q4_0, Q4_1, Q5_*, Q8_0, K-quants, F16 or F32."
        ) from error
    shape = [int(size) for size in reversed(tensor.shape)]
    return torch.from_numpy(np.require(values, np.float32, ["C", "W"])).reshape(shape)


def _read_blocks(tensor: Any, name: str, rotated: int | None, path: Path) -> BlockWeight:
    """The blocks of a tensor of BLOCKS, its codes as they are; the rows of `rotated` heads in transformers' order.

    Raises:
        CheckpointError: A scale or an offset is no number.
    """
    kind = tensor.tensor_type.name
    raw = np.asarray(tensor.data).view(np.uint8)
    outputs = int(tensor.shape[1])
    bits, has_offsets, _ = BLOCKS[kind]
    fields = 2 if has_offsets else 1
    blocks = raw.reshape(outputs, -1, K_BYTES if kind == "Q4_K" else 2 * fields + BLOCK * bits // 8)
    head = np.ascontiguousarray(blocks[..., : 2 * fields]).view("<f2").astype(np.float32)
    if not np.isfinite(head).all():
        raise CheckpointError(
            f"{name} in {path} has a scale that is no number. The checkpoint is damaged; use another."
        )
    codes, scales = blocks[..., 2 * fields :], head[..., 0]
    offsets = None
    if kind == "Q8_0":
        packed = (codes.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:  # the low halves are the first 16 codes, the high ones the others
        least = head[..., 1] if has_offsets else None
        if kind == "Q4_K":
            from gguf.quants import Q4_K

            factors, minima = Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
            scales = (scales.reshape(-1, 1) * factors).reshape(outputs, -1)
            least = -(head[..., 1].reshape(-1, 1) * minima).reshape(outputs, -1)
            codes = blocks[..., 16:].reshape(outputs, -1, BLOCK)  # low halves are one block, high ones the next
            packed = pack(np.stack([codes & 15, codes >> 4], axis=2).reshape(outputs, -1, BLOCK), 4)
        else:
            packed = pack(np.concatenate([codes & 15, codes >> 4], axis=-1), 4)
        if least is not None:
            offsets = least + 8 * scales  # MatMulNBits subtracts 8 of each code
    weight = BlockWeight(packed, scales, None, bits, offsets)
    if rotated is None:
        return weight
    return weight.rows(_unpaired(torch.arange(outputs), rotated).numpy())


def _read_rows(tensor: Any, name: str, rotated: int | None, path: Path) -> np.ndarray:
    """The rows of a tensor of FORMS as they are; those of `rotated` heads in transformers' order.

    Raises:
        CheckpointError: A scale is no number.
    """
    rows = np.asarray(tensor.data).view(np.uint8)
    bits, _, size = FORMS[tensor.tensor_type.name]
    numbers = rows.reshape(-1, size)[:, slice(0, 4) if bits == 4 else slice(size - 2, size)]
    if not np.isfinite(np.ascontiguousarray(numbers).view("<f2")).all():
        raise CheckpointError(
            f"{name} in {path} has a scale that is no number. The checkpoint is damaged; use another."
        )
    return rows if rotated is None else rows[_unpaired(torch.arange(len(rows)), rotated).numpy()]


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """Rows of a llama projection from GGUF's rotation of neighbours (2i, 2i+1) to transformers' of halves (i, i + D/2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file; transformers builds it, and the splitting rule of `tokenizer.ggml.pre` is set right."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    reader = open_gguf(path)  # first: it says what transformers would not
    rule = _value(reader, "tokenizer.ggml.pre", "")
    with mock.patch("gguf.GGUFReader", lambda _: reader):  # transformers would read the file once more
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    if rule == "smollm":
        # Every digit is a token of its own, and a space before it stands alone.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
