"""still::HybridAttention for bench and tune: its layers, calls, least costs and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from still_kernels.hybrid_attention.call import hybrid_attention
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.meaning.chunked import chunked_hybrid_attention
from still_kernels.hybrid_attention.meaning.inputs import Inputs
from still_kernels.hybrid_attention.meaning.state import HybridAttentionState
from still_kernels.tile import Setting, TileTable
from tools.kernels.settings import one, stages
from tools.kernels.work import Kind, OpWork, Work, filled

WARPS = one("num_warps", 2, 4, 8)
REGISTERS = one("max_registers", None, 128, 168)
ATTEND: list[Setting] = [
    {"BM": 64, "num_warps": 4, "STAGES": 3},
    {"BM": 128, "num_warps": 8},
    {"BM": 128, "num_warps": 4, "STAGES": 2},
    {"BM": 128, "BN": 128, "num_warps": 8, "STAGES": 2},
    {"BM": 128, "BN": 32, "num_warps": 8, "STAGES": 3, "max_registers": 128},
    {"BM": 128, "num_warps": 8, "STAGES": 2, "max_registers": 128},
    {"BM": 32, "num_warps": 4},
    *stages(2, 3, 4, 6),
    *one("BN", 32, 64, 128),
]
LINEAR: list[Setting] = [
    *REGISTERS,
    *one("TB", 1, 2, 4, 8),
    *one("DS", 16, 32, 64),
    *stages(1, 2, 3),
    {"BM": 128, "num_warps": 8},
    {"BM": 64, "num_warps": 4},
]
SCAN: list[Setting] = [
    *stages(2, 3, 4, 6),
    {"FB": 128},
    {"DB": 128},
    {"DB": 32},
    {"FB": 128, "num_warps": 8},
    {"RB": 32},
    *WARPS,
]
DECODE: list[Setting] = [
    *one("SN", 2, 3, 4, 6),
    {"BN": 32, "SN": 3},
    *one("SG", 2, 3, 4),
    {"BG": 64, "SG": 2},
    {"BG": 16, "SG": 6},
    {"DS": 64, "DW": 128},
    *one("BL", 32, 64, 128),
    *one("RB", 16, 32, 64),
    {"dependent": 0, "PDL": 0},
    *one("num_warps", 4, 8),
    *one("max_registers", None, 96, 128, 168),
    *one("decode_programs", 132, 264, 528),
]
MOVES: dict[str, list[Setting]] = {
    "attend": [{"attend_programs": 0, **setting} for setting in ATTEND],
    "linear": [{"linear_programs": 0, **setting} for setting in LINEAR],
    "features": [*REGISTERS, *one("TB", 1, 2, 4, 8), {"RB": 32}, *WARPS],
    "scan": [{"scan_tma": 0, **setting} for setting in SCAN],
    "score": [*one("BM", 32, 64), *WARPS, *one("max_registers", None, 80, 96, 128)],
    "select": [*one("num_warps", 1, 2, 4, 8)],
    "prefill": [
        *one("segment_tiles", 32, 64, 128, 256, 512, 1024),
        {"scan.EVERY": 1, "linear.EVERY": 1},
        {"scan.EVERY": 2, "linear.EVERY": 2},
    ],
    "decode": [{"decode_clusters": 0, **setting} for setting in DECODE],
}
"""What is tried from the current setting and then from better ones, by kernel; "prefill" is a whole call."""
INSTEAD = {**{name: f"{name}_tma" for name in ("attend", "linear", "scan")}, "decode": "decode_8"}
"""What runs in the place of a kernel; a setting says which."""
SHARES = {"attend": 3, "linear": 2}
"""Of the time, 1 where nothing is said: by what the kernels take and how many settings they have."""


def misfit(table: TileTable, config: HybridAttentionConfig, arch: int) -> str:
    """Why the block sizes of a table do not go together, or nothing; `arch` as for `tile_table`.

    With one stage the buffers of linear's last loop stay where they are, and its descriptors of them are constants. On sm_90
    ptxas 12.8, which Triton 3.6 and 3.7 bring, then adds to a register that holds something else: wrong results, or illegal
    addresses (docs/notebook/kernels.md). With more stages it computes them in the loop, and rightly.
    """
    tiles = {name: tile.constants for name, tile in table.kernels().items()}
    chunk, every = config.chunk_size, tiles["scan"]["EVERY"]
    rules = {
        "scan and linear need one EVERY": tiles["linear"]["EVERY"] == every and every in (1, 2),
        f"BM of linear divides {every * chunk}": every * chunk % tiles["linear"]["BM"] == 0,
        f"blocks divide the chunk of {chunk}": all(
            chunk % tiles[k][n] == 0 for k, n in (("score", "BM"), ("scan", "RB"))
        ),
        f"RB of features divides the chunk of {chunk}": chunk % tiles["features"]["RB"] == 0,
        "linear with 64 rows needs two stages on sm_90 (ptxas 12.8)": arch != 90
        or tiles["linear"]["BM"] < 64
        or tiles["linear"]["STAGES"] > 1,
        "attend_tma and linear_tma need segments of whole tiles": not any(
            table.host[name] for name in ("attend_programs", "linear_programs", "scan_tma")
        )
        or table.host["segment_tiles"] % 2 == 0,
        f"BL divides the ring of {2 * chunk}": 2 * chunk % tiles["decode"]["BL"] == 0,
    }
    return "; ".join(rule for rule, kept in rules.items() if not kept)


def prefill_cost(config: HybridAttentionConfig, tokens: int) -> tuple[float, float]:
    """Of prefilling one empty row.

    Bytes: activations once, S and the caches once. FLOP: local and salient pairs, both projections, S written and read.
    """
    heads, dim, chunk, rows = config.num_heads, config.head_dim, config.chunk_size, config.projection_dim
    chunks = tokens / chunk
    slots = config.salient_per_chunk * max(0.0, (chunks - 3) * (chunks - 2) / 2) / chunks  # a query's mean
    local = 1.5 * chunk - 0.5
    per_token = 4 * dim * (local + slots) + 4 * dim * rows + 4 * config.state_features * dim
    activations = tokens * dim * 2 * (3 * heads + 2 * config.num_kv_heads)
    state = config.slots_for(tokens) * config.select_heads * dim * 4 + heads * config.state_features * dim * 4
    return activations + state, tokens * heads * per_token


def decode_cost(config: HybridAttentionConfig, context: int, batch: int) -> tuple[float, float]:
    """Of one decode step: caches, window, S and the query projection are read once."""
    heads, dim = config.num_heads, config.head_dim
    slots = config.slots_for(context)
    salient = slots * config.select_heads * dim * 4
    state = heads * config.state_features * (dim + 1) * 4
    window = config.num_kv_heads * 2 * config.chunk_size * dim * 4
    weights = heads * config.projection_dim * dim * 2
    flop = heads * (
        4 * dim * (slots + 1.5 * config.chunk_size) + 2 * dim * (config.projection_dim + config.state_features)
    )
    return batch * (salient + state + window) + weights, batch * flop


def layer(sizes: Mapping[str, int], scope: str, context: int) -> HybridAttentionConfig:
    """A layer with room for `context` tokens and one chunk more."""
    return HybridAttentionConfig(
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        chunk_size=sizes["chunk_size"],
        salient_per_chunk=sizes["salient_per_chunk"],
        capacity_tokens=context + sizes["chunk_size"],
        select_scope=scope,
    )


def kinds(context: int, batches: Sequence[int]) -> list[Kind]:
    """A prefill, and steps that do not promote and that do."""
    steps = [
        kind
        for batch in batches
        for kind in (Kind("decode", batch, 1, context - 1), Kind("decode, promoting", batch, 1, context))
    ]
    return [Kind("prefill", 1, context, 0), *steps]


def work(config: HybridAttentionConfig, kind: Kind, dtype: torch.dtype, device: str) -> Work:
    """Calls of one kind."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    shape, dim = (kind.batch, kind.tokens), config.head_dim
    query, gate = random(*shape, config.num_heads, dim), random(*shape, config.num_heads, dim).sigmoid()
    key, value = random(*shape, config.num_kv_heads, dim), random(*shape, config.num_kv_heads, dim)
    q_weight, k_weight = (random(config.num_heads, config.projection_dim, dim) * dim**-0.5 for _ in "qk")
    new = torch.full((kind.batch,), kind.tokens, device=device)
    inputs = Inputs(query, key, value, gate, q_weight, k_weight, new)

    def state() -> HybridAttentionState:
        made = HybridAttentionState.empty(config, kind.batch, dtype, device)
        made.length.fill_(kind.length)
        return filled(made, torch.Generator(device).manual_seed(1)) if kind.length else made

    def launch(state: HybridAttentionState, output: Tensor, table: TileTable) -> None:
        from still_kernels.hybrid_attention.launch import launch_hybrid_attention

        launch_hybrid_attention(inputs, config, state, output, table=table)

    step = kind.tokens == 1
    cost = decode_cost(config, kind.length, kind.batch) if step else prefill_cost(config, kind.tokens)
    return Work(
        *cost,
        state=state,
        reference=lambda state: chunked_hybrid_attention(inputs, config, state)[0],
        run=lambda state: hybrid_attention(inputs, config, state, in_place=True)[0],
        launch=launch,
        output=query,
    )


def _table(config: HybridAttentionConfig, device: torch.device, wide: bool) -> TileTable:
    from still_kernels.hybrid_attention.launch import device_table

    return device_table(config, device, wide)


WORK = OpWork(
    sizes={"heads": 32, "kv_heads": 8, "head_dim": 128, "chunk_size": 64, "salient_per_chunk": 4},
    layers={"q_head": "q_head", "kv_group_max": "kv_group_max"},
    layer=layer,
    kinds=kinds,
    work=work,
    table=_table,
    moves=MOVES,
    decode=frozenset({"decode"}),
    misfit=misfit,
    instead=INSTEAD,
    shares=SHARES,
)
