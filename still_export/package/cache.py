"""The folder for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path

from still_export.package.trust import home

CACHE_VARIABLE = "STILL_CACHE"


def cache_folder() -> Path:
    """STILL_CACHE, or still-export's folder in the user's cache. It may be deleted at any time."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "still-export"
