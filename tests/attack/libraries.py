"""Packages whose manifest names native code that this machine did not build, with lies about names, digests and paths."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def attack() -> bool:
    tests = ["tests/still_export/package/test_trust.py", "-k", "library or says_so or links or listed"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode == 0
