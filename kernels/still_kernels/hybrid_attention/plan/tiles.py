"""Block sizes, warps and pipeline stages of the kernels, by architecture and head size. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, changed, for_two_programs, pow2

HEAD_DIMS = (48, 64, 80, 96, 128, 256)
CHUNK_SIZES = (32, 64, 128, 256)
MAX_SALIENT_PER_CHUNK = 32
MAX_FEATURE_ROWS = 256
MAX_GROUP = 16
CLUSTERS = (8, 2, 1)
"""Blocks that share the query heads of a step on sm_90: the count that fills the chip."""
MANY_HEADS = 1024
"""Number of query heads of all rows from which decode's programs are fewer and larger. 32 rows of 32 heads at 1,100 tokens take 92 instead
of 119 us, at 16,000 tokens 270 instead of 261 (H100); 64 rows at 1,100 take 150 instead of 204 (H200)."""


@lru_cache
def tile_table(arch: int, head_dim: int, chunk_size: int, feature_rows: int, wide: bool) -> TileTable:
    """The table of one variant.

    Args:
        arch: Compute capability, 90 for sm_90.
        head_dim: D.
        chunk_size: C.
        feature_rows: P, rows of a feature projection.
        wide: float32 activations.
    """
    dim, rows = pow2(head_dim), pow2(feature_rows)
    shared = SHARED_BYTES.get(arch, 99 << 10)
    small = shared < (160 << 10)
    heavy = wide or dim > 128
    tight = heavy and (shared < (200 << 10) or (wide and dim > 128))
    block = min(chunk_size, 32 if tight else 64)
    columns = min(dim, 32) if heavy else dim  # columns of a projection in shared memory at a time
    keys = 32 if heavy else 64
    features = min(rows, 32 if heavy else 64)
    stages = 1 if tight else 2 if heavy or small else 3
    near, ahead = (keys, stages) if heavy else for_two_programs(shared, dim, keys, stages)
    slices = min(dim, 32)  # columns of S of a step's program
    every = 1 if heavy or chunk_size > 64 else 2  # chunks from one stored S to the next
    many = small and rows > 128  # features of a head of 128 do not fit
    linear = 1 if many else stages if arch == 90 else min(stages, 2)
    tiles = {
        "score": KernelTile(
            {"BM": (16 if tight and wide and dim > 128 else min(block, 32)) if heavy else block, "STAGES": 1},
            4,
            1,
            128 if arch == 90 and not heavy else None,
        ),
        "select": KernelTile({}, 4, 1),
        "features": KernelTile(
            {"RB": min(block, 32) if heavy else block, "TB": 4, "DK": columns}, 4, 1, None if heavy else 168
        ),
        "scan": KernelTile(
            {
                "FB": features,
                "DB": 64,
                "RB": min(block, 32) if heavy else block,
                "EVERY": every,
                "STAGES": stages if heavy else 6 if arch == 90 else 4,  # 0.86 instead of 0.93 ms for 65,536 tokens
            },
            4,
            stages,
        ),
        "linear": KernelTile(
            {
                "BM": (16 if wide and (dim > 128 or many) else min(block, 32)) if heavy else 64,
                "TB": 4,
                "DK": columns,
                "DS": min(16 if heavy else 32, dim),
                "EVERY": every,
                "STAGES": linear,
            },
            4,
            linear,
        ),
        "attend": KernelTile({"BM": block, "BN": near, "STAGES": ahead}, 4, ahead),
        "commit": KernelTile({}, 4, 1),
        "decode": KernelTile(
            {
                "PDL": int(arch >= 90),
                "AHEAD": int(arch == 90),  # prefetch to L2 during the previous kernel, as far as the length allows
                "DS": slices,
                "LF": 0,  # rows of S at a time if a program has all of it; 0: a program has DS columns
                "LS": 3,
                "WG": 0,  # 1: the query heads of a key/value head share the programs of its window
                "DW": slices if wide else 2 * slices,  # bytes of DS columns of S: both tiles then have one layout
                "BN": 8 if wide and dim > 128 else 16,
                "SN": 2 if heavy else 3 if small else 5,
                "BG": 16 if heavy else 64,
                "SG": 2 if heavy or small else 3,
                "BL": min(2 * chunk_size, 32 if heavy else 64),
                "BS": 32,  # parts of one head that are merged together
                # sm_90's matrix instructions take 64 rows: with 256 features they need 154 registers
                "RB": 16 if heavy else min(chunk_size, 32 if rows > 128 else 64),
                "DK": columns,
            },
            4,
            1,
            None if heavy else 128,
            arch >= 90,
        ),
    }
    tma = arch == 90 and not wide and head_dim in (64, 128) and chunk_size == 64
    if tma:
        tiles["unpack"] = KernelTile({"RB": 32}, 4, 1)
        tiles["attend_tma"] = KernelTile({"SLOTS": 256 // head_dim}, 4, 1, blocks=_attend_blocks(head_dim))
    linear_tma = tma and feature_rows in (64, 128)
    if linear_tma:
        for blocks in CLUSTERS:
            # Three blocks per multiprocessor, so that the next kernel's blocks start before a step ends; two with whole S.
            stages_, least = (4, 3) if blocks > 1 else (6, 2)
            tiles[f"decode_{blocks}"] = KernelTile(
                {"CL": blocks, "GR": 1, "NST": stages_, "MINB": least}, 9, 1, None, True
            )
        tiles["linear_tma"] = KernelTile({}, 4, 1, blocks=_linear_blocks(head_dim, feature_rows))
        tiles["scan_tma"] = KernelTile(
            {"SLOTS": 4}, 4, 1, blocks=dict.fromkeys(("value", "phi_k", "prefix_kv"), (64, 64))
        )
    host = {
        # Each segment ends in a tail of waves: 16,384 tokens instead of 8,192 saved 0.1 ms of 65,536.
        "segment_tiles": max(2, 16384 // chunk_size),
        # Programs of attend_tma and linear_tma, one for each multiprocessor of H100 and H200; 0: attend, linear.
        "attend_programs": 132 if tma else 0,
        "linear_programs": 132 if linear_tma else 0,
        "scan_tma": int(linear_tma),  # 0: scan
        "decode_clusters": int(linear_tma),  # 0: decode
        "decode_programs": 264,  # salient splits; with the other roles one wave of four programs per multiprocessor
    }
    return TileTable(tiles, host)


def for_many_rows(table: TileTable, arch: int, head_dim: int, feature_rows: int, heads: int) -> TileTable:
    """Block sizes for a step with `heads` query heads in all rows, if S is in pages."""
    if arch != 90 or heads < MANY_HEADS:
        return table
    return changed(table, "decode", {"LF": min(pow2(feature_rows), 4096 // pow2(head_dim)), "WG": 1})


def _attend_blocks(head_dim: int) -> dict[str, tuple[int, int]]:
    """Copied blocks of attend_tma: 64 queries with their gates and outputs, 128 keys."""
    rows = {"query": 64, "gate": 64, "output": 64, "linear": 64}
    rows |= dict.fromkeys(("key", "value", "cached_key", "cached_value"), 128)
    return {name: (count, head_dim) for name, count in rows.items()}


def _linear_blocks(head_dim: int, feature_rows: int) -> dict[str, tuple[int, int]]:
    """Copied blocks of linear_tma: a chunk of tokens, halves of tensors with features."""
    blocks = {name: (64, head_dim) for name in ("query", "value", "linear")}
    blocks |= {name: (feature_rows, head_dim) for name in ("feature_q_weight", "prefix_kv")}
    return {**blocks, "phi_k": (64, feature_rows)}
