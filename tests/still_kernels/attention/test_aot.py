"""The kernels of still::Attention ahead of time: every architecture, every dtype, the largest head size. No GPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from still_kernels import aot
from still_kernels.attention.plan import KERNELS, Variant
from still_kernels.tile import SHARED_BYTES
from tests.descriptors import descriptors, instructions


@functools.cache
def compiled(variant: Variant, arch: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the archive has of a variant, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        entry, cubins = aot.compile_variant("Attention", variant, arch)
    assert set(entry["kernels"]) == set(KERNELS.functions()) == {"attend", "decode"}
    for kernel in entry["kernels"].values():
        assert kernel["shared_bytes"] <= SHARED_BYTES[arch]
        assert cubins[kernel["cubin"]][:4] == b"\x7fELF"
    return entry, cubins


def test_one_architecture() -> None:
    entry, _ = compiled(Variant(head_dim=64, count_dtype="int32"), 90)
    counts = {a["name"]: a["element"] for a in entry["kernels"]["attend"]["args"] if a["type"] == "ptr"}
    assert counts["past_length"] == "i32"


@pytest.mark.long
@pytest.mark.parametrize("arch", aot.ARCHS)
def test_every_architecture(arch: str) -> None:
    variants = [Variant()]
    if arch in ("sm_86", "sm_90"):  # the least shared memory, a server
        variants += [Variant("float32", 256), Variant("bfloat16", 256), Variant("float16", 128, cache="int8")]
    if arch == "sm_86":  # no larger than those
        variants += [Variant("float16", 64), Variant("float32", 128)]
    for variant in variants:
        compiled(variant, aot.parse_arch(arch))


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, *(pytest.param(dim, marks=pytest.mark.long) for dim in (16, 24, 64, 80, 256))])
def test_descriptors(dim: int, tmp_path: Path) -> None:
    """What matrix instructions of sm_90 get from one assembler may be wrong: tests/descriptors.py."""
    entry, cubins = compiled(Variant(head_dim=dim), 90)
    kernel = entry["kernels"]["attend"]
    count, wrong = descriptors(instructions(cubins[kernel["cubin"]], tmp_path), kernel["shared_bytes"])
    assert not wrong and (count or dim > 128)
