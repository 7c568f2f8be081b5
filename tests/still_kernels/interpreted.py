"""Runs a file of cases in Triton's interpreter, which must be chosen before Triton is imported: in processes of its own.

They are forks of one process that has imported torch and Triton, which takes longer than many a case.

Kernels that nobody edited compute what they did. tests/interpreted.json has of each run what it printed, the files of this project that it
loaded, and a hash of their code without comments and docstrings, of the cases' names, and of the versions of Python, torch, NumPy and
Triton. Where the hash is equal the tests judge the numbers of before.

    python -m pytest --write-compiled tests/still_kernels    record what ran
    python -m pytest --compile tests/still_kernels           run everything, as `tools/test.sh --all` does
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.compiled import INTERPRETED
from tests.durations import add_elsewhere

ROOT = Path(__file__).parents[2]
SECONDS = 1200
"""A file of cases that takes longer is ended."""


FILE = ROOT / "tests/interpreted.json"
PLACES = ("still_export", "kernels", "graphs", "tests", "tools")
LIBRARIES = ("torch", "numpy", "triton")
DIGITS = 4
"""Of a number that is recorded: none is as near to a limit."""


@functools.cache
def run_cases(script: Path, names: tuple[str, ...] = (), kind: str = "") -> dict[str, Any]:
    """What the cases print, by name.

    Args:
        script: Takes names of cases (none: all), and prints a JSON object with an entry for each.
        kind: Goes before the names; "": nothing does.
    """
    key = " ".join([script.relative_to(ROOT).as_posix(), kind, *names[:1]])
    known = {} if INTERPRETED.anew else recorded()["runs"].get(key, {})
    if known and known["hash"] == hash_of(recorded()["files"][known["files"]], names):
        INTERPRETED.equal += 1
        return known["found"]
    INTERPRETED.ran += 1
    found, files = _run(script, names, kind)
    if INTERPRETED.writes:
        _record(key, files, {"hash": hash_of(files, names), "found": _short(found)})
    return found


@functools.cache
def recorded() -> dict[str, dict[str, Any]]:
    """`runs`: by script, kind and first name the `hash`, what was `found`, and by which list in `files` the files that were loaded."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def hash_of(files: list[str], names: tuple[str, ...]) -> str:
    """Of the code in `files`, of the cases' names, and of what runs them; "" where a file is gone."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES]
    digest = hashlib.sha256(json.dumps([platform.python_version(), platform.machine(), versions, names]).encode())
    for file in files:
        if not (ROOT / file).exists():
            return ""
        digest.update(f"{file} {code_of(ROOT / file)}\n".encode())
    return digest.hexdigest()[:32]


@functools.cache
def code_of(path: Path) -> str:
    """A hash of a module without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            kept = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
            setattr(node, "body", kept)  # noqa: B010 - of any kind of node
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _record(key: str, files: list[str], run: dict[str, Any]) -> None:
    """Replace what FILE says of a run; runs of scripts that are gone leave it."""
    lock = ROOT / "build/interpreted.lock"
    lock.parent.mkdir(exist_ok=True)
    with FileLock(lock):
        recorded.cache_clear()
        runs, lists = recorded()["runs"], recorded()["files"]
        name = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:8]
        runs = {each: found for each, found in runs.items() if (ROOT / each.partition(" ")[0]).exists()}
        runs[key], lists[name] = {"files": name, **run}, files
        used = {found["files"] for found in runs.values()}
        parts = {"files": {each: lists[each] for each in lists if each in used}, "runs": runs}
        text = ",\n".join(
            f'"{part}": {{\n'
            + ",\n".join(f"{json.dumps(n)}: {json.dumps(x)}" for n, x in sorted(table.items()))
            + "\n}"
            for part, table in parts.items()
        )
        FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
        recorded.cache_clear()


def _run(script: Path, names: tuple[str, ...], kind: str) -> tuple[dict[str, Any], list[str]]:
    """What the cases print, and the files of this project that they loaded."""
    process = _server()
    assert process.stdin and process.stdout
    with tempfile.TemporaryDirectory() as folder:
        json.dump([str(script), *([kind] if kind else []), *names, folder], process.stdin)
        process.stdin.write("\n")
        process.stdin.flush()
        status, _, seconds = process.stdout.readline().strip().partition(" ")
        add_elsewhere(float(seconds or 0))
        assert status == "0", f"{status}: {Path(folder, 'err').read_text()[-3000:]}"
        return json.loads(Path(folder, "out").read_text()), json.loads(Path(folder, "files").read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, whose end closes its input."""
    roots = os.pathsep.join(str(ROOT / name) for name in (".", "kernels", "graphs"))  # this tree, whatever is installed
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": roots,
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.still_kernels.interpreted"]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def serve() -> None:
    """Of each line [script, arguments ..., folder] run the script in a fork, its output into `out` and `err` there, into `files` what it
    loaded of this project; say its exit status and the seconds of a processor that it took."""
    import torch  # noqa: F401
    import triton.language  # noqa: F401

    harness = set(sys.modules)
    for line in sys.stdin:
        script, *arguments, folder = json.loads(line)
        if child := os.fork():
            _, status, used = os.wait4(child, 0)
            print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
            continue
        signal.alarm(SECONDS)
        for number, name in ((0, os.devnull), (1, f"{folder}/out"), (2, f"{folder}/err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        status = 1
        try:
            runpy.run_path(script, run_name="__main__")
            loaded = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name not in harness}
            paths = (Path(path) for path in {script, *filter(None, loaded)} if path.startswith(str(ROOT)))
            own = sorted(path.relative_to(ROOT).as_posix() for path in paths)
            Path(folder, "files").write_text(json.dumps([file for file in own if file.startswith(PLACES)]))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    serve()
