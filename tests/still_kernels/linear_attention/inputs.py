"""Calls of still::LinearAttention for every rule: layers, splits, and what a loop over tokens in float64 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.spec import DELTA, GATED

Split = int | list[int]
SPLITS: list[Split] = [70, 1, [129, 3], [0, 65], [1, 2], [1, 0], [0, 0], 64, 1]
"""Beside the boundaries of chunks of 64: whole rows, single steps, ragged rows, rows without tokens."""

BOUND, HARD_BOUND = 5e-6, 5e-5
"""Of float32 against float64, relative by Frobenius norm; the second for correlated keys with beta up to 2 and for strong decay."""


@dataclass(frozen=True)
class Layer:
    """Sizes and rule of a layer; all sizes differ. `decay` is E, `beta` W; `strength` the largest decay of a token, `cosine` that of
    keys."""

    rule: str = "gated_delta"
    groups: int = 2
    shared: int = 1
    keys: int = 3
    dim: int = 10
    heads: int = 6
    size: int = 7
    decay: int = 1
    beta: int = 6
    scale: float = 0.0
    strength: float = 0.5
    cosine: float = 0.0
    most_beta: float = 2.0

    @property
    def bound(self) -> float:
        """The error that is allowed."""
        return HARD_BOUND if self.cosine or self.strength >= 5 else BOUND


LAYERS = [
    Layer("linear", groups=6, shared=2, keys=6, scale=1.0),
    Layer("gated"),
    Layer("gated", decay=10, groups=6, shared=3, keys=1, heads=6, size=16),
    Layer("delta", groups=6, keys=6, beta=1),
    Layer(),
    Layer(decay=10, groups=3, keys=2),
    Layer(dim=40, size=24, cosine=0.97, strength=0.02),
    Layer(decay=10, strength=5.0),
    Layer("gated", strength=60.0),
]
"""Every rule and decay; queries and keys in fewer heads than the state and in more; beta of one head for all, up to 2; keys nearly
parallel; decay of 5 and of 60 a token."""


@dataclass(frozen=True)
class Call:
    """One call: padded inputs with NaN where there is no token, and what must come out."""

    inputs: Inputs
    output: Tensor
    state: Tensor


def whole(layer: Layer, batch: int, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """Random sequences in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    common = torch.randn(1, 1, layer.keys, layer.dim, generator=generator, dtype=torch.float64)
    keys = normalize(normal(layer.keys, layer.dim), dim=-1)
    if layer.cosine:
        keys = normalize(layer.cosine**0.5 * normalize(common, dim=-1) + (1 - layer.cosine) ** 0.5 * keys, dim=-1)
    tensors = {
        "query": normal(layer.groups, layer.shared, layer.dim),
        "key": keys,
        "value": normal(layer.heads, layer.size),
    }
    if layer.rule in GATED:
        tensors["decay"] = -layer.strength * uniform(layer.heads, layer.decay)
    if layer.rule in DELTA:
        tensors["beta"] = layer.most_beta * uniform(layer.beta)
    return tensors


def loop(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and state of one token after the other."""
    query, key, value, decay, beta = inputs.spread()
    outputs = [query[:, :0] @ state[:, None]]
    for t in range(query.shape[1]):
        k, update = key[:, t, :, :, None], value[:, t, :, None]  # [B, H, D, 1], [B, H, 1, V]
        if decay is not None:
            state = decay[:, t, :, :, None].exp() * state
        if beta is not None:
            update = beta[:, t, :, None, None] * (update - k.transpose(2, 3) @ state)
        state = state + k * update
        outputs.append((query[:, t] @ state)[:, None])
    return torch.cat(outputs, dim=1).to(inputs.query.dtype), state


def calls(
    layer: Layer, splits: Sequence[Split], dtype: torch.dtype = torch.float32, batch: int = 2, seed: int = 0
) -> Iterator[Call]:
    """The calls that `splits` (tokens of all rows, or of each) cut random sequences into; outputs and states in float64."""
    counts = torch.tensor([s if isinstance(s, list) else [s] * batch for s in splits])  # [calls, B]
    tensors = {name: x.to(dtype if name in ("query", "key", "value") else torch.float32) for name, x in
               whole(layer, batch, int(counts.sum(0).max()), seed).items()}  # fmt: skip
    settings: dict[str, Any] = {"update_rule": layer.rule, "scale": layer.scale}
    expected, states = [], []
    for row in range(batch):
        given = {name: x[row : row + 1].double() for name, x in tensors.items()}
        state = torch.zeros(1, layer.heads, layer.dim, layer.size, dtype=torch.float64)
        outputs, after = [], []
        start = 0
        for count in counts[:, row].tolist():
            part = {name: x[:, start : start + count] for name, x in given.items()}
            output, state = loop(Inputs(**part, **settings), state)
            outputs.append(output[0])
            after.append(state[0])
            start += count
        expected.append(outputs)
        states.append(after)
    starts = torch.zeros(batch, dtype=torch.int64)
    for number, new in enumerate(counts):
        longest = max(int(new.max()), 1)
        feeds = {n: torch.full((batch, longest, *x.shape[2:]), torch.nan, dtype=x.dtype) for n, x in tensors.items()}
        output = torch.zeros(batch, longest, layer.heads, layer.shared, layer.size, dtype=torch.float64)
        for row, count in enumerate(new.tolist()):
            for name, x in tensors.items():
                feeds[name][row, :count] = x[row, starts[row] : starts[row] + count]
            output[row, :count] = expected[row][number]
        starts += new
        state = torch.stack([after[number] for after in states])
        yield Call(Inputs(**feeds, new_tokens=new, **settings), output, state)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, by Frobenius norm; NaN counts as infinite."""
    assert found.shape == expected.shape
    if not bool(expected.any()):
        return float(found.abs().max()) if found.numel() else 0.0
    wrong = float((found.double() - expected).norm() / expected.norm())
    return wrong if wrong == wrong else float("inf")


def without_gates(inputs: Inputs, rule: str) -> Inputs:
    """The same call by another rule, without the gates that it does not take."""
    return replace(
        inputs,
        update_rule=rule,
        decay=inputs.decay if rule in GATED else None,
        beta=inputs.beta if rule in DELTA else None,
    )


def wrong_forms(
    call: Inputs, state: Tensor, form: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """What faults make of a call by a form of the op: the controls of the design, by name."""
    assert call.decay is not None and call.beta is not None

    def of(inputs: Inputs, past: Tensor = state) -> Tensor:
        return form(inputs, past)[0]

    heads, groups = call.value.shape[2], call.query.shape[2]
    tiled = call.query.repeat(1, 1, heads // groups, 1, 1)
    late = torch.cat((torch.zeros_like(call.decay[:, :1]), call.decay[:, :-1]), dim=1)  # of the token before
    return {
        "state zeroed": of(call, torch.zeros_like(state)),
        "state transposed": of(call, state.transpose(2, 3).contiguous()),
        "heads tiled": of(replace(call, query=tiled)),
        "decay not exponentiated": of(replace(call, decay=(-call.decay).clamp_min(1e-6).log())),
        "decay after the update": of(replace(call, decay=late)),
        "beta 1": of(replace(call, beta=torch.ones_like(call.beta))),
        "gated": of(without_gates(call, "gated")),
        "keys not of unit length": of(replace(call, key=1.5 * call.key)),
        "scale 1": of(replace(call, scale=1.0)),
        "state in bfloat16": of(call, state.bfloat16().float()),
        "delta": of(without_gates(call, "delta")),
    }
