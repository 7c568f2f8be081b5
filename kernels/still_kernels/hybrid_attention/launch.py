"""Host side of the Triton kernels: which kernels one call launches, on what grids, with what workspace.

The C++ core mirrors this file: a few launches and integer arithmetic, no values read from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from still_graphs.errors import UnsupportedError
from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.state import HybridAttentionState
from still_kernels.hybrid_attention.tiles import KernelTile, TileTable, decode_splits, pow2, tile_table
from still_kernels.hybrid_attention.triton_attend import attend_kernel, commit_kernel
from still_kernels.hybrid_attention.triton_common import FEATURE_CODES, OVERFLOW_CODES, SCOPE_CODES
from still_kernels.hybrid_attention.triton_decode import decode_kernel
from still_kernels.hybrid_attention.triton_features import features_kernel
from still_kernels.hybrid_attention.triton_linear import linear_kernel
from still_kernels.hybrid_attention.triton_scan import scan_kernel
from still_kernels.hybrid_attention.triton_score import score_kernel
from still_kernels.hybrid_attention.triton_select import select_kernel

KERNELS = {
    "score": score_kernel,
    "select": select_kernel,
    "features": features_kernel,
    "scan": scan_kernel,
    "linear": linear_kernel,
    "attend": attend_kernel,
    "commit": commit_kernel,
    "decode": decode_kernel,
}


ARGUMENTS = {name: [arg.removeprefix("p_") for arg in kernel.arg_names] for name, kernel in KERNELS.items()}
"""Values that a kernel takes, in order; pointers come first."""
POINTERS = {name: sum(arg.startswith("p_") for arg in kernel.arg_names) for name, kernel in KERNELS.items()}
_compiled: dict[tuple[Any, ...], Any] = {}  # kernels that ran before, by name, Launcher.variant and kinds of pointers


@lru_cache
def constants_of(config: HybridAttentionConfig, wide: bool, ragged: bool, window_factor: bool) -> dict[str, Any]:
    """Compile-time constants by name; each kernel takes those that it declares.

    Args:
        config: The layer.
        wide: float32 activations.
        ragged: Packed tokens with query_start and state_row.
        window_factor: The call has a window_factor tensor.
    """
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
        "OVERFLOW": OVERFLOW_CODES[config.overflow],
        "EVICT": int(config.overflow != "error"),
        "GATE": int(config.gate == "channel"),
        "FACTOR": int(window_factor),
        "RAGGED": int(ragged),
        "SETTLE": int(not triton.knobs.runtime.interpret),
        "DOT": "tf32x3" if wide else "tf32",
    }


@dataclass
class Launcher:
    """Launches kernels by name; arguments are found by name without their p_ prefix, absent pointers are None.

    Triton looks for the compiled kernel by types and values of all arguments, which took 30 us a launch. `variant`, what a call's
    compile-time constants follow from, lets a launch find by that and its pointers the kernel that it got before. Integers at run
    time have no part in it: the kernels leave them unspecialised. None leaves the search to Triton.
    """

    tiles: dict[str, KernelTile]
    values: dict[str, Any]
    variant: object | None = None

    def __call__(self, name: str, grid: tuple[int, int, int], **more: Any) -> None:
        """Launch kernel `name` unless the grid is empty."""
        if 0 in grid:
            return
        kernel, tile = KERNELS[name], self.tiles[name]
        values = {**self.values, **tile.constants, **more}
        found = [values.get(argument) for argument in ARGUMENTS[name]]
        key = None
        if self.variant is not None:
            pointers = [x if x is None else (x.dtype, x.data_ptr() % 16) for x in found[: POINTERS[name]]]
            key = (name, self.variant, *pointers)
            if key in _compiled:
                self.start(name, partial(_compiled[key][grid], *found))
                return
        arguments = dict(zip(kernel.arg_names, found, strict=True))
        compiled = self.start(name, partial(kernel[grid], **arguments, **tile.options()))
        if key is not None and compiled is not None:
            _compiled[key] = compiled

    def start(self, name: str, run: Callable[[], Any]) -> Any:
        """Run one launch; returns the compiled kernel where Triton tells. `tune` also keeps the launch."""
        return run()


@cache
def _variant(*what: Any) -> object:
    """One object for equal arguments, which then need no comparison at each launch."""
    return object()


def workspace_shapes(
    config: HybridAttentionConfig, batch: int, tokens: int, packed: int, table: TileTable, splits: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and element type ("float32", "int8", "int32", "T" activations, "L" linear operand) of each workspace buffer.

    Args:
        tokens: T, most new tokens of a row. packed: Tokens of all rows together.
    """
    heads, select, dim = config.num_heads, config.select_heads, config.head_dim
    chunk, features = config.chunk_size, config.state_features
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    reach = tile_count(tokens, chunk) + 2
    segment = 1 if config.overflow != "error" else min(table.segment_tiles, reach - 2)
    if tokens > 1:
        shapes["score"] = ((packed, heads), "float32")
        stored = -(-segment // table.scan.constants["EVERY"])
        shapes["prefix_kv"] = ((batch, stored, heads, features, dim), "L")
        shapes["prefix_z"] = ((batch, stored, heads, features), "float32")
        shapes["linear"] = ((batch, segment, heads, chunk, dim), "L")
        shapes["linear_sum"] = ((batch, segment, heads, chunk), "float32")
    else:
        window = 2 * chunk // table.decode.constants["BL"]
        shapes["part_acc"] = ((batch, heads, splits + window + 1, dim), "float32")
        shapes["part_ml"] = ((batch, heads, splits + window + 1, 2), "float32")
        shapes["part_window"] = ((batch, heads, window, 4), "float32")
        shapes["part_lin"] = ((batch, heads, dim), "float32")
        shapes["part_den"] = ((batch, heads), "float32")
        if config.overflow != "error":  # named by the kernels, not written in decode
            shapes["prefix_kv"], shapes["prefix_z"] = ((16,), "L"), ((16,), "float32")
    if tokens > 1 or config.overflow != "error":
        shapes["flags"] = ((batch, reach, select, chunk), "int8")
    if tokens > 1 or config.overflow != "error":
        extra = 0 if config.overflow == "error" else pow2(config.salient_per_chunk)
        shapes["phi_k"] = ((batch, segment, heads, chunk + extra, features), "L")
    if config.overflow != "error":
        rows = pow2(config.salient_per_chunk)
        shapes["evicted_key"] = ((batch, select, rows, dim), "T")
        shapes["evicted_value"] = ((batch, select, rows, dim), "T")
        shapes["evicted_count"] = ((batch, select), "int32")
    return shapes


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A workspace buffer on the device of `like`; tests put guards around it."""
    return like.new_empty(shape, dtype=dtype)


def tile_count(tokens: int, chunk: int) -> int:
    """Chunks that `tokens` new tokens touch at most, whatever the position they start at."""
    return (tokens + chunk - 2) // chunk + 1


COUNTERS = 4096  # of one stream at least: 64 rows of 32 heads
_counters: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, list[Tensor]] = {}  # zero and not in use; the last one is the largest
_made: list[Tensor] = []  # kept for ever: CUDA graphs hold addresses


def current_stream(device: torch.device) -> tuple[int, bool]:
    """The current stream of a device, and whether it is being captured into a CUDA graph."""
    if device.type != "cuda":
        return 0, False
    return torch.cuda.current_stream(device).cuda_stream, torch.cuda.is_current_stream_capturing()


def persistent_counters(device: torch.device, size: int) -> Tensor:
    """Arrival counters of the decode kernel for the current stream: zero between launches, at least `size` of them.

    A capture only records work, so what it captured would be zero in its own replays and garbage for everyone else: captures take
    counters that an earlier call has left over. Graphs captured on one stream share them and must not run at the same time.

    Raises:
        UnsupportedError: In a capture that no call of this size went ahead of.
    """
    stream, capturing = current_stream(device)
    spare = _spare.setdefault(device, [])
    if not capturing and not (spare and spare[-1].numel() >= size):
        blocks = torch.zeros(8, max(size, COUNTERS), dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will use them
        _made.append(blocks)
        spare.extend(blocks)
    found = _counters.get((device, stream))
    if found is None or found.numel() < size:
        if not (spare and spare[-1].numel() >= size):
            raise UnsupportedError(
                f"a CUDA graph is being captured, and no counters for {size} heads of all rows are ready. "
                "Decode once with this batch before the capture; that also loads the kernel."
            )
        found = _counters[device, stream] = spare.pop()
    return found


def launch_hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor | None,
    feature_q_weight: Tensor,
    feature_k_weight: Tensor,
    config: HybridAttentionConfig,
    state: HybridAttentionState,
    output: Tensor,
    batch: int,
    tokens: int,
    new_tokens: Tensor | None,
    query_start: Tensor | None = None,
    state_row: Tensor | None = None,
    window_factor: Tensor | None = None,
    table: TileTable | None = None,
    present_length: Tensor | None = None,
) -> None:
    """Run the kernels on `state`, in place; `state.length` is read and left for the caller to advance.

    Args:
        query, gate, output: [B, T, H, D], or packed [tokens, H, D] with query_start. key, value: HK heads. All contiguous.
        batch: Rows of the call.
        tokens: T, or the most tokens of a packed row.
        new_tokens: int32 or int64 [B]; ignored for packed tokens.
        query_start: First packed token of each row, [B + 1]. state_row: State row of each, [B].
        window_factor: fp32 [H], or None.
        table: Block sizes; by default those of the device. With others Triton looks for the compiled kernels at each launch.
        present_length: [B], not the state's; in decode (T = 1, not packed) it gets the lengths after the call.
    """
    wide = query.dtype == torch.float32
    ragged = query_start is not None
    chunk, heads, kv_heads, select = config.chunk_size, config.num_heads, config.num_kv_heads, config.select_heads
    factor = window_factor is not None
    variant = None if table is not None else _variant(config, query.device, query.dtype, ragged, factor)
    if table is None:
        table = device_table(config, query.device, wide)
    splits = decode_splits(batch, select, state.slots, table.decode_programs)
    packed = query.numel() // (heads * config.head_dim)
    shapes = workspace_shapes(config, batch, tokens, packed, table, splits)
    dtypes = {
        "float32": torch.float32,
        "int8": torch.int8,
        "int32": torch.int32,
        "T": query.dtype,
        "L": torch.float32 if wide else torch.bfloat16,
    }
    workspace = {name: allocate(query, shape, dtypes[kind]) for name, (shape, kind) in shapes.items()}
    tiles = tile_count(tokens, chunk)
    values = {
        **constants_of(config, wide, ragged, factor),
        **state.tensors(),
        **workspace,
        "query": query,
        "key": key,
        "value": value,
        "gate": gate,
        "feature_q_weight": feature_q_weight,
        "feature_k_weight": feature_k_weight,
        "window_factor": window_factor,
        "output": output,
        "new_tokens": new_tokens,
        "past_length": state.length,
        "present_length": present_length,
        "query_start": query_start,
        "state_row": state_row,
        "T": tokens,
        "H": heads,
        "HK": kv_heads,
        "HS": select,
        "G": heads // kv_heads,
        "K": config.salient_per_chunk,
        "N": state.slots,
        "W_HEADS": feature_q_weight.shape[0],
        "R": tiles + 2,
        "NS": splits,
        "phantom": int(config.phantom_first_chunk),
        "scale": config.head_dim**-0.5,
        "epsilon": config.mix_epsilon,
    }
    with torch.cuda.device_of(query):  # Triton launches on the current device
        _launch_steps(Launcher(table.kernels(), values, variant), config, table, query.device, batch, tokens)


def _launch_steps(
    launch: Launcher, config: HybridAttentionConfig, table: TileTable, device: torch.device, batch: int, tokens: int
) -> None:
    """The kernels of one call in their order."""
    chunk, heads, select = config.chunk_size, config.num_heads, config.select_heads
    tiles = tile_count(tokens, chunk)
    values = launch.values
    scan = table.scan.constants
    scan_programs = -(-config.state_features // scan["FB"]) * -(-config.head_dim // scan["DB"])
    evicting = config.overflow != "error"
    if tokens == 1:
        if evicting:
            values["score"] = values["window_score"]  # never read: the promoted chunk lies in the ring
            launch("select", (1, select, batch), first_tile=0)
            launch("features", (1, heads, batch), first_tile=0, n_tiles=1)
            launch("scan", (scan_programs, heads, batch), first_tile=0, n_tiles=1, store_prefix=0)
        values["counters"] = persistent_counters(device, batch * 2 * heads)
        jobs = pow2(config.head_dim) // table.decode.constants["DS"] + 2 * chunk // table.decode.constants["BL"] + 1
        launch("decode", (heads // select * jobs + values["NS"], select, batch))
        return
    launch("score", (tiles * (chunk // table.score.constants["BM"]), heads, batch))
    if not evicting:
        launch("select", (tiles, select, batch), first_tile=0)
    step = 1 if evicting else table.segment_tiles
    rows = table.attend.constants["BM"]
    linear_rows = table.linear.constants["BM"] * table.linear.constants["TB"]
    for first in range(0, tiles, step):
        count = min(step, tiles - first)
        if evicting:  # the cache is right for one chunk at a time
            launch("select", (1, select, batch), first_tile=first)
        groups = -(-count // table.features.constants["TB"])
        launch("features", (groups, heads, batch), first_tile=first, n_tiles=count)
        launch("scan", (scan_programs, heads, batch), first_tile=first, n_tiles=count, store_prefix=1)
        launch("linear", (-(-count * chunk // linear_rows), heads, batch), first_tile=first, n_tiles=count)
        launch("attend", (-(-count * chunk // rows), heads, batch), first_tile=first, n_tiles=count)
    launch("commit", (heads, batch, 1))


def device_table(config: HybridAttentionConfig, device: torch.device, wide: bool) -> TileTable:
    """Block sizes for a device; the interpreter on the CPU uses those of sm_90."""
    return tile_table(arch_of(device), config.head_dim, config.chunk_size, config.projection_dim, wide)


@cache
def arch_of(device: torch.device) -> int:
    """Compute capability, 90 for sm_90; the interpreter's is that of the tables it uses."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
