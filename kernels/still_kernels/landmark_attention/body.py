"""Function body of still::LandmarkAttention: still::Attention with other logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.attention.body import MASKED, Queries, cached_body
from still_kernels.landmark_attention.spec import LANDMARK_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    values = {a.name: a.default for a in LANDMARK_ATTENTION.attributes}
    values |= {a.name: helper.get_attribute_value(a) for a in node.attribute}
    size, top = int(values["block_tokens"]), int(values["top_blocks"])
    heads, kv_heads, dim = dims["H"], dims["HK"], dims["D"]
    if size < 2:
        raise UnsupportedError(f"{node.name or node.op_type}: block_tokens={size} must be at least 2.")
    if top < 0 or (top and dim % 2):
        raise UnsupportedError(
            f"{node.name or node.op_type}: top_blocks={top} of heads of {dim}: at least 0, and even heads."
        )
    if top:
        frequency = [float(values["rope_base"]) ** (-2 * i / dim) for i in range(dim // 2)]
        return cached_body(
            LANDMARK_ATTENTION, node, dtype, opset, dims, partial(_retrieve, heads, kv_heads, dim, size, top, frequency)
        )

    def attend(b: Scope, queries: Queries) -> str:
        filled = b.unsqueeze(queries.filled, 0)
        key, value = (
            b.wide(b("Slice", f"present_{name}", [0], filled, [2]), queries.dtype) for name in ("key", "value")
        )
        query = b.reshape(b("Transpose", queries.query, perm=[0, 2, 1, 3]), 0, kv_heads, -1, dim)
        logits = b("Reshape", b("MatMul", query, b("Transpose", key, perm=[0, 1, 3, 2])), b.shape(0, heads, -1, filled))
        count = b("Div", b("Add", filled, size - 1), size)
        missing = b("Sub", b("Mul", count, size), filled)
        pads = b("Concat", [0] * 7, missing, axis=0)
        blocks = b("Reshape", b("Pad", logits, pads, 0.0), b.shape(0, 0, 0, -1, size))  # [B, H, M, blocks, size]
        tokens, landmark = b("Slice", blocks, [0], [size - 1], [4]), b("Slice", blocks, [size - 1], [size], [4])
        own = b("Equal", b.arange(count), b("Div", queries.position, size))  # [B, M, blocks]
        shared = b("Add", b("Sub", tokens, b("ReduceLogSumExp", tokens, [4], keepdims=1)), landmark)
        chosen = b("Where", b.unsqueeze(own, 1, 4), tokens, shared)
        flat = b("Reshape", b("Pad", chosen, [0] * 9 + [1], MASKED), b.shape(0, 0, 0, -1))
        weights = b("Softmax", b("Add", b("Slice", flat, [0], filled, [3]), queries.mask), axis=-1)
        mixed = b("MatMul", b("Reshape", weights, b.shape(0, kv_heads, -1, filled)), value)
        return b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])

    return cached_body(LANDMARK_ATTENTION, node, dtype, opset, dims, attend)


def _retrieve(
    heads: int, kv_heads: int, dim: int, size: int, top: int, frequency: list[float], b: Scope, queries: Queries
) -> str:
    """The output for tokens that read `top_blocks` blocks and their own. Rotations use distances instead of positions, because they stay
    small."""

    def turned(x: str, place: str) -> str:
        """Rotate `x` [.., D] to positions [..]."""
        angle = b("Mul", b.unsqueeze(b.cast(place, FLOAT), -1), b.constant(frequency, "float32"))
        cos, sin = b("Cos", angle), b("Sin", angle)
        first, second = b.multi("Split", x, out=2, axis=-1, num_outputs=2)
        turns = (
            b("Sub", b("Mul", first, cos), b("Mul", second, sin)),
            b("Add", b("Mul", second, cos), b("Mul", first, sin)),
        )
        return b("Concat", *turns, axis=-1)

    def rows(name: str, row: str, rank: int) -> str:
        """Rows `row` [B, H, M, ..] of the cache `name`, float32; `rank` is their number of dimensions."""
        dims = b("Shape", row)
        after = [1] * (rank - 1)
        parts = (
            b.reshape(b.arange(b.dim(row, 0)), -1, 1, *after[1:]),
            b.reshape(b.constant([h * kv_heads // heads for h in range(heads)], "int64"), 1, -1, *after[1:]),
            row,
        )
        index = b("Concat", *(b.unsqueeze(b("Expand", part, dims), -1) for part in parts), axis=-1)
        return b.wide(b("GatherND", f"present_{name}", index), queries.dtype)

    query = b("Transpose", queries.query, perm=[0, 2, 1, 3])  # [B, H, M, D]
    longest = b.dim(query, 2)
    own = b.unsqueeze(b("Div", queries.position, size), 1)  # [B, 1, M, 1]
    late = b("Sub", own, top)  # first of the latest blocks
    place = b.unsqueeze(queries.position, 1)
    count = b.unsqueeze(b("Div", b("Add", queries.filled, size - 1), size), 0)
    number = b.arange(count)

    last = b("Min", b("Add", b("Mul", number, size), size - 1), b("Sub", queries.filled, 1))
    marks = b.wide(b("Gather", "present_key", last, axis=2), queries.dtype)  # [B, HK, C, D]
    behind = b("Squeeze", b("Sub", place, b("Mul", late, size)), [3])  # [B, 1, M]
    grouped = b.reshape(turned(query, b("Add", behind, 1)), 0, kv_heads, -1, dim)
    far = b("MatMul", grouped, b("Transpose", marks, perm=[0, 1, 3, 2]))
    far = b("Where", b("Less", number, late), b("Reshape", far, b.shape(0, heads, longest, -1)), MASKED)

    nearby = b("Add", late, b.arange(top))  # [B, 1, M, k]
    row = b("Max", b("Add", b("Mul", nearby, size), size - 1), 0)
    row = b("Expand", row, b.shape(1, heads, 1, 1))
    table = b.constant([i * size + size - 1 for i in range(top)], "int64")
    near = b("MatMul", turned(rows("key", row, 4), table), b.unsqueeze(turned(query, behind), -1))
    near = b("Where", b("GreaterOrEqual", nearby, 0), b("Squeeze", near, [4]), MASKED)

    best, order = b.multi("TopK", b("Concat", far, near, axis=3), [top], out=2, axis=-1)
    block = b("Where", b("Less", order, count), order, b("Add", b("Sub", order, count), late))
    block = b("Where", b("Greater", best, MASKED / 2), block, count)  # after all others
    chosen, _ = b.multi("TopK", block, [top], out=2, axis=-1, largest=0)  # [B, H, M, k], ascending
    real = b("Less", chosen, own)
    latest = b("Max", late, 0)
    base = b("Add", b("Sub", latest, 1), b.arange(top))
    base = b("Add", base, b.cast(b("GreaterOrEqual", chosen, latest), TensorProto.INT64))
    itself = b("Expand", own, b.shape(1, heads, 1, 1))
    base, chosen = (b.unsqueeze(b("Concat", x, itself, axis=3), 4) for x in (base, chosen))  # [B, H, M, k + 1, 1]

    inside = b.arange(size)
    row = b("Min", b("Add", b("Mul", chosen, size), inside), b.unsqueeze(place, 4))
    read = turned(rows("key", row, 5), inside)
    distance = b("Sub", place, b("Mul", b("Squeeze", base, [4]), size))
    logits = b("Squeeze", b("MatMul", read, b.unsqueeze(turned(b.unsqueeze(query, 3), distance), -1)), [5])
    words, mark = b.multi("Split", logits, [size - 1, 1], out=2, axis=4)
    mine, others = b("Slice", words, [top], [top + 1], [3]), b("Slice", words, [0], [top], [3])
    share = b("Sub", b("Slice", mark, [0], [top], [3]), b("ReduceLogSumExp", others, [4], keepdims=1))
    others = b("Where", b.unsqueeze(real, 4), b("Add", others, share), MASKED)
    known = b("LessOrEqual", b("Add", b("Mul", own, size), b.arange(size - 1)), place)
    mine = b("Where", b.unsqueeze(known, 3), mine, MASKED)
    weights = b("Softmax", b.reshape(b("Concat", others, mine, axis=3), 0, 0, 0, 1, -1), axis=-1)
    row = b("Slice", row, [0], [size - 1], [4])
    value = b.reshape(rows("value", row, 5), 0, 0, 0, -1, dim)
    return b("Transpose", b("Squeeze", b("MatMul", weights, value), [3]), perm=[0, 2, 1, 3])


BODY = Body(function_body, ("H", "HK", "D"))
