"""Tolerances of all tests, by what is compared; widening one is a commit of its own with evidence.

Each is an absolute bound on outputs of unit-scale inputs.
"""

import torch

REFERENCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""A stateful form against the quadratic definition, both in the dtype; low precision with the selection forced or k = 0."""

NARROW_NORM = 2.6e-3
"""16-bit kernels with exact products against float64, outputs by Frobenius norm: at most 2.3e-3 measured, mostly that of
rounding outputs and weights to bf16; 3.2e-3 where the numerator is kept in bf16 between blocks."""

GOLDEN = 1e-10
"""float64 implementation against the golden arrays of the released prefill."""

MODEL = {"float32": 2e-4, "float16": 2e-2}
"""A tiny model of 3 layers, exported, against PyTorch in the same dtype, absolute and relative."""
