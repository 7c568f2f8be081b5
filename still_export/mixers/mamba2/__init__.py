"""Mamba-2's selective state space as linear attention with decay, as Granite 4 and Mamba-2 have it: module and mixer."""
