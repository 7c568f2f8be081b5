"""still-export doctor: what works on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from still_export.cli.output import Output


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Show what this machine can export, build, run and train, and what to install for the rest."""
    from still_export.doctor import examine, machine

    here, findings = machine(), examine()
    lines = [f"{name:<13} {value}" for name, value in here.items()] + [""]
    for finding in findings:
        lines.append(f"{'yes' if finding.able else 'no ':<4} {finding.what}: {finding.detail}")
        if finding.todo:
            lines.append(f"       {finding.todo}")
    Output(as_json).result({"machine": here, "findings": [asdict(f) for f in findings]}, *lines)
