"""What matrix instructions of sm_90 get from still::HybridAttention's kernels are descriptors (tests/descriptors.py). No GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton

from still_kernels import aot
from still_kernels.hybrid_attention import plan as variants
from still_kernels.hybrid_attention.plan.tiles import tile_table
from still_kernels.tile import TileTable, changed
from tests.descriptors import descriptors, instructions

LLAMA: dict[str, Any] = {"head_dim": 128, "feature_rows": 128}


@contextlib.contextmanager
def set_to(kernel: str, **setting: int) -> Iterator[None]:
    """With another setting of a kernel if one is given; of those for any GPU where they are named."""
    plain = {} if kernel.endswith("_tma") else dict.fromkeys(variants.BY_TMA.values(), 0)

    def table(*size: Any) -> TileTable:
        return changed(tile_table(*size), kernel, {**plain, **setting})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "tile_table", table)
        yield


def kernel_descriptors(
    variant: variants.Variant, kernels: tuple[str, ...], folder: Path, **setting: int
) -> dict[str, tuple[int, list[str]]]:
    """Descriptors of kernels compiled for sm_90."""
    found = {}
    for kernel in kernels:
        with set_to(kernel, **setting):
            entry, cubins = aot.compile_variant("HybridAttention", variant, 90, kernel)
        code = instructions(cubins[entry["kernels"][kernel]["cubin"]], folder)
        found[kernel] = descriptors(code, entry["kernels"][kernel]["shared_bytes"])
    return found


@pytest.mark.long
@pytest.mark.skipif(triton.knobs.nvidia.ptxas.version != "12.8", reason="needs the ptxas that errs")
def test_wrong_descriptors_are_found(tmp_path: Path) -> None:
    """What this assembler makes of linear with one stage, which no table has where rows are 64 (`misfit`)."""
    variant, setting = variants.Variant(**LLAMA), {"STAGES": 1, "num_stages": 1}
    _, wrong = kernel_descriptors(variant, ("linear",), tmp_path, **setting)["linear"]
    assert len(wrong) > 10


MATRIX = ("score", "features", "scan", "linear", "attend", "decode")


@pytest.mark.parametrize(
    ("size", "kernels"),
    [
        pytest.param(
            {"dtype": dtype, "head_dim": dim, "feature_rows": dim, **more},
            # In float32, or with heads of 256, the others have no descriptors.
            ("attend", "decode") if not more and (dtype, dim) in (("float32", 128), ("bfloat16", 256)) else MATRIX,
            # What the archive has by default, in every run; the others take up to half a minute each.
            marks=pytest.mark.slow if (dtype, dim, more) == ("bfloat16", 128, {}) else pytest.mark.long,
        )
        for dtype in ("bfloat16", "float16", "float32")
        for dim in (64, 80, 96, 128, 256)
        for more in ({}, {"chunk_size": 128})
    ],
    ids=str,
)
def test_descriptors(size: dict[str, Any], kernels: tuple[str, ...], tmp_path: Path) -> None:
    found = kernel_descriptors(variants.Variant(**size), kernels, tmp_path)
    assert {kernel: wrong for kernel, (_, wrong) in found.items() if wrong} == {}
    few = kernels == MATRIX and (size["head_dim"] > 128 or size["dtype"] == "float32")
    assert few or min(count for count, _ in found.values()) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "kernels"),
    [
        ({**LLAMA, "dtype": "bfloat16"}, ("scan_tma", "linear_tma")),
        ({**LLAMA, "dtype": "float16"}, ("scan_tma",)),
        ({"head_dim": 64, "feature_rows": 64, "dtype": "bfloat16"}, ("scan_tma", "linear_tma")),
    ],
    ids=str,
)
def test_descriptors_of_what_copies_by_tma(size: dict[str, Any], kernels: tuple[str, ...], tmp_path: Path) -> None:
    """scan_tma with a product of its own for values of the ring had six that nothing had computed."""
    found = kernel_descriptors(variants.Variant(**size), kernels, tmp_path)
    assert {kernel: wrong for kernel, (_, wrong) in found.items() if wrong} == {}
    assert min(count for count, _ in found.values()) > 0
