"""Function body of still::SelectBlocks: sums of keys, means of windows, scores, the largest ones; in float32."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto, helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import Body, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.attention.body import MASKED
from still_kernels.select_blocks.spec import SELECT_BLOCKS, fault_of

MOST, ALWAYS = 1e37, 3e38
"""Largest score, and the score of blocks that are always chosen."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    a = {each.name: each.default for each in SELECT_BLOCKS.attributes}
    a |= {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if fault := fault_of(a):
        raise UnsupportedError(f"{node.name or node.op_type}: {fault}.")
    block, stride, kernel, top, slots = (
        int(a[n]) for n in ("block_size", "mean_stride", "mean_length", "top_blocks", "block_slots")
    )
    heads, dim = dims["HK"], dims["D"]
    b = Scope()
    tokens = b.dim("query", 1)
    past, new = checked_counts(b, tokens)  # [B, 1]

    sums = _sums(b, b.wide("key", dtype), past, new, tokens, stride, dims)  # [B, HK, F, D]
    position = b("Add", past, b.arange(tokens))  # [B, T]
    scaled = b("Mul", b.wide("query", dtype), b.constant([dim**-0.5] * dim, "float32"))
    grouped = b.reshape(b("Transpose", scaled, perm=[0, 2, 1, 3]), 0, heads, -1, dim)  # [B, HK, G * T, D]

    def logits(step: int, width: int) -> tuple[str, str]:
        """Logits of the means of `width` keys at every `step`-th one [B, HK, G, T, J], and whether each is complete [B, 1, 1, T, J]."""
        keys = _means(b, sums, step // stride, width // stride, width, heads, dim)
        found = b("MatMul", grouped, b("Transpose", keys, perm=[0, 1, 3, 2]))
        count = b.dim(keys, 2)
        ends = b("Add", b("Mul", b.arange(count), step), width - 1)
        complete = b("LessOrEqual", ends, b.unsqueeze(position, 2))
        return b("Reshape", found, b.shape(0, heads, -1, tokens, count)), b.unsqueeze(complete, 1, 2)

    coarse, known = logits(int(a["lse_stride"]), int(a["lse_length"]))
    total = b("ReduceLogSumExp", b("Where", known, coarse, MASKED), [4], keepdims=1)
    fine, known = logits(stride, kernel)
    # Before the first coarse mean is complete, every block is read.
    share = b("Exp", b("Min", b("Sub", fine, total), 80.0))
    shares = b("Clip", b("ReduceSum", b("Where", known, share, 0.0), [2], keepdims=0), 0.0, MOST)  # [B, HK, T, F]
    # The largest over the windows that share a key with a block.
    shared, per = kernel // stride, block // stride
    count = b("Div", b("Add", b.dim(sums, 2), per - 1), per)  # blocks, [1]
    missing = b("Sub", b("Mul", count, per), b.dim(sums, 2))
    padded = b("Pad", shares, b("Concat", [0, 0, 0, shared - 1, 0, 0, 0], missing, axis=0), 0.0)
    room = b("Mul", count, per)
    windows = [b("Slice", padded, [i], b("Add", room, i + 1 - per), [3], [per]) for i in range(per + shared - 1)]
    scores = b("Max", *windows) if len(windows) > 1 else windows[0]  # [B, HK, T, blocks]
    number, own = b.arange(count), b.unsqueeze(b("Div", position, block), 2)  # [blocks], [B, T, 1]
    reach = b("Add", past, new) if a["switch_by_call"] else b("Add", position, 1)
    dense = b.unsqueeze(b("Less", reach, int(a["dense_length"])), 2)
    near = b("GreaterOrEqual", number, b("Sub", own, int(a["local_blocks"])))
    always = b("Or", b("Or", b("Less", number, int(a["init_blocks"])), near), dense)
    scores = b("Where", b.unsqueeze(always, 1), ALWAYS, scores)
    scores = b("Where", b.unsqueeze(b("LessOrEqual", number, own), 1), scores, -1.0)
    best, order = b.multi("TopK", scores, b("Min", count, [slots]), out=2, axis=-1)
    rank = b.arange(b.dim(order, 3))
    allowed = b.unsqueeze(b("Or", dense, b("Less", rank, top)), 1)
    real = b.unsqueeze(b("Less", b.arange(tokens), new), 1, 3)
    taken = b.all_of(b("GreaterOrEqual", best, 0.0), allowed, real)
    none = 1 << 30
    (ascending, _) = b.multi("TopK", b("Where", taken, order, none), b.dim(order, 3), out=2, axis=-1, largest=0)
    chosen = b("Where", b("Less", ascending, none), ascending, -1)
    pads = b("Concat", [0] * 7, b("Sub", [slots], b.dim(order, 3)), axis=0)
    b.cast(b("Transpose", b("Pad", chosen, pads, -1), perm=[0, 2, 1, 3]), TensorProto.INT32, out="blocks")
    return b.function(SELECT_BLOCKS, node, {"": opset})


def _sums(b: Scope, key: str, past: str, new: str, tokens: str, stride: int, dims: Mapping[str, int]) -> str:
    """Add `key`, float32, to the sums: write `present_key_sum` and return the rows filled by any sequence, [B, HK, F, D]."""
    heads, dim = dims["HK"], dims["D"]
    batch, end = b.dim("past_length", 0), b("Add", past, new)
    count = b("Div", b("Add", tokens, 2 * stride - 2), stride)  # most rows that T tokens touch, [1]
    # Rows after the last one repeat it.
    last = b("Div", b("Sub", end, 1), stride)
    row = b("Max", b("Min", b("Add", b("Div", past, stride), b.arange(count)), last), 0)  # [B, R]
    place = b("Sub", b("Add", b("Mul", b.unsqueeze(row, 2), stride), b.arange(stride)), b.unsqueeze(past, 2))
    is_new = b("And", b("GreaterOrEqual", place, 0), b("Less", place, b.unsqueeze(new, 2)))  # [B, R, stride]
    index = b.reshape(b("Where", is_new, place, 0), 0, -1, 1)
    # A call without tokens gathers an empty one.
    padded = b("Pad", key, [0, 0, 0, 0, 0, 1, 0, 0], 0.0)
    taken = b("Reshape", b("GatherND", padded, index, batch_dims=1), b.shape(0, -1, stride, heads, dim))
    fresh = b("Where", b.unsqueeze(is_new, 3, 4), taken, 0.0)
    added = b("ReduceSum", fresh, [2], keepdims=0)  # [B, R, HK, D]
    lead = b("Concat", batch, count, [heads, 1], axis=0)
    parts = (b.reshape(b.arange(batch), -1, 1, 1, 1), b.reshape(b.arange(heads), 1, 1, -1, 1), b.unsqueeze(row, 2, 3))
    target = b("Concat", *(b("Expand", part, lead) for part in parts), axis=3)
    before = b(
        "Where", b.unsqueeze(b("Less", b("Mul", row, stride), past), 2, 3), b("GatherND", "past_key_sum", target), 0.0
    )
    present = b("ScatterND", "past_key_sum", target, b("Add", before, added), out="present_key_sum")
    filled = b("Max", b("ReduceMax", b("Div", b("Add", end, stride - 1), stride), keepdims=0), 1)
    return b("Slice", present, [0], b.unsqueeze(filled, 0), [2])


def _means(b: Scope, sums: str, step: int, width: int, keys: int, heads: int, dim: int) -> str:
    """Means of `width` rows at every `step`-th one, [B, HK, J, D], from sums [B, HK, F, D] of `keys` keys each; zeros follow the last
    row."""
    rows = b.dim(sums, 2)
    count = b("Div", b("Add", rows, step - 1), step)
    parts = width // step
    room = b("Mul", b("Add", count, parts - 1), step)
    padded = b("Pad", sums, b("Concat", [0] * 6, b("Sub", room, rows), [0], axis=0), 0.0)
    grouped = b("ReduceSum", b("Reshape", padded, b.shape(0, heads, -1, step, dim)), [3], keepdims=0)
    windows = [b("Slice", grouped, [i], b("Add", count, i), [2]) for i in range(parts)]
    return b("Mul", b.total(*windows), b.constant(1 / keys, "float32"))


BODY = Body(function_body, ("HK", "D"))
