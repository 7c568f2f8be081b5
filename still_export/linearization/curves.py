"""Curves of a run, written during training: always as CSV, and as TensorBoard events if it is installed."""

from __future__ import annotations

import contextlib
import csv
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE, EVENTS = "curves.csv", "tensorboard"
COLUMNS = ("stage", "step", "loss", "validation", "rate", "tokens_per_s", "seconds")


class Curves:
    """Writes the measurements of each step of a stage.

    Args:
        folder: Folder of the run's work; all stages share one file in it.
        done: Steps in the checkpoint. Later steps of an earlier process are dropped, because they are repeated.
    """

    def __init__(self, folder: Path, stage: str, done: int) -> None:
        self.stage = stage
        path = folder / FILE
        earlier: list[dict[str, str]] = []
        with contextlib.suppress(OSError), path.open(newline="", encoding="utf-8") as file:
            earlier = [row for row in csv.DictReader(file) if row["stage"] != stage or int(row["step"]) <= done]
        self._file = path.open("w", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, COLUMNS)
        self._rows.writeheader()
        self._rows.writerows(earlier)
        self._events: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder / EVENTS), purge_step=done + 1, filename_suffix=f".{stage}")

    def add(
        self, step: int, loss: float, validation: float | None, rate: float, tokens_per_s: float, seconds: float
    ) -> None:
        """Add one step: its loss, the loss of held-out rows if measured, the learning rate, speed, and time since the start."""
        values = (self.stage, step, loss, "" if validation is None else validation, rate, tokens_per_s, seconds)
        self._rows.writerow(dict(zip(COLUMNS, values, strict=True)))
        self._file.flush()
        if self._events is not None:
            for name, value in (
                ("loss", loss),
                ("validation", validation),
                ("rate", rate),
                ("tokens_per_s", tokens_per_s),
            ):
                if value is not None:
                    self._events.add_scalar(f"{self.stage}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()
