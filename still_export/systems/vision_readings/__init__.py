"""PolaFormer, InLine and MirrorLA, in causal readings."""

MODEL_TYPES = ("polaformer", "inline", "mirrorla")
