"""Mamba-2 as linear attention with decay, as in Granite 4 and Mamba-2: module and mixer."""
