"""The command line in this process."""

from __future__ import annotations

import pytest

from still_export.cli.main import main


def call(*words: object) -> int:
    """Exit code of `still-export` with these words."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return int(end.value.code or 0)
