"""The tuner: what it tries, what it refuses to time, its output; in Triton's interpreter. Times need a GPU."""

import functools
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from still_kernels.hybrid_attention.config import HybridAttentionConfig
from still_kernels.hybrid_attention.plan.tiles import tile_table
from still_kernels.registry import op_names
from still_kernels.tile import changed
from tests.still_kernels.interpreted import run_cases
from tools.kernels import tune
from tools.kernels.ops.hybrid_attention import misfit
from tools.kernels.registry import work_of

interpreted = functools.partial(run_cases, Path(__file__).with_name("tune_cases.py"), ())


@pytest.mark.slow
def test_settings_are_checked_timed_and_written() -> None:
    done = interpreted("written")
    assert done["code"] == 0
    kernels = done["report"]["kernels"]
    assert set(kernels) == {"score", "select"}
    for trials in kernels.values():
        assert trials[0]["setting"] == {} and trials[0]["time_s"] > 0 and trials[0]["error"] == 0
    score = {json.dumps(t["setting"]): t for t in kernels["score"]}
    assert score['{"BM": 64}']["time_s"] is None
    assert score['{"BM": 64}']["note"] in ("blocks divide the chunk of 32", "no time left")
    assert "(current)" in done["shown"]


@pytest.mark.slow
def test_softmax_attention_is_tuned_by_the_same() -> None:
    done = interpreted("softmax")
    assert done["code"] == 0
    found = done["report"]["kernels"]
    assert all(trials[0]["time_s"] > 0 and trials[0]["error"] == 0 for trials in found.values())
    attend = {json.dumps(t["setting"]): t["note"] for t in found["attend"]}
    assert attend['{"BN": 64}'] in ("BN of attend divides its BM", "no time left")


@pytest.mark.slow
def test_a_wrong_result_gets_no_time() -> None:
    done = interpreted("wrong")
    assert done["code"] == 1
    assert "num_warps=2: WRONG RESULT" in done["shown"]


def test_workspace_starts_as_nan() -> None:
    assert interpreted("workspace") == {"nan": True, "after": ["Launcher", False]}


def test_every_move_is_a_setting_of_some_table() -> None:
    table = tile_table(90, 128, 64, 128, False)
    for op in op_names():
        given = work_of(op)
        layer = given.layer(given.sizes, next(iter(given.layers)), 8)
        own = given.table(layer, torch.device("cpu"), False)
        for kernel, moves in given.moves.items():
            for move in moves:
                assert changed(own, kernel, move).kernels()
    with pytest.raises(KeyError, match="attend has no setting XX; it has BM"):
        changed(table, "attend", {"XX": 1})


def test_settings_that_do_not_go_together() -> None:
    config = HybridAttentionConfig(num_heads=2, num_kv_heads=1, head_dim=128, chunk_size=64)
    table = tile_table(90, 128, 64, 128, False)
    assert misfit(table, config, 90) == ""
    assert misfit(changed(table, "scan", {"EVERY": 1}), config, 90).startswith("scan and linear need one EVERY")
    assert misfit(changed(table, "score", {"BM": 128}), config, 90) == "blocks divide the chunk of 64"
    one_stage = changed(table, "linear", {"STAGES": 1, "num_stages": 1})
    assert misfit(one_stage, config, 90) == "linear with 64 rows needs two stages on sm_90 (ptxas 12.8)"
    assert misfit(one_stage, config, 80) == misfit(changed(one_stage, "linear", {"BM": 32}), config, 90) == ""
    for arch in (80, 86, 90, 120):
        for dim in (48, 64, 80, 96, 128, 256):
            for chunk in (32, 64, 128, 256):
                for wide in (False, True):
                    layer = HybridAttentionConfig(num_heads=2, num_kv_heads=1, head_dim=dim, chunk_size=chunk)
                    assert misfit(tile_table(arch, dim, chunk, dim, wide), layer, arch) == "", (arch, dim, chunk, wide)


@pytest.mark.parametrize("dim", [4, 10, 16, 24, 32, 48, 256])
@pytest.mark.parametrize("wide", [False, True])
def test_programs_of_a_step_and_of_a_prompt_have_all_columns_of_the_state(dim: int, wide: bool) -> None:
    """Engines take small heads, too: of 16 columns none made a slice of 32."""
    for arch in (80, 90):
        kernels = tile_table(arch, dim, 64, dim, wide).tiles
        columns = max(16, 1 << (dim - 1).bit_length())
        assert all(columns % kernels[name].constants["DS"] == 0 for name in ("decode", "linear")), arch


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_refuses_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main(["HybridAttention"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_tune_on_a_gpu() -> None:
    given = ["--context", "2048", "--seconds", "30"]
    assert tune.main(["HybridAttention", *given, "--kernels", "score,linear,decode"]) == 0
    assert tune.main(["Attention", *given]) == 0
