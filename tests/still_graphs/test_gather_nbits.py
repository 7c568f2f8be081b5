"""The body of still::GatherNBits: the rows that the gguf package reads of a file, to the last bit."""

import numpy as np
import pytest
import torch

from still_graphs.errors import UnsupportedError
from still_kernels.gather_nbits.spec import GATHER_NBITS
from tests.still_graphs.node_model import node_model, session
from tests.still_kernels.matmul_nbits.super_block_cases import CASES, Case


def rows_of(case: Case, indices: np.ndarray, dtype: torch.dtype = torch.float32, **held: np.ndarray) -> np.ndarray:
    blocks, scales = case.held()
    model = node_model(GATHER_NBITS, case.sizes, dtype, kept=torch.float16, bits=case.bits)
    given = {"indices": indices, "blocks": blocks, "scales": scales, **held}
    found: np.ndarray = session(model).run(None, given)[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q4_K, one tile", "Q6_K, one tile"])
def test_rows_are_the_files(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    every = np.random.default_rng(0).permutation(case.outputs).astype(np.int64)
    for indices in (every.reshape(2, -1), every[:1, None], np.repeat(every[None, :3], 4, axis=1), every[None, :0]):
        expected = case.weight()[torch.from_numpy(indices)].to(dtype).numpy()
        assert np.array_equal(rows_of(case, indices, dtype), expected)


def test_a_neighbours_numbers_do_not_matter() -> None:
    """Eight rows lie in one another: infinite scales of seven leave the eighth as it is."""
    case = CASES["Q6_K"]
    scales = case.held()[1]
    tile = scales[:8].reshape(-1, 8)
    tile[:, np.arange(8) != 5] = np.inf
    found = rows_of(case, np.array([[5]]), scales=scales)
    assert np.array_equal(found[0], case.weight()[[5]].numpy())


def test_other_sizes_are_refused() -> None:
    case = CASES["Q6_K"]
    for sizes, bits in ((case.sizes | {"O": 42}, 6), (case.sizes, 4), (case.sizes, 5)):
        with pytest.raises(UnsupportedError, match="have no body"):
            node_model(GATHER_NBITS, sizes, torch.float32, kept=torch.float16, bits=bits)
