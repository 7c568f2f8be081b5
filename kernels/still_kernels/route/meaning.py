"""Definition of still::Route: every score, sorted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from still_graphs.errors import ShapeError
from still_kernels.route.spec import ROUTE
from still_kernels.sizes import sizes_of_call
from still_kernels.torch_ops import traced_op

BEST = 2
"""Number of experts whose scores add up to their group's score."""


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
        """Raise ShapeError for a tensor or attribute that does not fit."""
        experts = sizes_of_call(ROUTE, self)["E"]
        if self.groups < 1 or experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ShapeError(
                f"{experts} experts: the best {self.top_groups} of {self.groups} groups; groups must divide them."
            )
        if not 1 <= self.k <= experts // self.groups * self.top_groups:
            raise ShapeError(
                f"k={self.k} of {experts} experts, {experts // self.groups * self.top_groups} of which are candidates."
            )


def naive_route(inputs: Inputs, choices: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts int32 [B, T, K], the best first, and their weights [B, T, K] in at least float32.

    choices: Experts to use instead of the best ones, [B, T, K]; -1: the best.
    """
    inputs.check()
    scores, (*_, rank) = _ranked(inputs)
    expert = _largest(rank, inputs.k)
    if choices is not None:
        expert = torch.where(choices < 0, expert, choices.to(expert.dtype))
    weight = scores.gather(-1, expert)
    if inputs.normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + inputs.epsilon)
    return expert.to(torch.int32), weight * inputs.scaling


route = traced_op(ROUTE, Inputs)(naive_route)
"""`naive_route` as one node in a traced program."""


def margins(inputs: Inputs) -> Tensor:
    """Distance of each expert from the boundary of the choice, [B, T, 1, E].

    Positive: chosen. The weakest chosen expert and the best rejected one have equal distances from 0; equal scores are just above 0. -inf:
    its group is not chosen. With groups [B, T, 2, E], the distance of each expert's group first.
    """
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
    """Scores [B, T, E] in at least float32, and the compared numbers: with groups first those of groups [B, T, groups], then those of
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
    best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, taken, True)
    return scores, [of_groups, torch.where(best[..., None], apart, -torch.inf).flatten(-2)]


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the largest along the last dimension; the first of equal ones."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]
