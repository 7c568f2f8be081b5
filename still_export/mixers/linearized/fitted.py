"""GLA and Gated DeltaNet as teacher and student, initialized by least squares to be close to the base's attention.

Source: the same parts are initialized as in Taylor-Calibrate, arXiv:2606.16429 (memory, write gate, output gate, values). Here a search
over few values per head and ridge regression minimize the squared error of the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from still_export.mixers.linearized.module import (
    OPEN_GATE,
    LinearizedAttention,
    LinearizedGatedDeltaNet,
    LinearizedGLA,
    gate_bias,
    step_bias,
)
from still_export.mixers.trainable import TrainableModule, softmax_attention, without_lora

MEMORIES = tuple(2.0**n for n in range(13))
"""Candidate memories of a head: tokens after which its state decays to 1/e."""
STRETCHES = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0)
"""Candidate factors of the initial memories of a head's channels."""
STEPS = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Candidates for the share of a value that a token writes."""
ROUNDS = 2
"""Number of passes over all kinds of values; each searches one kind with the others fixed."""
FITTED = 0.75
"""Share of tokens for fitting coefficients; the others choose the ridge."""
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridges by the mean eigenvalue of the inputs' second moments; none at all is tried too."""
SMALLEST = 1e-12
LEAST_SCALE = 0.1
"""Least scale of a channel when its gate is fitted, relative to the scale that makes its output as large as the base's. Without it,
channels that explain nothing got gates in the thousands and scales near 0, and the first training step diverged."""

Setting = tuple[Sequence[float], Callable[[Tensor], None]]
"""Candidate values, and a function that sets the value of each head [H]."""


class Fitted(TrainableModule, LinearizedAttention):
    """The trainable form."""

    z_proj: nn.Linear

    def settings(self, hidden: Tensor) -> Iterator[Setting]:
        """Settings searched per head; hidden [B, T, channels] are inputs of the layer."""
        raise NotImplementedError

    @torch.no_grad()
    def fit(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> None:
        """Initialize by `fit_to` to the base's outputs on `hidden` [B, T, channels]."""
        query, key, value = self.heads(hidden)
        query, key = self.turned(query, key, position_embeddings)
        self.fit_to(softmax_attention(query, key, value), hidden, position_embeddings)

    @torch.no_grad()
    def fit_to(self, target: Tensor, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> None:
        """Set the new parameters to minimize the squared error to `target` [B, T, H, D], the output before `o_proj`.

        Memories and steps are searched on the first row. Scales, gates and, if present, LoRA of `o_proj` are fitted by regression, each on
        the remaining error.
        """
        first = None if position_embeddings is None else (position_embeddings[0][:1], position_embeddings[1][:1])
        row = hidden[:1]
        settings = list(self.settings(row))
        for _ in range(ROUNDS):
            for values, put in settings:
                left = []
                for value in values:
                    put(torch.full((self.num_heads,), value, dtype=torch.float64, device=hidden.device))
                    left.append(unexplained(self.mixed(row, *self._own_outputs(row), first, None), target[:1]))
                put(torch.tensor(values, dtype=torch.float64, device=hidden.device)[torch.stack(left).argmin(0)])
        rows = self.mixed(hidden, *self._own_outputs(hidden), position_embeddings, None)
        rows, wanted, inputs = (x.double().flatten(0, 1) for x in (rows, target, hidden))
        count = max(1, int(FITTED * len(inputs)))
        rows = self._fit_gates(rows, wanted, inputs, count)
        self._fit_output(rows.flatten(1), wanted.flatten(1), count)

    def _fit_gates(self, rows: Tensor, target: Tensor, inputs: Tensor, count: int) -> Tensor:
        """Set scales and gates by the first `count` of n rows: normed outputs and target [n, H, D], inputs [n, channels]. Returns scaled
        and gated outputs.

        Gates are linear near OPEN_GATE, where silu and its derivative are 1. Second moments of inputs times outputs are approximated by
        those of the inputs times the outputs' mean square, so that all channels share one matrix.
        """
        scale = best_scale(rows[:count], target[:count])
        size = (target[:count].square().mean(0) / rows[:count].square().mean(0).clamp_min(SMALLEST)).sqrt()
        floored = torch.where(scale < 0, -1.0, 1.0) * torch.maximum(scale.abs(), LEAST_SCALE * size)
        plain, scaled, mean = rows * scale, rows * floored, inputs[:count].mean(0)
        centered = inputs - mean
        ridge = Ridge(centered[:count])
        weighted = (scaled * (target - plain))[:count].flatten(1)
        products = centered[:count].T @ weighted / scaled[:count].square().mean(0).flatten().clamp_min(SMALLEST)
        none = torch.zeros_like(products)
        gated, weight = plain, none
        least = (target - plain)[count:].square().sum((0, 2))
        for share in RIDGES:
            tried = ridge.solve(products, share)
            gate = silu(OPEN_GATE + centered @ tried).view_as(rows)
            outputs = rows * gate
            outputs = outputs * best_scale(outputs[:count], target[:count])
            error = (target - outputs)[count:].square().sum((0, 2))
            better = error < least
            least = torch.where(better, error, least)
            gated = torch.where(better[:, None], outputs, gated)
            weight = torch.where(better.repeat_interleave(rows.shape[2]), tried, weight)
        gate = silu(OPEN_GATE + centered @ weight).view_as(rows)
        self.output_scale.copy_(best_scale((rows * gate)[:count], target[:count]))
        self.z_proj.weight.copy_(weight.T)
        self.z_proj.bias.copy_(OPEN_GATE - mean @ weight)
        return gated

    def _fit_output(self, outputs: Tensor, target: Tensor, count: int) -> None:
        """Set LoRA of `o_proj`, if present, to a reduced-rank regression of the layer's error on `outputs` [n, H * D]."""
        projection: Any = self.o_proj
        if without_lora(projection) is projection:
            return
        first, second = projection.lora_A["default"].weight, projection.lora_B["default"].weight
        missing = (target - outputs) @ projection.base_layer.weight.double().T
        ridge, products = Ridge(outputs[:count]), outputs[:count].T @ missing[:count]
        least, best = missing[count:].square().sum(), None
        for share in RIDGES:
            whole = ridge.solve(products, share)
            directions = torch.linalg.eigh(whole.T @ ridge.moments @ whole)[1][
                :, -len(first) :
            ]  # where the fit is largest
            error = (missing[count:] - outputs[count:] @ whole @ directions @ directions.T).square().sum()
            if error < least:
                least, best = error, (whole @ directions, directions)
        if best is None:
            return
        left, sizes, right = torch.linalg.svd(best[0], full_matrices=False)
        root = (sizes / projection.scaling["default"]).sqrt()
        first[: len(root)] = (left * root).T
        second[:, : len(root)] = best[1] @ right.T * root


class Ridge:
    """Least squares on inputs [n, F] of float64, for many ridges at the cost of one.

    moments: Inputs' second moments, [F, F].
    """

    def __init__(self, inputs: Tensor) -> None:
        self.moments = inputs.T @ inputs
        self.sizes, self.directions = torch.linalg.eigh(self.moments)

    def solve(self, products: Tensor, share: float) -> Tensor:
        """Coefficients [F, O] from products of inputs and targets [F, O]; `share`: ridge relative to the mean eigenvalue."""
        ridge = share * self.sizes.mean().clamp_min(SMALLEST)
        return self.directions @ ((self.directions.T @ products) / (self.sizes + ridge)[:, None])


def best_scale(rows: Tensor, target: Tensor) -> Tensor:
    """Least-squares factor of each channel between rows [n, H, D] and target, [H, D]."""
    return (rows * target).sum(0) / rows.square().sum(0).clamp_min(SMALLEST)


def unexplained(rows: Tensor, target: Tensor) -> Tensor:
    """Squared error per head, [H], of rows [B, T, H, D] to target after `best_scale`."""
    rows, target = (x.double().flatten(0, 1) for x in (rows, target))
    return (target - rows * best_scale(rows, target)).square().sum((0, 2))


class TrainableGLA(Fitted, LinearizedGLA):
    def settings(self, hidden: Tensor) -> Iterator[Setting]:
        def stretch(factor: Tensor) -> None:
            self.get_parameter("gk_proj.1.bias").copy_(gate_bias(self.head_dim, factor).flatten())

        yield STRETCHES, stretch


class TrainableGatedDeltaNet(Fitted, LinearizedGatedDeltaNet):
    b_proj: nn.Linear
    dt_bias: nn.Parameter

    def settings(self, hidden: Tensor) -> Iterator[Setting]:
        inputs = hidden.double().flatten(0, 1)
        one = Ridge(inputs).solve(inputs.sum(0)[:, None], RIDGES[0])  # what inputs have in common stands for a bias

        def remember(tokens: Tensor) -> None:
            self.dt_bias.copy_(step_bias(tokens))

        def write(share: Tensor) -> None:
            self.b_proj.weight.copy_(share.logit()[:, None] * one.T)

        yield MEMORIES, remember
        yield STEPS, write
