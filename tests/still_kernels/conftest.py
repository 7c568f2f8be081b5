"""What holds after every test on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def zero_counters(request: pytest.FixtureRequest) -> Iterator[None]:
    """Counters that launches of all ops share are zero between them: what one leaves, another one's programs count on."""
    yield
    if request.node.get_closest_marker("gpu") is None:
        return
    import torch

    from still_kernels import launcher

    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # for tests of other processes
    left = [blocks.nonzero().tolist() for blocks in launcher._made]
    for blocks in launcher._made:
        blocks.zero_()  # one test is to blame
    assert not any(left), f"counters were left: {left}"[:1000]
