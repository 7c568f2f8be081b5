"""Block sizes, warps and pipeline stages of the kernels, by architecture and sizes of a head. Integers only: no torch, no Triton."""

from __future__ import annotations

from functools import lru_cache

from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, pow2

MAX_HEAD_DIM = 256
MAX_SHARED = 16
SEGMENT_TOKENS = 8192
"""That a prompt's steps take at a time, which bounds the workspace: 304 MB for 32 heads of 128 with a decay per head, in 16 bits."""


@lru_cache
def tile_table(
    arch: int, head_dim: int, value_dim: int, shared: int, delta: bool, per_key: bool, dtype: str
) -> TileTable:
    """The table of one variant.

    Args:
        arch: Compute capability, 90 for sm_90.
        head_dim, value_dim: D, V.
        shared: G, query heads of one state.
        delta, per_key: The rule corrects; its decay is one per key.
        dtype: Of activations.
    """
    wide = dtype == "float32"
    room = SHARED_BYTES.get(arch, 99 << 10)
    dim, size = pow2(head_dim), 4 if wide else 2
    chunk = 32 if wide or dim > 128 or room < (160 << 10) else 64
    # A program's columns are rows of its GEMMs: 64 are what instructions of sm_90 take, which float32's registers have no room for.
    columns = 64 if arch == 90 and not wide else min(pow2(value_dim), 16 if wide and dim > 128 else 32)
    # A stage holds what a chunk reads; beside the stages lies what GEMMs pass on.
    stage = size * chunk * (dim * (1 + int(delta and per_key)) + columns) + 4 * chunk * chunk * int(delta)
    fixed = size * columns * (dim + chunk) + (16 << 10)
    stages = max(1, min(4 if arch == 90 else 3, (room - fixed) // stage))
    # Four programs a multiprocessor, which wait for their own GEMMs, in place of two; elsewhere it spills.
    registers = 128 if arch == 90 and not (wide or per_key) else None
    # Without a correction rows of the state do not meet: twice the programs. float16's columns have one divisor.
    rows = min(dim, 64) if arch == 90 and dtype == "bfloat16" and not delta else dim
    block = min(pow2(value_dim), 64 if wide or dim > 128 else 128)
    tiles = {
        "prepare": KernelTile({"C": chunk, "LEVELS": chunk.bit_length() - 1, "BD": min(dim, 64)}, 4, 1, registers),
        "scan": KernelTile({"C": chunk, "BD": rows, "BV": columns, "STAGES": stages}, 4, stages),
        "output": KernelTile({"C": chunk, "BV": max(block, 64) if arch == 90 else block}, 4, 1),
        "decode": KernelTile({"BV": min(pow2(value_dim), 16), "PDL": int(arch >= 90)}, 4, 1, None, arch >= 90),
    }
    return TileTable(tiles, {"segment_chunks": SEGMENT_TOKENS // chunk})
