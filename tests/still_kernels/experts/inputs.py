"""Calls of still::Route and still::Experts: random routers that are not flat, all dimensions different."""

from __future__ import annotations

from typing import Any

import torch

from still_kernels.experts.meaning import Inputs as ExpertsInputs
from still_kernels.experts_nbits.meaning import Inputs as NBitsInputs
from still_kernels.route.meaning import Inputs as RouteInputs

CHANNELS, EXPERTS, INNER = 20, 12, 14

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": dict(k=3),
    "softmax, normalized": dict(k=3, normalize=1),
    "sigmoid, bias": dict(k=4, score="sigmoid", normalize=1, epsilon=1e-6),
    "sigmoid, groups": dict(k=5, score="sigmoid", normalize=1, epsilon=1e-20, scaling=2.446, groups=4, top_groups=2),
    "groups of one": dict(k=2, score="sigmoid", groups=12, top_groups=3),
}


def draw(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def route_inputs(name: str, batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> RouteInputs:
    """A call of a router; sigmoids have a bias."""
    set_ = ROUTERS[name]
    bias = draw(EXPERTS, seed=3, scale=0.3) if set_.get("score") == "sigmoid" else None
    return RouteInputs(
        draw(batch, tokens, CHANNELS, seed=batch + tokens, dtype=dtype),
        draw(EXPERTS, CHANNELS, seed=2, scale=0.4, dtype=dtype),
        bias,
        **set_,
    )


def experts_inputs(
    batch: int,
    tokens: int,
    k: int = 3,
    activation: str = "swiglu",
    dtype: torch.dtype = torch.float32,
    channels: int = CHANNELS,
    inner: int = INNER,
) -> ExpertsInputs:
    """A call whose tokens go to few of the experts, each to different ones."""
    generator = torch.Generator().manual_seed(tokens)
    # The last experts get nothing.
    expert = torch.stack([torch.randperm(EXPERTS - 2, generator=generator)[:k] for _ in range(batch * tokens)])
    weight = torch.rand(batch, tokens, k, generator=generator) * 2
    weight[0, 0, 0] = 0.0
    rows = inner * (2 if activation == "swiglu" else 1)
    return ExpertsInputs(
        draw(batch, tokens, channels, seed=batch + tokens, dtype=dtype),
        expert.view(batch, tokens, k).to(torch.int32),
        weight,
        draw(EXPERTS, rows, channels, seed=4, scale=0.3, dtype=dtype),
        draw(EXPERTS, channels, inner, seed=5, scale=0.3, dtype=dtype),
        activation,
    )


def exact(given: ExpertsInputs) -> torch.Tensor:
    """The sum token by token, float64."""
    output = torch.zeros(given.input.shape, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in given.expert.shape)).tolist():
        row, token, _ = place
        number = int(given.expert[tuple(place)])
        inner = given.gate_up[number].double() @ given.input[row, token].double()
        if given.activation == "swiglu":
            inner = torch.nn.functional.silu(inner[::2]) * inner[1::2]
        else:
            inner = inner.clamp_min(0) ** 2
        output[row, token] += given.weight[tuple(place)].double() * (given.down[number].double() @ inner)
    return output


def nbits_inputs(
    batch: int, tokens: int, bits: int, zero_points: bool, dtype: torch.dtype, block: int = 16, **more: Any
) -> NBitsInputs:
    """A call of three blocks of channels and two inside."""
    generator = torch.Generator().manual_seed(bits)
    dense = experts_inputs(batch, tokens, dtype=dtype)
    channels, inner = 3 * block, 2 * block
    rows = 2 * inner if more.get("activation", "swiglu") == "swiglu" else inner

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)

    def matrix(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
        scales = (torch.rand(EXPERTS, rows, columns // block, generator=generator) + 0.1) / 2**bits
        found = {name: words(EXPERTS, rows, columns * bits // 32), f"{name}_scales": scales.to(dtype)}
        return found | ({f"{name}_zero_points": words(EXPERTS, rows, 1)} if zero_points else {})

    given: dict[str, Any] = {**matrix("gate_up", rows, channels), **matrix("down", channels, inner), **more}
    tokens_ = draw(batch, tokens, channels, seed=tokens, dtype=dtype)
    return NBitsInputs(tokens_, dense.expert, dense.weight, **given, bits=bits, block_size=block)


def as_dense(given: NBitsInputs) -> ExpertsInputs:
    """The same with matrices of numbers."""
    matrices = (given.dequantized(name) for name in ("gate_up", "down"))
    return ExpertsInputs(given.input, given.expert, given.weight, *matrices, given.activation)
