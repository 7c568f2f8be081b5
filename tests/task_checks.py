"""Whether a runner answers the queries of a trained task (assets/tasks). No PyTorch: TensorRT's Python runs it, too.

    python -m tests.task_checks PACKAGE TASK.npz --runtime trt [--provider cuda]

prints `{"wrong": 0, "asked": 171, "spoilt": 12}`: wrong answers, queries, and wrong answers with another sequence's state.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from still_export.loading.runtimes import open_runner
from still_export.package.trust import trust_package
from still_export.runtime.base import Runner

PIECES = (129, 320)
"""Where the two pieces end in which the first tokens are read; the others come one by one."""


class Task(NamedTuple):
    """Texts [rows, tokens], and what follows each token that is a query [rows, tokens]; -100 behind others."""

    ids: NDArray[np.int64]
    answers: NDArray[np.int64]

    @property
    def queries(self) -> NDArray[np.bool_]:
        """Which of the last tokens are queries, [tokens, rows]."""
        return (self.answers[:, PIECES[1] :] >= 0).T

    def wrong(self, said: NDArray[np.int64]) -> int:
        """Wrong answers among the likeliest tokens behind each of the last tokens, [tokens, rows]."""
        return int((said != self.answers[:, PIECES[1] :].T)[self.queries].sum())


def answers_of(runner: Runner, task: Task, spoil: bool = False) -> NDArray[np.int64]:
    """The likeliest tokens behind each of the last tokens, [tokens, rows]; `spoil`: one sequence goes on with the state of another."""
    rows, tokens = task.ids.shape
    runner.start(rows, tokens)
    runner.feed(task.ids[:, : PIECES[0]])
    runner.feed(task.ids[:, slice(*PIECES)])
    if spoil:
        runner.put(1, {name: x.copy() for name, x in runner.take(0).items()}, PIECES[1])
    return np.stack([runner.feed(task.ids[:, t : t + 1])[:, -1].argmax(-1) for t in range(PIECES[1], tokens)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("task", type=Path)
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--provider", default="cpu")
    options = parser.parse_args()
    with np.load(options.task) as file:
        task = Task(file["ids"], file["answers"])
    trust_package(options.package)
    manifest = json.loads((options.package / "manifest.json").read_text(encoding="utf-8"))
    runner = open_runner(options.package, manifest, options.runtime, provider=options.provider)
    figures = {
        "wrong": task.wrong(answers_of(runner, task)),
        "asked": int(task.queries.sum()),
        "spoilt": task.wrong(answers_of(runner, task, spoil=True)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
