"""Write the model of a linearization."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError
from still_export.linearization import adapter
from still_export.linearization.run_folder import check_replaceable
from still_export.models.load import load_tokenizer
from still_export.package.staging import staged_folder


def apply(base: str, adapter_folder: Path, output: Path, *, tokenizer: str | None = None, force: bool = False) -> Any:
    """Write the STILL model of `base` and `adapter_folder`; returns it.

    Raises:
        ConfigError: `output` exists and `force` is not given, or its content is no linearized model.
        CheckpointError: The folder is no adapter, or of another base.
    """
    check_replaceable(output, force, "Pass --force to replace it.")
    model, words = adapter.apply_adapter(base, adapter_folder), load_tokenizer(tokenizer or base)
    with staged_folder(output, force=True) as folder:
        save_model(model, words, folder)
    return model


def rehearse_save(model: Any, tokenizer: Any) -> None:
    """Save everything of `save_model` except weights and read it back, to find errors before training.

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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
