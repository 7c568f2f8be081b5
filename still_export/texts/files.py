"""Text files, read without PyTorch so that verbs can check them before loading anything."""

from __future__ import annotations

from pathlib import Path

from still_export.errors import DataError


def read_text(path: Path) -> str:
    """The content of a text file, without a byte order mark.

    Raises:
        DataError: The file is missing, empty, or not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Give a text file.") from error
    if not content.strip():
        raise DataError(f"{path} is empty. Give a file with text.")
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.start:,} is 0x{content[error.start]:02x}). Decompress or convert it first."
        ) from error
    if "\0" in text:
        raise DataError(f"{path} contains zero bytes, so it is a binary file. Give plain text.")
    return text
