"""Check the programs copied into a package: they equal this version's byte by byte, and run in their own process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from still_export.errors import StillExportError
from still_export.loading.runtimes import open_runner
from still_export.package.files import MODEL
from still_export.package.folder import Package, tool_versions
from still_export.package.programs import PROGRAMS, RUNTIME, write_programs
from still_export.package.refusals import RunError
from still_export.proof.texts_asked import PROSE
from still_export.proof.verdict import Check, Kind, Verdict
from still_export.runtime.sampling import Sampling
from still_export.runtime.text import Answer, Text

TOKENIZER = "tokenizer.json"
TOKENS = 12
"""Tokens that a program generates."""
TIMEOUT_S = 600
SHOWN = 60
"""Characters of a text that a message shows."""
OWN = ("still_export", "still_kernels", "still_graphs")
"""Folders by which a place of PYTHONPATH is this project's."""
ALONE = """
import importlib, pathlib, runpy, sys
_, folder, program, *words = sys.argv
sys.path.insert(0, folder)
for path in sorted(pathlib.Path(folder, "{runtime}").rglob("*.py")):
    name = ".".join(path.relative_to(folder).with_suffix("").parts)
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("{runtime}"):
            sys.exit(f"{{name}}: {{error}}")
    except BaseException as error:
        sys.exit(f"{{name}}: {{type(error).__name__}}: {{error}}")
sys.argv = [program, *words]
runpy.run_path(program, run_name="__main__")
"""
"""Imports every module of the copied runner, as far as other libraries are here, then runs a program of the package."""


def check_programs(package: Package, provider: str = "cpu") -> Verdict:
    """Compare the programs of a package with this version's, run these on the package, and compare their tokens with the runner's.

    Nothing of the package is executed.
    """
    with tempfile.TemporaryDirectory(prefix="still-programs-") as scratch:
        fresh = Path(scratch)
        write_programs(fresh, [runner for runner, name in PROGRAMS.items() if name in package.manifest["files"]])
        verdict = _compare_copies(package, fresh).of_kind(Kind.FILES)
        verdict.add(_run_program(package, fresh, provider))
    return verdict


def _run_program(package: Package, fresh: Path, provider: str) -> Verdict:
    """Run the program in `fresh` on the package in a process of its own."""
    manifest, verdict = package.manifest, Verdict()
    program = fresh / PROGRAMS["ort"]
    if not program.is_file():
        others = [name for name in PROGRAMS.values() if name in manifest["files"]]
        verdict.not_asked.append(
            f"{', '.join(others)}, run in a process of its own: it needs the GPU that the engine was built for"
            if others
            else "a program of its own: this package has none"
        )
        return verdict
    text = TOKENIZER in manifest["files"] and importlib.util.find_spec("tokenizers") is not None
    prompt = PROSE[:40]
    vocabulary = int(manifest["model"]["vocab_size"])
    ids = [1 + 7 * i % (vocabulary - 1) for i in range(9)] if vocabulary > 1 else [0]
    name = f"every file of {RUNTIME}/ can be imported, and {program.name} says the same, in a process of its own"
    try:
        runner = open_runner(package.path, manifest, "ort", provider, check=False)
        runner.start()
        speaks = Text(runner) if text else None
        tokens = speaks.encode(prompt) if speaks else []
        if not tokens:  # an empty tokenizer has no token for any text
            speaks, tokens = None, ids
        right = "".join(Answer(runner, speaks, tokens, TOKENS, Sampling()))
    except RunError as error:
        return Verdict.of([Check(name, False, f"the runner here: {error}", MODEL)])
    arguments = ["--prompt", prompt] if speaks else ["--prompt-ids", ",".join(map(str, ids))]
    arguments += ["--tokens", str(TOKENS), "--provider", provider, "--folder", str(package.path.absolute())]
    done = _run([sys.executable, "-c", ALONE.format(runtime=RUNTIME), str(fresh), str(program), *arguments])
    found, wrong = done.stdout.removesuffix("\n"), ""
    if done.returncode:
        wrong = f"it ends with exit code {done.returncode}: {_last_line(done)}"
    elif found != right:
        wrong = f"it says {found[:SHOWN]!r}, the runner here {right[:SHOWN]!r}"
    verdict.checks.append(Check(name, not wrong, wrong, program.name * bool(wrong)))
    return verdict


def _compare_copies(package: Package, fresh: Path) -> Verdict:
    """Whether the package's programs are those that this version wrote into `fresh`."""
    made, here = package.manifest["versions"].get("still-export"), tool_versions().get("still-export")
    names = {name for name in package.manifest["files"] if name in PROGRAMS.values() or name.startswith(f"{RUNTIME}/")}
    if made != here:
        line = f"its programs, byte by byte: still-export {made} wrote them, and this is {here}, whose own were run"
        return Verdict(not_asked=[line] * bool(names))
    right = {path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file()}
    wrong = sorted(
        name
        for name in names | right
        if name not in names & right or (package.path / name).read_bytes() != (fresh / name).read_bytes()
    )
    what = [(name, "it is not; export again") for name in wrong]
    return Verdict.of([Check.of("its programs are those that this version writes", what)] if names else [])


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run in a process without this project on its path; output keeps its carriage returns."""
    apart = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    others = [
        p
        for p in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if p and not any((Path(p) / o).is_dir() for o in OWN)
    ]
    apart |= {"PYTHONPATH": os.pathsep.join(others)} if others else {}
    apart |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(command, capture_output=True, env=apart, timeout=TIMEOUT_S, check=False)
        output, errors = (
            part.decode("utf-8", "replace").replace(os.linesep, "\n") for part in (done.stdout, done.stderr)
        )
        return subprocess.CompletedProcess(command, done.returncode, output, errors)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"it did not end in {TIMEOUT_S} seconds")
    except OSError as error:
        raise StillExportError(f"{command[0]} cannot be started: {error}.") from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:300] if lines else "it says nothing"
