"""The kernels of still::LinearAttention and still::CausalConv ahead of time: architectures, dtypes, the largest heads. No GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from still_kernels import aot
from still_kernels.registry import kernels_of
from still_kernels.tile import SHARED_BYTES, changed
from tests.descriptors import descriptors, instructions
from tools.kernels.ops.linear_attention import STEPS, misfit


def compiled(
    op: str, variant: Any, arch: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, bytes]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    entry, cubins = aot.compile_variant(op, variant, arch)
    assert set(entry["kernels"]) == set(kernels_of(op).functions())
    for kernel in entry["kernels"].values():
        assert kernel["shared_bytes"] <= SHARED_BYTES[arch]
        assert cubins[kernel["cubin"]][:4] == b"\x7fELF"
    return entry, cubins


def faults(entry: dict[str, Any], cubins: dict[str, bytes], folder: Path) -> list[str]:
    """What matrix instructions of sm_90 get that is no descriptor: on an H200 such a scan did what this names."""
    found = []
    for name in STEPS:
        kernel = entry["kernels"][name]
        _, wrong = descriptors(instructions(cubins[kernel["cubin"]], folder), kernel["shared_bytes"])
        found += [f"{name} {place}" for place in wrong]
    return found


@pytest.mark.long
def test_the_setting_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ptxas 12.8 and 8 warps, which share rows of 64: refused by `misfit`, seen in the machine code."""
    kernels = kernels_of("LinearAttention")
    variant = variant_of("LinearAttention", head_dim=64, value_dim=64)
    table = changed(variant.table(90), "scan", {"num_warps": 8})
    assert "4 warps" in misfit(table, 90) and not misfit(variant.table(90), 90)
    narrow = replace(kernels.build(variant, 90), tiles=table.kernels())
    monkeypatch.setattr(aot, "kernels_of", lambda op: replace(kernels, build=lambda *_: narrow))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    entry, cubins = aot.compile_variant("LinearAttention", variant, 90)
    assert [place for place in faults(entry, cubins, tmp_path) if place.startswith("scan")]


def variant_of(op: str, **fields: Any) -> Any:
    return kernels_of(op).variant(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.long)])
@pytest.mark.parametrize("op", ["LinearAttention", "CausalConv"])
def test_one_variant(op: str, arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"head_dim": 64, "value_dim": 64} if op == "LinearAttention" else {}
    variant = variant_of(op, count_dtype="int32", **small)
    entry, cubins = compiled(op, variant, arch, tmp_path, monkeypatch)
    if arch == 90 and op == "LinearAttention":
        assert not faults(entry, cubins, tmp_path)
    for name, kernel in entry["kernels"].items():
        names = {a["name"]: a.get("element") for a in kernel["args"]}
        assert names["new_tokens"] == "i32" and not names.keys() & {"query_start", "state_row"}, name


WIDE = [
    {"dtype": dtype, "head_dim": dim, "value_dim": size, "update_rule": rule, "per_key": per_key, "shared": shared}
    for dtype in ("bfloat16", "float16", "float32")
    for dim, size, rule, per_key, shared in (
        (128, 128, "gated_delta", 0, 1),
        (128, 128, "gated_delta", 1, 1),
        (96, 192, "gated_delta", 0, 1),
        (128, 64, "gated", 0, 1),
        (256, 64, "gated", 0, 1),
        (256, 256, "gated_delta", 1, 1),
        (64, 64, "gated", 1, 4),
        (128, 128, "delta", 0, 1),
        (128, 128, "linear", 0, 4),
        (16, 1, "gated", 1, 1),
    )
]


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 86, 90])
@pytest.mark.parametrize("fields", WIDE, ids=lambda f: "-".join(map(str, f.values())))
def test_every_kind_of_layer(
    fields: dict[str, Any], arch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled("LinearAttention", variant_of("LinearAttention", **fields), arch, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("op", ["LinearAttention", "CausalConv"])
def test_every_architecture(op: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(op, variant_of(op), aot.parse_arch(arch), tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields", [f for f in WIDE if f["dtype"] == "bfloat16"], ids=lambda f: "-".join(map(str, f.values()))
)
def test_descriptors(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What matrix instructions of sm_90 get from one assembler may be wrong: tests/descriptors.py."""
    entry, cubins = compiled("LinearAttention", variant_of("LinearAttention", **fields), 90, tmp_path, monkeypatch)
    assert not faults(entry, cubins, tmp_path)
