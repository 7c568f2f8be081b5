"""Locks of folders and files between processes; they end with the process. Systems without flock have none."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

LOCKS = fcntl is not None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, under which files in it are made, placed and swept."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        hold(handle)
        yield
    finally:
        os.close(handle)


def hold(handle: int) -> None:
    """Lock an open file until it is closed; waits for another holder. File systems without locks are left alone."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)


def is_held(handle: int) -> bool | None:
    """Whether another process holds an open file, which else is locked from now on; None: unknown."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False
