"""Kernels of still::HybridAttention: launches, block sizes, what they are compiled for. Imports neither torch nor Triton."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

from still_graphs.errors import unknown
from still_graphs.spec import CACHE
from still_kernels.common.cuda_function import can_compile
from still_kernels.hybrid_attention.config import CHOICES, HybridAttentionConfig
from still_kernels.hybrid_attention.plan.launches import PLAN
from still_kernels.hybrid_attention.plan.tiles import (
    CHUNK_SIZES,
    CLUSTERS,
    HEAD_DIMS,
    MAX_FEATURE_ROWS,
    MAX_GROUP,
    MAX_SALIENT_PER_CHUNK,
    tile_table,
)
from still_kernels.op_kernels import DTYPES, Build, Op, OpKernels, imported
from still_kernels.plan import Check
from still_kernels.tile import TileTable, changed, pow2


@dataclass(frozen=True)
class Variant:
    """What a set of kernels is compiled for; everything else is a run-time argument."""

    dtype: str = "bfloat16"
    head_dim: int = 128
    chunk_size: int = 64
    feature_rows: int = 128
    feature_map: str = "np_softmax_pm"
    gate: int = 1
    select_scope: str = "q_head"
    saliency: str = "margin"
    overflow: str = "error"
    window_factor: int = 0
    cache: str = "float"
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        known = {"dtype": DTYPES, "count_dtype": ("int32", "int64"), **CHOICES, CACHE.name: CACHE.choices}
        for name, value in asdict(self).items():
            if name in known and name != "gate" and value not in known[name]:
                raise unknown(value, known[name], f"{name}={value!r}")

    def config(self) -> HybridAttentionConfig:
        """A layer configuration with the variant's compile-time properties."""
        return HybridAttentionConfig(
            num_heads=1,
            num_kv_heads=1,
            head_dim=self.head_dim,
            chunk_size=self.chunk_size,
            salient_per_chunk=min(MAX_SALIENT_PER_CHUNK, self.chunk_size),
            feature_dim=self.feature_rows,
            feature_map=self.feature_map,
            gate="channel" if self.gate else "none",
            select_scope=self.select_scope,
            saliency=self.saliency,
            overflow=self.overflow,
            cache=None if self.cache == CACHE.default else self.cache,
        )


def default_variants() -> list[Variant]:
    """Gated layers with chunks of 64: both 16-bit types, head sizes 64 and 128, both scopes, both count types."""
    return [
        Variant(dtype=dtype, head_dim=dim, feature_rows=dim, select_scope=scope, count_dtype=count)
        for dtype, dim, scope, count in itertools.product(
            ("bfloat16", "float16"), (64, 128), ("q_head", "kv_group_max"), ("int64", "int32")
        )
    ]


def constants_of(config: HybridAttentionConfig, wide: bool, packed: bool, window_factor: bool) -> dict[str, Any]:
    """Compile-time constants by name; each kernel takes those that it declares.

    Args:
        config: The layer.
        wide: float32 activations.
        packed: Packed tokens with query_start and state_row.
        window_factor: The call has a window_factor tensor.
    """
    import triton

    from still_kernels.hybrid_attention.triton_common import FEATURE_CODES, SCOPE_CODES

    return {
        "C": config.chunk_size,
        "D": config.head_dim,
        "DP": pow2(config.head_dim),
        "F": config.state_features,
        "P": config.projection_dim,
        "PP": pow2(config.projection_dim),
        "KP": pow2(config.salient_per_chunk),
        "GP": pow2(config.group_size),
        "FEATURE": FEATURE_CODES[config.feature_map],
        "SCOPE": SCOPE_CODES[config.select_scope],
        "RELEASED": int(config.saliency == "released_prefill"),
        "EVICT": int(config.overflow != "error"),
        "GATE": int(config.gate == "channel"),
        "FACTOR": int(window_factor),
        "RAGGED": int(packed),
        "CODES": int(config.cache == "int8"),
        "PAGES": 0,
        "SETTLE": int(not triton.knobs.runtime.interpret),
        "DOT": "tf32x3" if wide else "tf32",
    }


def plan_constants(config: HybridAttentionConfig, table: TileTable) -> dict[str, int]:
    """Values of the plan's constants for kernels with these block sizes."""
    tiles = {name: tile.constants for name, tile in table.tiles.items()}
    instead = taken_by_tma(config, table)
    scan = {"FB": 128, "DB": 64} if "scan" in instead else tiles["scan"]
    return {
        "scan_programs": -(-config.state_features // scan["FB"]) * -(-config.head_dim // scan["DB"]),
        "features_tiles": tiles["features"]["TB"],
        "score_blocks_per_chunk": config.chunk_size // tiles["score"]["BM"],
        "prefix_every": tiles["scan"]["EVERY"],
        "linear_rows": tiles["linear"]["BM"] * tiles["linear"]["TB"],
        "unpack_rows": tiles["unpack"]["RB"] if instead and config.cache == "int8" else 0,
        "attend_rows": 128 if "attend" in instead else tiles["attend"]["BM"],
        "value_slices": 0 if tiles["decode"]["LF"] else pow2(config.head_dim) // tiles["decode"]["DS"],
        "window_parts": 2 * config.chunk_size // tiles["decode"]["BL"],
        **table.host,
        **{constant: table.host[constant] * (name in instead) for name, constant in BY_TMA.items()},
        "decode_clusters": int(by_clusters(config, table)),
        "evicted_rows": pow2(config.salient_per_chunk),
    }


def table_of(config: HybridAttentionConfig, arch: int, wide: bool) -> TileTable:
    """Block sizes for a layer; `arch` and `wide` as of `tile_table`."""
    table = tile_table(arch, config.head_dim, config.chunk_size, config.projection_dim, wide)
    if config.select_scope != "q_head" and table.host["decode_clusters"]:
        for blocks in CLUSTERS:  # two heads of a selection read its rows once
            table = changed(table, f"decode_{blocks}", {"GR": 2, "MINB": 2, "NST": 4 if blocks == 8 else 6})
    if config.overflow != "error":  # select then walks over the cache
        return table
    return changed(table, "select", {"num_warps": 1})  # 67 instead of 133 us for 65,536 tokens


BY_TMA = {
    "scan": "scan_tma",
    "linear": "linear_programs",
    "attend": "attend_programs",
}
"""Kernels in whose place one that copies by TMA may run, `<name>_tma`, and the constant that says so where it is not 0."""


def taken_by_tma(config: HybridAttentionConfig, table: TileTable) -> set[str]:
    """Those in whose place it does: none where a folding policy has them run chunk by chunk.

    scan_tma and linear_tma want features of two halves and S of every second chunk.
    """
    if config.overflow != "error":
        return set()
    halves = config.state_features == 2 * config.projection_dim
    second = table.tiles["scan"].constants["EVERY"] == 2
    fit = {"scan": halves and second, "linear": halves and second, "attend": True}
    return {name for name, constant in BY_TMA.items() if table.host[constant] > 0 and fit[name]}


def by_clusters(config: HybridAttentionConfig, table: TileTable) -> bool:
    """Whether clusters of blocks take steps: not where rows are in 8 bits, nor for a folding policy, other features or scores."""
    plain = config.overflow == "error" and config.cache != "int8" and config.saliency == "margin"
    return table.host["decode_clusters"] > 0 and plain and config.feature_map in ("np_softmax_pm", "softmax_pm")


def build(variant: Variant, arch: int) -> Build:
    """What a variant is on an architecture; without NVRTC, which compiles the clusters' kernels, steps are decode's."""
    config, wide = variant.config(), variant.dtype == "float32"
    table = table_of(config, arch, wide)
    clusters = by_clusters(config, table) and can_compile()
    table = changed(table, "decode", {"decode_clusters": int(clusters)})
    absent = {"gate"} if not variant.gate else set()
    absent |= {"window_factor"} if not variant.window_factor else set()
    absent |= {"evicted_key", "evicted_value", "evicted_count"} if variant.overflow == "error" else set()
    absent |= {s.name for s in PLAN.spec.states if s.only and s.only[0] == CACHE.name and s.only[1] != variant.cache}
    instead = taken_by_tma(config, table)
    others = {name if name in instead else f"{name}_tma" for name in BY_TMA}
    others |= set() if clusters else {f"decode_{blocks}" for blocks in CLUSTERS}
    others |= set() if instead and config.cache == "int8" else {"unpack"}
    return Build(
        {name: tile for name, tile in table.kernels().items() if name not in others},
        constants_of(config, wide, False, bool(variant.window_factor)),
        plan_constants(config, table),
        frozenset(absent),
    )


_COVERED = (
    Check(f"dtype in {DTYPES}", f"dtype=torch.{{dtype}}; the kernels have {', '.join(DTYPES)}."),
    Check(f"chunk_size in {CHUNK_SIZES}", f"chunk_size={{chunk_size}}; the kernels have one of {CHUNK_SIZES}."),
    Check(
        f"salient_per_chunk <= {MAX_SALIENT_PER_CHUNK}",
        f"salient_per_chunk={{salient_per_chunk}}; the kernels have at most {MAX_SALIENT_PER_CHUNK}.",
    ),
    Check(f"P <= {MAX_FEATURE_ROWS}", f"feature_dim={{P}}; the kernels have at most {MAX_FEATURE_ROWS}."),
    Check(
        f"H // HK <= {MAX_GROUP}",
        f"{{H // HK}} query heads per key/value head; the kernels have at most {MAX_GROUP}.",
    ),
    Check("local == 'chunked'", "local='{local}'; the kernels have 'chunked'."),
)

KERNELS = OpKernels(
    plan=PLAN,
    variant=Variant,
    default_variants=default_variants,
    build=build,
    functions=imported("still_kernels.hybrid_attention.kernels", "FUNCTIONS"),
    covered=(Check(f"D in {HEAD_DIMS}", f"head_dim={{D}}; the kernels have one of {HEAD_DIMS}."), *_COVERED),
    # Ahead of time also the sizes between the measured ones: the rest of a power of two is masked.
    covered_ahead=(
        Check(f"D <= {max(HEAD_DIMS)}", f"head_dim={{D}}; the kernels have at most {max(HEAD_DIMS)}."),
        *_COVERED,
    ),
)


OP = Op(KERNELS)
