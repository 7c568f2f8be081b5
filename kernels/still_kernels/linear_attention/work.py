"""Linear attention for bench and tune: its layers, calls, settings, and the library it stands beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from still_graphs.ops.linear_attention import DELTA, GATED
from still_kernels.linear_attention.chunked import chunked_linear_attention
from still_kernels.linear_attention.cost import decode_cost, prefill_cost
from still_kernels.linear_attention.dispatch import linear_attention
from still_kernels.linear_attention.inputs import Inputs
from still_kernels.linear_attention.settings import MOVES, misfit
from still_kernels.linear_attention.variants import Variant
from still_kernels.tile import TileTable
from still_kernels.work import Kind, OneTensor, OpWork, Work

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
        from still_kernels.linear_attention.launch import launch_linear_attention

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
