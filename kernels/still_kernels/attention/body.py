"""Function body of still::Attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import MOST_TOKENS, checked_counts
from still_graphs.spec import OpSpec
from still_kernels.attention.spec import ATTENTION

MASKED = -1e30
"""Added to masked logits. It is finite, so that a row without visible positions has no NaN."""


@dataclass(frozen=True)
class Queries:
    """Inputs of `attend`. M is the most new tokens of a sequence, and F the longest sequence after the call.

    query: [B, M, H, D] over sqrt(D), float32.
    token: Token of each sequence at each of M places, [B, M, 1].
    position: [B, M, 1].
    mask: MASKED at positions [F] later than the token's, [B, 1, M, F].
    filled, longest: F and M.
    dtype: Type of the activations.
    """

    query: str
    token: str
    position: str
    mask: str
    filled: str
    longest: str
    dtype: int


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    return cached_body(ATTENTION, node, dtype, opset, dims)


def cached_body(
    spec: OpSpec,
    node: onnx.NodeProto,
    dtype: int,
    opset: int,
    dims: Mapping[str, int],
    attend: Callable[[Scope, Queries], str] | None = None,
) -> onnx.FunctionProto:
    """The function of a `node` of `spec`: it writes the new tokens into the cache, then attends to the filled rows.

    Past and present may share one buffer: written values are gathered first, and later reads use only written rows.

    Args:
        attend: Returns the output [B, M, H, D] in float32, for ops whose tokens do not read every earlier position.
    """
    b = Scope()
    heads, kv_heads, dim = dims["H"], dims["HK"], dims["D"]
    batch = b.dim("past_length", 0)
    # Counts only, no T: layers share their results. A row with more than T new tokens fails where its tokens are gathered.
    past, new = checked_counts(b, b.constant([MOST_TOKENS]))  # [B, 1]
    longest = b("Max", b("ReduceMax", new, keepdims=0), 1)
    filled = b("Max", b("ReduceMax", b("Add", past, new), keepdims=0), 1)
    step = b("Range", 0, longest, 1)  # M
    # Padding repeats the row's last new token. A row without new tokens rewrites its last position.
    last = b("Min", step, b("Sub", new, 1))  # [B, M]
    token = b("Unsqueeze", b("Max", last, 0), [2])
    lead = b.shape(batch, b.unsqueeze(longest, 0), kv_heads, 1)
    parts = (
        b.reshape(b.arange(batch), -1, 1, 1, 1),
        b.reshape(b.arange(kv_heads), 1, 1, -1, 1),
        b.unsqueeze(b("Max", b("Add", past, last), 0), 2, 3),
    )
    index = b("Concat", *(b("Expand", part, lead) for part in parts), axis=3)  # [B, M, HK, 3]
    has_tokens = b.reshape(b("Greater", new, 0), -1, 1, 1, 1)
    position = b.unsqueeze(b("Add", past, step), 2)  # [B, M, 1]
    mask = b.unsqueeze(b("Where", b("LessOrEqual", b("Range", 0, filled, 1), position), 0.0, MASKED), 1)
    real = b.unsqueeze(b("Less", step, new), 2, 3)

    cache = {}
    for name in ("key", "value"):
        fresh = b("GatherND", name, token, batch_dims=1)  # [B, M, HK, D]
        # Cast to float32 and back, which is exact: ONNX Runtime has no Where for bfloat16 on the CPU.
        chosen = b("Where", has_tokens, b.wide(fresh, dtype), b.wide(b("GatherND", f"past_{name}", index), dtype))
        fresh = chosen if dtype == FLOAT else b.cast(chosen, dtype)
        present = b("ScatterND", f"past_{name}", index, fresh, out=f"present_{name}")
        if attend is None:
            cache[name] = b.wide(b("Slice", present, [0], b.unsqueeze(filled, 0), [2]), dtype)

    scaled = b(
        "Mul", b.wide(b("GatherND", "query", token, batch_dims=1), dtype), b.constant([dim**-0.5] * dim, "float32")
    )
    if attend is None:
        grouped = b.reshape(b("Transpose", scaled, perm=[0, 2, 1, 3]), 0, kv_heads, -1, dim)  # [B, HK, G * M, D]
        logits = b("MatMul", grouped, b("Transpose", cache["key"], perm=[0, 1, 3, 2]))
        of_heads = b.shape(0, heads, -1, b.unsqueeze(filled, 0))
        weights = b("Softmax", b("Add", b("Reshape", logits, of_heads), mask), axis=-1)
        mixed = b("MatMul", b("Reshape", weights, b.shape(0, kv_heads, -1, b.unsqueeze(filled, 0))), cache["value"])
        mixed = b("Transpose", b.reshape(mixed, 0, heads, -1, dim), perm=[0, 2, 1, 3])
    else:
        mixed = attend(b, Queries(scaled, token, position, mask, filled, longest, dtype))
    padding = b("Sub", b.dim("query", 1), b.unsqueeze(longest, 0))
    pads = b("Concat", [0, 0, 0, 0, 0], padding, [0, 0], axis=0)
    b.narrow(dtype, "output", "Pad", b("Where", real, mixed, 0.0), pads, 0.0)
    return b.function(spec, node, {"": opset})


BODY = Body(function_body, ("H", "HK", "D"))
