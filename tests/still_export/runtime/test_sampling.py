"""The likeliest token of half-precision logits is NumPy's; where logits are no finite numbers there is none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from still_export.runtime.sampling import NO_TOKEN, NotFiniteError, Sampling, likeliest

FLOATS = st.floats(width=16, allow_nan=False) | st.sampled_from([np.inf, -np.inf, 65504.0, 6e-8, -6e-8, 1.0])


@given(arrays(np.float16, st.tuples(st.integers(1, 3), st.integers(1, 40)), elements=FLOATS))
def test_likeliest_is_numpys(logits: np.ndarray) -> None:
    logits = logits + np.float16(0)  # no zeros of two signs: -0 + 0 is 0
    expected = np.where(np.isfinite(logits.max(-1)), logits.argmax(-1), NO_TOKEN)
    np.testing.assert_array_equal(likeliest(logits), expected)
    np.testing.assert_array_equal(likeliest(logits[0]), expected[0])


WRONG = {
    "all NaN": [np.nan] * 7,
    "one NaN": [0, 1, np.nan, 2, -3, 0, 0],
    "one NaN with a sign": [0, 1, -np.nan, 2, -3, 0, 0],
    "infinity": [0, 1, np.inf, 2, -3, 0, 0],
    "all -infinity": [-np.inf] * 7,
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("kind", WRONG)
def test_logits_that_are_no_numbers_are_refused_however_a_token_is_chosen(kind: str, dtype: type) -> None:
    rows = np.array([[0, 3, 1, 2, 0, 0, 0], WRONG[kind], [-np.inf, 3, 1, 2, 0, 0, 0]], dtype)
    assert likeliest(rows).tolist() == [1, NO_TOKEN, 1]  # the rows beside keep their tokens
    for sampling in (Sampling(), Sampling(0.8), Sampling(0.8, top_k=3), Sampling(0.8, top_p=0.9)):
        with pytest.raises(NotFiniteError, match="not finite"):
            sampling.choose(rows[1])
        assert sampling.choose(rows[2]) != 0
