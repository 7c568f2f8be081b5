"""still-export cache: what is kept outside the folders that commands name, and its removal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from still_export.cli.output import Output
from still_export.package.trust import home

EXAMPLES = """
Examples:

    still-export cache

    still-export cache --remove packages

    still-export cache --remove all
"""


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option(
            help="A kind (packages, kernels, linearize, headers, history, trust), the name of one package, or all; repeatable."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what there is, or what was removed, as JSON.")] = False,
) -> None:
    """List what is kept outside the folders that you name, such as packages of GGUF files, kernels and chat history, or remove it."""
    from still_export import disk

    chosen = disk.remove(remove) if remove else disk.kept()
    rows: list[dict[str, Any]] = [
        {"kind": each.kind, "path": str(each.path), "size_bytes": each.size_bytes, "made_of": each.made_of}
        for each in chosen
    ]
    lines = []
    for kind, meaning in disk.KINDS.items():
        found = [each for each in chosen if each.kind == kind]
        if found or not remove:
            lines.append(f"{kind:<9} {_size(found):>9}  {meaning}")
        for each in found:
            made_of = f", of {_short(Path(each.made_of))}" if each.made_of else ""
            lines.append(f"{'':<9} {_size([each]):>9}  {_short(each.path)}{made_of}")
    total = _size(chosen)
    lines.append(
        f"removed: {total}"
        if remove
        else f"{total} in all; remove: still-export cache --remove {'|'.join(disk.KINDS)}|all"
    )
    Output(as_json).result({"removed" if remove else "kept": rows}, *lines)


def _short(path: Path) -> str:
    own = home()
    return f"~/{path.relative_to(own)}" if path.is_relative_to(own) else str(path)


def _size(found: list[Any]) -> str:
    size = sum(each.size_bytes for each in found)
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB" if found else "nothing"
