"""still::LinearAttention for bench and tune: its layers, calls, least costs and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from still_kernels.linear_attention.call import linear_attention
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.meaning import Inputs
from still_kernels.linear_attention.plan import Variant
from still_kernels.linear_attention.spec import DELTA, GATED
from still_kernels.tile import Setting, TileTable
from tools.kernels.settings import one, stages
from tools.kernels.work import Kind, OneTensor, OpWork, Work

STEPS = ("prepare", "scan", "output")
"""Kernels of a prompt."""
SHORT: Setting = {"prepare.C": 32, "prepare.LEVELS": 5, "scan.C": 32, "output.C": 32}
"""Chunks of 32 tokens in the place of 64."""

MOVES: dict[str, list[Setting]] = {
    "prepare": [
        *one("num_warps", 1, 2, 4),
        *one("max_registers", None, 128, 168, 255),
        *one("BD", 16, 32, 64, 128),
        SHORT,
    ],
    "scan": [
        *stages(1, 2, 3, 4),
        *one("BV", 16, 32, 64),
        SHORT,
        *one("num_warps", 1, 2, 4, 8),
        *one("max_registers", None, 168),
    ],
    "output": [
        *one("BV", 32, 64, 128),
        SHORT,
        *one("num_warps", 2, 4, 8),
        *one("max_registers", None, 128, 168),
    ],
    "decode": [
        *one("BV", 16, 32, 64, 128),
        *one("num_warps", 1, 2, 4, 8),
    ],
    "segments": one("segment_chunks", 32, 64, 128, 256, 512),
}
"""What is tried from the current setting and then from better ones, by kernel; segments are settings of the whole call."""


def misfit(table: TileTable, arch: int) -> str:
    """Why the block sizes of a table do not go together on an architecture (90 for sm_90), or nothing."""
    tiles = table.kernels()
    if len({tiles[name].constants["C"] for name in STEPS}) > 1:
        return "all steps have chunks of one size"
    if arch == 90 and max(tiles[name].num_warps for name in STEPS) > 4:
        return "the steps of a prompt have 4 warps at most on sm_90 (ptxas 12.8: docs/notebook/kernels.md)"
    return ""


def prefill_cost(heads: int, key_heads: int, dim: int, size: int, tokens: int, delta: bool) -> tuple[float, float]:
    """Of one empty sequence: activations once; per token the state is read by the query, written by the key, corrected by what it has."""
    moved = tokens * 2 * (2 * key_heads * dim + 2 * heads * size)
    return moved, (6.0 if delta else 4.0) * heads * dim * size * tokens


def decode_cost(heads: int, dim: int, size: int, batch: int, delta: bool) -> tuple[float, float]:
    """Of one decode step: the state in float32 is read and written once."""
    elements = batch * heads * dim * size
    return 8 * elements, (6.0 if delta else 4.0) * elements


LAYERS = {"gated_delta": False, "gated_delta_per_key": True, "gated": False, "delta": False}
"""Rules by the name of the layer, and whether the decay is one per key."""


@dataclass(frozen=True)
class Layer:
    """Sizes and rule of a layer."""

    heads: int
    key_heads: int
    dim: int
    rule: str
    per_key: bool


def layer(sizes: Mapping[str, int], name: str, context: int) -> Layer:
    """A layer; its state has no room to be made for a context."""
    rule = name.removesuffix("_per_key")
    return Layer(sizes["heads"], sizes["kv_heads"], sizes["head_dim"], rule, LAYERS[name])


def inputs_of(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Inputs:
    """Tokens as a trained layer has them: keys of unit length, a decay that keeps 0.97 of the state a token, beta up to 1."""
    generator = torch.Generator(device).manual_seed(0)
    lead = (kind.batch, kind.tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, device=device, generator=generator)

    width = layer.dim if layer.per_key else 1
    return Inputs(
        normalize(random(layer.key_heads, 1, layer.dim), dim=-1).to(dtype),
        normalize(random(layer.key_heads, layer.dim), dim=-1).to(dtype),
        random(layer.heads, layer.dim).to(dtype),
        logsigmoid(random(layer.heads, width) + 3.5) if layer.rule in GATED else None,
        random(layer.heads).sigmoid() if layer.rule in DELTA else None,
        torch.full((kind.batch,), kind.tokens, device=device),
        layer.rule,
    )


def work(layer: Layer, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    inputs = inputs_of(layer, kind, dtype, device)
    delta, shape = layer.rule in DELTA, (kind.batch, layer.heads, layer.dim, layer.dim)

    def state() -> OneTensor:
        if not kind.length:
            return OneTensor(torch.zeros(shape, device=device))
        return OneTensor(torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(1)))

    def launch(state: OneTensor, output: Tensor, table: TileTable) -> None:
        from still_kernels.linear_attention.call import launch_linear_attention

        launch_linear_attention(inputs, state.state, output, table=table)

    if kind.tokens == 1:
        cost = decode_cost(layer.heads, layer.dim, layer.dim, kind.batch, delta)
    else:
        cost = prefill_cost(layer.heads, layer.key_heads, layer.dim, layer.dim, kind.tokens, delta)
    return Work(
        *cost,
        state=state,
        reference=lambda state: chunked_linear_attention(inputs, state.state)[0],
        run=lambda state: linear_attention(inputs, state.state, in_place=True)[0],
        launch=launch,
        output=inputs.value[..., None, :],
        peers=_peers(layer, kind, inputs) if device == "cuda" else {},
    )


def _peers(layer: Layer, kind: Kind, inputs: Inputs) -> dict[str, Callable[[Any], Tensor]]:
    """flash-linear-attention's kernels for the same call, where it is installed."""
    if layer.rule != "gated_delta" or layer.per_key:
        return {}
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError:
        return {}
    assert inputs.decay is not None
    group = layer.heads // layer.key_heads
    query, key = (x.repeat_interleave(group, dim=2) for x in (inputs.query[:, :, :, 0], inputs.key))
    name, function = "fla chunk_gated_delta_rule", chunk_gated_delta_rule
    if kind.tokens == 1:
        name, function = "fla fused_recurrent_gated_delta_rule", fused_recurrent_gated_delta_rule
    gates, beta = inputs.decay[..., 0].contiguous(), inputs.beta

    def run(state: OneTensor) -> Tensor:
        output, _ = function(
            q=query,
            k=key,
            v=inputs.value,
            g=gates,
            beta=beta,
            initial_state=state.state,
            output_final_state=True,
        )
        return output[..., None, :]

    return {name: run}


def _table(layer: Layer, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.launcher import arch_of

    dtype = "float32" if wide else "bfloat16"
    return Variant(dtype, layer.dim, layer.dim, 1, layer.rule, int(layer.per_key)).table(arch_of(device))


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 32, "head_dim": 128},
    layers=LAYERS,
    layer=layer,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"decode"}),
    misfit=lambda table, layer, arch: misfit(table, arch),
)
