"""Tokenizers of remote code: known rules are applied as tiktoken applies them, unknown ones leave a package for token ids; no code runs."""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from still_export.errors import CheckpointError, ModelNotFoundError
from still_export.folders.remote_tokenizer import KNOWN
from still_export.gguf.rules import RULES
from still_export.models.load import load_tokenizer

regex = pytest.importorskip("regex")
WORDS = [
    b"th",
    b"the",
    b"in",
    b" the",
    b"oW",
    b"ld",
    "世界".encode(),
    b"42",
    b"142",
    b"1423",
    b"n't",
    b"don",
    b"aa",
    b"\n\n",
]
TEXTS = (
    "the thing",
    "HelloWorld helloWorld",
    "世界abc 世界",
    "don't 1423 the, DON'T",
    "aaaaa  \n\n\n x",
    "1234567 ½ é e\u0301",
    "",
)


def encoded(text: str, expression: str, ranks: dict[bytes, int]) -> list[int]:
    """tiktoken's rule: pieces by the expression; a piece that is a token, or neighbours joined by the least rank."""
    found = []
    for piece in regex.findall(expression, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        if piece.encode() in ranks:
            parts = [piece.encode()]
        while len(parts) > 1:
            pairs = [(ranks.get(a + b, len(ranks)), at) for at, (a, b) in enumerate(pairwise(parts))]
            least, at = min(pairs)
            if least == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [ranks[part] for part in parts]
    return found


def write(folder: Path, name: str, file: str, added: list[str]) -> dict[bytes, int]:
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(WORDS)}
    lines = (f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in ranks.items())
    (folder / file).write_text("".join(lines))
    config: dict[str, Any] = {
        "tokenizer_class": name.rpartition(".")[2],
        "auto_map": {"AutoTokenizer": [name, None]},
        "eos_token": added[0] if added else None,
        "added_tokens_decoder": {
            str(len(ranks) + i): {"content": word, "special": True} for i, word in enumerate(added)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / f"{name.rpartition('--')[2].partition('.')[0]}.py").write_text("raise SystemExit('remote code ran')\n")
    return ranks


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_rule_splits_texts(name: str, tmp_path: Path) -> None:
    remote = KNOWN[name]
    added = ["<|im_end|>", "[BOS]", *remote.begins] if not remote.specials else []
    ranks = write(tmp_path, f"org/model--{name}" if "kimi" in name else name, remote.file, added)
    tokenizer = load_tokenizer(tmp_path)
    expression = "(?V1)" + RULES[remote.rule].expressions[0]  # with set operations, as Unicode has them
    for text in TEXTS:
        right = encoded(unicodedata.normalize("NFC", text) if RULES[remote.rule].composed else text, expression, ranks)
        begins = [tokenizer.convert_tokens_to_ids(token) for token in remote.begins]
        assert tokenizer(text)["input_ids"] == begins + right, text
        if not RULES[remote.rule].composed:
            assert tokenizer.decode(right) == text
    special = (added or remote.specials)[0]
    assert tokenizer.encode(special, add_special_tokens=False) == [len(ranks)]


@pytest.mark.parametrize(
    "name, file",
    [
        ("tokenization_other.TikTokenTokenizer", "tiktoken.model"),
        ("tokenization_internlm2.InternLM2Tokenizer", "tokenizer.model"),
        ("tiktoken.TiktokenTokenizerWrapper", "some.tiktoken"),
    ],
)
@pytest.mark.parametrize("mapped", [True, False])
def test_an_unknown_rule_is_no_tokenizer(name: str, file: str, mapped: bool, tmp_path: Path) -> None:
    write(tmp_path, name, file, ["</s>"])
    if not mapped:
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        del config["auto_map"]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotFoundError, match=re.escape(name.rpartition(".")[2])):
        load_tokenizer(tmp_path)


def test_a_vocabulary_without_any_class_states_no_rule(tmp_path: Path) -> None:
    write(tmp_path, "a.b", "tiktoken.model", [])
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("damage", ["lost", "lines", "twice", "numbers"])
def test_damaged_vocabularies(damage: str, tmp_path: Path) -> None:
    name = "tokenization_kimi.TikTokenTokenizer"
    write(tmp_path, name, "tiktoken.model", ["<|im_end|>"])
    path = tmp_path / "tiktoken.model"
    text = path.read_text()
    if damage == "lost":
        path.unlink()
    elif damage == "lines":
        path.write_text(text + "no base64\n")
    elif damage == "twice":
        path.write_text(text + text[:7])
    else:
        path.write_text("\n".join(text.splitlines()[:-2]))
    with pytest.raises(CheckpointError):
        load_tokenizer(tmp_path)
