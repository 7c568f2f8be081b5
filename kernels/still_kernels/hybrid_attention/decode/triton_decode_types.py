"""Tuples that parts of the decode kernel exchange. They add no code: the machine code equals that of their fields as arguments."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections import namedtuple

Row = namedtuple("Row", "i_batch row p_new_tokens p_past_length p_state_row")
"""One row of the call: its index in the call and in the states, and the pointers to counts, lengths and the table of its pages."""
Heads = namedtuple("Heads", "i_select GR HS H HK G")
"""Heads of a program, and numbers of heads: GR query heads share a selection, G a key/value head."""
Room = namedtuple("Room", "K N NS")
"""The salient cache: K slots a chunk, N in all, shared by NS programs."""
States = namedtuple(
    "States",
    "window_key window_value window_score salient_key salient_value kv z window_key_scale "
    "window_value_scale salient_key_scale salient_value_scale",
)
"""Pointers to the states."""
Parts = namedtuple("Parts", "acc ml lin den window")
"""Pointers to the partial results."""
Constants = namedtuple(
    "Constants",
    "C D DP DK P PP KP GP DS LF LS DW BN SN BG SG BL BS RB WP FEATURE SCOPE RELEASED FUSED "
    "GATE FACTOR RAGGED PAGES CODES SETTLE DOT",
)
"""Constants of a build of the kernel: sizes, their powers of two (DP, PP, KP, GP), blocks (see plan.py) and cases."""
