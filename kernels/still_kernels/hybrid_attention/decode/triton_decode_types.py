"""What the parts of the decode kernel hand each other. Tuples leave no code: the machine code is that of their fields as arguments."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections import namedtuple

Row = namedtuple("Row", "i_batch row p_new_tokens p_past_length p_state_row")
"""One row of the call: its number in the call and in the states, the pointers to counts and lengths, and to the table of its pages."""
Heads = namedtuple("Heads", "i_select GR HS H HK G")
"""Which heads a program works for, and how many there are: GR query heads share a selection, G a key/value head."""
Room = namedtuple("Room", "K N NS")
"""Of the salient cache: K slots a chunk, N in all, NS programs that share them."""
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
"""What a build of the kernel fixes: sizes, their powers of two (DP, PP, KP, GP), blocks (see plan.py) and cases."""
