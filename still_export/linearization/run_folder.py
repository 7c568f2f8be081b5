"""The output folder of a linearization: what it may replace, and how a run is resumed. Does not import PyTorch."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from still_export.errors import ConfigError, TrainingError
from still_export.package.staging import real_place, write_json

RUN_FILE, WORK = "run.json", "training"
TO_REPLACE = "Pass --resume to continue its run, or --force to replace it."
REPLACED_FILE = "replaced.json"
"""File in the work folder that lists the contents of the output folder when --force began this run; it stays until the new model is
complete."""


class RunFolder:
    """The output folder of a run; checkpoints and results of stages are in `work`."""

    def __init__(self, output: Path) -> None:
        self.output = real_place(output)
        self.work = self.output / WORK

    def fingerprint(self) -> dict[str, Any]:
        """Identity of the folder's run.

        Raises:
            TrainingError: The folder has no run.
        """
        try:
            return dict(json.loads((self.work / RUN_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise TrainingError(
                f"{self.output} has no run to resume ({RUN_FILE} cannot be read: {error}). Leave out --resume."
            ) from error

    def resume(self, mine: dict[str, Any]) -> None:
        """Check that the folder's run has the fingerprint `mine`.

        Raises:
            TrainingError: It belongs to another run, or there is none.
        """
        recorded = self.fingerprint()
        differing = sorted(k for k in mine.keys() | recorded.keys() if mine.get(k) != recorded.get(k))
        if differing:
            shown = ", ".join(f"{k} {recorded.get(k)} there, {mine.get(k)} here" for k in differing[:3])
            raise TrainingError(
                f"{self.output} has another run: {shown}. "
                "Nothing was changed. Resume with the recipe that started it, or choose another folder with -o."
            )

    def begin(self, mine: dict[str, Any], force: bool) -> None:
        """Create the folder of a new run.

        Raises:
            ConfigError: It exists without `force`, or does not contain a run.
        """
        check_replaceable(self.output, force, TO_REPLACE)
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        replaced = sorted(p.name for p in self.output.iterdir() if p.name != WORK)
        write_json(self.work / REPLACED_FILE, replaced)
        write_json(self.work / RUN_FILE, mine)

    def has_run(self) -> bool:
        """Whether a run can be resumed here."""
        return (self.work / RUN_FILE).is_file()

    def discard(self) -> None:
        """Remove a run without checkpoint or result of a stage."""
        if any(self.work.glob("*/step-*/report.json")) or any(self.work.glob("*.safetensors")):
            return
        shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.output.rmdir()  # fails if it is not empty

    def other_entries(self) -> list[str]:
        """Entries of the output folder that do not belong to the model that this run replaces."""
        path = self.work / REPLACED_FILE
        replaced = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [p.name for p in self.output.iterdir() if p.name not in replaced]


def check_replaceable(folder: Path, force: bool, hint: str) -> None:
    """Raise ConfigError if `folder` is not empty without `force`, or if no linearization wrote it (such as a base or a home folder)."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not force:
        raise ConfigError(f"{folder} exists. {hint}")
    if not ((folder / WORK / RUN_FILE).is_file() or is_still_folder(folder)):
        raise ConfigError(f"{folder} has no linearized model, so --force does not delete it. Choose another folder.")


def is_still_folder(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return "still_config" in config
    except (OSError, ValueError, TypeError):
        return False
