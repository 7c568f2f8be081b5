"""The likeliest token of half-precision logits is NumPy's."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from still_export.runtime.sampling import likeliest

FLOATS = st.floats(width=16, allow_nan=False) | st.sampled_from([np.inf, -np.inf, 65504.0, 6e-8, -6e-8, 1.0])


@given(arrays(np.float16, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS))
def test_likeliest_is_numpys(logits: np.ndarray) -> None:
    logits = logits + np.float16(0)  # no zeros of two signs: -0 + 0 is 0
    np.testing.assert_array_equal(likeliest(logits), logits.argmax(-1))
    np.testing.assert_array_equal(likeliest(logits[0]), logits[0].argmax(-1))
