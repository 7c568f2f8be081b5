"""The base model in another runtime: rows for `bench --beside`."""

import json
from pathlib import Path

import pytest

from tests.still_export.training import byte_tokenizer, make_base
from tools.benchmarks import peer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "BASE"
    make_base(folder, max_position_embeddings=512)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments: object) -> int:
    return peer.main([str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.long
def test_rows_for_bench(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "peer.json"
    given = ("--runtime", "transformers", "--lengths", "80,100", "--steps", 2, "--threads", 1, "-o", rows)
    assert run(base, *given) == 0
    found = json.loads(rows.read_text())
    assert [row["length"] for row in found] == [80, 100]
    assert all(row["prefill_s"] > 0 and row["decode_ms"] > 0 and row["peak_mb"] > 50 for row in found)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--runtime", "vllm"], "invalid choice: 'vllm'"),
        (["--runtime", "llama.cpp"], "llama.cpp takes a GGUF file, transformers a folder"),
        (["--quantize", "int4", "--runtime", "transformers"], "are of genai, not of transformers"),
        (["--provider", "cuda", "--runtime", "transformers"], "are of genai, not of transformers"),
    ],
)
def test_refusals(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("BASE", *given)
    assert message in " ".join(capsys.readouterr().err.split())


LLAMA_CPP = """
import ctypes, os
calls = []
class Llama:
    ctx = "context"
    def __init__(self, path, n_ctx, n_threads, n_threads_batch, flash_attn, verbose):
        assert os.path.exists(path) and (n_ctx, n_threads, n_threads_batch, flash_attn) == (83, 1, 1, True), locals()
    def n_vocab(self):
        return 7
    def reset(self):
        calls.clear()
    def eval(self, tokens):
        calls.append(tokens)
        assert len(calls[0]) == 80 and max(calls[0]) < 7 and (len(calls) == 1 or tokens == [4]), calls
def llama_get_logits(context):
    assert context == "context"
    return (ctypes.c_float * 7)(0, 0, 0, 0, 1)
"""
"""A stand-in for llama-cpp-python that checks what it is given: 80 tokens, then the likeliest one."""


def test_llama_cpp_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = tmp_path / "peer.json"
    given = ["--runtime", "llama.cpp", "--lengths", 80, "--steps", 2, "--threads", 1, "-o", rows]
    assert run(tmp_path / "model.gguf", *given) == 0
    (found,) = json.loads(rows.read_text())
    assert found["length"] == 80 and found["decode_ms"] > 0
    assert 10 < found["peak_mb"] < 200  # no torch


def test_without_llama_cpp_the_message_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda name: None)  # it may be installed here
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "model.gguf", "--runtime", "llama.cpp")
    assert "pip install 'still-export[llama-cpp]'" in " ".join(capsys.readouterr().err.split())
