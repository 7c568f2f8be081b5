"""What tools/soak_serve.py counts as a near tie."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from still_export.runtime.sampling import Sampling

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


def test_an_answer_that_nearly_went_on(soak: ModuleType) -> None:
    pieces = (("one", 1), (" two", 2), ("", 2))
    case = soak.Case({}, "one two", pieces, (0.9, 0.9, 0.01), 0.1)
    assert soak.verdict(case, "one two three") == "near tie"
    assert soak.verdict(case, "one 2") == "wrong"


def test_a_sampled_token_near_the_end_of_its_share(soak: ModuleType) -> None:
    """Of two tokens the first has a share of a half: a number just below it may give either, one far below gives the first alone."""

    class Model:
        @property
        def runner(self) -> "Model":
            return self

        def start(self) -> None: ...

        def prefill(self, prompt: list[int]) -> np.ndarray:
            return np.zeros(2)

        def feed(self, ids: np.ndarray) -> np.ndarray:
            return np.zeros((1, 1, 2))

    seed = next(i for i in range(1000) if 0.497 < np.random.default_rng(i).random() < 0.5)
    gaps = soak.gaps_of(Model(), [1], [0], Sampling(1.0, seed=seed), tie=0.03)
    assert gaps[0] == 0 and len(gaps) == 2
    seed = next(i for i in range(1000) if np.random.default_rng(i).random() < 0.4)
    assert soak.gaps_of(Model(), [1], [0], Sampling(1.0, seed=seed), tie=0.03)[0] > 1
