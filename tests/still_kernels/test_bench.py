"""The benchmark's arithmetic and its refusal; the timing itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from still_kernels.hybrid_attention import bench

CEILINGS = bench.Ceilings(copy=4e12, gemm=800e12)


def test_costs_are_those_of_the_specification() -> None:
    config = bench.layer(65_536, "q_head")
    size_bytes, _ = bench.decode_cost(config, 65_536, 1)
    assert size_bytes / 2**20 == pytest.approx(68.4, rel=0.02)
    grouped, _ = bench.decode_cost(bench.layer(65_536, "kv_group_max"), 65_536, 1)
    assert grouped / 2**20 == pytest.approx(20.5, rel=0.06)
    _, flop = bench.prefill_cost(config, 65_536)
    assert flop / 65_536 / 1e6 == pytest.approx(41.8, rel=0.02)


def test_floor_is_the_slower_of_both() -> None:
    assert CEILINGS.floor_s(4e12, 1) == 1
    assert CEILINGS.floor_s(1, 1600e12) == 2


def test_failed_check_prints_no_speed(tmp_path: Path) -> None:
    good = bench.Row("decode", 8192, 1, 4e6, 1e6, 1e-3, 2e-6)
    bad = bench.Row("prefill", 8192, 1, 4e6, 1e6, 0.5, None)
    text = bench.table([good, bad], CEILINGS)
    assert "50%" in text.splitlines()[2]
    assert "CHECK FAILED" in text.splitlines()[3] and "%" not in text.splitlines()[3]
    pytest.importorskip("matplotlib")
    bench.plot([good, bad], CEILINGS, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 1000


def test_nan_fails_the_check() -> None:
    expected = torch.ones(3)
    assert bench.relative_error(expected, expected) == 0
    assert bench.relative_error(torch.tensor([1, float("nan"), 1]), expected) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_bench_on_a_gpu() -> None:
    assert bench.main(["--context", "2048", "--batch", "2", "--scope", "kv_group_max"]) == 0
