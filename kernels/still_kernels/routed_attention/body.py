"""Function body of still::RoutedAttention, with LinearAttention's terms: chunks aligned to the op's, and reversal of chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_graphs.functions.counts import checked_counts
from still_kernels.linear_attention.body.chunks import CHUNK, SecondState, write_chunks
from still_kernels.linear_attention.body.layer import Layer, Tensors, write_step
from still_kernels.routed_attention.spec import ROUTED_ATTENTION, ROUTED_CHUNK

assert CHUNK == ROUTED_CHUNK
RUN, CHUNK_STATE = "past_routed_state", "past_chunk_state"
Of = Callable[[Scope, str], Tensors]
Keys = Callable[[Scope, str], str]


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`: the recurrence for one token, chunks for longer calls."""
    heads, dim, size, routes = dims["H"], dims["D"], dims["V"], dims["R"]
    if heads % routes:
        raise UnsupportedError(f"{node.name or node.op_type}: {routes} routes do not divide the {heads} heads.")
    keep = bool({a.name: a.i for a in node.attribute}.get("keep_decay", 1))
    layer = Layer("gated_delta", heads, 1, heads, dim, heads, size, 1, heads, dim**-0.5)
    b = Scope()
    tokens = b.dim("query", 1)
    past, new = checked_counts(b, tokens)  # [B, 1]
    wide = {t.name: b.wide(t.name, FLOAT if t.dtype == "float32" else dtype) for t in ROUTED_ATTENTION.inputs[:5]} | {
        "softmax": b.cast("softmax", FLOAT)
    }
    # A token after the last one is empty: missing places are gathered from it.
    padded = {
        name: b("Pad", x, [0] * (n := 3 if name in ("decay", "beta", "softmax") else 4) + [0, 1] + [0] * (n - 2), 0.0)
        for name, x in wide.items()
    }

    def at(s: Scope, name: str, place: str) -> str:
        """Values of the tokens at `place` [B, M], empty outside the call: [B, M, ...]."""
        inside = s("And", s("GreaterOrEqual", place, 0), s("Less", place, new))
        return s("GatherND", padded[name], s.unsqueeze(s("Where", inside, place, tokens), 2), batch_dims=1)

    def tensors(s: Scope, place: str) -> Tensors:
        query, key, value = (s("Transpose", at(s, n, place), perm=[0, 2, 1, 3]) for n in ("query", "key", "value"))
        decay, beta = (s.unsqueeze(s("Transpose", at(s, n, place), perm=[0, 2, 1]), 3) for n in ("decay", "beta"))
        return Tensors(s.unsqueeze(s("Mul", query, layer.factor), 3), key, value, decay, beta)

    def of_heads(s: Scope, softmax: str) -> str:
        """[.., R] as [.., H, 1, 1]."""
        return s.unsqueeze(s("Gather", softmax, [h * routes // heads for h in range(heads)], axis=-1), -1, -2)

    branches = []
    for write in (_step, _chunks):
        s = Scope(b)
        names = write(s, layer, tensors, of_heads, lambda s, place: at(s, "softmax", place), (tokens, past, new), keep)
        branches.append(s.graph(write.__name__.strip("_"), [(name, FLOAT) for name in names]))
    output, _, _ = b.multi(
        "If",
        b("Equal", b("Squeeze", tokens), 1),
        out=["output_wide", "present_routed_state", "present_chunk_state"],
        then_branch=branches[0],
        else_branch=branches[1],
    )  # [B, T, H, V]
    real = b("Less", b.arange(tokens), new)  # [B, T]
    b.narrow(dtype, "output", "Where", b.unsqueeze(real, 2, 3), output, 0.0)
    return b.function(ROUTED_ATTENTION, node, {"": opset})


def _closed(
    s: Scope, run: str, chunk_state: str, ends: str, softmax: str, out: tuple[str, ...] = ()
) -> tuple[str, str]:
    """Both states for the next chunk; `ends` and `softmax` [B, 1 or H, 1, 1]."""
    both = s("Where", s("Greater", softmax, 0.5), chunk_state, run)
    names = out or (s.fresh("run"), s.fresh("held"))
    return s("Where", ends, both, run, out=names[0]), s("Where", ends, both, chunk_state, out=names[1])


def _step(
    s: Scope, layer: Layer, tensors: Of, of_heads: Keys, softmax: Keys, counts: tuple[str, str, str], keep: bool
) -> tuple[str, ...]:
    _, past, new = counts
    first = s("Mul", past, 0)  # [B, 1]
    x = tensors(s, first)
    output, run, chunk_state = s.fresh("output"), s.fresh("run"), CHUNK_STATE
    write_step(s, layer, x, output, run, RUN)
    if keep:
        chunk_state = s("Mul", CHUNK_STATE, s("Exp", str(x.decay)))
    end = s("Add", past, new)
    ends = s("And", s("Equal", s("Mod", end, CHUNK), 0), s("Greater", new, 0))
    decision = s("Squeeze", of_heads(s, softmax(s, first)), [1])
    names = "present_routed_step", "present_chunk_step"
    return s("Squeeze", output, [3]), *_closed(s, run, chunk_state, s.unsqueeze(ends, 2, 3), decision, names)


def _chunks(
    s: Scope, layer: Layer, tensors: Of, of_heads: Keys, softmax: Keys, counts: tuple[str, str, str], keep: bool
) -> tuple[str, ...]:
    tokens, past, new = counts
    off = s("Mod", past, CHUNK)  # [B, 1]
    count = s("Div", s("Add", tokens, 2 * CHUNK - 2), CHUNK)
    place = s("Sub", s.arange(s("Mul", count, CHUNK)), off)  # [B, P]
    last = s("Sub", s("Add", s("Mul", s.arange(count), CHUNK), CHUNK - 1), off)  # [B, chunks]
    ends = s("And", s("GreaterOrEqual", last, 0), s("Less", last, new))
    fed = {
        "ends": s.unsqueeze(s.cast(s("Transpose", ends, perm=[1, 0]), FLOAT), 2, 3, 4),
        "softmax": s("Transpose", of_heads(s, softmax(s, last)), perm=[1, 0, 2, 3, 4]),
    }

    def close(c: Scope, run: str, chunk_state: str, chunk: Mapping[str, str]) -> tuple[str, str]:
        return _closed(c, run, chunk_state, c("Greater", chunk["ends"], 0.5), chunk["softmax"])

    names = "present_routed_chunks", "present_chunk_chunks"
    output = s.fresh("output")
    write_chunks(
        s, layer, tensors(s, place), output, names[0], RUN, SecondState(CHUNK_STATE, names[1], fed, close, keep)
    )
    back = s.unsqueeze(s("Add", s.arange(tokens), off), 2)  # [B, T, 1]
    return s("Squeeze", s("GatherND", output, back, batch_dims=1), [3]), *names


BODY = Body(function_body, ("H", "D", "V", "R"))
