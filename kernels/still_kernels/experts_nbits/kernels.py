"""Triton's functions of still::ExpertsNBits, by kernel."""

from __future__ import annotations

from still_kernels.common import triton_grouped
from still_kernels.experts_nbits.gluon_few import few_codes_down_kernel, few_codes_gate_up_kernel

FUNCTIONS = {
    **triton_grouped.FUNCTIONS,
    "few_codes_gate_up": few_codes_gate_up_kernel,
    "few_codes_down": few_codes_down_kernel,
}
