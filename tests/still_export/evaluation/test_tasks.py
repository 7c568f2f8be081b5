"""Trained models whose task is exact, one a state rule: a package answers every query, and does not with a state that is spoilt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.loading.runtimes import open_runner
from still_export.models.load import load_model
from still_export.package.files import MODEL, PORTABLE
from still_export.runtime.ort import OrtModel
from still_export.targets.export import export
from tests.task_checks import Task, answers_of
from tools.train_tasks import QUERY, RULES, TOKENS, UNASKED, texts

TASKS = Path(__file__).parents[3] / "assets/tasks"
KEPT = sorted(folder.name for folder in TASKS.iterdir() if folder.is_dir())
ROWS, BYTES = 6, 400_000


def task_of(name: str) -> Task:
    """Its texts of a seed that training did not have."""
    rule = RULES[name]
    return Task(*(x.numpy() for x in texts(ROWS, TOKENS, rule.again, np.random.default_rng(7), rule.keys)))


def test_texts_are_what_they_say() -> None:
    ids, answers = (x.numpy() for x in texts(4, 200, True, np.random.default_rng(1)))
    for row, right in zip(ids, answers, strict=True):
        kept: dict[int, int] = {}
        for token, answer in zip(row.tolist(), right.tolist(), strict=True):
            if token < QUERY:
                kept[token // 16] = token % 16
            assert (answer != UNASKED) == (QUERY <= token < QUERY + 12)
            assert answer == UNASKED or answer == QUERY + 12 + kept[token - QUERY]


@pytest.mark.slow
def test_pytorch_answers_too() -> None:
    """What AllMem remembers; its trained weights with gates shut forget it, so that no window answers."""
    ids, answers = texts(ROWS, TOKENS, False, np.random.default_rng(7))
    model = load_model(TASKS / "allmem", dtype="float32")
    said = model(ids, use_cache=False).logits.argmax(-1)
    asked = answers != UNASKED
    assert int(asked.sum()) > 500 and torch.equal(said[asked], answers[asked])
    for layer in model.model.layers:
        layer.self_attn.memory_gate.weight.data.zero_()
        layer.self_attn.memory_gate.bias.data.zero_()
    said = model(ids, use_cache=False).logits.argmax(-1)
    assert int((said != answers)[asked].sum()) > 100


TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "float16": ("float16", {}),
    "bodies": ("float32", {"bodies": True}),
    "bodies in float16": ("float16", {"bodies": True}),
    "the portable graph": ("float32", {"bodies": True, "graph": PORTABLE}),
    "PyTorch": ("float32", {"runtime": "torch"}),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KEPT)
def test_every_target_answers_every_query(name: str, target: str, tmp_path: Path) -> None:
    dtype, how = TARGETS[target]
    package = export(ExportOptions(str(TASKS / name), dtype=dtype), tmp_path / "package", command="test")
    if how.get("graph", MODEL) not in package.manifest["files"]:
        pytest.skip(f"{name} is one graph, {MODEL}")
    runner = open_runner(package.path, package.manifest, **{"runtime": "ort", "threads": 1, **how})
    task = task_of(name)
    assert task.queries.sum() > 100 and task.wrong(answers_of(runner, task)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_every_query_is_answered(name: str, tmp_path: Path) -> None:
    files = [path for path in (TASKS / name).iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= BYTES
    export(ExportOptions(str(TASKS / name), dtype="float32"), tmp_path / "package", command="test")
    runner = OrtModel(tmp_path / "package", threads=1)
    task = task_of(name)
    assert task.queries.sum() > 100 and task.wrong(answers_of(runner, task)) == 0
    assert task.wrong(answers_of(runner, task, spoil=True)) > 3
