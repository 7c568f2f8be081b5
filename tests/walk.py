"""Which files of the three packages call which in a command of still-export, in order.

    python tests/walk.py OUT.json VERB ...

with the packages of whichever tree is on PYTHONPATH: nothing of the tests is imported. Of each pair of files the first call counts.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import FrameType

PACKAGES = ("still_export", "still_kernels", "still_graphs")
_names: dict[str, str] = {}


def module(file: str) -> str:
    """The module of a file of the packages by its dotted name; "" for others."""
    if file not in _names:
        parts = Path(file).with_suffix("").parts
        own = next((i for i, part in enumerate(parts) if part in PACKAGES), None) if file.endswith(".py") else None
        name = "" if own is None else ".".join(parts[own:])
        _names[file] = name.removesuffix(".__init__")
    return _names[file]


def main(out: Path, words: list[str]) -> int:
    """Run the command; write the pairs."""
    pairs: dict[tuple[str, str], None] = {}

    def see(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code.co_name == "<module>" or not (callee := module(frame.f_code.co_filename)):
            return
        back = frame.f_back
        while back is not None and not (caller := module(back.f_code.co_filename)):
            back = back.f_back  # through another library, and through what it calls
        if back is not None and caller != callee:
            pairs.setdefault((caller, callee))

    from still_export.cli.main import main as verb

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        code = verb(words)
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.setprofile(None)
    out.write_text(json.dumps(list(pairs)), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
