"""The function body of still::MatMulNBits against products in float64."""

from dataclasses import replace

import onnx
import pytest
import torch

from still_export.graph.quantization.read import eight_bits
from still_graphs.errors import UnsupportedError
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from tests.still_graphs.node_model import node_model, session
from tests.still_kernels.matmul_nbits.inputs import CODES_FROM_0, FEW, Case, exact, tokens, weight


def model_of(
    case: Case,
    dtype: torch.dtype = torch.float32,
    kept: torch.dtype | None = None,
    onnxruntime: bool = False,
    **sizes: int,
) -> onnx.ModelProto:
    """A model of one node of the case's weight; `kept`: the type of its scales."""
    given = weight(case, dtype)
    own = {"I": case.inputs, "O": case.outputs, "IW": given.blocks.shape[1], "IS": given.scales.shape[1]}
    if given.zero_points is not None:
        own["IZ"] = given.zero_points.shape[1]
    own |= sizes
    absent = tuple(name for name in ("zero_points", "offsets") if not getattr(case, name))
    return node_model(
        MATMUL_NBITS,
        own,
        dtype,
        absent,
        23,
        onnxruntime,
        kept,
        bits=case.bits,
        block_size=case.block_size,
        zero_code=case.zero,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*FEW, *CODES_FROM_0])
def test_body(name: str, dtype: torch.dtype) -> None:
    case = (FEW | CODES_FROM_0)[name]
    runner = session(model_of(case, dtype))
    for batch, count in case.rows:
        given = replace(weight(case, dtype), input=tokens(case, batch, count, dtype))
        feeds = {n: x.numpy() for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
        expected = exact(given)
        error = (torch.from_numpy(runner.run(None, feeds)[0]).double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-4), name


@pytest.mark.parametrize("name", ["4 bits", "8 bits, zero points, offsets", "4 bits from 0, offsets", "8 bits from 3"])
def test_body_around_onnxruntimes_op_rounds_as_that_does(name: str) -> None:
    """Not what offsets and other codes of 0 are multiplied with."""
    case = (FEW | CODES_FROM_0)[name]
    runner = session(model_of(case, kept=torch.float16, onnxruntime=True))
    given = replace(weight(case), input=tokens(case, 2, 3, torch.float32))
    feeds = {n: x.numpy() for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
    wide = replace(given, scales=given.scales.double())
    if given.offsets is not None:
        wide = replace(wide, offsets=given.offsets.double())
    expected = exact(wide)
    found = torch.from_numpy(runner.run(None, feeds)[0]).double()
    own = exact(replace(wide, input=eight_bits(given.input, case.block_size)))
    assert (found - expected).norm() < 1.1 * (own - expected).norm()


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="4 bits in blocks of 32, 37 words and 9 scales for 288 inputs"):
        model_of(Case(), IW=37)
