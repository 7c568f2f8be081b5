"""Files that are cut or written while they are mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from still_export.package.files import OpenFiles
from still_export.package.refusals import CheckError

READ = """
import mmap, os, sys, threading
import numpy as np
from still_export.cli.errors import end_at_lost_pages
end_at_lost_pages()
with open(sys.argv[1], "r+b") as file:
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.float32)
    os.truncate(sys.argv[1], 0)
    read = lambda: print(mapped.sum())
    if sys.argv[2] == "thread":
        threading.Thread(target=read).start()
    else:
        read()
"""


@pytest.mark.parametrize("place", ["main", "thread"])
def test_a_cut_file_ends_in_a_sentence(place: str, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(1 << 16))
    command = [sys.executable, "-c", READ, str(tmp_path / "weights"), place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("LostPages: a file was cut while it was read") and done.stderr.count("\n") == 1


def test_a_file_that_is_written_shows_and_one_that_is_exchanged_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"0" * 100)
    held = OpenFiles([path])
    (tmp_path / "new").write_bytes(b"1" * 100)
    os.replace(tmp_path / "new", path)
    held.check()
    for change in (lambda: os.truncate(path, 7), lambda: os.utime(path, ns=(1, 1))):
        held = OpenFiles([path])
        held.check()
        change()
        with pytest.raises(CheckError, match="weights was changed while it was used"):
            held.check()
