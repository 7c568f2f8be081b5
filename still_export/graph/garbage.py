"""Pauses of Python's garbage collector while a graph is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (50_000, 20, 20)
"""Thresholds for rare collections."""


@contextmanager
def few_collections() -> Iterator[None]:
    """Collect garbage rarely, and skip objects that exist already: a trace makes a million objects that stay.

    Looking through them again and again is a quarter of the time of a trace, a fifth of that of lowering.
    """
    if (before := gc.get_threshold()) == RARELY:  # whoever made it so has frozen what there was
        yield
        return
    frozen = gc.get_freeze_count()
    gc.freeze()
    gc.set_threshold(*RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:  # of whoever froze before, it stays frozen
            gc.unfreeze()
