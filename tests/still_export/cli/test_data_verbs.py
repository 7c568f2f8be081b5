"""bench-peer, write-chats and fetch-texts on small things, without a network."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.error
from pathlib import Path

import pytest

from still_export.cli.main import main
from still_export.errors import ConfigError
from still_export.texts import public_texts
from tests.docs.stand_ins import CHAT
from tests.still_export.training import byte_tokenizer, make_base


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that chats."""
    folder = tmp_path_factory.mktemp("base") / "BASE"
    make_base(folder, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def exit_code(*arguments: object) -> int | str | None:
    """Of the command line."""
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return end.value.code


@pytest.mark.slow
@pytest.mark.long
def test_bench_peer_gives_rows_for_bench(base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "peer.json"
    given = [
        "bench-peer",
        base,
        "--runtime",
        "transformers",
        "--lengths",
        "80,100",
        "--steps",
        2,
        "--threads",
        1,
        "-o",
        rows,
    ]
    assert exit_code(*given) == 0
    found = json.loads(rows.read_text())
    assert [row["length"] for row in found] == [80, 100]
    assert all(row["prefill_s"] > 0 and row["decode_ms"] > 0 and row["peak_mb"] > 50 for row in found)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--runtime", "vllm"], "--runtime vllm is unknown; known: genai, llama.cpp, transformers"),
        (["--runtime", "llama.cpp"], "llama.cpp takes a GGUF file, transformers a folder"),
        (["--quantize", "int4", "--runtime", "transformers"], "give int4 with genai"),
        (["--provider", "cuda", "--runtime", "transformers"], "--provider cuda with --runtime transformers: give cpu"),
        (["--lengths", "a"], "--lengths a: give numbers"),
    ],
)
def test_bench_peer_refuses(given: list[str], message: str, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("bench-peer", base, *given) == 2
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
    def eval(self, tokens):
        calls.append(tokens)
        assert len(calls[0]) == 80 and max(calls[0]) < 7 and (len(calls) == 1 or tokens == [4]), calls
def llama_get_logits(context):
    assert context == "context"
    return (ctypes.c_float * 7)(0, 0, 0, 0, 1)
"""
"""A stand-in for llama-cpp-python that checks what it is given: 80 tokens, then the likeliest one."""


def test_bench_peer_measures_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    rows = tmp_path / "peer.json"
    given = ["--runtime", "llama.cpp", "--lengths", 80, "--steps", 2, "--threads", 1, "-o", rows]
    assert exit_code("bench-peer", tmp_path / "model.gguf", *given) == 0
    (found,) = json.loads(rows.read_text())
    assert found["length"] == 80 and found["decode_ms"] > 0
    assert 10 < found["peak_mb"] < 200  # no torch


def test_bench_peer_without_llama_cpp_says_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # it may be installed here
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert exit_code("bench-peer", tmp_path / "model.gguf", "--runtime", "llama.cpp") == 2
    assert "pip install 'still-export[llama-cpp]'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_write_chats(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("still_export.texts.chats.ANSWER_TOKENS", 4)
    chats, text = tmp_path / "chat.jsonl", tmp_path / "chat.txt"
    assert exit_code("write-chats", base, chats, "--conversations", 3) == 0
    lines = [json.loads(line) for line in chats.read_text().splitlines()]
    assert [len(chat) for chat in lines] == [4, 2, 4]
    assert [message["role"] for message in lines[0]] == ["user", "assistant"] * 2
    assert exit_code("write-chats", base, text, "--conversations", 1) == 0
    assert text.read_text().startswith("<user>")


def test_write_chats_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_base(tmp_path / "BASE")
    assert exit_code("write-chats", tmp_path / "BASE", tmp_path / "chat.txt") == 2
    assert "has no chat template" in " ".join(capsys.readouterr().err.split())


def source(files: dict[str, bytes]) -> bytes:
    """A source distribution."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


def test_a_text_is_checked_by_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = source(
        {"a-1/src/b.py": b"b = 1\n", "a-1/src/a.py": b"a = 1\n", "a-1/src/empty.py": b" ", "a-1/README": b"no"}
    )
    digest = hashlib.sha256(archive).hexdigest()
    pages = {"https://files/a-1.tar.gz": archive, public_texts.PYPI.format(project="a"): b""}

    def page(found: str) -> None:
        pages[public_texts.PYPI.format(project="a")] = f'<a href="https://files/a-1.tar.gz#sha256={found}">'.encode()

    monkeypatch.setattr(public_texts, "fetch", pages.__getitem__)
    page(digest)
    assert public_texts.code("a", "a-1.tar.gz", "src") == b"# src/a.py\na = 1\n\n\n# src/b.py\nb = 1\n"
    page("0" * 64)
    with pytest.raises(ConfigError, match="does not have the index's SHA-256"):
        public_texts.code("a", "a-1.tar.gz", "src")
    with pytest.raises(ConfigError, match="is not on the index page"):
        public_texts.code("a", "a-2.tar.gz", "src")


def test_no_network_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(public_texts.urllib.request, "urlopen", fails)
    assert exit_code("fetch-texts", tmp_path / "TEXTS") == 2
    assert "cannot be fetched" in " ".join(capsys.readouterr().err.split())
