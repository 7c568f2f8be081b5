"""Cases that hold the backward kernels to autograd in float64; as a program (DEVICE:DTYPE [NAME ...]): run them, print the errors.

On the CPU Triton's interpreter runs them, which must be chosen before Triton is imported: the tests start this file in a process of
its own.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from still_kernels.hybrid_attention import call as dispatch
from still_kernels.hybrid_attention.backward.gradients import tiles_of, whole_gradients
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning import whole
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.whole import whole_hybrid_attention
from still_kernels.tile import KernelTile

SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "feature_dim": 20,
    "chunk_size": 16,
    "salient_per_chunk": 3,
}
"""All dimensions differ, none but C is a power of two."""


@dataclass(frozen=True)
class Case:
    """A layer, tokens of each row, and what is special about the inputs; `whole`: forward kernels too, with their selection."""

    tokens: int
    changes: dict[str, Any] = field(default_factory=dict)
    factor: bool = True
    shared: bool = False
    rows: int = 2
    whole: bool = False
    wanted: tuple[str, ...] = ()  # of the inputs; none = all
    blocks: dict[str, dict[str, int]] = field(default_factory=dict)  # other block sizes, by kernel
    apart: float = 0.0  # added to the first query; the key that is all it sees gets -1

    def config(self) -> HybridAttentionConfig:
        """The layer."""
        return HybridAttentionConfig(**{**SMALL, "capacity_tokens": max(self.tokens, 64), **self.changes})


CASES: dict[str, Case] = {
    "one token": Case(1),
    "within a chunk": Case(5),
    "whole chunks": Case(48, rows=1),
    "first promotion": Case(33),
    "past a chunk": Case(97, rows=1),
    "most of a chunk": Case(111, rows=1),
    "no factor": Case(52, factor=False),
    "stage 1": Case(52, factor=False, rows=1, wanted=("gate", "feature_q_weight", "feature_k_weight")),
    "shared maps, group max": Case(79, {"select_scope": "kv_group_max", "gate": "none"}, shared=True),
    "group mean": Case(52, {"select_scope": "kv_group_mean"}, factor=False),
    "no logit of a row above -90": Case(39, rows=1, apart=30.0),
    "none salient": Case(65, {"salient_per_chunk": 0}),
    "all salient": Case(52, {"salient_per_chunk": 16}),
    "released": Case(52, {"profile": "released"}),
    **{
        f"map {name}": Case(52, {"feature_map": name}, factor=False, rows=1)
        for name in ("softmax_pm", "softmax", "relu", "elu_plus_one")
    },
    "blocks of half a chunk": Case(
        82,
        {"chunk_size": 32, "num_heads": 3, "num_kv_heads": 1},
        rows=1,
        blocks={
            "query": {"BM": 16, "BN": 16},
            "salient": {"BM": 16, "BN": 32},
            "key": {"BM": 16},
            "linear_query": {"BM": 16, "TB": 2},
            "linear_key": {"BM": 16, "TB": 1},
            "scan": {"FB": 16, "DB": 16},
        },
    ),
    "forward and backward": Case(104, {"chunk_size": 32}, whole=True),
    "forward and backward, group": Case(
        99, {"chunk_size": 32, "select_scope": "kv_group_max"}, rows=1, factor=False, whole=True
    ),
}
REAL: dict[str, Any] = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "feature_dim": 64,
    "chunk_size": 64,
    "salient_per_chunk": 8,
}
LARGE = {
    "heads of 64": Case(1000, REAL, whole=True),
    "heads of 128": Case(500, {**REAL, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128, "feature_dim": 128}, whole=True),
}  # fmt: skip
"""Sizes of real layers, for a GPU."""


def tensors_of(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Random inputs, maps of the scale of a projection."""
    config, generator = case.config(), torch.Generator().manual_seed(case.tokens)
    heads, dim, rows = config.num_heads, config.head_dim, config.projection_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    query, key, value, gate = (
        random(case.rows, case.tokens, h, dim) for h in (heads, *2 * (config.num_kv_heads,), heads)
    )
    to_q, to_k = (random(1 if case.shared else heads, rows, dim) * dim**-0.5 for _ in range(2))
    factor = random(heads).float().exp() if case.factor else None
    gated = gate.sigmoid() if config.gate == "channel" else None
    query *= 1.5
    if case.apart:
        query[:, 0] += case.apart
        key[:, 0] -= 1
    return Inputs(query, key, value, gated, to_q, to_k, window_factor=factor)


def expected_gradients(
    inputs: Inputs, config: HybridAttentionConfig, grad: Tensor, folds: Tensor | None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, selection and gradients by autograd in float64; with the selection `folds` where it is given."""
    leaves = {n: t.double().requires_grad_() for n, t in vars(inputs).items() if t is not None}
    select, chunk = whole.select_tokens, config.chunk_size
    late = max(-(-inputs.query.shape[1] // chunk) - 2, 0)
    seen = torch.zeros(len(inputs.query), late + 2, config.select_heads, chunk, dtype=torch.int8, device=grad.device)

    def selected(scores: Tensor, k: int) -> Tensor:
        found = select(scores, k)
        if folds is not None:
            found = folds[:, 2 : late + 2].transpose(1, 2).sort(dim=-1, stable=True).indices[..., :k]
            found = found.sort(dim=-1).values
        taken = torch.ones_like(scores, dtype=torch.int8).scatter(3, found, 0)
        seen.copy_(pad(taken.transpose(1, 2), (0, 0, 0, 0, 2, 0)))
        return found

    whole.select_tokens = selected
    try:
        output = whole_hybrid_attention(replace(inputs, **leaves), config)
    finally:
        whole.select_tokens = select
    found = torch.autograd.grad(output, list(leaves.values()), grad.double(), allow_unused=True)
    gradients = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), found, strict=True)}
    return output.detach().contiguous(), seen, gradients


def errors_of(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest error of each gradient, relative to its largest entry where that is above 1."""
    config, inputs = case.config(), tensors_of(case, dtype, device)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(inputs.query.shape, generator=generator).to(dtype).to(device)
    names = set(case.wanted) or {name for name, tensor in vars(inputs).items() if tensor is not None}
    if case.whole:
        folds = dispatch._whole_with_selection(inputs, config)[1]
        leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
        output = dispatch._KernelsWhole.apply(config, *replace(inputs, **leaves).tensors())
        output.backward(grad)
        found = {name: leaf.grad for name, leaf in leaves.items()}
        _, _, expected = expected_gradients(inputs, config, grad, folds)
    else:
        output, folds, expected = expected_gradients(inputs, config, grad, None)
        tiles = tiles_of(config, dtype == torch.float32)
        for name, blocks in case.blocks.items():
            tiles[name] = KernelTile({**tiles[name].constants, **blocks}, tiles[name].num_warps, 1)
        if "scan" in case.blocks:
            tiles["reverse"] = tiles["scan"]
        found = whole_gradients(inputs, config, output.to(dtype), folds, grad, names, tiles)
    return {
        name: float((found[name].double() - wanted).abs().max() / wanted.abs().max().clamp_min(1))
        for name, wanted in expected.items()
        if name in names
    }


def main(arguments: list[str]) -> None:
    """Command line."""
    device, kind = arguments[0].split(":")
    if device == "cpu":
        from tests.still_kernels.quick_interpreter import install

        install()
    dispatch.demand_kernel = lambda *_: None  # small heads have kernels, but no times
    every = {**CASES, **LARGE}
    found = {n: errors_of(every[n], getattr(torch, kind), device) for n in arguments[1:] or CASES}
    print(json.dumps(found), flush=True)
    if device == "cuda":
        os._exit(0)  # PyTorch's threads of backward ended one such process by std::terminate


if __name__ == "__main__":
    main(sys.argv[1:])
