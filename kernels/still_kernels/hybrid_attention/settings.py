"""What tune tries for the kernels of still::HybridAttention, and which settings do not go together. Integers only."""

from __future__ import annotations

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.tile import Setting, TileTable, one, stages

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
