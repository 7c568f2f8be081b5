"""Numbers in e4m3 of still::DenseMatMul."""

from __future__ import annotations

import torch

from still_kernels.dense_matmul.plan import naive_dense_matmul
from tests.still_kernels.dense_matmul.inputs import every_number


def test_definition_rounds_every_number_as_torch_does() -> None:
    given, expected = every_number()
    assert torch.equal(naive_dense_matmul(given).nan_to_num(), expected.nan_to_num())
    assert naive_dense_matmul(given)[0, :2].isnan().all()
