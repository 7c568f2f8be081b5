"""Rows in 8 bits, in PyTorch."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import still_kernels
from still_kernels.codes import dequantized, near_codes, quantized, rounded, stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_was_read_is_written_as_it_was(dtype: torch.dtype) -> None:
    """Bit for bit, codes and scales, and numbers once they are rounded; whatever the size of a row."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4000, 64, generator=generator) * torch.logspace(-4, 3, 4000)[:, None]
    rows[::97] = 0
    once = rounded(rows.to(dtype))
    assert once.dtype == dtype and torch.equal(rounded(once), once)
    words, scale = quantized(once)
    assert words.shape == (4000, 16) and words.dtype == torch.int32 and scale.dtype == torch.float32
    read = dequantized(words, scale, dtype)
    assert torch.equal(read, once)
    again = quantized(read)
    assert torch.equal(again[0], words) and torch.equal(again[1], scale)
    codes = words.view(torch.int8)
    assert codes.abs().amax(1)[scale > 0].unique().tolist() == [127] and not codes[scale == 0].any()


@pytest.mark.parametrize("dim", [4, 8])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_parts_of_a_state_are_read(dim: int, rows: int) -> None:
    """Few rows of many, rows of one word, none: whatever their strides."""
    words, scale = quantized(torch.randn(2, 3, 25, dim, generator=torch.Generator().manual_seed(1)))
    wanted = dequantized(words, scale, torch.float32)[:, :, :rows]
    part = words.transpose(-1, -2)[..., :rows].transpose(-1, -2)
    assert torch.equal(dequantized(part, scale[:, :, :rows], torch.float32), wanted)
    column = torch.as_strided(part, (*part.shape[:-1], 1), (75, 25, 1, 25))  # the stride of one word is anything
    assert dequantized(column, scale[:, :, :rows], torch.float32).shape == (2, 3, rows, 4)


def test_every_scale_comes_back() -> None:
    """All mantissas: 127 steps of a scale that is a part of 127, as a row's largest number, give the scale again."""
    largest = (torch.arange(1 << 23, dtype=torch.int32) | 0x3F800000).view(torch.float32)
    scale = largest / 127
    assert torch.equal(scale * 127 / 127, scale)


def test_the_rule() -> None:
    """The largest magnitude is 127 steps; halves go to the even step."""
    words, scale = quantized(torch.tensor([[-127.0, 0.5, 1.5, 2.5], [0.0, 0.0, 0.0, 0.0]]))
    assert words.view(torch.int8).tolist() == [[-127, 0, 2, 2], [0, 0, 0, 0]] and scale.tolist() == [1.0, 0.0]
    (word,) = words[0].tolist()
    assert word & 255 == 129 and word >> 8 & 255 == 0  # the first one lowest


def test_no_function_of_the_kernels_returns_scales_that_may_not_be_there() -> None:
    """Where rows are numbers their pointer is None, and Triton 3.6 compiles no function that returns that; 3.7 does."""
    returned = []
    for path in Path(still_kernels.__file__).parent.rglob("triton_*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                mine = {a.arg for a in function.args.args if a.arg.endswith("_scale") and a.arg.startswith("p_")}
                for node in ast.walk(function):
                    if isinstance(node, ast.Return):
                        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                        names = {value.id for value in values if isinstance(value, ast.Name)}
                        returned += [f"{path.name}: {function.name} returns {name}" for name in names & mine]
    assert returned == []


@pytest.mark.parametrize("cache", ["codes", "float16"])
def test_only_numbers_about_halfway_get_either(cache: str) -> None:
    """Within a share of the row's largest; and the other, where all goes the other way."""
    share, largest = 2.0**-17, 127.0
    halfway = 64.5 if cache == "codes" else 64 + 2.0**-5  # float16 has a spacing of 2 ** -4 there
    far, near = 1.5 * share * largest, 0.3 * share * largest
    row = torch.tensor([largest, halfway - far, halfway - near, halfway + near, halfway + far], dtype=torch.float64)
    rows = row.expand(200, -1).float() if cache == "codes" else row.expand(200, -1)
    found = []
    for way in (share, -share):
        with near_codes(way, torch.Generator().manual_seed(0)):
            found.append(rounded(rows) if cache == "codes" else stored(rows, torch.float16))
    assert [len(column.unique()) for column in found[0].T] == [1, 1, 2, 2, 1]
    assert (found[0] != found[1]).all(0).tolist() == [False, False, True, True, False]
