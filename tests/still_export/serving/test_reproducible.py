"""With `reproducible` a request's logits are the same bits alone, among others, in other pieces, and behind kept states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from still_export.graph.options import ExportOptions
from still_export.package.cache import CACHE_VARIABLE
from still_export.package.trust import trust_package
from still_export.runtime.ort import OrtModel
from still_export.runtime.prefix_folder import open_prefixes
from still_export.runtime.sampling import RunError, Sampling
from still_export.runtime.text import Text
from still_export.serving.requests import Request
from still_export.serving.scheduler import Scheduler
from still_export.targets.export import export
from still_export.targets.ort.options import OrtOptions
from tests.still_export.expert_models import expert_model, published_sizes
from tests.still_export.linear_models import PUBLISHED, linear_model
from tests.still_export.tiny import MIXED, still_model
from tests.still_export.training import byte_tokenizer

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow
CONTEXT = 512
VOCABULARY = dict(vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
TEXT = np.random.default_rng(7).integers(0, 256, CONTEXT).tolist()


def model_of(kind: str) -> Any:
    """STILL beside softmax, a delta rule and a scan beside softmax, and experts; of widths as published models have them."""
    if kind.startswith("still"):
        sizes = dict(VOCABULARY, hidden_size=128, num_attention_heads=4, head_dim=32)
        chunk = {"chunk_size": 96} if kind == "still_96" else {}
        return still_model("llama", torch.float32, sizes=sizes, layer_types=MIXED, capacity_tokens=CONTEXT, **chunk)
    if kind == "granitemoehybrid":
        experts = dict(num_local_experts=16, num_experts_per_tok=6)
        return expert_model(kind, **{**published_sizes(kind), **VOCABULARY, **experts})
    return linear_model(kind, **{**PUBLISHED[kind], **VOCABULARY})


KINDS = [
    "still",
    pytest.param("still_96", marks=pytest.mark.long),
    "qwen3_5_text int4",
    "granitemoehybrid int4",
    pytest.param("granitemoehybrid", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=KINDS)
def package(request: pytest.FixtureRequest, kernels_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with kernels for CPUs."""
    kind, _, quantize = str(request.param).partition(" ")
    folder = tmp_path_factory.mktemp("reproducible")
    model_of(kind).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    asked = ExportOptions(str(folder / "model"), quantize=quantize or None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(kernels_cache))
        return export(asked, folder / "package", options=OrtOptions(native=True)).path


@dataclass
class Watching(Sampling):
    """Keeps digests of the logits that tokens are chosen by."""

    seen: list[str] = field(default_factory=list)

    def choose(self, logits: np.ndarray) -> int:
        self.seen.append(hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16])
        return super().choose(logits)


@dataclass
class Asked:
    """A request with what it was given."""

    prompt: list[int]
    tokens: int
    seed: int

    def request(self) -> tuple[Request, list[str]]:
        watching = Watching(0.8, seed=self.seed)
        return Request(self.prompt, self.tokens, watching, lambda event: None, ignore_eos=True), watching.seen


def drawn(random: np.random.Generator, count: int) -> Iterator[Asked]:
    """Prompts of a few beginnings, which part at any place, and of any length."""
    for seed in range(count):
        shared, own = int(random.integers(0, 300)), int(random.integers(1, 150))
        yield Asked(TEXT[:shared] + random.integers(0, 256, own).tolist(), int(random.integers(2, 12)), seed)


def alone(scheduler: Scheduler, asked: Asked) -> tuple[list[int], list[str]]:
    """Tokens, and digests of logits, of a request beside which there is none."""
    request, seen = asked.request()
    scheduler.submit(request)
    while scheduler.step():
        pass
    assert len(request.tokens) == asked.tokens == len(seen)
    return request.tokens, seen


def served(
    model: OrtModel, text: Text, random: np.random.Generator, count: int, reproducible: bool = True
) -> list[int]:
    """Numbers of the requests whose answers are not those that they get alone; half of them go on with an answer, so with kept states."""
    cold = Scheduler(model, text, 1, piece=512, reproducible=reproducible)
    wanted: list[tuple[Asked, tuple[list[int], list[str]]]] = []
    for asked in drawn(random, count // 2):
        wanted.append((asked, alone(cold, asked)))
        more = Asked([*asked.prompt, *wanted[-1][1][0], *random.integers(0, 256, 9).tolist()], 5, asked.seed)
        wanted.append((more, alone(cold, more)))
    cache = open_prefixes(model, "64MiB", reproducible=reproducible)
    other: list[int] = []
    assert cache is not None
    group, most = (16, 6) if count < 100 else (65, 65)
    for begin in range(0, count, group):
        rows, piece = int(random.integers(2, most + 1)), int(random.choice([1, 64, 100, 128, 300]))
        together = Scheduler(model, text, rows, 64, piece=piece, prefixes=cache, reproducible=reproducible)
        some = [(number, *wanted[number][0].request()) for number in range(begin, min(begin + group, count))]
        for _, request, _ in some:
            together.submit(request)
            for _ in range(int(random.integers(0, 6))):
                together.step()
        while together.step():
            pass
        other += [number for number, request, seen in some if (request.tokens, seen) != wanted[number][1]]
    assert cache.hit_tokens > cache.prompt_tokens / 8, "kept states were found"
    return other


def test_answers_are_the_same_bits(package: Path) -> None:
    model = OrtModel(package, threads=2)
    text = Text(model)
    assert not served(model, text, np.random.default_rng(0), 24)
    assert served(model, text, np.random.default_rng(0), 8, reproducible=False), (
        "the test sees pieces that end elsewhere"
    )


@pytest.mark.long
def test_a_thousand_answers_are_the_same_bits(package: Path) -> None:
    model = OrtModel(package, threads=2)
    assert not served(model, Text(model), np.random.default_rng(1), 1000)


def test_what_cannot_be_reproducible_says_so(byte_package: Path, tmp_path: Path) -> None:
    trust_package(byte_package)
    model = OrtModel(byte_package, threads=1, bodies=True)
    with pytest.raises(RunError, match="needs the package's own kernels"):
        Scheduler(model, Text(model), reproducible=True)


def test_states_of_other_servers_are_not_taken(package: Path, tmp_path: Path) -> None:
    """They may have been left in the midst of a chunk."""
    model = OrtModel(package, threads=1)
    for reproducible in (False, True):
        cache = open_prefixes(model, "8MiB", tmp_path / "kept", reproducible)
        scheduler = Scheduler(model, Text(model), 1, prefixes=cache, reproducible=reproducible)
        assert cache is not None and not cache.hit_tokens
        alone(scheduler, Asked(TEXT[:100], 2, 0))
        cache.close()
    again = open_prefixes(model, "8MiB", tmp_path / "kept", reproducible=True)
    assert again is not None and again.known(TEXT[:100]) == 64
