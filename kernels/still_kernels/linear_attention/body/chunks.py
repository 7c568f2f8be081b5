"""A longer call: matrix products for all chunks at once, then the state from chunk to chunk.

The recurrence over chunks is a Scan of two products; there is none over tokens. still_kernels/linear_attention/chunked.py is
the same in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from still_graphs.functions.builder import FLOAT, Scope
from still_kernels.linear_attention.body.layer import Layer, Tensors

CHUNK = 64
"""Tokens of a chunk, a power of two."""


@dataclass(frozen=True)
class Terms:
    """Terms of N blocks of tokens, over all rows, heads and chunks.

    Sums of decay up to each token and after it [N, size, E]; query times key under the decay between them [N, size * G, size]; and the
    inverse [N, size, size] of the delta rules.
    """

    prefix: str | None
    suffix: str | None
    scores: str
    inverse: str | None


PAST = "past_recurrent_state"
Close = Callable[[Scope, str, str, Mapping[str, str]], tuple[str, str]]
"""Function (scope, state after a chunk, second state before its decay, fed values) -> both states for the next chunk."""


@dataclass(frozen=True)
class SecondState:
    """A second state of a scan, to which nothing is added.

    past, present: Its names before and after the call.
    fed: Values of each chunk for `close`, [chunks, B, ...].
    decays: The state's decay also applies to it.
    """

    past: str
    present: str
    fed: Mapping[str, str]
    close: Close
    decays: bool


def write_chunks(
    b: Scope, layer: Layer, x: Tensors, output: str, present: str, past: str = PAST, second: SecondState | None = None
) -> None:
    """Write `output` [B, T, H, G, V] and the state `present` after the call."""
    heads, shared, dim, size = layer.heads, layer.shared, layer.dim, layer.size
    tokens = b.dim(x.key, 2)
    missing = b("Mod", b("Sub", [0], tokens), [CHUNK])

    def blocks(value: str, *rest: int) -> str:
        return blocks_of(b, value, missing, *rest)

    query, key, value = blocks(x.query, shared, dim), blocks(x.key, dim), blocks(x.value, size)
    decay = None if x.decay is None else blocks(x.decay, layer.decay)
    beta = None
    if x.beta is not None:
        ones = b.shape(1, heads, 1, 1)
        beta = blocks(x.beta if layer.beta == heads else b("Expand", x.beta, ones), 1)
    terms = terms_of(b, layer, query, key, decay, beta)
    start = None if terms.prefix is None else b("Exp", terms.prefix)  # decay of the state up to each token, [N, C, E]
    write, read = key, query
    if start is not None:
        write = b("Mul", key, b("Exp", terms.suffix))
        read = b("Mul", query, b.unsqueeze(start, 2))
    read = b.reshape(read, -1, CHUNK * shared, dim)
    added = value
    if terms.inverse is not None:
        stepped = b("Mul", beta, key)
        taken = b("MatMul", terms.inverse, stepped if start is None else b("Mul", stepped, start))
        read = b("Concat", taken, read, axis=1)
        added = b("MatMul", terms.inverse, b("Mul", beta, value))
    else:
        read = b("Pad", read, [0, 1, 0, 0, 0, 0], 0.0)  # a row of zeros, see below
    corrections = CHUNK if terms.inverse is not None else 1
    found = (read, added, terms.scores, write)
    write_scan(b, layer, x.key, found, start, corrections, CHUNK, output, present, past, second)


def blocks_of(b: Scope, value: str, missing: str, *rest: int) -> str:
    """[B, h, T, ...] as [N, C, ...]; the `missing` tokens of the last chunk are 0."""
    pads = b("Concat", [0] * (5 + len(rest)), missing, [0] * len(rest), axis=0)
    return b.reshape(b("Pad", value, pads, 0.0), -1, CHUNK, *rest)


def write_scan(
    b: Scope,
    layer: Layer,
    key: str,
    terms: tuple[str, str, str, str],
    start: str | None,
    corrections: int,
    writes: int,
    output: str,
    present: str,
    before: str = PAST,
    second: SecondState | None = None,
) -> None:
    """The state from chunk to chunk: writes `output` [B, T, H, G, V] and the state `present`.

    Args:
        key: The call's keys, [B, H, T, D], for their sizes.
        terms: read [N, corrections + C * G, D], whose first rows are subtracted from the added values; added, scores and write, as in
            `ChunkTerms`; write [N, writes, D].
        start: The state's decay up to each token; None: no decay.
        writes: Rows that a chunk adds to the state.
        before: The state before the call.
    """
    heads, shared, dim, size = layer.heads, layer.shared, layer.dim, layer.size
    rows = corrections + CHUNK * shared
    tokens = b.dim(key, 2)

    def scanned(value: str, *rest: int) -> str:
        """[N, ...] as [chunks, B, H, ...]."""
        by_row = b.reshape(value, b.dim(key, 0), heads, -1, *rest)
        return b("Transpose", by_row, perm=[2, 0, 1, *range(3, 3 + len(rest))])

    read, added, scores, write = terms
    fed = {
        "read": scanned(read, rows, dim),
        "added": scanned(added, writes, size),
        "scores": scanned(scores, CHUNK * shared, writes),
        "kept": scanned(b("Transpose", write, perm=[0, 2, 1]), dim, writes),
    }
    if start is not None:
        last = b("Slice", start, [CHUNK - 1], [CHUNK], [1])  # [N, 1, E]
        fed["left"] = scanned(b.reshape(last, -1, layer.decay, 1), layer.decay, 1)

    fed |= {} if second is None else second.fed
    c = Scope(b)
    past, chunk = c.fresh("state"), {name: c.fresh(name) for name in fed}
    # One product reads the state, and every rule writes after it: past and present may share one buffer.
    found = c("MatMul", chunk["read"], past)
    new = c("Sub", chunk["added"], c("Slice", found, [0], [corrections], [2]))
    result = c("Add", c("Slice", found, [corrections], [rows], [2]), c("MatMul", chunk["scores"], new))
    state = past if start is None else c("Mul", past, chunk["left"])
    state = c("Add", state, c("MatMul", chunk["kept"], new))
    carried, states, starts, presents = [past], [state], [before], [present]
    if second is not None:
        past_second = c.fresh("held")
        other = c("Mul", past_second, chunk["left"]) if second.decays else c("Identity", past_second)
        states = [*second.close(c, state, other, chunk)]
        carried, starts, presents = [past, past_second], [before, second.past], [present, second.present]
    body = c.graph(
        "chunk",
        [(name, FLOAT) for name in (*states, result)],
        [(name, FLOAT, None) for name in (*carried, *chunk.values())],
    )
    *_, results = b.multi(
        "Scan",
        *starts,
        *fed.values(),
        out=[*presents, b.fresh("results")],
        body=body,
        num_scan_inputs=len(fed),
    )  # [chunks, B, H, C * G, V]
    by_token = b.reshape(results, 0, 0, heads, CHUNK, shared, size)
    ordered = b("Transpose", by_token, perm=[1, 0, 3, 2, 4, 5])
    flat = b.reshape(ordered, b.dim(key, 0), -1, heads, shared, size)
    b("Slice", flat, [0], tokens, [1], out=output)


def terms_of(
    b: Scope, layer: Layer, query: str, key: str, decay: str | None, beta: str | None, reading: str | None = None
) -> Terms:
    """The terms of whole chunks, by joining neighbouring blocks of 1, 2, 4 .. tokens. `reading` is the key with which a correction reads
    the state, [N, C, D]; None: the token's key.

    The part below the diagonal is a product of the second block's rows, decayed from its start, and the first block's, decayed to its end.
    Exponents are sums of decays, never a difference of two long sums. They are at most 0, also for an infinite decay.
    """
    shared, dim = layer.shared, layer.dim
    prefix = None if decay is None else b.reshape(decay, -1, 1, layer.decay)
    suffix = None if prefix is None else b("Expand", 0.0, b("Shape", prefix))
    products = b("ReduceSum", b("Mul", query, b.unsqueeze(key, 2)), [3], keepdims=0)
    scores = b.reshape(products, -1, shared, 1)
    inverse = None
    stepped = None
    if beta is not None:
        stepped = b("Mul", beta, reading or key)
        inverse = b("Expand", 1.0, b("Concat", b.dim(scores, 0), [1, 1], axis=0))

    def half(value: str, which: int, *rest: int) -> str:
        """The first or the second block of each pair."""
        return b("Gather", b.reshape(value, -1, 2, *rest), which, axis=1)

    size = 1
    while size < CHUNK:
        left, queries = half(key, 0, size, dim), half(query, 1, size, shared, dim)
        start = None
        if prefix is not None and suffix is not None:
            first, second = (half(prefix, i, size, layer.decay) for i in (0, 1))
            behind = [half(suffix, i, size, layer.decay) for i in (0, 1)]
            left = b("Mul", left, b("Exp", behind[0]))
            start = b("Exp", second)
            queries = b("Mul", queries, b.unsqueeze(start, 2))
            ends = [b("Slice", x, [size - 1], [size], [1]) for x in (first, second)]
            prefix = b("Concat", first, b("Add", second, ends[0]), axis=1)
            suffix = b("Concat", b("Add", behind[0], ends[1]), behind[1], axis=1)
        left = b("Transpose", left, perm=[0, 2, 1])
        rows = size * shared
        between = b("MatMul", b.reshape(queries, -1, rows, dim), left)
        scores = _joined(b, half(scores, 0, rows, size), half(scores, 1, rows, size), between, size)
        if inverse is not None and stepped is not None:
            above, below = (half(inverse, i, size, size) for i in (0, 1))
            later = half(stepped, 1, size, dim)
            links = b("MatMul", later if start is None else b("Mul", later, start), left)
            between = b("Neg", b("MatMul", b("MatMul", below, links), above))
            inverse = _joined(b, above, below, between, size)
        size *= 2
    return Terms(prefix, suffix, scores, inverse)


def _joined(b: Scope, first: str, second: str, between: str, size: int) -> str:
    """[first, 0; between, second]."""
    upper = b("Pad", first, [0, 0, 0, 0, 0, size], 0.0)
    return b("Concat", upper, b("Concat", between, second, axis=2), axis=1)
