"""still-export write-chats: conversations as training text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from still_export.cli.output import Output

EXAMPLES = """
Examples:

    still-export write-chats BASE chat.txt

    still-export write-chats BASE chat.jsonl --conversations 1500 --seed 1
"""


def write_chats(
    base: Annotated[str, typer.Argument(help="Model folder or GGUF file with a chat template.", show_default=False)],
    output: Annotated[
        Path,
        typer.Argument(help="A .jsonl file for linearize --chat-file; any other is running text.", show_default=False),
    ],
    conversations: Annotated[int, typer.Option(min=1, help="How many.")] = 3000,
    seed: Annotated[int, typer.Option(help="Of the prompts and the answers.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Let the base model answer questions of this project, so that a linearized model still chats: training text for `linearize`."""
    from still_export.texts.chats import write_chats as write

    count, size = write(base, output, conversations, seed)
    content = {"file": str(output), "conversations": count, "size_bytes": size}
    Output(as_json).result(content, f"{output}: {count} conversations, {size:,} bytes")
