"""Gradients of hybrid attention of whole sequences by Triton kernels: recomputation, order of kernels, block sizes.

A chunk's features and states are computed again; the selection is the forward pass's. The gradient of a chunk's share of the states is a
sum over later chunks, computed by a reverse scan. The softmax part is one pass over the keys of each query for its gradient and one over
the queries of each key, for window and salient rows alike.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.plan.tiles import HEAD_DIMS
from still_kernels.tile import KernelTile, pow2

TYPES = (torch.float32, torch.bfloat16)
MAX_DIM = 128
"""Largest size of heads and features; twice as many would not fit into registers."""


def covers_backward(config: HybridAttentionConfig, dtype: torch.dtype) -> bool:
    """Whether `whole_gradients` covers a layer that the forward kernels cover."""
    sizes = config.head_dim in HEAD_DIMS and max(config.head_dim, config.projection_dim) <= MAX_DIM
    positive = config.feature_map != "identity"  # so is every denominator, whose logarithm the kernels compute
    return dtype in TYPES and sizes and positive and config.overflow == "error" and config.local == "chunked"


def tiles_of(config: HybridAttentionConfig, wide: bool) -> dict[str, KernelTile]:
    """Block sizes by kernel; wide: float32 activations."""
    large = wide or max(config.head_dim, config.projection_dim) > 64
    rows, warps, stages = min(config.chunk_size, 32 if wide else 64), 8 if wide else 4, 1 if large else 2
    part = min(32 if wide else 64, pow2(config.head_dim))
    scan = KernelTile({"FB": 32 if wide else 64, "DB": part, "STAGES": 1 if wide else 3}, 4, 1)
    # 64 rows for heads of 64 take 464 us although registers spill; 32 rows with twice the warps, without spills, take 1,068.
    few = min(config.chunk_size, 16 if large else 64)
    linear = KernelTile({"BM": few, "TB": 512 // few}, 8 if large else 4, 1)
    return {
        "features": KernelTile({}, warps, 1),
        "scan": scan,
        "reverse": scan,
        "query": KernelTile({"BM": rows, "BN": rows, "STAGES": stages if large else 3}, warps, 1),
        "salient": KernelTile({"BM": rows, "BN": 32 if wide else 64, "STAGES": stages}, warps, 1),
        "key": KernelTile({"BM": 16 if wide else rows, "STAGES": 1}, warps, 1),
        "linear_query": linear,
        "linear_key": linear,
    }


def whole_gradients(
    inputs: Inputs,
    config: HybridAttentionConfig,
    output: Tensor,
    folds: Tensor,
    grad: Tensor,
    wanted: Collection[str],
    tiles: dict[str, KernelTile] | None = None,
) -> dict[str, Tensor]:
    """Gradients of `whole_hybrid_attention` with a given selection.

    Args:
        inputs: Inputs of the forward pass, contiguous, feature maps in the type of the tokens; window factors, if any, as a tensor.
        output: Its output, [B, T, H, D].
        folds: 0 for tokens that stay in softmax, 1 for those folded into the states, int8 [B, >= chunks, HS, C]; those of chunk c are at c
            + 2.
        grad: Gradient of `output`, same shape.
        wanted: Names of the inputs that need gradients.

    Returns:
        Gradients by name, at least the wanted ones; tokens' in the type of the tokens, those of maps and factors in float32.
    """
    from still_kernels.hybrid_attention.backward import triton_linear as linear
    from still_kernels.hybrid_attention.backward import triton_softmax as softmax
    from still_kernels.hybrid_attention.plan import constants_of

    query, key, value, gate = inputs.query, inputs.key, inputs.value, inputs.gate
    batch, tokens, heads, dim = query.shape
    kv_heads, select_heads, chunk, salient = (
        config.num_kv_heads,
        config.select_heads,
        config.chunk_size,
        config.salient_per_chunk,
    )
    wide, features, rows = query.dtype == torch.float32, config.state_features, config.projection_dim
    chunks = -(-tokens // chunk)
    late = max(chunks - 2, 0)
    slots, flags = late * salient, folds.shape[1]
    factor, weights = inputs.window_factor, (inputs.feature_q_weight, inputs.feature_k_weight)
    scale, weight_heads = dim**-0.5, weights[0].shape[0]
    tiles = tiles or tiles_of(config, wide)
    every = {
        **constants_of(config, wide, False, factor is not None),
        "DOT": "ieee" if wide else "tf32",
        "FP": pow2(features),
        "TOWARDS": int(bool({"query", "window_factor"} & set(wanted))),
    }
    numbers = torch.float32

    def new(*shape: int, dtype: torch.dtype = query.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    def run(name: str, kernel: object, grid: tuple[int, int, int], *arguments: object) -> None:
        tile = tiles[name] if name in tiles else KernelTile()
        known = {**every, **tile.constants}
        taken = {n: known[n] for n in kernel.arg_names[len(arguments) :]}  # type: ignore[attr-defined]
        kernel[grid](*arguments, **taken, **tile.options())  # type: ignore[index]

    salient_key, salient_value = new(batch, select_heads, slots, dim), new(batch, select_heads, slots, dim)
    phi_q, phi_k = (
        new(batch, heads, tokens if late else 0, features),
        new(batch, heads, tokens if late else 0, features),
    )
    states, masses = new(batch, heads, late, features, dim), new(batch, heads, late, features, dtype=numbers)
    parts = -(-features // tiles["scan"].constants["FB"]) * -(-dim // tiles["scan"].constants["DB"])
    if slots:
        run("gather", softmax.gather_kernel, (late, select_heads, batch), key, value, folds, salient_key, salient_value,
            tokens, kv_heads, select_heads // kv_heads, salient, flags)  # fmt: skip
    if late:
        for x, weight, fold, phi, first in (
            (query, weights[0], None, phi_q, 2),
            (key, weights[1], folds, phi_k, 0),
        ):
            run("features", linear.backward_features_kernel, (late, heads, batch), x, weight, fold, phi,
                tokens, heads, x.shape[2], weight_heads, select_heads, flags, first, first + late)  # fmt: skip
        run("scan", linear.backward_scan_kernel, (parts, heads, batch), value, phi_k, states, masses,
            tokens, heads, kv_heads, late)  # fmt: skip

    grad_query, grad_key, grad_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    lse, inverse, delta = (new(batch, heads, tokens, dtype=numbers) for _ in range(3))
    row_sums = None if factor is None else torch.empty_like(lse)
    run("query", softmax.backward_query_kernel, (-(-tokens // tiles["query"].constants["BM"]), heads, batch),
        query, key, value, output, grad, factor, salient_key, salient_value, phi_q, masses, grad_query, lse, inverse, delta,
        row_sums, tokens, heads, kv_heads, select_heads, salient, slots, int(config.phantom_first_chunk), scale,
        config.mix_epsilon)  # fmt: skip

    grad_gate = None if gate is None else torch.zeros_like(gate)
    linear_grad_key, linear_grad_value = (new(batch, late * chunk, heads, dim) for _ in range(2))
    of_salient = [new(batch, select_heads, slots, dim, dtype=numbers) for _ in range(2)]
    grad_weights = [torch.zeros_like(w, dtype=numbers) for w in weights]
    if late:
        grad_states, grad_masses = torch.empty_like(states), torch.empty_like(masses)
        programs = [
            -(-late * chunk // (tiles[name].constants["BM"] * tiles[name].constants["TB"]))
            for name in ("linear_query", "linear_key")
        ]
        of_weights = [new(batch, n, heads, rows, dim, dtype=numbers) for n in programs]
        run("linear_query", linear.backward_linear_query_kernel, (programs[0], heads, batch),
            query, gate, grad, weights[0], inverse, delta, states, masses, grad_query, grad_gate, of_weights[0],
            tokens, heads, weight_heads, late)  # fmt: skip
        run("reverse", linear.backward_reverse_kernel, (parts, heads, batch),
            grad, gate, phi_q, inverse, delta, grad_states, grad_masses, tokens, heads, late)  # fmt: skip
        run("linear_key", linear.backward_linear_key_kernel, (programs[1], heads, batch),
            key, value, weights[1], folds, grad_states, grad_masses, linear_grad_key, linear_grad_value, of_weights[1],
            tokens, heads, kv_heads, select_heads, weight_heads, late, flags)  # fmt: skip
        grad_weights = [part.sum((0, 1)) if weight_heads > 1 else part.sum((0, 1, 2))[None] for part in of_weights]
    found = {"query": grad_query, "feature_q_weight": grad_weights[0], "feature_k_weight": grad_weights[1]}
    if grad_gate is not None:
        found["gate"] = grad_gate
    if row_sums is not None:
        found["window_factor"] = row_sums.sum((0, 2))
    if not {"key", "value"} & set(wanted):
        return found
    if slots:
        run("salient", softmax.backward_salient_kernel,
            (-(-slots // tiles["salient"].constants["BN"]), select_heads, batch),
            query, grad, factor, salient_key, salient_value, lse, delta, *of_salient, tokens, heads, select_heads, salient,
            slots, scale)  # fmt: skip
    run("key", softmax.backward_key_kernel, (chunks, kv_heads, batch),
        query, key, value, grad, factor, folds, lse, delta, linear_grad_key, linear_grad_value, *of_salient, grad_key,
        grad_value, tokens, heads, kv_heads, select_heads, salient, late, flags, scale)  # fmt: skip
    return {**found, "key": grad_key, "value": grad_value}
