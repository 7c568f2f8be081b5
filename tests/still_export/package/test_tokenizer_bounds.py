"""A stranger's tokenizer.json and manifest: what would take the process, or the terminal, is refused or made harmless."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from still_export.package.refusals import RunError, printable
from still_export.package.tokenizer_bounds import guarded, repeats_repetitions
from still_export.runtime.text import Text
from tests.still_export.verbs import call

SMALL = Path(__file__).parents[3] / "assets/small/tokenizer.json"


def opened(folder: Path, change: Callable[[dict[str, Any]], None]) -> Text:
    described = json.loads(SMALL.read_text())
    change(described)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    size = (folder / "tokenizer.json").stat().st_size
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    manifest = {"files": {"tokenizer.json": {"sha256": digest, "size_bytes": size}}, "eos_token_ids": [0], "chat": None}
    return Text(SimpleNamespace(folder=folder, manifest=manifest))  # type: ignore[arg-type]


def replace(content: str, pattern: dict[str, str], times: int = 1) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": pattern, "content": content}] * times}


def normalizers(content: str, pattern: dict[str, str], times: int = 1) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": replace(content, pattern, times)["decoders"]}


@pytest.mark.parametrize(
    "part, value",
    [
        ("decoder", replace("a" * 1000, {"Regex": "."}, 4)),
        ("decoder", replace("ab" * 3, {"String": "a"}, 7)),
        ("normalizer", normalizers("a" * 1000, {"String": "a"}, 4)),
        ("normalizer", normalizers("a" * 1000, {"Regex": ""})),
        ("normalizer", normalizers("b", {"Regex": "((a|b)*c?)*$"})),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 1000}),
        ("post_processor", {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 99, "pair": [],
                            "special_tokens": {}}),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(?:(?:\\w{2,})x?)+!"}, "behavior": "Isolated", "invert": False},
        ),
    ],
)  # fmt: skip
def test_texts_that_grow_and_expressions_that_never_end_are_refused(tmp_path: Path, part: str, value: Any) -> None:
    with pytest.raises(RunError, match=part):
        opened(tmp_path, lambda described: described.update({part: value}))


def test_padding_and_truncation_are_ignored_and_published_parts_are_read(tmp_path: Path) -> None:
    plain = opened(tmp_path, lambda described: None).encode("aaa aaa!")
    size = {
        "strategy": {"Fixed": 1 << 31},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
    }
    assert opened(tmp_path, lambda d: d.update(padding={**size, "pad_token": "a"})).encode("aaa aaa!") == plain
    cut = {
        "direction": "Right",
        "max_length": 1,
        "strategy": "LongestFirst",
        "stride": 1,
    }  # with a stride the library panics
    assert opened(tmp_path, lambda d: d.update(truncation=cut)).encode("aaa aaa!") == plain
    blanks = normalizers("▁", {"String": " "}, 3)
    assert opened(tmp_path, lambda d: d.update(normalizer=blanks)).encode("aaa")
    with pytest.raises(RunError, match="no tokenizer"):
        opened(tmp_path, lambda d: d.update(decoder={"type": "What"}))


def test_an_expression_that_gives_up_is_an_error(tmp_path: Path) -> None:
    slow = {"type": "Split", "pattern": {"Regex": "(a|aa|aaa)+$"}, "behavior": "Isolated", "invert": False}
    text = opened(tmp_path, lambda d: d.update(pre_tokenizer=slow))
    began = time.process_time()
    with pytest.raises(RunError, match="fails on this text"):
        text.encode("a" * 60 + "!")
    assert time.process_time() - began < 30


@pytest.mark.parametrize("part, value", [
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}),
    ("normalizer", normalizers("abc", {"String": ""})), ("normalizer", normalizers("abc", {"Regex": "x*"})),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA"}),
])  # fmt: skip
def test_panics_are_sentences(tmp_path: Path, part: str, value: Any) -> None:
    text = opened(tmp_path, lambda described: described.update({part: value}))
    with pytest.raises(RunError, match="as expected"), guarded("as expected"):
        text.tokenizer.encode("a" * 60 + "!")


@pytest.mark.parametrize("escaped", [False, True])
@pytest.mark.parametrize("charsmap", ["/////wAAAAAAAAAA", "BAAA", "!", ""])
def test_damaged_tables_of_characters_are_refused_before_the_library_reads_them(
    tmp_path: Path, charsmap: str, escaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("still_export.package.tokenizer_bounds.guarded", lambda what: pytest.fail("it was read"))
    dumps = json.dumps
    if escaped:
        monkeypatch.setattr(json, "dumps", lambda value: dumps(value).replace("precompiled", "\\u0070recompile\\u0064"))
    with pytest.raises(RunError, match="charsmap"):
        table = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        opened(tmp_path, lambda described: described.update(normalizer=table))


@pytest.mark.parametrize("prefix, merge", [
    ("", ["a", "b" * 99]), ("", "a " + "b" * 99), ("####", ["a", "b"]), ("x", ["a", "\u00e9"]), ("x", ["a", "xc"]),
])  # fmt: skip
@pytest.mark.parametrize("twice", ["", "continuing_subword_prefix", "merges"])
def test_merges_that_make_no_token_are_refused_before_the_library_reads_them(
    tmp_path: Path, prefix: str, merge: Any, twice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a prefix that ends within a character the library aborts, and with it the process."""
    monkeypatch.setattr("still_export.package.tokenizer_bounds.guarded", lambda what: pytest.fail("it was read"))
    words = ["a", "b", "b" * 99, "\u00e9", "xc", "ab"]
    model = {"vocab": {word: number for number, word in enumerate(words)}, "merges": [merge]}
    if prefix:
        model["continuing_subword_prefix"] = prefix
    model.setdefault(twice or "merges", None)
    dumps = json.dumps
    if twice:
        monkeypatch.setattr(
            json, "dumps", lambda value: dumps(value).replace(f'"{twice}"', f'"{twice}": null, "{twice}"')
        )
    with pytest.raises(RunError, match="is there twice" if twice else "makes no token"):
        opened(tmp_path, lambda described: described["model"].update(model))


def test_repeated_repetitions_by_brute_force() -> None:
    """Of random expressions, those in which nothing repeats a repetition have no star behind a group with one."""
    rng = random.Random(0)
    for _ in range(300):
        inner = "".join(rng.choice(["a", "[(+]", "\\+", "\\)", "b?", "(?:c)"]) for _ in range(4))
        assert not repeats_repetitions(f"({inner})+")
        repeat = rng.choice(["+", "*", "{2,}"])
        assert repeats_repetitions(f"({inner}a{repeat})*") and repeats_repetitions(f"(?:x({inner}[a)]{repeat}))+")
        assert not repeats_repetitions(f"({inner}a{repeat})?")
        re.compile(f"({inner})+")


@pytest.mark.parametrize("secret", ["\x1b[2J", "\x9b31m", "\x07", "\u202e", "\r", "\x7f"])
def test_terminals_see_no_control_characters(secret: str, export_tiny: Any, tmp_path: Path, capsys: Any) -> None:
    assert secret not in printable(f"a{secret}b") and printable("é\n\t世 a") == "é\n\t世 a"
    package = tmp_path / "package"
    shutil.copytree(export_tiny().path, package)
    manifest = json.loads((package / "manifest.json").read_text())
    manifest["command"] = manifest["config"]["model"] = manifest["versions"]["python"] = f"a{secret}b"
    manifest["model"]["family"] = f"a{secret}b"
    (package / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    call("inspect", str(package))
    said = capsys.readouterr()
    assert secret not in said.out + said.err and f"a{secret}b".encode("unicode_escape").decode() in said.out
