"""Definition of still::Attention in PyTorch: inputs, state, and all tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from still_graphs.errors import ShapeError
from still_graphs.spec import CACHE, AttributeValue, OpSpec
from still_kernels.attention.spec import ATTENTION
from still_kernels.codes import dequantized, quantized
from still_kernels.sizes import counts_of
from still_kernels.torch_ops import ByName, call, register


@dataclass(frozen=True)
class Inputs:
    """Tokens and counts of one call; fp16, bf16, fp32 or fp64.

    query: After RoPE, [B, T, H, D].
    key, value: [B, T, HK, D], key after RoPE; query head h uses key/value head h // (H / HK).
    new_tokens: Number of new tokens of each sequence, the rest of T is padding, int [B]; None = T for all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    new_tokens: Tensor | None = None

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    def check(self) -> tuple[int, int]:
        """B and T of a call; ShapeError for a tensor that does not fit."""
        if self.query.dim() != 4 or self.key.dim() != 4:
            shapes = f"{list(self.query.shape)} and {list(self.key.shape)}"
            raise ShapeError(f"query, key: expected [B, T, H, D], got {shapes}.")
        batch, tokens, heads, dim = self.query.shape
        narrow = (batch, tokens, self.key.shape[2], dim)
        for name in ("key", "value"):
            if (shape := tuple(getattr(self, name).shape)) != narrow:
                raise ShapeError(f"{name}: expected {list(narrow)}, got {list(shape)}.")
        if heads % max(narrow[2], 1) or not narrow[2]:
            raise ShapeError(f"query has {heads} heads, which is no multiple of the {narrow[2]} of key.")
        return batch, tokens


@dataclass(frozen=True)
class AttentionState:
    """Keys and values after `length` [B] tokens, [B, HK, N, D] each; position p is in row p. All zeros mean empty.

    With 8-bit rows they are words, [B, HK, N, D / 4] int32, with scales, [B, HK, N] float32 (`still_kernels.codes`).
    """

    key: Tensor
    value: Tensor
    length: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        dim: int,
        rows: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        cache: str = CACHE.choices[0],
    ) -> AttentionState:
        """State of `batch` empty sequences, with room for `rows` tokens of `heads` key/value heads."""
        symbols = {"B": batch, "HK": heads, "N": rows, "D": dim}
        tensors = {
            s.name: torch.zeros(
                s.sizes(symbols), dtype=dtype if s.dtype == "T" else getattr(torch, s.dtype), device=device
            )
            for s in ATTENTION.states_with({CACHE.name: cache})
        }
        return cls(length=torch.zeros(batch, dtype=torch.int64, device=device), **tensors)

    @property
    def rows(self) -> int:
        """N, the capacity in tokens."""
        return self.key.shape[2]

    @property
    def cache(self) -> str:
        """Storage of rows, as in the op's attribute."""
        return CACHE.choices[int(self.key_scale is not None)]  # PyTorch 2.11 traces no bool as an index

    def tensors(self) -> dict[str, Tensor]:
        """The present tensors by name, `length` last."""
        found = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        found["length"] = found.pop("length")
        return found

    def check(self, inputs: Inputs) -> None:
        """Raise ShapeError if a tensor does not fit a call with these inputs."""
        query, key = inputs.query, inputs.key
        symbols = {"B": query.shape[0], "HK": key.shape[2], "N": self.rows, "D": query.shape[3]}
        for spec in ATTENTION.states_with({CACHE.name: self.cache}):
            tensor, expected = getattr(self, spec.name), spec.sizes(symbols)
            # Float16 rows are allowed with wider activations.
            kinds = (query.dtype, torch.float16) if spec.dtype == "T" else (getattr(torch, spec.dtype),)
            if tensor is None or tuple(tensor.shape) != expected or tensor.dtype not in kinds:
                got = "nothing" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
                raise ShapeError(
                    f"state {spec.name}: expected {list(expected)} of {kinds[0]}, got {got}. "
                    "Start from AttentionState.empty."
                )
        if tuple(self.length.shape) != (symbols["B"],):
            raise ShapeError(f"state length: expected [{symbols['B']}], got {list(self.length.shape)}.")


BLOCK = 256
"""Query tokens of one GEMM. With 8,192 keys a mask then has 24 MB for three heads per group, for any prompt length."""


Seen = Callable[[slice, slice, int], Tensor]
"""Function (sequences, tokens, end) -> whether the tokens may read each of the first `end` positions, [B, HK, T, end]. Causality is applied
separately."""
Attend = Callable[[slice, Tensor, Tensor, Tensor, int], Tensor]
"""Replaces `_attend` for given sequences."""
Of = TypeVar("Of", bound=Inputs)
Compute = Callable[[Of, AttentionState, bool], tuple[Tensor, AttentionState]]
"""Function (inputs, state, whether to write into it) -> output [B, T, H, D] and the state after the call."""


def blocked_attention(
    inputs: Inputs,
    state: AttentionState,
    in_place: bool = False,
    seen: Seen | None = None,
    attend: Attend | None = None,
) -> tuple[Tensor, AttentionState]:
    """Causal softmax attention of new tokens to themselves and to the cache. Any split of a sequence gives the same result.

    Args:
        state: State before the call; only filled rows are read.
        in_place: Write into `state`'s keys and values, and return them.
        seen: None: every position up to the token's own.
        attend: Replaces softmax attention.

    Returns:
        output [B, T, H, D], dtype of query, 0 at padding, which affects nothing else; and the state after the call.
    """
    batch, tokens = inputs.check()
    state.check(inputs)
    query = inputs.query
    counts = torch.full((batch,), tokens) if inputs.new_tokens is None else inputs.new_tokens
    both = counts_of(state.length, counts, tokens, state.rows)
    present = {name: x if in_place else x.clone() for name, x in state.tensors().items() if name != "length"}
    alike = len(set(both)) == 1
    outputs = []
    for rows in [slice(None)] if alike else [slice(row, row + 1) for row in range(batch)]:
        length, count = both[rows][0]
        place = (rows, slice(None), slice(length, length + count))
        for name, tensor in (("key", inputs.key), ("value", inputs.value)):
            fresh, scale = tensor[rows, :count].transpose(1, 2), f"{name}_scale"
            if scale in present:
                fresh, present[scale][place] = quantized(fresh)
            present[name][place] = fresh
        keys, values = (_rows(present, name, rows, length + count, query.dtype) for name in ("key", "value"))
        own = query[rows, :count]
        output = (
            attend(rows, own, keys, values, length)
            if attend
            else _attend(own, keys, values, length, seen and partial(seen, rows))
        )
        outputs.append(torch.nn.functional.pad(output, (0, 0, 0, 0, 0, tokens - count)))
    after = torch.tensor([sum(x) for x in both], dtype=state.length.dtype, device=query.device)
    output = torch.cat(outputs) if outputs else torch.zeros_like(query)
    return output, AttentionState(**present, length=after)


def _rows(state: dict[str, Tensor], name: str, rows: slice, end: int, dtype: torch.dtype) -> Tensor:
    """Keys or values [B, HK, end, D] of these sequences, in the type of the activations."""
    values, scale = state[name][rows, :, :end], state.get(f"{name}_scale")
    return values.to(dtype) if scale is None else dequantized(values, scale[rows, :, :end], dtype)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, length: int, seen: Callable[[slice, int], Tensor] | None = None
) -> Tensor:
    """Output [B, T, H, D] of query [B, T, H, D] at positions from `length`; keys and values [B, HK, .., D] include the new tokens."""
    batch, tokens, heads, dim = query.shape
    group = heads // keys.shape[1]
    outputs = []
    for start in range(0, tokens, BLOCK):
        block = query[:, start : start + BLOCK]
        count, end = block.shape[1], length + start + block.shape[1]
        rows = block.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, HK, G * count, D]
        mask = None
        if count > 1:
            last = torch.arange(end - count, end, device=query.device).repeat(group)
            mask = torch.arange(end, device=query.device) <= last[:, None]
        if seen is not None:
            own = seen(slice(start, start + count), end).repeat(1, 1, group, 1)
            mask = own if mask is None else own & mask
        mixed = scaled_dot_product_attention(rows, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
        outputs.append(mixed.reshape(batch, heads, count, dim).transpose(1, 2))
    return torch.cat(outputs, dim=1) if outputs else torch.zeros_like(query)


def op_of_keys(
    spec: OpSpec, inputs_type: type[Of]
) -> Callable[[Compute[Of]], Callable[..., tuple[Tensor, AttentionState]]]:
    """Register an op with one output and an AttentionState. Its inputs and attributes are fields of `inputs_type`.

    Returns:
        A decorator of the function that computes it. The decorated function calls the original; in a traced program it is one node of the
        op, without a derivative.
    """

    def decorated(compute: Compute[Of]) -> Callable[..., tuple[Tensor, AttentionState]]:
        def computed(by_name: ByName, attributes: Mapping[str, AttributeValue], in_place: bool) -> dict[str, Tensor]:
            tensors: dict[str, Any] = {name: tensor for name, tensor in by_name.items() if tensor is not None}
            past = [name for name in tensors if name.startswith("past_")]
            state = AttentionState(**{name.removeprefix("past_"): tensors.pop(name) for name in past})
            own: dict[str, Any] = {name: value for name, value in attributes.items() if name != CACHE.name}
            output, present = compute(inputs_type(**tensors, **own), state, in_place)
            return {"output": output, **{f"present_{name}": x for name, x in present.tensors().items()}}

        register(spec, computed)

        def run(inputs: Of, state: AttentionState, in_place: bool = False) -> tuple[Tensor, AttentionState]:
            if not torch.compiler.is_compiling():
                return compute(inputs, state, in_place and not inputs.needs_gradients())
            assert inputs.new_tokens is not None
            past = {f"past_{name}": tensor for name, tensor in state.tensors().items()}
            known = {**vars(inputs), CACHE.name: state.cache}
            results = call(spec, {**vars(inputs), **past}, {a.name: known[a.name] for a in spec.attributes})
            states = {name.removeprefix("present_"): tensor for name, tensor in results.items() if name != "output"}
            return results["output"], replace(state, **states, length=state.length + inputs.new_tokens)

        return run

    return decorated
