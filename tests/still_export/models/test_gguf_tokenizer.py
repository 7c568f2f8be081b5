"""Tokenizers of GGUF files give the ids of the tokenizers that they were made of, which transformers' own classes are."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from still_export.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from still_export.gguf.container import open_gguf
from still_export.gguf.rules import RULES
from still_export.models.gguf import read_tokenizer
from still_export.models.read.tokenizer_file import TEXTS, write_tokenizer

SPECIAL = ["<|begin|>", "<|end|>", "<\uff5cturn\u2581one\uff5c>"]


def trained(split: Any) -> tuple[list[str], list[str]]:
    """A byte-level vocabulary and its merges, special tokens last."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([text for text in TEXTS if text] * 9, trainer)
    model = json.loads(made.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return [*sorted(model["vocab"], key=model["vocab"].__getitem__), *SPECIAL], merges


def write(
    path: Path, tokens: list[str], merges: list[str] | None, rule: str | None, kinds: list[int], **keys: Any
) -> Path:
    """A file with no model but an embedding."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model(keys.pop("model", "gpt2"))
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if merges is not None:
        writer.add_token_merges(merges)
    rows = keys.pop("rows", len(tokens))
    for name, value in keys.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((rows, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("rule, owner", [
    ("qwen2", Qwen2Tokenizer), ("deepseek-r1-qwen", Qwen2Tokenizer), ("qwen35", Qwen3_5Tokenizer),
    ("gpt-2", GPT2Tokenizer), ("olmo", GPTNeoXTokenizer), ("command-r", CohereTokenizer),
])  # fmt: skip
def test_rules_split_as_the_models_own_tokenizers(rule: str, owner: type, tmp_path: Path) -> None:
    split = owner(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer
    tokens, merges = trained(split)
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    ids = {token: number for number, token in enumerate(tokens)}
    base = owner(vocab=ids, merges=[tuple(merge.split(" ")) for merge in merges], bos_token=SPECIAL[0])
    base.add_special_tokens({"additional_special_tokens": SPECIAL})
    ours = read_tokenizer(write(tmp_path / "m.gguf", tokens, merges, rule, kinds, bos_token_id=len(tokens) - 3))
    for text in (*TEXTS, f"a{SPECIAL[1]} b{SPECIAL[2]}c"):
        want = base.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == want, text
        assert ours.decode(want) == base.decode(want)
    assert [ours.convert_tokens_to_ids(token) for token in SPECIAL] == [ids[token] for token in SPECIAL]
    assert ours.decode([ids[token] for token in SPECIAL], skip_special_tokens=True) == SPECIAL[2]


def test_rules_differ(tmp_path: Path) -> None:
    """What the test above compares with tells them apart."""
    splits = {
        name: tuple(
            map(str, rule.pre_tokenizer().pre_tokenize_str(TEXTS[0] + TEXTS[2] + TEXTS[3] + "你好abc 你a camelCase"))
        )
        for name, rule in RULES.items()
    }
    names = ("qwen2", "qwen35", "gpt-2", "command-r", "llama-bpe", "tekken", "gpt-4o", "deepseek-v3", "kimi-k2")
    assert len({splits[name] for name in names}) == len(names)


@pytest.mark.parametrize("rule, flag, first", [
    ("llama-bpe", None, True), ("llama-bpe", False, False), ("qwen2", None, False), ("qwen2", True, True), ("tekken", None, True),
])  # fmt: skip
def test_a_first_token_is_added_by_key_or_rule(rule: str, flag: bool | None, first: bool, tmp_path: Path) -> None:
    tokens, merges = trained(RULES[rule].pre_tokenizer())
    keys: dict[str, Any] = {} if flag is None else {"add_bos_token": flag}
    bos = len(tokens) - 3
    path = write(tmp_path / "m.gguf", tokens, merges, rule, [1] * bos + [3, 3, 3], bos_token_id=bos, **keys)
    assert (read_tokenizer(path).encode("x")[0] == bos) is first


def test_sentence_pieces(tmp_path: Path) -> None:
    """Merges by scores, bytes for what no token has; a space before a text, and behind special tokens, where no key forbids it."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["\u2581", "t", "h", "e", "a", "he", "th", "the", "\u2581the", "\u2581t", "\n\n"]
    tokens = pieces + words
    kinds = [2, 3, 3, *[6] * 256, *[1] * 10, 4]
    scores = [0.0] * 259 + [-20.0, -21.0, -22.0, -23.0, -24.0, -1.0, -2.0, -3.0, -4.0, -5.0, 0.0]
    keys: dict[str, Any] = dict(model="llama", token_scores=scores, bos_token_id=1, eos_token_id=2, unk_token_id=0)
    ids = {token: number for number, token in enumerate(tokens)}
    ours = read_tokenizer(write(tmp_path / "m.gguf", tokens, None, "default", kinds, **keys))
    assert ours.encode("the") == [1, ids["\u2581the"]]
    assert ours.encode("thh") == [
        1,
        ids["\u2581"],
        ids["th"],
        ids["h"],
    ]  # "th" has a better score than a space and its t
    assert ours.encode("th") == [1, ids["\u2581"], ids["th"]]
    assert ours.encode("a</s>a\n\n") == [1, *(ids[x] for x in ("\u2581", "a", "</s>", "\u2581", "a", "\n\n"))]
    assert ours.encode("\u00e9")[2:] == [ids["<0xC3>"], ids["<0xA9>"]]
    assert ours.decode(ours.encode("the \u00e9"), skip_special_tokens=True) == "the \u00e9"
    plain = read_tokenizer(write(tmp_path / "n.gguf", tokens, None, "default", kinds, **keys, add_space_prefix=False))
    assert plain.encode("the a") == [1, ids["the"], ids["\u2581"], ids["a"]]
    unnamed = {name: value for name, value in keys.items() if not name.endswith("_token_id")}
    found = read_tokenizer(write(tmp_path / "o.gguf", tokens, None, "default", kinds, **unnamed))  # llama.cpp's ids
    assert (found.encode("the"), found.bos_token, found.eos_token) == ([1, ids["\u2581the"]], "<s>", "</s>")


def test_pieces_as_gemma_has_them(tmp_path: Path) -> None:
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"]
    scores = [0.0] * 260 + [-9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581a", "b"), ("\u2581", "ab")]
    base = GemmaTokenizer(vocab={token: number for number, token in enumerate(words)}, merges=merges)
    kinds = [3, 3, 3, 2, *[6] * 256, *[1] * 6]
    keys: dict[str, Any] = dict(
        model="llama", token_scores=scores, bos_token_id=2, eos_token_id=1, add_space_prefix=False
    )
    ours = read_tokenizer(write(tmp_path / "m.gguf", words, None, "default", kinds, **keys))
    for text in ("ab ab  a\u00e9<eos>b", "", " a", "b\n"):
        assert ours.encode(text, add_special_tokens=False) == base.encode(text, add_special_tokens=False), text


def test_ends_of_turns_are_tokens_whatever_kind_they_have(tmp_path: Path) -> None:
    """As llama.cpp has it: files have been written with `<|im_end|>` as a plain token."""
    tokens, merges = trained(RULES["qwen2"].pre_tokenizer())
    tokens = ["<|im_end|>" if token == SPECIAL[1] else token for token in tokens]
    kinds = [1] * len(tokens)
    for template, whole in (("{{ messages }}<|im_end|>", True), ("{{ messages }}", False)):
        path = write(tmp_path / f"{whole}.gguf", tokens, merges, "qwen2", kinds, chat_template=template)
        assert (read_tokenizer(path).encode("a<|im_end|>")[-1] == tokens.index("<|im_end|>")) is whole


@pytest.mark.parametrize("change, error, said", [
    (dict(rule=None), UnsupportedModelError, "tokenizer.ggml.pre"),
    (dict(rule="default"), UnsupportedModelError, "'default'"),
    (dict(rule="unheard-of"), UnsupportedModelError, "unheard-of"),
    (dict(model="t5"), UnsupportedModelError, "'t5'"),
    (dict(model="none"), ModelNotFoundError, "none"),
    (dict(merges=["\u0120 q", "qq"]), CheckpointError, "not a pair"),
    (dict(merges=["nota pair"]), CheckpointError, "not a pair"),
    (dict(merges=["a " + "b" * 3]), CheckpointError, "not a pair"),
    (dict(merges=["\u0120 \u00e9"]), CheckpointError, "make another"),
    (dict(merges=None), CheckpointError, r"tokenizer\.ggml\.merges"),
    (dict(model="llama", merges=None), CheckpointError, r"tokenizer\.ggml\.scores"),
    (dict(rows=300), CheckpointError, "outside"),
    (dict(kinds=[1] * 5), CheckpointError, "5 types"),
])  # fmt: skip
def test_a_tokenizer_that_cannot_be_right_is_an_error(
    change: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    tokens, merges = trained(RULES["qwen2"].pre_tokenizer())
    given = {"rule": "qwen2", "merges": merges, "kinds": [1] * (len(tokens) - 3) + [3] * 3, **change}
    path = write(tmp_path / "m.gguf", tokens, **given)
    with pytest.raises(error, match=said):
        read_tokenizer(path)


def test_tokens_beyond_the_embedding_that_nothing_uses(tmp_path: Path) -> None:
    """Converters pad the list; two tokens of one text keep their ids."""
    tokens, merges = trained(RULES["qwen2"].pre_tokenizer())
    count = len(tokens)
    padded = [*tokens, tokens[5], "[PAD1]", "[PAD2]"]
    kinds = [1] * (count - 3) + [3] * 3 + [1, 5, 5]
    ours = read_tokenizer(write(tmp_path / "m.gguf", padded, merges, "qwen2", kinds, rows=count + 1))
    assert len(ours) == count + 1 and max(ours.encode(" ".join(padded))) < count + 1
    assert ours.convert_tokens_to_ids(tokens[5]) == 5


def test_a_written_file_gives_the_tokenizers_ids(tmp_path: Path) -> None:
    """And has neither truncation nor padding, which training leaves behind."""
    tokens, merges = trained(RULES["qwen2"].pre_tokenizer())
    kinds = [1] * (len(tokens) - 3) + [3] * 3
    ours = read_tokenizer(write(tmp_path / "m.gguf", tokens, merges, "qwen2", kinds, bos_token_id=len(tokens) - 3))
    ours.backend_tokenizer.enable_truncation(5)
    ours.backend_tokenizer.enable_padding(length=9)
    (tmp_path / "out").mkdir()
    write_tokenizer(ours, tmp_path / "out", "m.gguf")
    written = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert written.truncation is None and written.padding is None
    assert written.encode(TEXTS[0]).ids == ours.encode(TEXTS[0])

    class Other:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [*ours.encode(text), 1]}

        save_pretrained = ours.save_pretrained

    with pytest.raises(CheckpointError, match="contradict"):
        write_tokenizer(Other(), tmp_path / "out", "m.gguf")


LISTS: dict[str, Any] = {
    "texts": ["", "a", "\u4e16\u754c", "longer than eight bytes"],
    "whole": [3, -1, 7],
    "floats": [0.5, -2.25],
    "truths": [True, False, True],
    "nested": [[1, 2], [3, 4]],
}


@pytest.mark.parametrize("order", ["LITTLE", "BIG"])
def test_lists_are_read_as_the_library_reads_them(order: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3", endianess=gguf.GGUFEndian[order])
    for name, values in LISTS.items():
        writer.add_array(name, values)
    writer.add_uint32("behind", 77)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    found, right = open_gguf(path), gguf.GGUFReader(path)
    assert found.fields.keys() == right.fields.keys() > {*LISTS, "behind"}
    for name, field in right.fields.items():
        assert found.value(name) == field.contents(), name
    whole = path.read_bytes()
    for size in range(24, len(whole) - gguf.GGUF_DEFAULT_ALIGNMENT, 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_gguf(path)
