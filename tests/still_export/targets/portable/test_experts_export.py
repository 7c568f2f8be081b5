"""Families with experts end to end: transformers' folder in, package out, proven on ONNX Runtime's CPU provider; targets that refuse."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from still_export.errors import UnsupportedError
from still_export.targets.registry import target_of
from tests.still_export.expert_models import SPARSE, expert_model
from tests.still_export.models.test_expert_families import calm_seed
from tests.still_export.targets.portable.test_linear_export import call

FEW = ("granitemoehybrid",)
CASES = [pytest.param(f, marks=pytest.mark.slow if f in FEW else pytest.mark.long) for f in SPARSE]


@pytest.mark.parametrize("name", CASES)
def test_a_folder_becomes_a_proven_package(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert_model(name, seed=calm_seed(name)).save_pretrained(tmp_path / "model")
    package = tmp_path / "package"
    assert call("export", tmp_path / "model", "-o", package, "--quiet") == 0
    assert call("verify", package, "--lengths", "1,65", "--decode-steps", "4", "--quiet") == 0, capsys.readouterr().out
    for graph, op in (("model.onnx", "MoE"), ("portable.onnx", "Loop")):
        bodies = onnx.load(package / graph, load_external_data=False).functions
        assert [op in {n.op_type for n in f.node} for f in bodies if f.name == "Experts"] == [True]


@pytest.mark.parametrize("target", ["trt", "trt8", "trt-rtx", "genai", "web"])
def test_targets_without_experts_refuse_by_name(target: str) -> None:
    """Before anything is traced."""
    record = target_of(target)
    manifest = {"ops": {"Experts": 1}, "model": {"family": "qwen3_next", "dtype": record.dtypes[0]}}
    with pytest.raises(UnsupportedError, match="holds no Experts yet, which layers of this qwen3_next model are"):
        record.check_model(manifest, None)
