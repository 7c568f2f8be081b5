"""Function bodies of still::ExpertsNBits: the loop of still::Experts with dequantized matrices; and ONNX Runtime's op for CPUs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from still_graphs.errors import UnsupportedError
from still_graphs.functions.builder import FLOAT, Body, Scope
from still_kernels.experts.body import activation_of, loop_over_experts, scattered
from still_kernels.experts_nbits.spec import EXPERTS_NBITS

WORD_BITS = 32
ACCURACY_LEVEL = {int(FLOAT): 4, int(TensorProto.FLOAT16): 0}
"""4: activations are rounded to 8 bits in blocks, as in MatMulNBits here. 4-bit weights then take 0.76 instead of 1.9 ms a token (E 64, M
512, k 6, ONNX Runtime 1.31.1); 8-bit weights have no other kernel. Float16 stands in for GPU kernels, which do not round."""


def function_body(node: onnx.NodeProto, dtype: int, opset: int, dims: Mapping[str, int]) -> onnx.FunctionProto:
    """The function of `node`, in float32 with weights rounded to the activations' type."""
    bits, block, sizes = _form(node, dims)
    present = _present(node)

    def codes(turn: Scope, words: str, width: int) -> str:
        """float32 [rows, codes] of words [rows, W]."""
        shifts = turn.constant(range(0, WORD_BITS, bits), "uint32")
        spread = turn("BitShift", turn.unsqueeze(turn.cast(words, TensorProto.UINT32), 2), shifts, direction="RIGHT")
        masked = turn("BitwiseAnd", spread, turn.constant((1 << bits) - 1, "uint32"))
        return turn("Slice", turn.reshape(turn.cast(masked, FLOAT), 0, -1), [0], [width], [1])

    def matrix(turn: Scope, name: str, expert: str) -> str:
        columns = sizes["I" if name == "gate_up" else "M"]
        zero: str | float = float(1 << (bits - 1))
        if f"{name}_zero_points" in present:
            words = turn("Gather", f"{name}_zero_points", expert)
            zero = turn.unsqueeze(codes(turn, words, columns // block), 2)
        blocks = turn.reshape(codes(turn, turn("Gather", name, expert), columns), 0, -1, block)
        scales = turn.unsqueeze(turn.cast(turn("Gather", f"{name}_scales", expert), FLOAT), 2)
        values = turn.reshape(turn("Mul", turn("Sub", blocks, zero), scales), 0, columns)
        return values if dtype == FLOAT else turn.cast(turn.cast(values, dtype), FLOAT)

    b = Scope()
    loop_over_experts(b, activation_of(node, sizes), dtype, sizes, matrix)
    return b.function(EXPERTS_NBITS, node, {"": opset}, "expert")


def runtime_body(
    node: onnx.NodeProto, dtype: int, dims: Mapping[str, int], imports: Mapping[str, int], domain: str
) -> onnx.FunctionProto | None:
    """The function of `node` around `domain`'s QMoE, which reads bytes. Bytes of constants are computed once, when a session opens."""
    bits, block, sizes = _form(node, dims)
    if dtype not in (FLOAT, TensorProto.FLOAT16) or activation_of(node, sizes) != "swiglu":
        return None
    b, present = Scope(), _present(node)

    def bytes_of(name: str, width: int) -> str:
        """[E, rows, bytes] of words [E, rows, W]."""
        shifts = b.constant((0, 8, 16, 24), "uint32")
        spread = b("BitShift", b.unsqueeze(b.cast(name, TensorProto.UINT32), 3), shifts, direction="RIGHT")
        masked = b.cast(b("BitwiseAnd", spread, b.constant(255, "uint32")), TensorProto.UINT8)
        return b("Slice", b.reshape(masked, 0, 0, -1), [0], [width], [2])

    def zero_points(name: str, columns: str) -> str | None:
        name = f"{name}_zero_points"
        return bytes_of(name, -(-sizes[columns] // block * bits // 8)) if name in present else None

    weight = b.reshape("weight", -1, dims["K"])
    # Inputs for the choice and for the weights.
    router = scattered(b, dims, b("Add", b("Mul", weight, 0.0), 1.0), 0.0)
    weights = scattered(b, dims, weight, 0.0)
    mixed = b(
        "QMoE",
        *("input", b.cast(router, dtype)),
        *(bytes_of("gate_up", sizes["I"] * bits // 8), "gate_up_scales", None),
        *(bytes_of("down", sizes["M"] * bits // 8), "down_scales", None),
        *(None, None, None, zero_points("gate_up", "I"), zero_points("down", "M"), None, b.cast(weights, dtype)),
        domain=domain,
        k=dims["K"],
        activation_type="swiglu",
        swiglu_fusion=1,
        activation_alpha=1.0,
        activation_beta=0.0,
        normalize_routing_weights=0,
        expert_weight_bits=bits,
        block_size=block,
        accuracy_level=ACCURACY_LEVEL[dtype],
    )
    b("Identity", mixed, out="output")
    return b.function(EXPERTS_NBITS, node, imports, "expert")


def _present(node: onnx.NodeProto) -> set[str]:
    return {name for name, value in zip(EXPERTS_NBITS.input_names(), node.input, strict=False) if value}


def _form(node: onnx.NodeProto, dims: Mapping[str, int]) -> tuple[int, int, dict[str, int]]:
    """Bits, block size, and `dims` with the inner channels."""
    set_ = {a.name: a.i for a in node.attribute}
    bits, block = (set_.get(name, EXPERTS_NBITS.attribute(name).default) for name in ("bits", "block_size"))
    assert isinstance(bits, int) and isinstance(block, int)
    sizes = {**dims, "M": dims["MS"] * block}
    fits = all(dims[f"{x}W"] * WORD_BITS == sizes[x] * bits and dims[f"{x}S"] * block == sizes[x] for x in "IM")
    if bits not in (4, 8) or not fits:
        raise UnsupportedError(
            f"{node.name or node.op_type}: {bits} bits in blocks of {block}, {dims['IW']} and {dims['MW']} words, {dims['IS']} and "
            f"{dims['MS']} scales for {sizes['I']} and {sizes['M']} inputs have no body."
        )
    return bits, block, sizes


BODY = Body(function_body, ("I", "E", "K", "R", "IW", "IS", "MW", "MS"), runtime=runtime_body)
