"""The function body of still::DenseMatMul with codes in e4m3, against products in float64."""

import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_kernels.dense_matmul.spec import DENSE_MATMUL
from tests.still_graphs.node_model import node_model, session
from tests.still_kernels.dense_matmul.inputs import FLOAT8, call, every_number, exact

OTHERS = ("weight", "turned_weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(FLOAT8))
def test_body(name: str, dtype: torch.dtype) -> None:
    case = FLOAT8[name]
    absent = (
        *OTHERS,
        *(part for part, there in (("norm_weight", case.normed), ("residual", case.residual)) if not there),
    )
    sizes = {"I": case.inputs, "O": case.outputs, "IW": case.inputs // 4, "IS": case.blocks}
    runner = session(node_model(DENSE_MATMUL, sizes, dtype, absent, norm_epsilon=3e-5))
    for batch, count in case.rows:
        given = call(case, batch, count, dtype)
        feeds = {n: x.numpy() for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
        expected = exact(given)
        error = (torch.from_numpy(runner.run(None, feeds)[0]).double() - expected).norm() / expected.norm()
        # Where norms are not those of float64 to the last bit, one code of a few thousand is another.
        assert error < (5e-6 if dtype == torch.float32 and not case.normed else 1e-3), name


def test_every_number_is_rounded_as_torch_does() -> None:
    given, expected = every_number()
    absent = (*OTHERS, "norm_weight", "residual")
    model = node_model(DENSE_MATMUL, {"I": 256, "O": 256, "IW": 64, "IS": 1}, torch.float16, absent)
    feeds = {n: x.numpy() for n, x in vars(given).items() if isinstance(x, torch.Tensor)}
    found = torch.from_numpy(session(model).run(None, feeds)[0])
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert found[0, :2].isnan().all()


@pytest.mark.parametrize("words, blocks", [(51, 1), (52, 3)])
def test_codes_that_do_not_fit_have_no_body(words: int, blocks: int) -> None:
    sizes = {"I": 208, "O": 72, "IW": words, "IS": blocks}
    with pytest.raises(UnsupportedError, match=f"{words} words of codes and scales of {blocks} blocks for 208 inputs"):
        node_model(DENSE_MATMUL, sizes, torch.float32, (*OTHERS, "norm_weight", "residual"))
