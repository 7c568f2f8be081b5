"""Function body of still::KeptAttention: new tokens attend to the cache and to each other; retained tokens are written."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, INT64, Body, Scope
from still_graphs.functions.counts import MOST_TOKENS, checked_counts
from still_kernels.attention.body import MASKED
from still_kernels.kept_attention.spec import KEPT_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`. M is the most new tokens of a sequence, K the most chunks that these touch.

    Past and present may share one buffer: rows are gathered before they are written, and rows read later are not written.
    """
    heads, kv_heads, dim, routes = dims["H"], dims["HK"], dims["D"], dims["R"]
    chunk = {a.name: int(a.i) for a in node.attribute}.get("chunk_size", 64)
    if kv_heads % routes or chunk < 1:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {routes} routes must divide the {kv_heads} heads of key, and chunk_size={chunk} be at least 1."
        )
    b = Scope()
    past, new = checked_counts(b, b.constant([MOST_TOKENS]))  # [B, 1]
    longest = b.unsqueeze(b("Max", b("ReduceMax", new, keepdims=0), 1), 0)
    step = b.arange(longest)  # M
    offset = b("Mod", past, chunk)
    of_heads = [h * routes // kv_heads for h in range(kv_heads)]

    def each(x: str) -> str:
        """[B, R, ..] as [B, HK, ..]."""
        return b("Gather", x, of_heads, axis=1)

    # Chunks that end in this call, and which of them are retained.
    count = b("Div", b("Add", longest, 2 * chunk - 2), chunk)
    number = b.arange(count)  # K
    last = b("Sub", b("Add", b("Mul", number, chunk), chunk - 1), offset)  # [B, K]
    ends = b("And", b("GreaterOrEqual", last, 0), b("Less", last, new))
    decisions = b("GatherND", "keep", b.unsqueeze(b("Where", ends, last, 0), 2), batch_dims=1)  # [B, K, R]
    stays = b(
        "And", b("Greater", b("Transpose", b.cast(decisions, INT64), perm=[0, 2, 1]), 0), b.unsqueeze(ends, 1)
    )  # [B, R, K]
    goes = b("And", b("Not", stays), b.unsqueeze(ends, 1))
    retained = b.cast("past_kept_chunks", INT64)  # [B, R]
    b.cast(b("Add", retained, b("ReduceSum", b.cast(stays, INT64), [2], keepdims=0)), FLOAT, out="present_kept_chunks")

    # Rows: retained chunks and the open chunk are consecutive from `begin`, where the open chunk was or is.
    base = b("Mul", retained, chunk)
    left_out = b("Squeeze", b("Slice", goes, [0], [1], [2]), [2])  # [B, R], the open chunk
    begin = b("Where", left_out, 0, offset)  # after `base`
    tokens_of = b("Sub", chunk, b("Where", b("Equal", number, 0), offset, 0))  # [B, K]
    gone = b("ReduceSum", b("Where", goes, b.unsqueeze(tokens_of, 1), 0), [2], keepdims=0)
    live = b("Sub", new, gone)  # [B, R], number of written tokens
    rank = b("CumSum", b("Sub", 1, b.cast(goes, INT64)), 2, exclusive=1)
    nowhere = b("Expand", b.unsqueeze(count, 0, 1), b("Concat", b("Shape", retained), b("Add", count, 1), axis=0))
    numbers = b("Expand", b.unsqueeze(number, 0, 1), b("Shape", rank))
    order = b("ScatterElements", nowhere, b("Where", goes, count, rank), numbers, axis=2)  # [B, R, K + 1]
    # Tokens after the last written one repeat it. Then the rows of a discarded open chunk: unwritten ones are zeroed.
    inner = b.arange(b.constant([chunk]))
    nth = b("Max", b("Min", step, b.unsqueeze(b("Sub", live, 1), 2)), 0)  # [B, R, M]
    place = b("Add", b.unsqueeze(begin, 2), nth)
    emptied = b.unsqueeze(b("Max", b("Min", inner, b("Sub", offset, 1)), 0), 1)  # [B, 1, chunk]
    emptied = b("Where", b.unsqueeze(left_out, 2), emptied, b("Slice", place, [0], [1], [2]))
    place = b("Concat", place, emptied, axis=2)  # [B, R, M + chunk]
    is_written = b("Less", b("Sub", place, b.unsqueeze(begin, 2)), b.unsqueeze(live, 2))
    source = b(
        "Sub", b("Mul", b("GatherElements", order, b("Div", place, chunk), axis=2), chunk), b.unsqueeze(offset, 2)
    )
    source = b("Where", is_written, b("Add", source, b("Mod", place, chunk)), 0)
    # A sequence without new tokens rewrites a row with its own value.
    has_tokens = b.unsqueeze(b("Greater", new, 0), 2)  # [B, 1, 1]
    target = b("Where", has_tokens, b("Add", b.unsqueeze(base, 2), place), 0)
    opened = b("Min", b("Add", b.unsqueeze(base, 2), inner), b("Sub", b.dim("past_key", 2), 1))

    lead = b.reshape(b.arange(b.dim("past_length", 0)), -1, 1, 1, 1)
    head = b.reshape(b.arange(b.constant([kv_heads])), 1, -1, 1, 1)

    def places(rows: str, rows_first: bool = True) -> str:
        """Indices [B, HK, .., 3] of rows [B, R, ..] of all heads; otherwise of a call's tokens."""
        own = b.unsqueeze(each(rows), 3)
        shape = b("Shape", own)
        first, second = (b("Expand", x, shape) for x in (lead, head))
        return b("Concat", *((first, second, own) if rows_first else (first, own, second)), axis=3)

    written, read, sources = places(target), places(b("Concat", target, opened, axis=2)), places(source, False)
    # Values of padding may be NaN.
    token = b.unsqueeze(b("Max", b("Min", step, b("Sub", new, 1)), 0), 2)
    keys = {}
    for name in ("key", "value"):
        before = b("GatherND", f"past_{name}", read)  # [B, HK, M + 2 chunk, D]
        rows = b("Add", longest, chunk)
        old, open_ = (b("Slice", before, *part, [2]) for part in (([0], rows), (rows, [1 << 40])))
        # Cast to float32 and back, which is exact: ONNX Runtime has no Where for bfloat16 on the CPU.
        fresh = b("GatherND", name, sources)
        fresh = b("Where", b.unsqueeze(each(is_written), 3), b.wide(fresh, dtype), 0.0)
        fresh = b("Where", b.unsqueeze(has_tokens, 3), fresh, b.wide(old, dtype))
        fresh = fresh if dtype == FLOAT else b.cast(fresh, dtype)
        present = b("ScatterND", f"past_{name}", written, fresh, out=f"present_{name}")
        own = b("Transpose", b("GatherND", name, token, batch_dims=1), perm=[0, 2, 1, 3])
        filled = b("Max", b("ReduceMax", base, keepdims=0), 1)
        cached = b("Slice", present, [0], b.unsqueeze(filled, 0), [2])
        keys[name] = b.wide(cached, dtype), b.wide(b("Concat", open_, own, axis=2), dtype)

    # Visibility: [B, R, 1 or M, ..].
    at = b("Div", b("Add", offset, step), chunk)  # [B, M], each token's chunk
    row = b("Less", b("Range", 0, filled, 1), b.unsqueeze(base, 2, 3))
    first_stays = b.unsqueeze(b("Slice", stays, [0], [1], [2]), 2)  # [B, R, 1, 1]
    open_seen = b("Or", first_stays, b.unsqueeze(b("Equal", at, 0), 1, 3))  # [B, R, M, 1]
    open_seen = b("And", open_seen, b.unsqueeze(b("Less", inner, offset), 1, 2))
    shape = b("Concat", b("Shape", retained), longest, axis=0)
    at_retained = b("GatherElements", stays, b("Expand", b.unsqueeze(at, 1), shape), axis=2)  # [B, R, M]
    same = b("Equal", b.unsqueeze(at, 2), b.unsqueeze(at, 1))  # [B, M, M]
    seen = b("Or", b.unsqueeze(at_retained, 2), b.unsqueeze(same, 1))
    seen = b("And", seen, b("LessOrEqual", b.unsqueeze(step, 0), b.unsqueeze(step, 1)))
    masks = row, b("Concat", open_seen, seen, axis=3)

    scaled = b(
        "Mul", b.wide(b("GatherND", "query", token, batch_dims=1), dtype), b.constant([dim**-0.5] * dim, "float32")
    )
    query = b.reshape(b("Transpose", scaled, perm=[0, 2, 1, 3]), 0, kv_heads, -1, dim)  # [B, HK, G * M, D]
    logits, sizes = [], []
    for part, mask in zip(keys["key"], masks, strict=True):
        product = b("MatMul", query, b("Transpose", part, perm=[0, 1, 3, 2]))
        sizes.append(b.dim(part, 2))
        apart = b("Reshape", product, b.shape(0, kv_heads, -1, longest, sizes[-1]))
        logits.append(b("Add", apart, b.unsqueeze(each(b("Where", mask, 0.0, MASKED)), 2)))
    weights = b("Softmax", b("Concat", *logits, axis=4), axis=-1)
    mixed = []
    before, behind = b("Slice", weights, [0], sizes[0], [4]), b("Slice", weights, sizes[0], [1 << 40], [4])
    for part, share in zip(keys["value"], (before, behind), strict=True):
        mixed.append(b("MatMul", b("Reshape", share, b.shape(0, kv_heads, -1, b.dim(part, 2))), part))
    output = b("Transpose", b.reshape(b("Add", *mixed), 0, heads, -1, dim), perm=[0, 2, 1, 3])
    real = b.unsqueeze(b("Less", step, new), 2, 3)
    pads = b("Concat", [0, 0, 0, 0, 0], b("Sub", b.dim("query", 1), longest), [0, 0], axis=0)
    b.narrow(dtype, "output", "Pad", b("Where", real, output, 0.0), pads, 0.0)
    return b.function(KEPT_ATTENTION, node, {"": opset})


BODY = Body(function_body, ("H", "HK", "D", "R"))
