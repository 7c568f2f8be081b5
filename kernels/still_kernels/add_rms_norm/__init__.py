"""A sum and its norm: definition and kernel."""

from still_kernels.add_rms_norm.inputs import Inputs
from still_kernels.add_rms_norm.naive import naive_add_rms_norm

__all__ = ["Inputs", "naive_add_rms_norm"]
