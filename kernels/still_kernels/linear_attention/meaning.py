"""Definition of still::LinearAttention in PyTorch: inputs and state of a call; `chunked` computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from still_graphs.errors import ShapeError, unknown
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION
from still_kernels.sizes import tensors_of


class Sizes(NamedTuple):
    """Sizes of a call by the symbols of the OpSpec."""

    B: int
    T: int
    H: int
    G: int
    D: int
    V: int


@dataclass(frozen=True)
class Inputs:
    """Tokens, gates and counts of one call; fp16, bf16, fp32 or fp64.

    query: [B, T, HQ, G, D]. With H = HQ * n states, query group i has the states from i * n on, G query heads each.
    key: [B, T, HK, D], HK divides H. Unit length for delta rules with beta up to 2.
    value: [B, T, H, V].
    decay: Logarithm of the state's decay at each token, at most 0, [B, T, H, 1] or [B, T, H, D]; for the gated rules.
    beta: Step size, [B, T, H] or [B, T, 1]; for the delta rules.
    new_tokens: Number of new tokens of each sequence, the rest of T is padding, int [B]; None = T for all.
    update_rule: linear, gated, delta or gated_delta.
    scale: Factor of the output; 0 = 1 / sqrt(D).

    Packed tokens are [tokens, ...] instead of [B, T, ...], with counts in a Packing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    new_tokens: Tensor | None = None
    update_rule: str = "gated_delta"
    scale: float = 0.0

    @property
    def factor(self) -> float:
        """Factor of outputs."""
        return self.scale or self.query.shape[-1] ** -0.5

    @property
    def wide(self) -> torch.dtype:
        """Type of the computation and of the state: at least float32."""
        return torch.promote_types(self.query.dtype, torch.float32)

    def needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(self).values())

    def real(self) -> Tensor:
        """False at padding, [B, T]."""
        batch, tokens = self.query.shape[:2]
        if self.new_tokens is None:
            return torch.ones(batch, tokens, dtype=torch.bool, device=self.query.device)
        return torch.arange(tokens, device=self.query.device) < self.new_tokens[:, None]

    def spread(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Query times scale [B, T, H, G, D], key, value, decay [B, T, H, 1 or D], beta [B, T, H] for every head, computed in `wide`.

        All are 0 at padding, which leaves the state unchanged bit for bit.
        """
        heads, real, wide = self.value.shape[2], self.real(), self.wide

        def of_heads(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            masked = x.to(wide).masked_fill(~real.reshape(*real.shape, *[1] * (x.dim() - 2)), 0)
            return masked if x.shape[2] == heads else masked.repeat_interleave(heads // x.shape[2], dim=2)

        query, key, value = (of_heads(x) for x in (self.query, self.key, self.value))
        assert query is not None and key is not None and value is not None
        return query * self.factor, key, value, of_heads(self.decay), of_heads(self.beta)

    def check(self, state: Tensor) -> Sizes:
        """Sizes of a call; ShapeError for a tensor or rule that does not fit."""
        rules = LINEAR_ATTENTION.attribute("update_rule").choices
        if self.update_rule not in rules:
            raise unknown(self.update_rule, rules, f"update_rule={self.update_rule!r}", ShapeError)
        for name, takers in (("decay", GATED), ("beta", DELTA)):
            if (getattr(self, name) is not None) != (self.update_rule in takers):
                verb = "needs" if self.update_rule in takers else "takes no"
                raise ShapeError(f"update_rule={self.update_rule!r} {verb} {name}.")
        if self.query.dim() != 5 or self.key.dim() != 4 or self.value.dim() != 4:
            shapes = ", ".join(str(list(x.shape)) for x in (self.query, self.key, self.value))
            raise ShapeError(
                f"query, key, value: expected [B, T, HQ, G, D], [B, T, HK, D], [B, T, H, V], got {shapes}."
            )
        batch, tokens, groups, shared, dim = self.query.shape
        heads, size = self.value.shape[2:]
        for what, count in (("query groups", groups), ("key heads", self.key.shape[2])):
            if not count or heads % count:
                raise ShapeError(f"{count} {what} do not divide the {heads} heads of value.")
        lead = (batch, tokens)
        expected: dict[str, tuple[tuple[int, ...], ...]] = {
            "key": ((*lead, self.key.shape[2], dim),),
            "value": ((*lead, heads, size),),
            "decay": ((*lead, heads, 1), (*lead, heads, dim)),
            "beta": ((*lead, heads), (*lead, 1)),
            "new_tokens": ((batch,),),
        }
        for name, fitting in expected.items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) not in fitting:
                either = " or ".join(str(list(s)) for s in dict.fromkeys(fitting))
                raise ShapeError(f"{name}: expected {either}, got {list(tensor.shape)}.")
        if tuple(state.shape) != (batch, heads, dim, size) or state.dtype != self.wide:
            raise ShapeError(
                f"state: expected {[batch, heads, dim, size]} of {self.wide}, got {list(state.shape)} of {state.dtype}."
            )
        return Sizes(batch, tokens, heads, shared, dim, size)


def empty_state(
    batch: int,
    heads: int,
    dim: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """State [B, H, D, V] of empty sequences; float64 for float64 activations."""
    kind = torch.promote_types(dtype, torch.float32)
    return torch.zeros(batch, heads, dim, size, dtype=kind, device=device)
