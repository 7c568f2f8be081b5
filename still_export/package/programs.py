"""The programs of a package: runners copied from this project that need nothing else of it.

Inside the project they import each other by their full names; in a package they lie side by side in the folder `runtime`, the modules of
`still_export/runtime` in its folder `runners`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import still_graphs
from still_export.package.checked import SCHEMA

RUNTIME = "runtime"
SHARED = (
    *(
        "base",
        "decoding",
        "feeding",
        "sampling",
        "speculation",
        "text",
        "stop_texts",
        "reasoning",
        "conversation",
        "prefixes",
        "snapshot",
    ),
    "program",
)
CHECKS = (
    *(
        "refusals",
        "tokenizer_bounds",
        "files",
        "locks",
        "checked",
        "external",
        "installed",
        "trust",
        "archive",
        "template",
        "template_process",
    ),
    "chat_format",
    "telemetry",
)
RUNNERS = {
    "ort": ("head", "ort_bindings", "ort_replay", "ort_session", "ort_states"),
    "tensorrt": ("trt_engine", "cuda_driver"),
}
"""Runners by module, with the modules that they alone need."""
PROGRAMS = {"ort": "run_ort.py", "tensorrt": "run_trt.py"}

PROGRAM = '''#!/usr/bin/env python3
"""{summary} `python {name} --help` says how."""

import os
import sys

# Not where links lead: behind those of Hugging Face's cache no file has its name.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
sys.dont_write_bytecode = True  # the package stays as it was exported

from {runtime}.runners.{module} import main

sys.exit(main())
'''

_IMPORT = re.compile(r"^from (?:(still_export\.runtime)|still_export|still_graphs)\.(\S+) import", re.MULTILINE)


def write_programs(folder: Path, runners: Sequence[str]) -> None:
    """Write the programs of `runners` and the modules that they need into the package `folder`."""
    sources = Path(__file__).parents[1] / "runtime"
    target = folder / RUNTIME / "runners"
    target.mkdir(parents=True)
    modules = {*SHARED, *runners, *(m for runner in runners for m in RUNNERS[runner])}
    for name in sorted(modules):
        _copy(sources / f"{name}.py", target / f"{name}.py")
    _copy(Path(still_graphs.__file__).parent / "states.py", folder / RUNTIME / "states.py")
    (folder / RUNTIME / "package").mkdir()
    for name in CHECKS:
        _copy(Path(__file__).with_name(f"{name}.py"), folder / RUNTIME / "package" / f"{name}.py")
    shutil.copyfile(SCHEMA, folder / RUNTIME / "package" / SCHEMA.name)
    for runner in runners:
        summary = (sources / f"{runner}.py").read_text(encoding="utf-8").split('"""')[1].split(".")[0] + "."
        program = folder / PROGRAMS[runner]
        program.write_text(PROGRAM.format(summary=summary, name=program.name, runtime=RUNTIME, module=runner))


def _copy(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    target.write_text(
        _IMPORT.sub(lambda m: f"from {RUNTIME}.{'runners.' if m[1] else ''}{m[2]} import", text), encoding="utf-8"
    )
