"""What the parts of the decode kernel hand each other. Tuples leave no code: the machine code is that of their fields as arguments."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any, NamedTuple


class Row(NamedTuple):
    """One row of the call: its number in the call and in the states, the pointers to counts and lengths, and to the table of its pages."""

    i_batch: Any
    row: Any
    p_new_tokens: Any
    p_past_length: Any
    p_state_row: Any


class Heads(NamedTuple):
    """Which heads a program works for, and how many there are: GR query heads share a selection, G a key/value head."""

    i_select: Any
    GR: Any
    HS: Any
    H: Any
    HK: Any
    G: Any


class Room(NamedTuple):
    """Of the salient cache: K slots a chunk, N in all, NS programs that share them."""

    K: Any
    N: Any
    NS: Any


class States(NamedTuple):
    """Pointers to the states."""

    window_key: Any
    window_value: Any
    window_score: Any
    salient_key: Any
    salient_value: Any
    kv: Any
    z: Any
    window_key_scale: Any
    window_value_scale: Any
    salient_key_scale: Any
    salient_value_scale: Any


class Parts(NamedTuple):
    """Pointers to the partial results."""

    acc: Any
    ml: Any
    lin: Any
    den: Any
    window: Any


class Constants(NamedTuple):
    """What a build of the kernel fixes: sizes, their powers of two (DP, PP, KP, GP), blocks (see plan.py) and cases."""

    C: Any
    D: Any
    DP: Any
    DK: Any
    P: Any
    PP: Any
    KP: Any
    GP: Any
    DS: Any
    LF: Any
    LS: Any
    WG: Any
    DW: Any
    BN: Any
    SN: Any
    BG: Any
    SG: Any
    BL: Any
    BS: Any
    RB: Any
    WP: Any
    FEATURE: Any
    SCOPE: Any
    RELEASED: Any
    OVERFLOW: Any
    FUSED: Any
    GATE: Any
    FACTOR: Any
    RAGGED: Any
    PAGES: Any
    CODES: Any
    SETTLE: Any
    DOT: Any
