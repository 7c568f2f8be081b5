"""The function body of still::MatMulNBits against products in float64."""

from __future__ import annotations

from dataclasses import replace

import onnx
import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_graphs.ops.matmul_nbits import MATMUL_NBITS
from tests.matmul_nbits_cases import FEW, Case, exact, tokens, weight
from tests.still_graphs.node_model import node_model
from tests.still_graphs.test_functions import session


def model_of(case: Case, dtype: torch.dtype = torch.float32, **sizes: int) -> onnx.ModelProto:
    """A model of one node of the case's weight."""
    given = weight(case, dtype)
    own = {"I": case.inputs, "O": case.outputs, "IW": given.blocks.shape[1], "IS": given.scales.shape[1], **sizes}
    if given.zero_points is not None:
        own["IZ"] = given.zero_points.shape[1]
    absent = tuple(name for name in ("zero_points", "offsets") if not getattr(case, name))
    return node_model(MATMUL_NBITS, own, dtype, absent, bits=case.bits, block_size=case.block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(FEW))
def test_body(name: str, dtype: torch.dtype) -> None:
    case = FEW[name]
    runner = session(model_of(case, dtype))
    for batch, count in case.rows:
        given = replace(weight(case, dtype), input=tokens(case, batch, count, dtype))
        feeds = {n: x.numpy() for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
        expected = exact(given)
        error = (torch.from_numpy(runner.run(None, feeds)[0]).double() - expected).norm() / expected.norm()
        assert error < (1e-6 if dtype == torch.float32 else 4e-4), name


def test_sizes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="4 bits in blocks of 32, 37 words and 9 scales for 288 inputs"):
        model_of(Case(), IW=37)
