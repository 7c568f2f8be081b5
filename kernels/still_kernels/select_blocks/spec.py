"""still::SelectBlocks: the past blocks that each token reads, chosen by its queries and means of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from still_graphs.spec import AttributeSpec, AttributeValue, Growth, OpSpec, StateSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The op's attributes; `block_slots`: see `slots_of`."""

    block_size: int = 64
    mean_stride: int = 16
    mean_length: int = 32
    lse_stride: int = 64
    lse_length: int = 128
    top_blocks: int = 96
    init_blocks: int = 1
    local_blocks: int = 32
    dense_length: int = 8192
    block_slots: int = 128
    switch_by_call: int = 0


SELECT_BLOCKS = OpSpec(
    # All in float32, for the token at position p and each key/value head, whose G = H / HK query heads decide together:
    #   k1_j = mean of the keys at mean_stride j .. mean_stride j + mean_length - 1, where the last of them is at most p; k2_i with
    #          lse_stride and lse_length
    #   a_j  = sum over the heads of exp(q k1_j / sqrt(D) - log sum over i of exp(q k2_i / sqrt(D)))
    #   score of block b = the largest a_j of those k1_j that share a key with it, 0 if none does
    # The first `init_blocks`, the token's own block and the `local_blocks` before it are always chosen. Blocks of the largest scores fill
    # up to `top_blocks`, the lower index first if equal. A token with fewer than `dense_length` tokens up to itself reads all blocks.
    # With `switch_by_call`, as in the published code, the length at the end of the call counts; a prompt must then be one call.
    # k1 and k2 follow from sums of `mean_stride` keys, the only state.
    name="SelectBlocks",
    torch_name="select_blocks",
    inputs=(
        TensorSpec("query", ("B", "T", "H", "D"), "T", "activation"),
        TensorSpec("key", ("B", "T", "HK", "D"), "T", "activation"),
        TensorSpec("new_tokens", ("B",), "int64", "count"),
        TensorSpec("past_length", ("B",), "int64", "count"),
    ),
    # In place: rows are gathered before they are written; written values are read from the writer's output.
    states=(StateSpec("key_sum", ("B", "HK", "N", "D"), "float32", Growth("key_sums", 2, per="mean_stride")),),
    # Ascending; -1 after them, and at padding.
    outputs=(TensorSpec("blocks", ("B", "T", "HK", "block_slots"), "int32", "activation"),),
    attributes=tuple(AttributeSpec(name, value) for name, value in vars(Choice()).items()),
)


def slots_of(top: int, dense_length: int, block: int) -> int:
    """Most blocks of a token."""
    return max(top, -(-(dense_length - 1) // block))


def fault_of(values: Mapping[str, AttributeValue]) -> str | None:
    """The fault of a node's attributes, with their names; None: no fault."""
    a = {name: int(value) for name, value in values.items()}
    sizes = ("mean_stride", "block_size", "mean_length", "lse_stride", "lse_length")
    for name, low in (
        dict.fromkeys(sizes, 1) | dict.fromkeys(("init_blocks", "local_blocks", "switch_by_call"), 0)
    ).items():
        if a[name] < low:
            return f"{name}={a[name]} must be at least {low}"
    for name in ("block_size", "mean_length", "lse_stride"):
        if a[name] % a["mean_stride"]:
            return f"{name}={a[name]} must be a multiple of mean_stride={a['mean_stride']}"
    if a["lse_length"] % a["lse_stride"]:
        return f"lse_length={a['lse_length']} must be a multiple of lse_stride={a['lse_stride']}"
    if a["top_blocks"] < a["init_blocks"] + a["local_blocks"] + 1:
        forced = f"init_blocks={a['init_blocks']} + local_blocks={a['local_blocks']} + 1"
        return f"top_blocks={a['top_blocks']} must be at least {forced}, the blocks that are chosen always"
    if a["dense_length"] < a["lse_length"]:
        return f"dense_length={a['dense_length']} must be at least lse_length={a['lse_length']}"
    if a["switch_by_call"] > 1:
        return f"switch_by_call={a['switch_by_call']} must be 0 or 1"
    always = (a["init_blocks"] + a["local_blocks"] + 1) * a["block_size"]
    if a["switch_by_call"] and always < a["lse_length"]:
        return f"lse_length={a['lse_length']} must be at most {always} with switch_by_call, the keys of the blocks that are chosen always"
    if a["block_slots"] != (slots := slots_of(a["top_blocks"], a["dense_length"], a["block_size"])):
        return f"block_slots={a['block_slots']} must be {slots}, as top_blocks, dense_length and block_size say"
    return None
