"""MoH in recipes."""

from still_export.mixers.layers import Linearizer

LINEARIZERS = (Linearizer("moh", "chosen_heads", trained=False),)
