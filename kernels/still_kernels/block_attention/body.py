"""Function body of still::BlockAttention: still::Attention restricted to each token's blocks."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, INT64, Body, Scope
from still_kernels.attention.body import MASKED, Queries, cached_body
from still_kernels.block_attention.spec import BLOCK_ATTENTION


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: a step with few blocks gathers their rows; other calls mask the blocks that are not chosen."""
    block = {a.name: int(a.i) for a in node.attribute}.get("block_size", 64)
    if block < 1:
        raise UnsupportedError(f"{node.name or node.op_type}: block_size={block} must be at least 1.")
    heads, kv_heads, dim = dims["H"], dims["HK"], dims["D"]

    def attend(b: Scope, queries: Queries) -> str:
        chosen = b("Transpose", b.cast(b("GatherND", "blocks", queries.token, batch_dims=1), INT64), perm=[0, 2, 1, 3])
        rows = b("Mul", b.dim("blocks", 3), block)  # of a step, [1]
        few = b("And", b("Equal", queries.longest, 1), b("Less", b("Squeeze", rows), queries.filled))
        # [B, HK, G * M, D]: a step has M = 1
        query = b.reshape(b("Transpose", queries.query, perm=[0, 2, 1, 3]), 0, kv_heads, -1, dim)
        branches = []
        for write, name in ((_gathered, "gathered"), (_masked, "masked")):
            scope = Scope(b)
            result = write(scope, queries, query, chosen, block, kv_heads, dim)
            branches.append(scope.graph(name, [(result, FLOAT)]))
        (mixed,) = b.multi(
            "If", few, out=[b.fresh("mixed")], then_branch=branches[0], else_branch=branches[1]
        )  # [B, HK, G * M, D]
        return b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])

    return cached_body(BLOCK_ATTENTION, node, dtype, opset, dims, attend)


def _gathered(b: Scope, queries: Queries, query: str, chosen: str, block: int, kv_heads: int, dim: int) -> str:
    """The output of a step, from gathered rows of its blocks."""
    rows = b("Add", b("Mul", b.unsqueeze(chosen, 4), block), b.arange(block))  # [B, HK, 1, S, block]
    taken = b.reshape(rows, 0, kv_heads, -1)
    wrong = b("Or", b("Less", taken, 0), b("Greater", taken, queries.position))
    # The cache as rows of all heads: ONNX Runtime gathers whole rows faster than slices with two batch dimensions.
    heads = b("Mul", b.dim("present_key", 0), kv_heads)
    first = b.reshape(b("Mul", b.arange(heads), b.dim("present_key", 2)), -1, kv_heads, 1)
    place = b("Add", b("Where", wrong, 0, taken), first)
    key, value = (
        b.wide(b("Gather", b.reshape(f"present_{name}", -1, dim), place, axis=0), queries.dtype)
        for name in ("key", "value")
    )
    mask = b.unsqueeze(b("Where", wrong, MASKED, 0.0), 2)
    logits = b("Add", b("MatMul", query, b("Transpose", key, perm=[0, 1, 3, 2])), mask)
    return b("MatMul", b("Softmax", logits, axis=-1), value)


def _masked(b: Scope, queries: Queries, query: str, chosen: str, block: int, kv_heads: int, dim: int) -> str:
    """The output of any call, from every row up to the longest sequence's end, with a mask."""
    filled = b.unsqueeze(queries.filled, 0)
    key, value = (b.wide(b("Slice", f"present_{name}", [0], filled, [2]), queries.dtype) for name in ("key", "value"))
    count = b("Div", b("Add", queries.filled, block - 1), block)
    nowhere = b("Or", b("Less", chosen, 0), b("Greater", chosen, count))
    place = b("Where", nowhere, count, chosen)
    shape = b("Concat", b("Shape", chosen, end=3), b.unsqueeze(b("Add", count, 1), 0), axis=0)
    masked = b("ConstantOfShape", shape, value=helper.make_tensor("masked", FLOAT, [1], [MASKED]))
    zeros = b("Mul", b.cast(place, FLOAT), 0.0)
    of_blocks = b("Slice", b("ScatterElements", masked, place, zeros, axis=3), [0], b.unsqueeze(count, 0), [3])
    of_rows = b("Expand", b.unsqueeze(of_blocks, 4), b.shape(1, 1, 1, 1, block))
    of_rows = b("Slice", b("Reshape", of_rows, b.shape(0, 0, 0, -1)), [0], filled, [3])  # [B, HK, M, F]
    mask = b.unsqueeze(b("Add", of_rows, queries.mask), 2)
    logits = b("MatMul", query, b("Transpose", key, perm=[0, 1, 3, 2]))
    apart = b("Reshape", logits, b.shape(0, kv_heads, -1, b.unsqueeze(queries.longest, 0), filled))
    weights = b("Softmax", b("Add", apart, mask), axis=-1)
    return b("MatMul", b("Reshape", weights, b.shape(0, kv_heads, -1, filled)), value)


BODY = Body(function_body, ("H", "HK", "D"))
