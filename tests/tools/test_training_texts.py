"""Chats and public texts for training, on small things, without a network."""

import hashlib
import io
import json
import tarfile
import urllib.error
from pathlib import Path

import pytest

from still_export.errors import ConfigError
from tests.docs.stand_ins import CHAT
from tests.still_export.training import byte_tokenizer, make_base
from tools import fetch_texts, write_chats


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "BASE"
    make_base(folder, max_position_embeddings=512)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_write_chats(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.write_chats.ANSWER_TOKENS", 4)
    chats, text = tmp_path / "chat.jsonl", tmp_path / "chat.txt"
    assert write_chats.main([str(base), str(chats), "--conversations", "3"]) == 0
    lines = [json.loads(line) for line in chats.read_text().splitlines()]
    assert [len(chat) for chat in lines] == [4, 2, 4]
    assert [message["role"] for message in lines[0]] == ["user", "assistant"] * 2
    assert write_chats.main([str(base), str(text), "--conversations", "1"]) == 0
    assert text.read_text().startswith("<user>")


def test_write_chats_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_base(tmp_path / "BASE")
    with pytest.raises(SystemExit, match="2"):
        write_chats.main([str(tmp_path / "BASE"), str(tmp_path / "chat.txt")])
    assert "has no chat template" in " ".join(capsys.readouterr().err.split())


def source(files: dict[str, bytes]) -> bytes:
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
    pages = {"https://files/a-1.tar.gz": archive, fetch_texts.PYPI.format(project="a"): b""}

    def page(found: str) -> None:
        pages[fetch_texts.PYPI.format(project="a")] = f'<a href="https://files/a-1.tar.gz#sha256={found}">'.encode()

    monkeypatch.setattr(fetch_texts, "fetch", pages.__getitem__)
    page(digest)
    assert fetch_texts.code("a", "a-1.tar.gz", "src") == b"# src/a.py\na = 1\n\n\n# src/b.py\nb = 1\n"
    page("0" * 64)
    with pytest.raises(ConfigError, match="does not have the index's SHA-256"):
        fetch_texts.code("a", "a-1.tar.gz", "src")
    with pytest.raises(ConfigError, match="is not on the index page"):
        fetch_texts.code("a", "a-2.tar.gz", "src")


def test_no_network_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(fetch_texts.urllib.request, "urlopen", fails)
    with pytest.raises(SystemExit, match="2"):
        fetch_texts.main([str(tmp_path / "TEXTS")])
    assert "cannot be fetched" in " ".join(capsys.readouterr().err.split())
