"""Definition of still::LocalLinearAttention, in blocks of query tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.attention.meaning import BLOCK, AttentionState, blocked_attention, op_of_keys
from still_kernels.attention.meaning import Inputs as AttentionInputs
from still_kernels.local_linear_attention.spec import LARGEST, LOCAL_LINEAR_ATTENTION, MOST, NEAR, fault_of


@dataclass(frozen=True)
class Inputs(AttentionInputs):
    """Inputs of attention, and exactly one of:

    correction: Multiplies keys, not scaled, [B, T, H, D].
    ridge: Above 0, [H].
    """

    correction: Tensor | None = None
    ridge: Tensor | None = None

    def check(self) -> tuple[int, int]:
        batch, tokens = super().check()
        heads = self.query.shape[2]
        for name, shape in (("correction", tuple(self.query.shape)), ("ridge", (heads,))):
            tensor: Tensor | None = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ShapeError(f"{name}: expected {list(shape)}, got {list(tensor.shape)}.")
        present = [name for name in ("correction", "ridge") if getattr(self, name) is not None]
        if fault := fault_of(present):
            raise ShapeError(f"LocalLinearAttention: {fault}.")
        if self.ridge is not None and not bool((self.ridge > 0).all()):
            raise ShapeError(
                f"ridge: {self.ridge.min():g} must be above 0: what is solved for may have no solution otherwise."
            )
        return batch, tokens

    def attend(self, rows: slice, query: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
        """Output [B, T, H, D] of query [B, T, H, D] at positions from `length`; keys and values [B, HK, .., D] include the new tokens."""
        wide = torch.float64 if self.correction is None else torch.promote_types(query.dtype, torch.float32)
        heads, dim = query.shape[2:]
        kv_heads = keys.shape[1]
        outputs = []
        for start in range(0, query.shape[1], BLOCK):
            part = slice(start, min(start + BLOCK, query.shape[1]))
            end = length + part.stop

            def grouped(x: Tensor, own: slice = part) -> Tensor:
                """[B, T, H, D] as [B, HK, G * T, D]."""
                return x[:, own].to(wide).unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)

            q, k, v = grouped(query), keys[:, :, :end].to(wide), values[:, :, :end].to(wide)
            last = torch.arange(length + start, end, device=query.device).repeat(heads // kv_heads)
            later = torch.arange(end, device=query.device) > last[:, None]
            logits = (q @ k.transpose(2, 3) * dim**-0.5).masked_fill(later, -torch.inf)
            weights, mean = logits.softmax(-1), None
            if self.correction is not None:
                corrected = grouped(self.correction[rows])
            else:
                assert self.ridge is not None
                mean = weights @ k
                ridge = (
                    self.ridge.to(wide).view(1, kv_heads, -1, 1).expand(len(q), -1, -1, end - length - start).flatten(2)
                )
                ridge = ridge * (-logits.logsumexp(-1)).clamp_max(LARGEST).exp()
                corrected = solved(weights, k, mean, mean - q, ridge[..., None])
            scores = corrected @ k.transpose(2, 3)
            scores = scores - (weights * scores).sum(-1, keepdim=True)
            mixed = (weights * (1 - scores)) @ v
            outputs.append(mixed.unflatten(2, (heads // kv_heads, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3))
        return torch.cat(outputs, dim=1).to(query.dtype) if outputs else torch.zeros_like(query)


def solved(weights: Tensor, keys: Tensor, mean: Tensor, right: Tensor, ridge: Tensor) -> Tensor:
    """(C + ridge I)^-1 right, where C is the keys' covariance under the weights; all in float64.

    Args:
        weights: [B, HK, M, N].
        keys: [B, HK, N, D].
        mean: Mean of the keys, [B, HK, M, D].
        right: [B, HK, M, D].
        ridge: [B, HK, M, 1].

    Returns:
        [B, HK, M, D]; NaN if the steps did not converge.
    """
    scale = (weights @ (keys * keys) - mean * mean).clamp_min(0) + ridge

    def times(x: Tensor) -> Tensor:
        across = weights * (x @ keys.transpose(2, 3) - (x * mean).sum(-1, keepdim=True))
        return across @ keys - across.sum(-1, keepdim=True) * mean + ridge * x

    least = torch.finfo(right.dtype).tiny
    x, rest = torch.zeros_like(right), right
    way = near = rest / scale
    size = (rest * near).sum(-1, keepdim=True)
    enough = NEAR * size
    for _ in range(MOST):
        moved = times(way)
        step = size / (way * moved).sum(-1, keepdim=True).clamp_min(least)
        x, rest = x + step * way, rest - step * moved
        near = rest / scale
        before, size = size, (rest * near).sum(-1, keepdim=True)
        way = near + size / before.clamp_min(least) * way
        if not bool((size > enough).any()):
            break
    return torch.where(size <= enough, x, torch.nan)


@op_of_keys(LOCAL_LINEAR_ATTENTION, Inputs)
def local_linear_attention(
    inputs: Inputs, state: AttentionState, in_place: bool = False
) -> tuple[Tensor, AttentionState]:
    """Like `blocked_attention`, with corrected values."""
    return blocked_attention(inputs, state, in_place, attend=inputs.attend)
