"""Kernels of still::LinearAttention: launches, block sizes, variants. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from still_graphs.errors import ConfigError
from still_kernels.linear_attention.spec import DELTA, GATED, LINEAR_ATTENTION
from still_kernels.op_kernels import HEAD_DIM, TYPES, check_known, combinations, constants_of_heads, op_with_state
from still_kernels.plan import Branch, Check, Launch, Let, Loop, Plan, Region
from still_kernels.tile import SHARED_BYTES, KernelTile, TileTable, pow2

MAX_SHARED = 16
SEGMENT_TOKENS = 8192
"""Tokens that a prompt's steps process at a time. It bounds the workspace: 304 MB for 32 heads of 128 with a decay per head, in 16 bits."""


@lru_cache
def tile_table(
    arch: int, head_dim: int, value_dim: int, shared: int, delta: bool, per_key: bool, dtype: str
) -> TileTable:
    """The table of a variant on an architecture (90 for sm_90); delta: the rule has corrections; per_key: it has a decay per key
    channel."""
    wide = dtype == "float32"
    room = SHARED_BYTES.get(arch, 99 << 10)
    dim, size = pow2(head_dim), 4 if wide else 2
    chunk = 32 if wide or dim > 128 or room < (160 << 10) else 64
    # A program's columns are rows of its GEMMs. sm_90's instructions need 64, for which float32 lacks registers.
    columns = 64 if arch == 90 and not wide else min(pow2(value_dim), 16 if wide and dim > 128 else 32)
    # A stage has what a chunk reads; the results between GEMMs need more shared memory.
    stage = size * chunk * (dim * (1 + int(delta and per_key)) + columns) + 4 * chunk * chunk * int(delta)
    fixed = size * columns * (dim + chunk) + (16 << 10)
    stages = max(1, min(4 if arch == 90 else 3, (room - fixed) // stage))
    # Four programs per multiprocessor instead of two, since they wait for their own GEMMs; elsewhere it spills.
    registers = 128 if arch == 90 and not (wide or per_key) else None
    # Without corrections rows of the state are independent: twice the programs. float16's columns have one divisor.
    rows = min(dim, 64) if arch == 90 and dtype == "bfloat16" and not delta else dim
    block = min(pow2(value_dim), 64 if wide or dim > 128 else 128)
    tiles = {
        "prepare": KernelTile({"C": chunk, "LEVELS": chunk.bit_length() - 1, "BD": min(dim, 64)}, 4, 1, registers),
        "scan": KernelTile({"C": chunk, "BD": rows, "BV": columns, "STAGES": stages}, 4, stages),
        "output": KernelTile({"C": chunk, "BV": max(block, 64) if arch == 90 else block}, 4, 1),
        "decode": KernelTile({"BV": min(pow2(value_dim), 16), "PDL": int(arch >= 90)}, 4, 1, None, arch >= 90),
    }
    return TileTable(tiles, {"segment_chunks": SEGMENT_TOKENS // chunk})


DECODE = "T <= 8"
"""So few tokens that reading and writing the state dominates, not the GEMMs."""
PER_KEY = "(E > 1 if has(decay) else 0)"
_CHUNKS = f"not ({DECODE})"
_OF_KEYS = f"{_CHUNKS} and {PER_KEY}"
_OF_HEADS = f"{_CHUNKS} and has(decay) and not {PER_KEY}"
_PREPARED = "(has(decay) or has(beta))"
_CORRECTED = f"{_CHUNKS} and has(beta)"

_STEP = (Launch("decode", ("ceil_div(V, decode_block)", "H", "B")),)
_PART = {"first": "first", "n_chunks": "n_chunks"}  # the chunks of a segment
_SEGMENT = (
    Let("n_chunks", "min(segment_chunks, chunks - first)"),
    Launch("prepare", (f"n_chunks if {_PREPARED} else 0", "H", "B"), **_PART),
    Launch("scan", ("ceil_div(V, value_block) * ceil_div(D, key_block)", "H", "B"), **_PART),
    Launch("output", ("n_chunks * ceil_div(V, output_block)", "H", "B"), **_PART),
)

PLAN = Plan(
    LINEAR_ATTENTION,
    key={
        "dtype": "dtype",
        "head_dim": "D",
        "value_dim": "V",
        "shared": "G",
        "update_rule": "update_rule",
        "per_key": PER_KEY,
        "count_dtype": "count_dtype",
    },
    constants=(
        "chunk",  # tokens of a chunk
        "segment_chunks",  # chunks that workspace is sized for
        "value_block",  # columns of the state of a prompt's scan program
        "key_block",  # rows of it
        "output_block",  # columns of an output program
        "decode_block",  # columns of a step's program
    ),
    checks=(
        Check("HQ > 0 and H % max(HQ, 1) == 0", "HQ={HQ} query groups do not divide the H={H} heads of value."),
        Check("HK > 0 and H % max(HK, 1) == 0", "HK={HK} key heads do not divide the H={H} heads of value."),
        Check(
            f"has(decay) == (update_rule in {GATED})", "update_rule={update_rule}: decay is for gated and gated_delta."
        ),
        Check(
            f"has(beta) == (update_rule in {DELTA})", "update_rule={update_rule}: beta is for delta and gated_delta."
        ),
        Check("not has(decay) or E == 1 or E == D", "decay has E={E} values a head; expected 1 or D={D}."),
        Check("not has(beta) or W == 1 or W == H", "beta has W={W} heads; expected 1 or H={H}."),
    ),
    define={"chunks": "ceil_div(T, chunk)", "span": "min(chunks, segment_chunks)", "wide": "dtype == 'float32'"},
    types={"halves": "'float32' if dtype == 'float32' else 'bfloat16'"},
    workspace=(
        Region("scores", "T", ("B", "span", "H", "G", "chunk", "chunk"), _OF_KEYS),
        Region("inverse", "halves", ("B", "span", "H", "1 if wide else 2", "chunk", "chunk"), _CORRECTED),
        Region("left", "float32", ("B", "span", "H", f"D if {PER_KEY} else chunk"), f"{_CHUNKS} and has(decay)"),
        Region("rest", "float32", ("B", "span", "H", "chunk"), _OF_HEADS),
        Region("asked", "T", ("B", "span", "H", "G", "chunk", "D"), _OF_KEYS),
        Region("taken", "T", ("B", "span", "H", "chunk", "D"), f"{_OF_KEYS} and has(beta)"),
        Region("added", "T", ("B", "span", "H", "chunk", "D"), _OF_KEYS),
        Region("before", "T", ("B", "span", "H", "V", "D"), _CHUNKS),
        Region("unit", "float32", ("B", "span", "H", "V"), f"{_CHUNKS} and dtype == 'float16'"),
        Region("new", "T", ("B", "span", "H", "V", "chunk"), _CORRECTED),
    ),
    arguments={
        **{name: name for name in ("T", "H", "HQ", "HK")},
        "W": "W if has(beta) else 1",
        "scale": "scale if scale != 0 else rsqrt(D)",
    },
    steps=(Branch(DECODE, _STEP, (Loop("first", "0", "chunks", "segment_chunks", _SEGMENT),)),),
)


RULES = LINEAR_ATTENTION.attribute("update_rule").choices


@dataclass(frozen=True)
class Variant:
    """Properties that a set of kernels is compiled for; everything else is a run-time argument.

    head_dim, value_dim: D, V.
    shared: G, query heads of one state.
    per_key: Whether there is a decay per key channel, not one per head.
    """

    dtype: str = "bfloat16"
    head_dim: int = 128
    value_dim: int = 128
    shared: int = 1
    update_rule: str = "gated_delta"
    per_key: int = 0
    count_dtype: str = "int64"

    def __post_init__(self) -> None:
        check_known(self, update_rule=RULES)
        if self.per_key and self.update_rule not in GATED:
            raise ConfigError(f"per_key={self.per_key}: update_rule={self.update_rule!r} has no decay.")

    @property
    def decay(self) -> int:
        """The kernels' constant: 0 none, 1 per head, 2 per key."""
        return 0 if self.update_rule not in GATED else 1 + bool(self.per_key)

    def table(self, arch: int) -> TileTable:
        """Block sizes on an architecture."""
        delta = self.update_rule in DELTA
        return tile_table(arch, self.head_dim, self.value_dim, self.shared, delta, bool(self.per_key), self.dtype)


def constants_of(variant: Variant) -> dict[str, Any]:
    return {
        **constants_of_heads(variant),
        "V": variant.value_dim,
        "G": variant.shared,
        "DELTA": int(variant.update_rule in DELTA),
        "DECAY": variant.decay,
        "RAGGED": 0,
        "PAGE": 0,
        "NARROW": int(variant.dtype == "float16"),
        "WIDE": int(variant.dtype == "float32"),
    }


def absent(variant: Variant) -> set[str]:
    names: set[str] = set()
    if variant.update_rule not in DELTA:
        names |= {"beta", "inverse", "taken", "new"}
    if variant.dtype != "float16":
        names |= {"unit"}
    per_key = {"scores", "asked", "taken", "added"}
    return names | ({"decay", "left", "rest", *per_key}, per_key, {"rest"})[variant.decay]


OP = op_with_state(
    PLAN,
    Variant,
    combinations(Variant),
    Variant.table,
    constants_of,
    module="still_kernels.linear_attention.kernels",
    blocks={
        "chunk": "scan.C",
        "value_block": "scan.BV",
        "key_block": "scan.BD",
        "output_block": "output.BV",
        "decode_block": "decode.BV",
    },
    absent=absent,
    covered=(
        TYPES,
        HEAD_DIM,
        Check(f"G <= {MAX_SHARED}", f"{{G}} query heads share a state; the kernels have at most {MAX_SHARED}."),
    ),
)
KERNELS = OP.kernels
