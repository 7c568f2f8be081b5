"""PolaFormer, InLine and MirrorLA, read causally."""

MODEL_TYPES = ("polaformer", "inline", "mirrorla")
