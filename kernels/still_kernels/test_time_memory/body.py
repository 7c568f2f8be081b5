"""Function body of still::TestTimeMemory: a Scan over pieces of chunks, which updates weights where a chunk ends."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from still_graphs.errors import UnsupportedError, unknown
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.test_time_memory.spec import MATRIX_EPSILON, ORTHOGONALIZE, ROW_EPSILON, TEST_TIME_MEMORY

STATES = tuple(state.name for state in TEST_TIME_MEMORY.states)
WEIGHTS = (("gate", 0), ("up", 1), ("down", 2))


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    heads, queries, dim, hidden = (dims[name] for name in "HGDM")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    chunk, step = int(attributes.get("chunk_size", 64)), attributes.get("memory_update", b"muon").decode()
    known = TEST_TIME_MEMORY.attribute("memory_update").choices
    if chunk < 1:
        raise UnsupportedError(f"{node.name or node.op_type}: chunk_size={chunk}; a chunk has at least one token.")
    if step not in known:
        raise unknown(step, known, f"{node.name or node.op_type}: memory_update={step!r}", UnsupportedError)
    b = Scope()
    tokens = b.dim("query", 1)
    past, new = checked_counts(b, tokens)  # [B, 1]
    offset = b("Mod", past, chunk)
    last = b("Sub", b("Add", b("ReduceMax", offset, keepdims=0), b("Squeeze", tokens)), 1)
    pieces = b("Add", b("Div", last, chunk), 1)
    slots = b.arange(b("Min", tokens, [chunk]))
    begin = b("Sub", b("Mul", b.arange(pieces), chunk), offset)  # [B, pieces]
    start, end = b("Max", begin, 0), b("Min", b("Add", begin, chunk), new)
    place = b("Add", b.unsqueeze(start, 2), slots)  # [B, pieces, S]
    real = b("Less", place, b.unsqueeze(end, 2))
    inside = b("Min", place, b("Sub", tokens, [1]))
    closed = b("And", b("GreaterOrEqual", end, b("Add", begin, chunk)), b("Greater", end, start))

    def taken(name: str, *rest: int) -> str:
        """[B, T, H, rest] as [pieces, B, H, S, rest], 0 where there is no token."""
        x = b.wide(name, FLOAT if name in ("rate", "momentum") else dtype)
        rows = b("GatherND", x, b.unsqueeze(inside, 3), batch_dims=1)  # [B, pieces, S, H, rest]
        rows = b("Where", b.unsqueeze(real, *range(3, 4 + len(rest))), rows, 0.0)
        return b("Transpose", rows, perm=[1, 0, 3, 2, *range(4, 4 + len(rest))])

    fed = {
        "rows": b.reshape(taken("query", queries, dim), 0, 0, heads, -1, dim),
        "keys": taken("key", dim),
        "values": taken("value", dim),
        "rates": b("Transpose", taken("rate", 3), perm=[0, 1, 2, 4, 3]),  # [pieces, B, H, 3, S]
        "momentum_here": b("ReduceSum", taken("momentum"), [3], keepdims=0),
        "closed": b.cast(b("Transpose", closed, perm=[1, 0]), FLOAT),
    }
    norms = _norms(b, "initial")
    c = Scope(b)
    names = {name: c.fresh(name) for name in STATES}
    piece = {name: c.fresh(name) for name in fed}
    after, read = _piece(c, names, piece, norms, (chunk, step, hidden, dim))
    body = c.graph(
        "chunk",
        [(name, FLOAT) for name in (*after, read)],
        [(name, FLOAT, None) for name in (*names.values(), *piece.values())],
    )
    *states, results = b.multi(
        "Scan", *(f"past_{name}" for name in STATES), *fed.values(), out=5, body=body, num_scan_inputs=len(fed)
    )
    # Writes to the states come after all reads of them.
    any_token = b("Greater", new, 0)
    for name, found in zip(STATES, states, strict=True):
        has_tokens = any_token if name == "momentum_sum" else b.unsqueeze(any_token, 2, 3, 4)
        b("Where", has_tokens, found, f"past_{name}", out=f"present_{name}")
    # Each token's piece and slot.
    by_slot = b.reshape(results, 0, 0, heads, -1, queries, dim)
    by_slot = b("Transpose", by_slot, perm=[1, 0, 3, 2, 4, 5])  # [B, pieces, S, H, G, D]
    token = b.arange(tokens)
    own = b("Div", b("Add", token, offset), chunk)  # [B, T]
    slot = b("Sub", token, b("Max", b("Sub", b("Mul", own, chunk), offset), 0))
    back = b("Concat", b.unsqueeze(own, 2), b.unsqueeze(slot, 2), axis=2)
    output = b("GatherND", by_slot, back, batch_dims=1)
    b.narrow(dtype, "output", "Where", b.unsqueeze(b("Less", token, new), 2, 3, 4), output, 0.0)
    return b.function(TEST_TIME_MEMORY, node, {"": opset})


def _piece(
    c: Scope,
    past: Mapping[str, str],
    piece: Mapping[str, str],
    norms: str,
    fixed: tuple[int, str, int, int],
) -> tuple[list[str], str]:
    """The states after a piece of one chunk, and its outputs [B, H, S * G, D]."""
    chunk, kind, hidden, dim = fixed
    weights = c("Add", "initial", past["memory_step"])
    at = {name: c("Gather", weights, i, axis=2) for name, i in WEIGHTS}  # [B, H, M, D]
    across = {name: c("Transpose", x, perm=[0, 1, 3, 2]) for name, x in at.items()}

    def silu(x: str) -> tuple[str, str]:
        sigmoid = c("Sigmoid", x)
        return c("Mul", x, sigmoid), sigmoid

    rows, keys, values = piece["rows"], piece["keys"], piece["values"]
    active, _ = silu(c("MatMul", rows, across["gate"]))
    read = c("MatMul", c("Mul", active, c("MatMul", rows, across["up"])), at["down"])
    before, linear, back = (
        c("MatMul", x, across[name]) for x, name in ((keys, "gate"), (keys, "up"), (values, "down"))
    )
    active, sigmoid = silu(before)
    slope = c("Mul", sigmoid, c("Add", c("Mul", before, c("Sub", 1.0, sigmoid)), 1.0))
    parts = (
        (c("Mul", c("Mul", back, linear), slope), keys),
        (c("Mul", back, active), keys),
        (c("Mul", active, linear), values),
    )
    found = []
    for i, (x, y) in enumerate(parts):
        turned = c("Transpose", x, perm=[0, 1, 3, 2])  # [B, H, M, S]
        rated = c("Mul", turned, c("Slice", piece["rates"], [i], [i + 1], [2]))
        found.append(c.unsqueeze(c("MatMul", rated, y), 2))
    gradient = c("Add", past["memory_gradient"], c("Concat", *found, axis=2))
    total = c("Add", past["momentum_sum"], piece["momentum_here"])
    ends = c("Greater", piece["closed"], 0.5)  # [B]

    open_, shut = Scope(c), Scope(c)
    same = [
        open_("Identity", x, out=open_.fresh("open"))
        for x in (past["memory_step"], past["memory_momentum"], gradient, total)
    ]
    s = shut
    left = s("Add", gradient, s("Mul", s.unsqueeze(s("Div", total, float(chunk)), 2, 3, 4), past["memory_momentum"]))
    moved = s("Add", weights, _orthogonalized(s, left, hidden, dim) if kind == "muon" else left)
    moved = s("Mul", s("Div", moved, s("Add", _norms(s, moved), ROW_EPSILON)), norms)
    every, head = s.unsqueeze(ends, 1, 2, 3, 4), s.unsqueeze(ends, 1)
    done = [
        s("Where", every, s("Sub", moved, "initial"), past["memory_step"]),
        s("Where", every, left, past["memory_momentum"]),
        s("Where", every, 0.0, gradient),
        s("Where", head, 0.0, total),
    ]
    some = c("Greater", c("ReduceMax", piece["closed"], keepdims=0), 0.5)
    after = c.multi(
        "If",
        some,
        out=4,
        then_branch=shut.graph("closed", [(x, FLOAT) for x in done]),
        else_branch=open_.graph("open", [(x, FLOAT) for x in same]),
    )
    return after, read


def _norms(s: Scope, x: str) -> str:
    """Norm of the output row of each number of [.., 3, M, D], [.., 3, M, D] with dimensions of 1 where Concat allows them."""
    axis = -3
    first, second = s("Slice", x, [0], [2], [axis]), s("Slice", x, [2], [3], [axis])
    rows = s("Expand", s("ReduceL2", first, [-1], keepdims=1), s("Shape", first))
    columns = s("Expand", s("ReduceL2", second, [-2], keepdims=1), s("Shape", second))
    return s("Concat", rows, columns, axis=axis)


def _orthogonalized(s: Scope, x: str, hidden: int, dim: int) -> str:
    """Like `orthogonalized` of still_kernels, for [B, H, 3, M, D]."""
    turn = [0, 1, 2, 4, 3]
    x = s("Transpose", x, perm=turn) if hidden < dim else x
    x = s("Div", x, s("Add", s("ReduceL2", x, [-2, -1], keepdims=1), MATRIX_EPSILON))
    for a, b, c in ORTHOGONALIZE:
        square = s("MatMul", s("Transpose", x, perm=turn), x)
        mixed = s("Add", s("Mul", square, b), s("Mul", s("MatMul", square, square), c))
        x = s("Add", s("Mul", x, a), s("MatMul", x, mixed))
    return s("Transpose", x, perm=turn) if hidden < dim else x


BODY = Body(function_body, ("H", "G", "D", "M"))
