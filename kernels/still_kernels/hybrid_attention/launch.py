"""Runs the plan of still::HybridAttention with Triton: which tensors go by which name, and sizes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from still_kernels import launcher
from still_kernels.common.cuda_function import can_compile
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.kernels import FUNCTIONS
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState, state_names
from still_kernels.hybrid_attention.pages import Pages
from still_kernels.hybrid_attention.plan import BY_TMA, constants_of, plan_constants, table_of
from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.plan.tiles import for_many_rows
from still_kernels.packing import Packing, size_of_call
from still_kernels.plan import Call
from still_kernels.tile import TileTable, changed


def device_table(config: HybridAttentionConfig, device: torch.device, wide: bool, described: bool = True) -> TileTable:
    """Block sizes for a device; the interpreter on the CPU, which cannot run Gluon, uses those of sm_90. Steps by clusters need NVRTC.

    described: Descriptors can be made of the call's tensors.
    """
    table = table_of(config, launcher.arch_of(device), wide)
    if table.host["decode_clusters"] and (device.type == "cpu" or not can_compile()):
        table = changed(table, "decode", {"decode_clusters": 0})
    if described and device.type != "cpu":
        return table
    return changed(table, "attend", dict.fromkeys(BY_TMA.values(), 0))


def can_be_described(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the addresses are what descriptors need."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def call_of(
    config: HybridAttentionConfig,
    dtype: torch.dtype,
    table: TileTable,
    batch: int,
    tokens: int,
    slots: int,
    weight_heads: int = 1,
    packed: tuple[int, int] | None = None,
) -> Call:
    """What the plan sees of a call.

    Args:
        slots: N. weight_heads: Heads of the feature weights.
        packed: Tokens of all rows and rows of the state, where rows are packed.
    """
    return Call(
        {**config.symbols(), "B": batch, "T": tokens, "N": slots},
        config.attributes(),
        plan_constants(config, table),
        dtype=str(dtype).removeprefix("torch."),
        present=frozenset(name for name in state_names(config) if name.endswith("_scale")),
        shapes={"feature_q_weight": (weight_heads,)},
        tokens=None if packed is None else packed[0],
        rows=None if packed is None else packed[1],
    )


def _prepare(
    config: HybridAttentionConfig,
    dtype: torch.dtype,
    table: TileTable,
    variant: object | None,
    factor: bool,
    pages: Pages | None,
    *call: Any,
) -> launcher.Prepared:
    """The launches of a kind of call; `call` (see `call_of`), where states lie in pages with their number for the rows of the state."""
    if pages is not None:  # whose kernels know pages
        table = changed(table, "scan", {"scan_tma": 0, "linear_programs": 0})
        if config.cache == "int8":  # of which numbers for a copy by TMA would take more memory than requests save
            table = changed(table, "attend", {"attend_programs": 0})
    if call[-1] is not None:  # rows side by side
        table = changed(table, "decode", {"decode_clusters": 0})
    seen = call_of(config, dtype, table, *call)
    constants = constants_of(config, dtype == torch.float32, seen.tokens is not None, factor)
    launches = PLAN.evaluate(seen)
    if pages is not None:
        assert seen.rows is not None
        all_rows = (seen.rows * pages.size_bytes // pages.row_bytes, config.head_dim)
        launches = replace(launches, matrices={**launches.matrices, "cached_key": all_rows, "cached_value": all_rows})
        constants["PAGES"] = pages.kernel
    return launcher.prepare(launches, FUNCTIONS, table.kernels(), constants, variant)


@lru_cache(1024)
def _prepared(
    config: HybridAttentionConfig,
    device: torch.device,
    dtype: torch.dtype,
    factor: bool,
    described: bool,
    pages: Pages | None,
    *call: Any,
) -> launcher.Prepared:
    """The same with the block sizes of the device; kept, for a layer is called once per token."""
    table = device_table(config, device, dtype == torch.float32, described)
    if pages is not None:
        heads = call[0] * config.num_heads
        table = for_many_rows(table, launcher.arch_of(device), config.head_dim, config.projection_dim, heads)
    whole = table.tiles["decode"].constants["LF"]
    variant = launcher.variant_of(config, device, dtype, factor, pages, call[-1] is not None, whole)
    return _prepare(config, dtype, table, variant, factor, pages, *call)


def launch_hybrid_attention(
    inputs: Inputs,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    output: Tensor,
    packing: Packing | None = None,
    table: TileTable | None = None,
    present_length: Tensor | None = None,
    flags: Tensor | None = None,
) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance.

    Args:
        inputs: Contiguous; without a packing `new_tokens` are given.
        state: Of states in pages `Pages.views` and the lengths of the call's rows.
        output: As query.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.
        present_length: [B], not the state's; in decode (T = 1, not packed) it gets the lengths after the call.
        flags: Gets the selection of a call with T > 1 whose policy is "error", int8 [B, tiles + 2, HS, C] as in the plan.
    """
    query, factor = inputs.query, inputs.factor(config)
    pages = None if packing is None else packing.pages
    assert pages is None or isinstance(pages, Pages)
    rows, slots = (state.length.shape[0], state.slots) if pages is None else (len(state.kv_state), pages.slots)
    batch, tokens, packed = size_of_call(query, packing, rows)
    call = (batch, tokens, slots, inputs.feature_q_weight.shape[0], packed)
    if table is None:
        states = (state.salient_key, state.salient_value)
        copied = (query, inputs.key, inputs.value, inputs.gate, inputs.feature_q_weight, output, *states)
        described = tokens > 1 and can_be_described(copied)
        kind = (factor is not None, described, pages)
        prepared = _prepared(config, query.device, query.dtype, *kind, *call)
    else:
        prepared = _prepare(config, query.dtype, table, None, factor is not None, pages, *call)
    tensors: dict[str, Tensor | None] = {
        **as_codes(state.tensors()),
        **vars(inputs),
        "window_factor": factor,
        "output": output,
        "past_length": state.length,
        "present_length": present_length,
        **({} if packing is None else packing.tensors()),
    }
    if flags is not None:
        tensors["flags"] = flags
    launcher.Launcher().run(prepared, tensors, query)


def as_codes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a state by name; words as the codes that they hold."""
    return {name: x.view(torch.int8) if x.dtype == torch.int32 else x for name, x in state.items()}


def bind_decode(
    inputs: Inputs, config: HybridAttentionConfig, state: HybridAttentionState, factor: Tensor | None
) -> launcher.Bound:
    """Decode steps like this one on `state`, in place: output, query, key, value, gate where the layer has one, weights, new_tokens and
    past_length are those of each call.

    Args:
        factor: See `Inputs.factor`.
    """
    query = inputs.query
    call = (query.shape[0], 1, state.slots, inputs.feature_q_weight.shape[0], None)
    prepared = _prepared(config, query.device, query.dtype, factor is not None, False, None, *call)
    fixed = {name: tensor for name, tensor in as_codes(state.tensors()).items() if name != "length"}
    gate = () if inputs.gate is None else ("gate",)
    names = (
        "output",
        "query",
        "key",
        "value",
        *gate,
        "feature_q_weight",
        "feature_k_weight",
        "new_tokens",
        "past_length",
    )
    return launcher.Bound(prepared, query.dtype, {**fixed, "window_factor": factor}, names)
