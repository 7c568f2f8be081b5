"""The folder that a linearization writes: what it may replace, how a run is found again, the model at its end."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, ConfigError, TrainingError
from still_export.linearization import adapter
from still_export.models.load import load_tokenizer
from still_export.package.staging import staged_folder

RUN_FILE, WORK = "run.json", "training"
REPLACED_FILE = "replaced.json"
"""In the work folder: what the output folder held when --force began this run; it stays until the new model is complete."""


class RunFolder:
    """The output folder of a run, whose checkpoints and results of stages lie in `work`."""

    def __init__(self, output: Path) -> None:
        self.output, self.work = output, output / WORK

    def resume(self, mine: dict[str, Any]) -> None:
        """Check that the folder holds the run whose fingerprint is `mine`.

        Raises:
            TrainingError: It belongs to another run, or to none.
        """
        try:
            theirs = json.loads((self.work / RUN_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TrainingError(
                f"{self.output} holds no run to resume ({RUN_FILE} cannot be read: {error}). Leave out --resume."
            ) from error
        differing = sorted(k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k))
        if differing:
            shown = ", ".join(f"{k} {theirs.get(k)} there, {mine.get(k)} here" for k in differing[:3])
            raise TrainingError(
                f"{self.output} holds another run: {shown}. "
                "Nothing was changed. Resume with the recipe that started it, or choose another folder."
            )

    def begin(self, mine: dict[str, Any], force: bool) -> None:
        """Make the folder of a new run.

        Raises:
            ConfigError: It exists and `force` is not given, or holds something else than a run.
        """
        check_replaceable(self.output, force, "Pass --resume to continue its run, or --force to replace it.")
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        replaced = sorted(p.name for p in self.output.iterdir() if p.name != WORK)
        (self.work / REPLACED_FILE).write_text(json.dumps(replaced), encoding="utf-8")
        (self.work / RUN_FILE).write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")

    def holds_a_run(self) -> bool:
        """Whether a run that was begun can go on."""
        return (self.work / RUN_FILE).is_file()

    def discard(self) -> None:
        """Remove a run that left nothing to go on from: no checkpoint, no result of a stage."""
        if any(self.work.glob("*/step-*/report.json")) or any(self.work.glob("*.safetensors")):
            return
        shutil.rmtree(self.work, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.output.rmdir()  # which fails where it holds something

    def kept(self) -> list[str]:
        """Entries of the output folder that are not of the model that this run replaces."""
        path = self.work / REPLACED_FILE
        replaced = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [p.name for p in self.output.iterdir() if p.name not in replaced]


def apply(base: str, adapter_folder: Path, output: Path, *, tokenizer: str | None = None, force: bool = False) -> Any:
    """Write the STILL model that `adapter_folder` makes of `base`; returns it.

    Raises:
        ConfigError: `output` exists and `force` is not given, or it holds something else than a model that was linearized.
        CheckpointError: The folder is no adapter, or of another base.
    """
    check_replaceable(output, force, "Pass --force to replace it.")
    model, words = adapter.apply_adapter(base, adapter_folder), load_tokenizer(tokenizer or base)
    with staged_folder(output, force=True) as folder:
        save_model(model, words, folder)
    return model


def check_replaceable(folder: Path, force: bool, hint: str) -> None:
    """Raise ConfigError where `folder` holds something and `force` is not given, or what no linearization made: the base, a home."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not force:
        raise ConfigError(f"{folder} exists. {hint}")
    if not ((folder / WORK / RUN_FILE).is_file() or is_still_folder(folder)):
        raise ConfigError(f"{folder} holds no linearized model, so --force does not delete it. Choose another folder.")


def is_still_folder(folder: Path) -> bool:
    """Whether the folder holds a STILL model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return "still_config" in config
    except (OSError, ValueError, TypeError):
        return False


def rehearse_save(model: Any, tokenizer: Any) -> None:
    """Write all of `save_model` but the weights, and read it: what cannot be written is said before a training.

    Raises:
        CheckpointError: The configuration, generation settings or tokenizer cannot be saved and read again.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.config.save_pretrained(folder)
            model.generation_config.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        except Exception as error:  # transformers has a check and an error of its own for each
            reason = " ".join(str(error).split())
            raise CheckpointError(
                f"the trained model could not be saved beside its base's settings: {reason}"
            ) from error
        load_tokenizer(folder)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a STILL model and its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
