"""The core launches of still::MatMulNBits what the Python launcher launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from still_kernels.matmul_nbits.plan import OP, SPANS, Inputs, Variant
from still_kernels.matmul_nbits.spec import MATMUL_NBITS
from tests.plugins.test_launches import fake_compiler, mirror  # noqa: F401  # fixtures

pytest.importorskip("triton")


@pytest.mark.parametrize(
    "batch, count, outputs, inputs, bits, beside, block",
    [
        (1, 1, 40, 288, 4, ("zero_points",), 32),
        (8, 1, 77, 288, 8, (), 32),
        (3, 21, 40, 320, 4, ("offsets",), 64),
        (1, 65, 77, 288, 8, ("zero_points", "offsets"), 32),
        (2, 300, 40960, 4096, 4, ("zero_points",), 32),
    ],
    ids=str,
)
def test_matmul_nbits(
    batch: int, count: int, outputs: int, inputs: int, bits: int, beside: tuple[str, ...], block: int, mirror: Callable[..., None]  # noqa: F811
) -> None:  # fmt: skip
    def made(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    blocks = inputs // block
    tensors = {
        "input": made(batch, count, inputs, kind=torch.float16),
        "blocks": made(outputs, inputs * bits // 32),
        "scales": made(outputs, blocks, kind=torch.float16),
    }
    optional = {
        "zero_points": made(outputs, -(-blocks * bits // 32)),
        "offsets": made(outputs, blocks, kind=torch.float16),
    }
    tensors |= {name: optional[name] for name in beside}
    given = Inputs(**tensors, bits=bits, block_size=block)  # type: ignore[arg-type]
    present = {name: int(name in beside) for name in optional}
    span = sum(outputs > most for most in SPANS)
    variant = Variant("float16", bits, block, aligned=int(outputs % 8 == 0), span=span, **present)
    mirror(
        MATMUL_NBITS,
        tensors,
        lambda output: OP.launch(given, output),
        variant,
        {"bits": bits, "block_size": block},
    )
