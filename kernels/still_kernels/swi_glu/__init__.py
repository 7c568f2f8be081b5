"""The gate of a feed-forward layer: definition and kernel."""

from still_kernels.swi_glu.inputs import Inputs
from still_kernels.swi_glu.naive import naive_swi_glu

__all__ = ["Inputs", "naive_swi_glu"]
