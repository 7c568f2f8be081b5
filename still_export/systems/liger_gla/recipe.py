"""Liger-GLA in recipes."""

from still_export.mixers.layers import Linearizer

LINEARIZERS = (Linearizer("liger-gla", "liger_gla", trained=False),)
