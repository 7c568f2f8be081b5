"""What a recipe calls AllMem."""

from still_export.mixers.layers import Linearizer

LINEARIZERS = (Linearizer("allmem", "allmem", options=("chunk_size", "finetune_maps")),)
