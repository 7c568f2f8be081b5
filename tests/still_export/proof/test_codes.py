"""Rows in 8 bits, read without PyTorch."""

import numpy as np
import torch

from still_export.proof.codes import as_numbers, in_codes
from still_kernels.codes import dequantized, quantized


def test_words_are_compared_as_numbers() -> None:
    """One code more or less is one step, whatever its place in a word; other outputs stay as they are."""
    rows = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    words, scale = quantized(rows)
    outputs = {
        "present_key.10": words.numpy(),
        "present_key_scale.10": scale.numpy(),
        "present_z_state.10": np.ones((2, 3), np.float32),
    }
    assert in_codes(outputs) == ["present_key.10"]
    numbers = as_numbers(outputs)
    np.testing.assert_array_equal(numbers["present_key.10"], dequantized(words, scale, torch.float32).numpy())
    assert all(numbers[name] is outputs[name] for name in outputs if name != "present_key.10")
    other = words.numpy().copy()
    other.view(np.int8)[0, 0, 0, 3] ^= 1
    error = np.abs(as_numbers({**outputs, "present_key.10": other})["present_key.10"] - numbers["present_key.10"])
    assert np.count_nonzero(error) == 1 and np.isclose(error.max(), scale[0, 0, 0])
