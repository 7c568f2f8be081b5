"""tools/soak_serve.py for 24 s, of which attackers have 19: half a request is held for 15. A quarter of an hour is run by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai")
pytest.importorskip("psutil")
TOOL = Path(__file__).parents[3] / "tools/soak_serve.py"


@pytest.mark.slow
def test_users_among_attackers(byte_package: Path) -> None:
    """Every user's answer is right; times of so few answers say little, beside other tests."""
    options = "--minutes 0.4 --cases 12 --context 150 --clients 3 --rows 2 --slower 20".split()
    done = subprocess.run([sys.executable, TOOL, byte_package, *options], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["right"] > 8 and not report["wrong_answers"]
    assert {"wrong keys: 401", "other hosts: 403", "stop texts of 23000: 413", "half bodies: 429"} <= set(
        report["attacks"]
    )
