"""One launch for keys and values; a program rounds some heads of either."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from still_kernels.common.triton_shared import floats_of, to_codes


@triton.jit(do_not_specialize=["M"])
def round_kernel(
    p_key, p_value, p_rounded_key, p_rounded_value, M, BR: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """p_rounded_key [M, D] of p_key, and p_rounded_value of p_value. Grid (ceil(M / BR), 2)."""
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    o_dim = tl.arange(0, DP)
    mask = (o_row < M)[:, None] & (o_dim < D)[None, :]
    o_number = o_row.to(tl.int64)[:, None] * D + o_dim[None, :]
    p_from, p_to = p_key, p_rounded_key
    if tl.program_id(1) == 1:
        p_from, p_to = p_value, p_rounded_value
    b_codes, b_scale = to_codes(tl.load(p_from + o_number, mask=mask, other=0.0))
    tl.store(p_to + o_number, (floats_of(b_codes) * b_scale[:, None]).to(p_to.dtype.element_ty), mask=mask)


FUNCTIONS = {"round": round_kernel}
