"""tools/benchmarks/torch_generate.py: runs on a CPU with tiny sizes, and refuses to time a static cache that gives other tokens."""

import json
import sys
from typing import Any

import pytest

from tools.benchmarks import torch_generate


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["torch_generate.py", "--small", "--contexts", "20", "--steps", "3"])
    return torch_generate


@pytest.mark.slow
def test_both_models_both_ways(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main() == 0
    lines = capsys.readouterr().out.splitlines()
    checked, *rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert checked["same"]
    assert [(row["model"], row["way"]) for row in rows] == [
        (model, way) for way in ("eager", "static") for model in ("base", "still")
    ]
    assert all(row["decode_us"] > 0 for row in rows)
    assert "11 of 11 tokens alike" in lines[-1] and lines[-3].split()[1] == "eager" and lines[-2].split()[-1] == "0.9"


def test_other_tokens_are_an_error(
    tool: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = tool.LlamaForCausalLM.generate

    def wrong(model: Any, ids: Any, **given: Any) -> Any:
        found = generate(model, ids, **{**given, "max_new_tokens": 2, "compile_config": None})
        return found + ("cache_implementation" in given)

    monkeypatch.setattr(tool.LlamaForCausalLM, "generate", wrong)
    assert tool.main() == 1
    assert "other tokens" in capsys.readouterr().out
