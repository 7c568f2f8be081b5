"""Function body of still::RankOneAttention, with LinearAttention's terms: a token writes its value and the value that it read first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_new_tokens
from still_kernels.linear_attention.body.chunks import CHUNK, blocks_of, terms_of, write_scan
from still_kernels.linear_attention.body.layer import Layer
from still_kernels.rank_one_attention.spec import RANK_ONE_ATTENTION

STATE = "past_recurrent_state"


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: the recurrence for one token, chunks for longer calls."""
    heads, dim, size = dims["H"], dims["D"], dims["V"]
    layer = Layer("", heads, 1, heads, dim, heads, size, dim, 0, 1.0)
    b = Scope()
    tokens = b.dim("query", 1)
    real = b.unsqueeze(b("Less", b.arange(tokens), checked_new_tokens(b, tokens)), 2, 3)  # [B, T, 1, 1]
    x = {}
    for tensor in RANK_ONE_ATTENTION.inputs[:-1]:
        wide = tensor.name if FLOAT == dtype or tensor.dtype == "float32" else b.cast(tensor.name, FLOAT)
        x[tensor.name] = b("Transpose", b("Where", real, wide, 0.0), perm=[0, 2, 1, 3])  # [B, H, T, ...]
    branches = []
    for write, name in ((_write_step, "step"), (_write_chunks, "chunks")):
        scope = Scope(b)
        names = f"output_{name}", f"present_{name}"
        write(scope, layer, x, *names)
        branches.append(scope.graph(name, [(n, FLOAT) for n in names]))
    wide = b.multi(
        "If",
        b("Equal", b("Squeeze", tokens), 1),
        out=["output_wide", "present_recurrent_state"],
        then_branch=branches[0],
        else_branch=branches[1],
    )[0]  # [B, T, H, 1, V]
    b.narrow(dtype, "output", "Where", real, b("Squeeze", wide, [3]), 0.0)
    return b.function(RANK_ONE_ATTENTION, node, {"": opset})


def _write_step(b: Scope, layer: Layer, x: Mapping[str, str], output: str, present: str) -> None:
    """The recurrence. In place: the sum that writes the present state is the last reader of the past one."""
    state = b("Mul", STATE, b("Transpose", b("Exp", x["decay"]), perm=[0, 1, 3, 2]))
    values = b("Concat", x["value"], b("MatMul", x["read_key"], state), axis=2)  # [B, H, 2, V]
    keys = b("Transpose", b("Concat", x["key"], x["write_key"], axis=2), perm=[0, 1, 3, 2])
    b("Add", state, b("MatMul", keys, values), out=present)
    b("Unsqueeze", b("Transpose", b("MatMul", x["query"], present), perm=[0, 2, 1, 3]), [3], out=output)


def _write_chunks(b: Scope, layer: Layer, x: Mapping[str, str], output: str, present: str) -> None:
    missing = b("Mod", b("Sub", [0], b.dim(x["key"], 2)), [CHUNK])
    dim = layer.dim
    query, key, value, decay, reading, writing = (
        blocks_of(b, x[t.name], missing, layer.size if t.name == "value" else dim)
        for t in RANK_ONE_ATTENTION.inputs[:-1]
    )
    queries = b("Concat", b.unsqueeze(query, 2), b.unsqueeze(reading, 2), axis=2)  # [N, C, 2, D]
    both = b.reshape(terms_of(b, replace(layer, shared=2), queries, key, decay, None).scores, -1, CHUNK, 2, CHUNK)
    of_queries, of_readings = (b("Gather", both, i, axis=2) for i in (0, 1))
    written = terms_of(b, layer, b.unsqueeze(query, 2), writing, decay, b.constant([-1.0], "float32"), reading)
    assert written.prefix is not None and written.suffix is not None and written.inverse is not None
    start, to_end = b("Exp", written.prefix), b("Exp", written.suffix)
    taken = b("Neg", b("MatMul", written.inverse, b("Mul", start, reading)))
    before = b("Trilu", of_readings, -1, upper=0)  # a token reads before it is written
    read = b("MatMul", written.inverse, b("MatMul", before, value))
    write_scan(
        b,
        layer,
        x["key"],
        (
            b("Concat", b("Pad", taken, [0, 0, 0, 0, CHUNK, 0], 0.0), b("Mul", query, start), axis=1),
            b("Concat", read, value, axis=1),
            b("Concat", written.scores, of_queries, axis=2),
            b("Concat", b("Mul", writing, to_end), b("Mul", key, to_end), axis=1),
        ),
        start,
        2 * CHUNK,
        2 * CHUNK,
        output,
        present,
    )


BODY = Body(function_body, ("H", "D", "V"))
