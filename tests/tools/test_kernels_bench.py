"""The benchmark's arithmetic and its refusal; the timing itself needs a GPU."""

import dataclasses
from typing import Any

import pytest
import torch

from still_kernels.op_kernels import DTYPES
from still_kernels.registry import kernels_of, op_names
from tools.kernels import bench, work
from tools.kernels.ops import attention as attention_cost
from tools.kernels.ops import hybrid_attention as cost
from tools.kernels.registry import work_of

CEILINGS = bench.Ceilings(copy=4e12, gemm=800e12)


def test_costs_are_those_of_the_specification() -> None:
    op = work_of("HybridAttention")
    config = op.layer(op.sizes, "q_head", 65_536)
    size_bytes, _ = cost.decode_cost(config, 65_536, 1)
    assert size_bytes / 2**20 == pytest.approx(68.4, rel=0.02)
    grouped, _ = cost.decode_cost(op.layer(op.sizes, "kv_group_max", 65_536), 65_536, 1)
    assert grouped / 2**20 == pytest.approx(20.5, rel=0.06)
    _, flop = cost.prefill_cost(config, 65_536)
    assert flop / 65_536 / 1e6 == pytest.approx(41.8, rel=0.02)


def test_costs_of_softmax_attention() -> None:
    """Two thirds of a GiB of keys and values for a model's step at 64K tokens of 32 layers; half of T^2 pairs, twice."""
    size_bytes, flop = attention_cost.decode_cost(32, 8, 128, 65_536, 1)
    assert size_bytes == 65_536 * 8 * 128 * 2 * 2 and flop == 2 * 2 * 32 * 128 * 65_536
    size_bytes, flop = attention_cost.prefill_cost(32, 8, 128, 3)
    assert size_bytes == 3 * 128 * 2 * (32 + 32 + 16 + 16) and flop == 2 * 2 * 32 * 128 * (1 + 2 + 3)


@pytest.mark.parametrize("op", op_names())
def test_every_kind_of_call_is_checked_and_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the forms of PyTorch stand in; a result that is off gets no time."""
    monkeypatch.setattr(bench, "time_call", lambda work: 1.0)
    monkeypatch.setattr(bench, "time_step", lambda work: 2.0)
    given = work_of(op)
    sizes = {**given.sizes, "heads": 4, "kv_heads": 2, "head_dim": 24}
    for name in given.layers:
        layer = given.layer(sizes, name, 200)
        kinds = given.kinds(200, [1, 3])
        rows = [row for kind in kinds for row in bench.measure(given, layer, name, kind, 200, torch.float32, "cpu")]
        prompts = [1.0 for kind in kinds if kind.tokens > 1]
        assert [row.time_s for row in rows] == prompts + [2.0] * (len(rows) - len(prompts))
        assert {row.batch for row in rows} == ({1, 3} if prompts else {1}) and all(row.size_bytes > 0 for row in rows)
        copies = [row.batch for row in rows if not row.flop]
        assert copies == [kind.batch for kind in kinds if kind.tokens == 1], "beside each step"
        assert max(row.error for row in rows) <= 1e-5
    wrong = dataclasses.replace(
        given, work=lambda *what: dataclasses.replace(given.work(*what), run=lambda _: torch.ones(1))
    )
    assert bench.measure(wrong, layer, name, kinds[0], 200, torch.float32, "cpu")[0].time_s is None


def test_peers_stand_beside_ours_and_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_call", lambda work: 1.0)
    given = work_of("Attention")
    layer, kind = given.layer({"heads": 4, "kv_heads": 2, "head_dim": 24}, "softmax", 20), given.kinds(20, [1])[0]

    def with_peers(*what: Any) -> work.Work:
        made = given.work(*what)
        return dataclasses.replace(made, peers={"theirs": made.run, "wrong": lambda state: 2 * made.run(state)})

    beside = dataclasses.replace(given, work=with_peers)
    rows = bench.measure(beside, layer, "softmax", kind, 20, torch.float32, "cpu")
    assert [(row.name, row.time_s) for row in rows] == [("prefill softmax", 1.0), ("theirs", 1.0), ("wrong", None)]


def test_unknown_layers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["HybridAttention", "--layer", "q_heads"]) == 2
    assert "--layer q_heads is unknown; known: q_head" in capsys.readouterr().err


def test_floor_is_the_slower_of_both() -> None:
    assert CEILINGS.floor_s(4e12, 1) == 1
    assert CEILINGS.floor_s(1, 1600e12) == 2


def test_failed_check_prints_no_speed() -> None:
    good = bench.Row("decode", 8192, 1, 4e6, 1e6, 1e-3, 2e-6)
    bad = bench.Row("prefill", 8192, 1, 4e6, 1e6, 0.5, None)
    text = bench.table([good, bad], CEILINGS)
    assert "50%" in text.splitlines()[2]
    assert "CHECK FAILED" in text.splitlines()[3] and "%" not in text.splitlines()[3]


def test_nan_fails_the_check() -> None:
    expected = torch.ones(3)
    assert work.relative_error(expected, expected) == 0
    assert work.relative_error(torch.tensor([1, float("nan"), 1]), expected) == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["Attention"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("op", op_names())
def test_draws_what_the_kernels_take(op: str) -> None:
    assert set(work_of(op).dtypes) <= set(getattr(kernels_of(op).variant, "DTYPES", DTYPES)) and work_of(op).dtypes


def test_refuses_a_type_that_the_op_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["MatMulNBits", "--dtype", "bfloat16"]) == 2
    assert "--dtype bfloat16: MatMulNBits has float16." in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("op", op_names())
def test_bench_on_a_gpu(op: str) -> None:
    assert bench.main([op, "--context", "2048", "--batch", "2"]) == 0
