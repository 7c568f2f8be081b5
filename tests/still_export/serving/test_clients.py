"""tools/try_clients.py for what is installed with the tests; its other libraries are tried by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from still_export.serving.app import Settings
from tests.still_export.serving.conftest import exported
from tests.still_export.serving.served import serve

pytest.importorskip("openai")
TOOL = Path(__file__).parents[3] / "tools/try_clients.py"


@pytest.mark.slow
def test_clients_get_what_they_ask_for(tmp_path: Path) -> None:
    with serve(exported(tmp_path, "llama", context=4000), Settings("tiny"), rows=4, waiting=8) as served:
        url = f"http://127.0.0.1:{served.port}/v1"
        libraries = ("openai", "Open WebUI", "continue.dev")
        done = subprocess.run([sys.executable, TOOL, url, *libraries], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "20 ok, 0 FAILED, 0 not installed" in done.stdout, done.stdout + done.stderr
