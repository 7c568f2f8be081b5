"""The kernels of still::Experts on a GPU: other types, and steps in a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from still_kernels.experts.meaning import naive_experts
from tests.still_kernels.experts.inputs import experts_inputs

pytest.importorskip("triton")
cases = pytest.importorskip("tests.still_kernels.experts.cases")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70, 3000])
def test_other_types(dtype: torch.dtype, tokens: int) -> None:
    from still_kernels.experts.plan import OP

    given = experts_inputs(1, tokens, dtype=dtype)
    on_gpu = replace(given, **{name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)})
    found, expected = OP(on_gpu).cpu().double(), naive_experts(given).double()
    assert (found - expected).norm() <= {torch.bfloat16: 8e-3, torch.float32: 1e-5}[dtype] * expected.norm()


@pytest.mark.gpu
def test_graphs() -> None:
    """A step in a CUDA graph reads nothing back: other experts at a replay give what they give outside of it."""
    from still_kernels.experts.plan import OP

    for tokens in (1, 70):
        given = experts_inputs(1, tokens, dtype=torch.float16)
        held = replace(given, **{name: x.cuda() for name, x in vars(given).items() if isinstance(x, torch.Tensor)})
        OP(held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = OP(held)
        held.expert.copy_((held.expert + 1) % len(held.down))
        graph.replay()
        assert torch.equal(output, OP(held))
