"""Device functions shared by the Gluon kernels. Triton's interpreter cannot run them."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from still_kernels.common.triton_shared import row_of

CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)

row_of_call = gluon.jit(row_of.fn)


@gluon.jit
def meet(x):
    """Wait until both consumers are here."""
    gl.inline_asm_elementwise("bar.sync 12, 256; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fill_rows(
    buffer, p_new, p_ring, first, length, end, stride, ROWS: gl.constexpr, COLUMNS: gl.constexpr, C: gl.constexpr,
    D: gl.constexpr,
):  # fmt: skip
    """COLUMNS of ROWS keys or values from position `first` on, of the call's tokens or of the ring; zeros where there are none.

    p_new: the head's row of the row's first token, `stride` elements between tokens. p_ring: the head's ring, of rows of D.
    """
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    o_position = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, rows))
    o_dim = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, rows))
    m_new = (o_position >= length) & (o_position < end)
    m_old = (o_position >= 0) & (o_position < length) & (o_position >= length - 2 * C)
    o_new = (o_position - length).to(gl.int64) * stride
    o_old = (o_position & (2 * C - 1)).to(gl.int64) * D
    p_row = gl.where(m_new, p_new + o_new, p_ring + o_old)
    mask = (m_new | m_old)[:, None] & (o_dim < COLUMNS)[None, :]
    buffer.store(gl.load(p_row[:, None] + o_dim[None, :], mask=mask, other=0.0).to(buffer.dtype))


@gluon.jit
def send(desc, at, column, buffer, full, empty, phase, pred):
    """A block by TMA into `buffer` once that is empty; where not `pred` it is handed over as it is."""
    mbarrier.wait(empty, phase)
    mbarrier.expect(full, desc.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(desc, [at, column], full, buffer, pred=pred)
    mbarrier.arrive(full, count=1, pred=pred ^ True)
