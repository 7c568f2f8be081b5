"""still-export verify http://HOST:PORT --model FILE: are a running server's answers those of the file?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from still_export.cli.output import Output, report_folder
from still_export.errors import ConfigError
from still_export.package.staging import write_json

SHOWN = 5
"""Wrong answers of a way that are printed; the report has all."""


def is_server(named: str) -> bool:
    return named.startswith(("http:/", "https:/"))


def verify_server(
    address: str,
    model: str | None,
    name: str | None,
    lengths: tuple[int, ...],
    output: Path | None,
    seed: int,
    flags: Mapping[str, bool],
    out: Output,
) -> bool:
    """Compare answers of the server at `address` with PyTorch; print and write the verdict.

    Args:
        address: "http://HOST:PORT".
        model: The file that it serves: folder, hub id or GGUF file.
        name: The server's name of the model.
        lengths: Of prompts, tokens; (): as usual.
        output: Folder of report.json; None: none is written.
        flags: Flags of other proofs; whether each is set.

    Raises:
        ConfigError: No --model, a flag of other proofs, or no server answers.
        StillExportError: The file cannot be read.
        RunError: The server refuses.
    """
    wrong = [flag for flag, is_set in flags.items() if is_set]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: not with a server's address. Leave {'it' if len(wrong) == 1 else 'them'} out."
        )
    if model is None:
        raise ConfigError(
            f"{address} is compared with the file that it serves: name it with --model FILE (folder, hub id or .gguf)."
        )
    from still_export.proof import server as proof
    from still_export.proof.server_client import Client

    folder = None if output is None else report_folder(output)
    client = Client(address, name)
    with out.steps() as step:
        step(f"reading {model}")
        reference, notes = proof.read_reference(model)
    first = proof.prompts_of(reference, [16], seed)[0]
    client.probe(reference.text(first), first)
    if not client.tokens:
        notes.append("the server accepts text only, so its tokenizer is also compared")
    if not client.logprobs:
        notes.append("the server reports no log-probabilities: its tokens are compared with the file's margins")
    job = proof.ServerProof(client, reference, lengths or proof.LENGTHS, seed=seed)
    with out.bar("asking", 6) as advance:
        found = job.run(advance)
    client.close()
    content = proof.to_dict(found, notes)
    if folder is not None:
        write_json(folder / "report.json", content)
    if out.as_json:
        out.result(content)
    else:
        _print(address, model, found, notes)
    return bool(content["passed"])


def _print(address: str, model: str, found: list[Any], notes: list[str]) -> None:
    console = Console(width=None if Console().is_terminal else 150)
    table = Table(title=f"{address} against {model}: difference of a log-probability, nats")
    for column in ("asked", "requests", "tokens", "near ties", "other words", "worst", "bound", ""):
        table.add_column(column, justify="left" if column in ("asked", "") else "right", no_wrap=True)
    for way in found:
        numbers = (way.requests, way.tokens, way.near_ties, way.changed)
        table.add_row(
            way.name, *map(str, numbers), f"{way.worst:.2g}", f"{way.bound:.2g}", "ok" if way.passed else "MISMATCH"
        )
    console.print(table)
    for way in found:
        for line in way.wrong[:SHOWN]:
            print(line)
    for note in notes:
        print(f"note: {note}")
    passed = all(way.passed for way in found)
    print("PASSED" if passed else "FAILED: the server does not answer what the file computes")
