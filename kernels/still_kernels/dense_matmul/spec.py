"""still::DenseMatMul: a product with a 16-bit or e4m3 weight and float32 sums, for runtimes without one."""

from __future__ import annotations

import math

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

DENSE_MATMUL = OpSpec(
    # Symbols: I inputs, O outputs; IW words of codes of an output, IS blocks of inputs. Exactly one of three weights is given: [I, O] like
    # MatMul's; [O, I] like an embedding that is also the head; or e4m3 codes with a scale for each output, or for each block of its
    # inputs. A word has four codes, the first in the lowest byte, because TensorRT plugins support no bytes.
    # With norm_weight a token is first divided by its root mean square.
    #
    # A token that is multiplied by codes is rounded to e4m3, too. With a its largest magnitude, scale = a / 448 and code = x / scale, both
    # divided in float32, codes rounded to the nearest number and halves to even. All codes of a zero token are 0. A token with a NaN or
    # infinity has NaN outputs.
    name="DenseMatMul",
    torch_name="dense_matmul",
    inputs=(
        TensorSpec("input", ("B", "T", "I"), "T", "activation"),
        TensorSpec("weight", ("I", "O"), "T", "weight", optional=True),
        TensorSpec("turned_weight", ("O", "I"), "T", "weight", optional=True),
        TensorSpec("norm_weight", ("I",), "T", "weight", optional=True),
        TensorSpec("residual", ("B", "T", "O"), "T", "activation", optional=True),
        TensorSpec("codes", ("O", "IW"), "int32", "weight", optional=True),
        TensorSpec("scales", ("IS", "O"), "float32", "weight", optional=True),
    ),
    outputs=(TensorSpec("output", ("B", "T", "O"), "T", "activation"),),
    attributes=(AttributeSpec("norm_epsilon", 1e-5),),
    traced=False,
)


def _e4m3(code: int) -> float:
    """The number of a code: sign, four exponent bits, three mantissa bits; no infinities."""
    power, last = code >> 3 & 15, code & 7
    size = last / 512 if not power else (8 + last) * 2.0 ** (power - 10)
    return math.nan if code & 127 == 127 else math.copysign(size, 127.5 - code)


NUMBERS = [_e4m3(code) for code in range(256)]
"""e4m3 numbers by code."""
