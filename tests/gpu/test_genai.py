"""onnxruntime-genai gives the tokens of this project's runner, in turns with it; runs on the CPU, where genai is installed."""

import time
from pathlib import Path

import pytest

from tests.gpu.conftest import ROOT, Proof, prepared
from tools.benchmarks.genai_turns import compare

LENGTHS = (8, 200)


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_equal(length: int, proof: Proof) -> None:
    """Of a package of STILL_GPU_PLACE, a prompt of this repository's own words."""
    og = pytest.importorskip("onnxruntime_genai")
    from tokenizers import Tokenizer

    from still_export.runtime.ort import OrtModel

    package: Path = proof.of(prepared("genai"), runtime="onnxruntime-genai")
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(package / "tokenizer.json")).encode(text).ids
    row = compare(og, og.Model(str(package)), OrtModel(package, check=False), ids[:length], 100, time.thread_time)
    proof.figures |= row
    assert row["equal"] == row["steps"]
