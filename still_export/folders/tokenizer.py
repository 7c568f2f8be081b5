"""The tokenizer of a model's folder, for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from still_export.errors import CheckpointError, ModelNotFoundError
from still_export.folders.files import Files
from still_export.folders.remote_tokenizer import make_remote, remote_class

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def read_folder_tokenizer(folder: Files, source: str) -> Any:
    """The tokenizer of `folder`, which its user named `source`.

    Raises:
        ModelNotFoundError: There is none.
        CheckpointError: It is damaged.
    """
    path = folder.path
    present = [path / name for name in TOKENIZER_FILES if (path / name).exists()]
    try:
        tokenizer = _by_transformers(folder)
        is_empty = not tokenizer.encode("a word", add_special_tokens=False)
    except (ModelNotFoundError, CheckpointError):
        raise
    except BaseException as error:  # of half a dozen libraries, one of which panics outside Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        if (why := _config_fault(path)) == reason:
            raise CheckpointError(f"{path / 'config.json'}: transformers cannot read it: {why}") from error
        if present:
            lacks = "" if path / "tokenizer.json" in present else " without tokenizer.json"
            raise CheckpointError(
                f"{', '.join(map(str, present))}{lacks}: no tokenizer that transformers can read: {reason}"
            ) from error
        raise ModelNotFoundError(f"{source} has no tokenizer that transformers can read: {reason}") from error
    if not present and is_empty:  # for some families transformers makes one
        raise ModelNotFoundError(
            f"{source} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there. Copy them from its base."
        )
    return tokenizer


def _config_fault(folder: Path) -> str:
    """transformers' error for config.json alone; "" if it reads it."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        return " ".join(str(error).split())
    return ""


def _by_transformers(folder: Files) -> Any:
    """The tokenizer of a folder by transformers, with its errors. A model's own code is never run: if the folder names its own class for
    tokenizer.json, that file alone is used; without the file, the class is one whose rules are known, or refused."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if name := remote_class(folder, lambda name: tokenizer_class_from_name(name) is not None):
        return make_remote(folder, name)
    named = folder.json("tokenizer_config.json").get("auto_map")
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    if folder.has("tokenizer.json") and isinstance(classes, list) and classes[1:] and classes[1]:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder.path)
        tokenizer.init_kwargs.pop("auto_map", None)  # otherwise it is written into packages, which lack such a class
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder.path, trust_remote_code=False)
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and getattr(model, "dropout", None):
        model.dropout = None  # merges that training dropped at random
    return tokenizer
