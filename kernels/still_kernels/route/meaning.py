"""The definition of still::Route: every score, sorted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.route.spec import ROUTE
from still_kernels.sizes import sizes_of_call
from still_kernels.torch_ops import traced_op

BEST = 2
"""Experts of a group whose scores are its own."""


@dataclass(frozen=True)
class Inputs:
    """Tensors and attributes of one call (see the op's spec), fp16, bf16, fp32 or fp64."""

    input: Tensor
    router: Tensor
    bias: Tensor | None = None
    k: int = 1
    score: str = "softmax"
    normalize: int = 0
    epsilon: float = 0.0
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def check(self) -> None:
        """Raise ShapeError naming the tensor or attribute that does not fit."""
        experts = sizes_of_call(ROUTE, self)["E"]
        if self.groups < 1 or experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ShapeError(
                f"{experts} experts: the best {self.top_groups} of {self.groups} groups; groups must divide them."
            )
        if not 1 <= self.k <= experts // self.groups * self.top_groups:
            raise ShapeError(
                f"k={self.k} of {experts} experts, {experts // self.groups * self.top_groups} of which are candidates."
            )


def naive_route(inputs: Inputs, told: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts int32 [B, T, K], the best first, and their weights [B, T, K] in at least float32.

    told: The experts of tokens in the place of those with the best scores, [B, T, K]; -1: not told.
    """
    inputs.check()
    scores, (*_, rank) = _ranked(inputs)
    expert = _largest(rank, inputs.k)
    if told is not None:
        expert = torch.where(told < 0, expert, told.to(expert.dtype))
    weight = scores.gather(-1, expert)
    if inputs.normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + inputs.epsilon)
    return expert.to(torch.int32), weight * inputs.scaling


route = traced_op(ROUTE, Inputs)(naive_route)
"""The same, one node where a program is traced."""


def margins(inputs: Inputs) -> Tensor:
    """How far each expert is from being chosen or not, [B, T, 1, E]: positive where it is chosen, the least that is chosen as far from 0 as
    the best that is not, or of equal ones just above; -inf where its group is not. With groups [B, T, 2, E], that of each expert's group in
    front."""
    inputs.check()
    _, ranks = _ranked(inputs)
    found = []
    for rank, count in zip(ranks, (inputs.top_groups, inputs.k)[-len(ranks) :], strict=True):
        best = rank.topk(min(count + 1, rank.shape[-1])).values
        between = (best[..., count - 1 : count] + best[..., -1:]) / 2
        margin = rank - (between if count < rank.shape[-1] else between - 1)
        chosen = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, _largest(rank, count), True)
        found.append(torch.where(chosen, margin.clamp_min(torch.finfo(torch.float32).tiny), margin))
    if len(found) > 1:
        found[0] = found[0].repeat_interleave(found[1].shape[-1] // inputs.groups, -1)
    return torch.stack(found, dim=-2)


def _ranked(inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
    """Scores [B, T, E] in at least float32; and what is compared: where there are groups first that of groups [B, T, groups], then that of
    experts, -inf in other groups."""
    wide = torch.promote_types(inputs.input.dtype, torch.float32)
    logits = inputs.input.to(wide) @ inputs.router.to(wide).T
    scores = logits.sigmoid() if inputs.score == "sigmoid" else logits.softmax(-1)
    rank = scores.detach() if inputs.bias is None else scores.detach() + inputs.bias.detach()
    if inputs.groups == 1:
        return scores, [rank]
    apart = rank.unflatten(-1, (inputs.groups, -1))
    of_groups = apart.topk(min(BEST, apart.shape[-1])).values.sum(-1)
    taken = _largest(of_groups, inputs.top_groups)
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, taken, True)
    return scores, [of_groups, torch.where(kept[..., None], apart, -torch.inf).flatten(-2)]


def _largest(values: Tensor, count: int) -> Tensor:
    """Places of the largest along the last dimension; of equal ones the first."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]
