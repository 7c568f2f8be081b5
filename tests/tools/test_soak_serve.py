"""What tools/soak_serve.py counts as a near tie."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("openai")
pytest.importorskip("psutil")
TOOL = Path(__file__).resolve().parents[2] / "tools/soak_serve.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_serve", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("one two three", "right"),
        ("one 2", "near tie"),
        ("1", "wrong"),
        ("one two 3", "wrong"),
        ("one two three four", "wrong"),
        ("one", "near tie"),
    ],
)
def test_a_tie_counts_where_the_texts_part(soak: ModuleType, text: str, wanted: str) -> None:
    """The second piece, of two tokens, has the only small gap: parting before or behind it is a wrong answer."""
    pieces = (("one", 1), (" two", 3), (" three", 4), ("", 4))
    case = soak.Case({}, "one two three", pieces, (0.9, 0.9, 0.01, 0.9), 0.1)
    assert soak.verdict(case, text) == wanted
