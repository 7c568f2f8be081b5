"""What was taken comes back as it was, where it was."""

from __future__ import annotations

import numpy as np
from still_export.proof.shelf import Shelf


def test_arrays_come_back() -> None:
    rng, zeros = np.random.default_rng(0), np.zeros((3, 4))
    wide, half = rng.standard_normal((2, 3, 5)), rng.standard_normal((1, 7)).astype(np.float16)
    first, second = {"a.0": wide, "b.0": half, "a.1": wide[0], "logits": half}, {"c.0": wide, "d.0": zeros}
    calls, right = [first, second], [dict(first), dict(second)]
    shelf = Shelf()
    shelf.take(calls, ".0")
    assert first.keys() == {"a.1", "logits"} and second.keys() == {"d.0"}
    shelf.take(calls, ".1")
    shelf.put_back()
    for found, expected in zip(calls, right, strict=True):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)
            assert found[name].dtype == x.dtype
    assert second["d.0"] is zeros and first["logits"] is half
    first["a.0"][0] = 0  # nobody else's
    np.testing.assert_array_equal(second["c.0"][1:], wide[1:])
    Shelf().put_back()
