"""AllMem in recipes."""

from still_export.mixers.layers import Linearizer

LINEARIZERS = (Linearizer("allmem", "allmem", options=("chunk_size", "finetune_maps")),)
