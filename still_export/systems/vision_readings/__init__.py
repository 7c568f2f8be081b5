"""PolaFormer, InLine and MirrorLA, read causally."""
