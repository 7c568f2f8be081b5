"""Overflow policies: newcomers compete for the N slots of the salient cache, losers are folded into S and z.

The competition is sequential over the chunks of a call, so it is a Loop over chunks; only flags and slot numbers go round in it.
Entries are the cached rows followed by the call's new rows, M = N + k * chunks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from still_graphs.functions.builder import BOOL, FLOAT, INT64, Scope
from still_kernels.hybrid_attention.body.layer import Layer


@dataclass
class Competition:
    """visible: entries in the softmax of each grid chunk, bool [B, HS, chunks, M]. folded: entries that leave when each chunk is
    promoted, bool, same shape. slots: cache slot of each new row, N = none, int64 [B, HS, k * chunks]."""

    visible: str
    folded: str
    slots: str


def compete(b: Scope, layer: Layer, promoted: str, new_scores: str, chunks: str) -> Competition:
    """Run the policy.

    Args:
        promoted: Grid chunks that promote, bool [B, chunks].
        new_scores: Of the new rows, [B, HS, chunks, k].
        chunks: int64 [1].
    """
    k, heads = layer.salient, layer.select_heads
    slots = b.dim("past_salient_key", 2)  # N
    held = b.unsqueeze(layer.held_rows(b), 1)  # [B, 1]
    slot = b.arange(slots)
    occupied = b.unsqueeze(b("Less", slot, held), 1)  # [B, 1, N]
    entries = b("Add", slots, b("Mul", chunks, k))  # M
    full = b.shape(layer.batch, heads, entries)
    if layer.overflow == "fold_oldest":
        # Age of a slot: the latest chunk that was written there; N is a multiple of k.
        ring, lane = b("Max", b("Div", slots, k), 1), b("Div", slot, k)
        chunks_held = b("Div", held, k)
        turns = b("Div", b("Sub", b("Sub", chunks_held, 1), lane), ring)
        age = b("Add", lane, b("Mul", turns, ring))
        count = b("CumSum", b.cast(promoted, INT64), 1)
        fresh = b("Sub", b("Add", chunks_held, count), 1)  # [B, chunks]
        fresh = b.reshape(b("Expand", b.unsqueeze(fresh, 2), b.shape(1, 1, k)), 0, -1)
        order = b.cast(b.unsqueeze(b("Concat", age, fresh, axis=1), 1), FLOAT)
        order = b("Expand", order, full)
    else:
        order = b("Concat", "past_salient_score", b.reshape(new_scores, 0, 0, -1), axis=2)
    group = b("Div", b("Add", b("Sub", b.arange(entries), slots), k), k)  # 1 + grid chunk of a new row, else <= 0
    group = b("Where", b("Less", b.arange(entries), slots), 0, group)
    alive = b("Concat", occupied, b("Expand", False, b.shape(layer.batch, 1, b("Mul", chunks, k))), axis=2)
    alive = b("Expand", alive, full)
    slot_of = b("Expand", b("Min", b.arange(entries), slots), full)
    body, names = _body(b, layer, promoted, order, group, slots)
    types = [BOOL, BOOL, INT64, BOOL, BOOL]
    inputs: list[tuple[str, int, list[int] | None]] = [
        (names[0], INT64, []),
        (names[1], BOOL, []),
        (names[2], BOOL, None),
        (names[3], INT64, None),
    ]
    graph = body.graph("compete", list(zip(names[4:], types, strict=True)), inputs)
    alive, slot_of, visible, folded = b.multi("Loop", b("Squeeze", chunks), True, alive, slot_of, out=4, body=graph)
    is_new = b("Slice", alive, slots, entries, [2])
    assigned = b("Where", is_new, b("Slice", slot_of, slots, entries, [2]), slots)
    perm = [1, 2, 0, 3]
    return Competition(b("Transpose", visible, perm=perm), b("Transpose", folded, perm=perm), assigned)


def _body(outer: Scope, layer: Layer, promoted: str, order: str, group: str, slots: str) -> tuple[Scope, list[str]]:
    """One chunk's promotion; returns the body and its input names (4) and output names (5)."""
    b = Scope(outer)
    k = layer.salient
    step, go, alive, slot_of = (b.fresh(name) for name in ("step", "go", "alive", "slot_of"))
    newcomer = b("Equal", group, b("Add", step, 1))  # [M]
    enters = b("And", newcomer, b.unsqueeze(b("Gather", promoted, step, axis=1), 1, 2))  # [B, 1, M]
    entered = b("Or", alive, enters)
    # The N highest stay; of equals the earlier entry.
    _, best = b.multi("TopK", b("Where", entered, order, -math.inf), slots, out=2)
    zeros = b("Expand", 0.0, b("Shape", alive))
    kept = b("ScatterElements", zeros, best, b("Expand", 1.0, b("Shape", best)), axis=2)
    stays = b("And", entered, b.cast(kept, BOOL))
    leaves = b("And", entered, b("Not", stays))
    # Freed slots go to the surviving newcomers, both in ascending order.
    older = b("And", stays, b("Not", newcomer))
    taken = b("Where", older, slot_of, slots)
    width = b("Add", slots, k + 1)
    flags = b("Expand", 1.0, b.shape(layer.batch, layer.select_heads, width))
    free = b("ScatterElements", flags, taken, b("Expand", 0.0, b("Shape", taken)), axis=2)
    free = b("Where", b("Less", b.arange(width), slots), free, -1.0)
    _, free = b.multi("TopK", free, [k], out=2)  # [B, HS, k]
    part = b("Add", b("Add", b("Mul", step, k), slots), b.constant(range(k)))  # [k]
    survives = b("Gather", stays, part, axis=2)
    turn = b("Max", b("Sub", b("CumSum", b.cast(survives, INT64), 2), 1), 0)
    chosen = b("Where", survives, b("GatherElements", free, turn, axis=2), slots)
    index = b("Expand", part, b("Shape", chosen))
    slot_next = b("ScatterElements", slot_of, index, chosen, axis=2)
    outputs = [b("Identity", go), b("Identity", stays), slot_next, b("Identity", stays), leaves]
    return b, [step, go, alive, slot_of, *outputs]
