"""still::DenseMatMul: a product with a weight of 16-bit numbers or in e4m3 whose sums are in float32, for runtimes that have none."""

from __future__ import annotations

import math

from still_graphs.spec import AttributeSpec, OpSpec, TensorSpec

DENSE_MATMUL = OpSpec(
    # Symbols: I inputs, O outputs; IW words of codes of an output, IS blocks of inputs. One of the three weights is given: numbers of an
    # output beside each other, as a MatMul has them, or of an input, as an embedding that is the head too, or codes in e4m3 with a scale
    # for each output or for each block of inputs of it, four in a word, the first one lowest: plugins of TensorRT take no bytes.
    # With norm_weight the root mean square of a token is divided out of it first.
    #
    # A token that codes are multiplied with is rounded to e4m3, too: with a the largest magnitude of its numbers, scale = a / 448 and
    # code = x / scale, both divided in float32, codes to the nearest number, halves to the even one; of a token of zeros all are 0, and
    # of one that has a number that is none so are all outputs.
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
    """The number of a code: a sign, four bits of exponent and three more; without infinities."""
    power, last = code >> 3 & 15, code & 7
    size = last / 512 if not power else (8 + last) * 2.0 ** (power - 10)
    return math.nan if code & 127 == 127 else math.copysign(size, 127.5 - code)


NUMBERS = [_e4m3(code) for code in range(256)]
"""In e4m3, by code."""
