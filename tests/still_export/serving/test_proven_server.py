"""`verify http://...` of this project's own server, right and with a fault in what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from still_export.runtime.prefixes import PrefixCache
from still_export.serving.app import Settings
from tests.still_export.serving.test_app import serve
from tests.still_export.verbs import call

LENGTHS = ["--lengths", "5,40,65"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_kept_prefixes(byte_package: Path, wrong: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def open_cache(runner: Any) -> PrefixCache:
        cache = PrefixCache(runner.table, 1 << 28)
        if wrong:
            spoil(cache)
        return cache

    with serve(byte_package, Settings("tiny", None, 50_000), rows=3, waiting=20, piece=16, cache=open_cache) as served:
        address = f"http://127.0.0.1:{served.port}"
        code = call("verify", address, "--model", byte_package.parent / "model", *LENGTHS)
        said = capsys.readouterr().out
        assert code == int(wrong), said
        assert ("FAILED" in said) == wrong and "in a batch" in said
        assert not wrong or "MISMATCH" in said
        if wrong:
            return
        assert call("verify", address, "--model", byte_package.parent / "model", "--as", "other") == 2
        assert "serves 'tiny'" in capsys.readouterr().err
        assert call("verify", address) == 2 and "--model FILE" in capsys.readouterr().err
        assert call("verify", address, "--model", "x", "--record", "y") == 2 and "--record" in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", "http://127.0.0.1:9", "--model", "x") == 2
    assert "does not answer" in capsys.readouterr().err


def spoil(cache: PrefixCache) -> None:
    """A sequence that finds a prefix gets the tensors of fixed size that belong to the one found before."""
    right, before = cache.state, [dict[str, Any]()]

    def state(node: Any) -> dict[str, Any]:
        own = right(node)
        other = before.pop()
        before.append(own)
        return {n: other[n] if n in other and other[n].shape == x.shape else x for n, x in own.items()}

    cache.state = state  # type: ignore[method-assign]
