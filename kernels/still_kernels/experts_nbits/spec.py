"""still::ExpertsNBits: still::Experts with matrices of 4 or 8 bits in blocks."""

from __future__ import annotations

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec
from still_kernels.experts.spec import EXPERTS


def _matrix(name: str, rows: str, inputs: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(name, ("E", rows, f"{inputs}W"), "int32", "weight"),
        TensorSpec(f"{name}_scales", ("E", rows, f"{inputs}S"), "T", "weight"),
        TensorSpec(f"{name}_zero_points", ("E", rows, f"{inputs}Z"), "int32", "weight", optional=True),
    )


EXPERTS_NBITS = OpSpec(
    # Symbols: those of Experts; IW, IS, IZ and MW, MS, MZ words of codes, scales and words of zero points of a row; see MatMulNBits.
    name="ExpertsNBits",
    torch_name="experts_nbits",
    inputs=(*EXPERTS.inputs[:3], *_matrix("gate_up", "R", "I"), *_matrix("down", "I", "M")),
    outputs=EXPERTS.outputs,
    attributes=(*EXPERTS.attributes, AttributeSpec("bits", 4), AttributeSpec("block_size", 32)),
    traced=False,
)
