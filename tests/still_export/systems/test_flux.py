"""A prompt is fed whole, however long: run, served, asked again, it decides as PyTorch's forward of all of it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.loading.language_model import LanguageModel
from still_export.models.load import load_model
from still_export.runtime.ort import OrtModel
from still_export.runtime.prefix_folder import open_prefixes
from still_export.runtime.sampling import RunError, Sampling
from still_export.serving.requests import Request
from still_export.serving.scheduler import Scheduler
from tests.still_export.linear_models import VOCAB, linear_model
from tests.still_export.verbs import call

PROMPTS = np.random.default_rng(5).integers(3, VOCAB, (6, 300))
SMALL = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("flux")
    model = linear_model("flux_qwen3", sink_size=1, local_window_size=128, pool_size=2)
    for name, tensor in model.tensors.items():
        if "mask_allocator" in name and name.endswith("bias"):
            tensor.zero_()  # what is decided follows from the queries alone
    model.save_pretrained(place / "model")
    assert not call("export", place / "model", "-o", place / "package", "--quiet")
    return place


@pytest.fixture
def model(folder: Path) -> Any:
    """Its pieces would be shorter than the prompts."""
    model = OrtModel(folder / "package", threads=1)
    model.manifest["prefill_tokens"] = SMALL
    model.start()
    return model


def decided(model: Any) -> list[float]:
    """+1 or -1 for each layer, of the single sequence."""
    return [float(x.ravel()[0]) for name, x in sorted(model.state_arrays().items()) if "recurrent_state" in name]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """PyTorch's greedy answers."""
    reference = load_model(folder / "model")
    found = []
    for prompt in PROMPTS:
        said = reference.generate(torch.tensor(prompt)[None], max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        found.append(said.tolist())
    return found


def test_a_prompt_is_one_call(model: Any, expected: list[list[int]]) -> None:
    """In pieces some of these prompts decide otherwise."""
    others = 0
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        model.start()
        assert list(model.generate(prompt, 6, Sampling())) == answer
        whole = decided(model)
        assert len(whole) == 3 and set(whole) <= {-1.0, 1.0}
        model.start()
        for start in range(0, len(prompt), SMALL):
            model.feed(prompt[None, start : start + SMALL])
        others += decided(model) != whole
    assert others


def test_a_longer_prompt_decides_anew(model: Any, expected: list[list[int]]) -> None:
    """What was read of it before, or is kept of others, is not gone on from."""
    assert open_prefixes(model, "1MiB") is None
    talk = LanguageModel(model)
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        talk.generate(prompt[:150].tolist(), max_tokens=2)
        assert list(map(int, talk.generate(prompt.tolist(), max_tokens=6).text.split())) == answer
    with pytest.raises(RunError, match="decides by a whole prompt"):
        talk.snapshot()


class Ids:
    """Token ids for a text."""

    def __init__(self) -> None:
        self.tokenizer = self

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


def test_it_is_served_alike(model: Any, expected: list[list[int]]) -> None:
    """Prompts of several requests, each read in one call, whatever a piece is."""
    scheduler = Scheduler(model, Ids(), rows=2, piece=16)  # type: ignore[arg-type]
    requests = [Request(prompt.tolist(), 6, Sampling(), lambda event: None) for prompt in PROMPTS]
    for request in requests:
        scheduler.submit(request)
    for _ in range(200):
        scheduler.step()
    assert [request.tokens for request in requests] == expected
