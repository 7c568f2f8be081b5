"""The short branch: one new token in every row and no promotion. Its cost is the number of nodes, so it has few.

Everything that depends only on counts is outside the branch, see Layer.
"""

from __future__ import annotations

from still_graphs.functions.builder import INT64, Scope
from still_kernels.hybrid_attention.body.features import features
from still_kernels.hybrid_attention.body.layer import MASKED, Layer
from still_kernels.hybrid_attention.body.saliency import self_saliency


class DecodeIndex:
    """Index tensors of a decode step, and `condition`, true for one; S = 2C slots of the ring."""

    def __init__(self, layer: Layer) -> None:
        b, chunk = layer.scope, layer.chunk
        # Ranges that start at a computed 0 are not folded into separate constants of each layer.
        zero = b("Sub", b("ReduceMax", "past_length", keepdims=0), b("ReduceMax", "past_length", keepdims=0))
        offset = b("Mod", "past_length", chunk)
        # No promotion in this row, and not position 0, which is alone in its window.
        early = b("And", b("Less", "past_length", 2 * chunk), b("Greater", "past_length", 0))
        waits = b("Or", b("Greater", offset, 0), early)
        # The general branch refuses negative lengths.
        plain = b.all_of(waits, b("Equal", "new_tokens", 1), b("GreaterOrEqual", "past_length", 0))
        plain = b("ReduceMin", b("Cast", plain, to=INT64), keepdims=1)  # [1]: 1, or 0 which no T equals
        self.condition = b("Equal", b.dim("query", 1), plain)

        past = b.reshape("past_length", -1, 1, 1, 1)
        slot = b("Mod", past, 2 * chunk)  # of the new token
        column = b("Range", zero, b("Add", zero, 2 * chunk), 1)
        age = b("Mod", b("Sub", slot, column), 2 * chunk)  # 0 = the new token, [B, 1, 1, S]
        reach = b("Add", b.reshape(offset, -1, 1, 1, 1), chunk)
        if not layer.phantom:
            reach = b("Min", reach, past)
        self.mask = layer.mask(b, b("LessOrEqual", age, reach))  # of the local softmax, [B, 1, 1, S]
        # Columns of the saliency window without the token itself, bool [B, 1, 1, S].
        self.others = b("And", b("Greater", age, 0), b("LessOrEqual", age, b("Min", past, chunk - 1)))

        row = b("Range", zero, b("Add", zero, b("Squeeze", layer.batch)), 1)
        slot_flat = b.reshape(slot, -1, 1, 1)

        def index(heads: int) -> str:
            head = b("Range", zero, b("Add", zero, heads), 1)
            shape = b.shape(layer.batch, heads, 1)
            parts = (b.reshape(row, -1, 1, 1), b.reshape(head, 1, -1, 1), slot_flat)
            return b("Concat", *(b("Expand", part, shape) for part in parts), axis=2)

        # Row, head and slot, as ScatterND indices of new keys [B, 1, HK, D] and scores [B, H, 1, 1].
        self.ring_index = b.unsqueeze(index(layer.kv_heads), 1)
        self.score_index = b.unsqueeze(index(layer.heads), 2, 3)
        self.own_index = b("Expand", slot, b.shape(layer.batch, layer.heads, 1, 1))  # slot of the new token
        self.own = b("Equal", age, 0)  # column is the new token, bool [B, 1, 1, S]
        self.rest = layer.mask(b, self.others)
        self.cached_rows = b.reshape(layer.cached_rows(b), -1, 1, 1, 1)  # number of cached salient rows


def write_decode(b: Scope, layer: Layer, index: DecodeIndex, outputs: dict[str, str]) -> None:
    """Write the branch; `outputs` maps each output of the op to its name."""
    chunk = layer.chunk
    rows = (0, layer.heads, 1, layer.dim)
    query = layer.wide(b, b.reshape("query", *rows))
    scaled = b("Mul", query, layer.weights["scale"])

    # Each ring has one writer, and its readers use the writer's output.
    ring = {}
    for name in ("key", "value"):
        out = outputs[f"present_window_{name}"]
        ring[name] = layer.wide(b, b("ScatterND", f"past_window_{name}", index.ring_index, name, out=out))

    grouped = b.reshape(scaled, 0, layer.kv_heads, -1, layer.dim)
    logits = b("MatMul", grouped, b("Transpose", ring["key"], perm=[0, 1, 3, 2]))
    logits = b.reshape(logits, 0, layer.heads, 1, -1)  # [B, H, 1, S]
    own = b("GatherElements", logits, index.own_index, axis=3)
    last_slot = b("Equal", b("Mod", b.arange(2 * chunk), chunk), chunk - 1) if layer.saliency != "margin" else ""
    score = self_saliency(b, layer, logits, own, index.others, "", index.own, last_slot, index.rest)
    b("ScatterND", "past_window_score", index.score_index, score, out=outputs["present_window_score"])

    logits = b("Add", logits, index.mask)
    if layer.salient:
        salient_q = scaled if layer.per_query_head else grouped
        by_cache = b("MatMul", salient_q, b("Transpose", layer.wide(b, "past_salient_key"), perm=[0, 1, 3, 2]))
        if not layer.per_query_head:
            by_cache = b.reshape(by_cache, 0, layer.heads, 1, -1)
        slots = b.dim("past_salient_key", 2)
        by_cache = b("Where", b("Less", b.arange(slots), index.cached_rows), by_cache, MASKED)
        logits = b("Concat", logits, by_cache, axis=3)
    p = b("Softmax", logits, axis=-1)
    share = b("ReduceMax", p, [-1])  # 1 / sum of e^(s - m): the largest term is e^0
    if layer.salient:
        near, far = b.multi("Split", p, b.shape(2 * chunk, slots), out=2, axis=3)
        if not layer.per_query_head:
            far = b.reshape(far, 0, layer.kv_heads, -1, slots)
    else:
        near = p
    near = b.reshape(near, 0, layer.kv_heads, -1, 2 * chunk)
    value = b.reshape(b("MatMul", near, ring["value"]), *rows)
    if layer.salient:
        far = b("MatMul", far, layer.wide(b, "past_salient_value"))
        value = b("Add", value, far if layer.per_query_head else b.reshape(far, *rows))

    phi = features(b, layer, query, layer.weights["q"], (0, layer.heads, 1), rows=1)
    linear = b("MatMul", phi, "past_kv_state")
    mass = b("MatMul", phi, b.unsqueeze("past_z_state", 3))
    if layer.gated:
        linear = b("Mul", linear, layer.wide(b, b.reshape("gate", *rows)))
    # Numerator and denominator divided by the softmax sum.
    linear, mass = b("Mul", linear, share), b("Mul", b("Add", mass, layer.mix_epsilon), share)
    unit: str | float = 1.0
    if layer.factored:
        factor = b.reshape("window_factor", 1, layer.heads, 1, 1)
        value, unit = b("Mul", value, factor), factor
    mixed = b("Div", b("Add", value, linear), b("Add", mass, unit))
    width = b.reshape(mixed, 0, 1, layer.heads, layer.dim, out=None if layer.dtype != 1 else outputs["output"])
    if layer.dtype != 1:
        b.cast(width, layer.dtype, out=outputs["output"])
    for state in ("salient_key", "salient_value", "kv_state", "z_state"):
        if f"present_{state}" in outputs:
            b("Identity", f"past_{state}", out=outputs[f"present_{state}"])
