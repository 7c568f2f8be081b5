"""Render chat templates in Jinja2's sandbox, in a process with limits on time, memory and output.

Exports copy this file into packages.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from still_export.package.refusals import RunError

WALL_S = 30.0
"""For one rendering on a busy machine; the process limits itself to less than a second of processor time."""

START = "import sys; del sys.path[0]; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Runs a file without the current folder or the file's on the path, as `python -P` does from 3.11 on."""


class TemplateRefusal(RunError):
    """A chat template refuses these messages, or cannot be rendered."""


def render_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text of a Jinja template, with what transformers gives to chat templates.

    Raises:
        TemplateRefusal: The template raises, fails, or exceeds a bound.
        RunError: jinja2 is not installed.
    """
    found = _PROCESS.ask({"template": template, "variables": variables})
    if "text" in found:
        return str(found["text"])
    reasons = {
        "refusal": "the model's chat template refuses these messages",
        "failure": "the model's chat template fails on these messages",
        "syntax": "the model's chat template is not one that Jinja can read",
    }
    beginning = reasons.get(found["kind"], "the model's chat template was given up")
    raise TemplateRefusal(f"{beginning}: {found['error'].rstrip('.')}.")


class _Process:
    """The process; starts with the first request, and again after it ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: Mapping[str, Any]) -> dict[str, str]:
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            late = threading.Timer(WALL_S, process.kill)
            late.daemon = True
            late.start()
            try:
                process.stdin.write(line)
                process.stdin.flush()
                found = process.stdout.readline()
            except BrokenPipeError:
                found = b""
            finally:
                late.cancel()
            if found.endswith(b"\n"):
                return dict(json.loads(found))
            code = process.wait()
            self.close()
        if sys.platform != "win32" and code in (-signal.SIGPROF, -signal.SIGKILL):
            return {"kind": "bound", "error": "it runs for more than a second"}
        return {"kind": "bound", "error": f"its process ended with code {code}"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._running is not None and self._owner == os.getpid() and self._running.poll() is None:
            return self._running
        if find_spec("jinja2") is None:
            raise RunError("chat templates need the package jinja2: pip install jinja2; or leave out --chat.")
        self._owner = os.getpid()
        self._running = subprocess.Popen(
            [sys.executable, "-c", START, str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C ends an answer, not this
        )
        return self._running

    def close(self) -> None:
        """End the process; the next request starts it again."""
        process, self._running = self._running, None
        if process is None or self._owner != os.getpid():
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # unread output
                    pass
        process.wait()


_PROCESS = _Process()
atexit.register(_PROCESS.close)
