"""Compare everything else that a user runs of a package with the model's: tokenizer, chat format, end tokens, generation settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from still_export.package.chat_format import ChatFormat
from still_export.package.folder import Package
from still_export.proof.texts_asked import CHATS, KINDS, Silent, tokenizer_texts
from still_export.proof.verdict import Check, Verdict
from still_export.runtime.sampling import RunError
from still_export.runtime.text import Text

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
SPECIAL_MOST = 64
"""Special tokens that are tested in every place; of all others only the ids."""
CONTROL = (3, 4)
"""GGUF token types that may end an answer: control tokens, and user-defined ones."""
GGUF_IDS = {"eos": "", "eot": "", "eom": "", "bos": "bos_token_id", "padding": "pad_token_id"}
"""GGUF's names of special tokens, and the generation settings that they are."""
SHOWN = 60
"""Characters of a text that a message shows."""
SAVED = (
    *("special_tokens_map", "added_tokens_decoder", "model_max_length", "clean_up_tokenization_spaces"),
    *("padding_side", "truncation_side", "model_input_names"),
)
"""Attributes of a tokenizer of transformers that its files keep."""
APART = ("transformers_version", "_from_model_config", "output_attentions", "output_hidden_states", "use_cache")
"""Generation settings that change no token."""
SINGLE, IDS = ("bos_token_id", "pad_token_id"), ("_token_id", "_token_ids")
"""Settings whose first entry counts if they are lists; suffixes of names of token ids."""


def check_files(package: Package, source: Path) -> Verdict:
    """Compare tokenizer, chat format, end tokens and generation settings with those of the model folder or GGUF file `source`."""
    verdict = Verdict()
    if TOKENIZER in package.manifest["files"]:
        verdict.add(_check_texts(package, source))
    else:
        verdict.not_asked.append(f"texts: the package has no {TOKENIZER} and runs on token ids")
    verdict.add(_check_ends(package, source))
    return verdict


def _check_texts(package: Package, source: Path) -> Verdict:
    from tokenizers import Tokenizer

    verdict = Verdict()
    path = package.path / TOKENIZER
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # of the library's Rust side
        return Verdict.of([Check("the tokenizer is the model's", False, f"it cannot be read: {error}", TOKENIZER)])
    own = _own_tokenizer(source, verdict)
    if own is None:
        return verdict
    added = sorted(own.get_added_vocab().items(), key=lambda entry: entry[1])
    texts = tokenizer_texts([token for token, _ in added[:SPECIAL_MOST]])
    wrong = []
    for text in texts:
        for special in (False, True):
            right = list(own(text, add_special_tokens=special)["input_ids"])
            found = tokenizer.encode(text, add_special_tokens=special).ids
            if right != found:
                wrong.append(_first_difference(text, right, found))
        back = own.decode(right, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if right == found and tokenizer.decode(found) != back:
            wrong.append(
                f"the tokens of {text[:SHOWN]!r} become {tokenizer.decode(found)[:SHOWN]!r}, the model's {back[:SHOWN]!r}"
            )
    written = {token["content"]: token["id"] for token in _json(path).get("added_tokens") or []}
    wrong += [
        f"token {token!r} has the id {found}, the model's {number}"
        for token, number in added
        for found in {
            tokenizer.token_to_id(token),
            written.get(token),
        }  # ids of its own that the library has better ones for
        if found != number
    ]
    vocabulary = own.get_vocab()
    if tokenizer.get_vocab() != vocabulary:
        other = {token for token, number in tokenizer.get_vocab().items() if vocabulary.get(token) != number}
        other |= {token for token in vocabulary if token not in tokenizer.get_vocab()}
        wrong.append(f"{len(other)} words have other ids, such as {min(other)!r}")
    wrong += _other_rules(tokenizer, own)
    name = f"the tokenizer reads and writes {len(texts)} texts as the model's"
    verdict.checks.append(Check.of(name, [(TOKENIZER, text) for text in wrong]))
    verdict.checks.append(_check_saved(package, own))
    verdict.add(_check_chat(package, tokenizer, own))
    return verdict


def _other_rules(tokenizer: Any, own: Any) -> list[str]:
    """Differences of two tokenizers other than words: merges, splitting rules, flags of special tokens."""
    from tokenizers import Tokenizer

    backend = getattr(own, "backend_tokenizer", None)
    if backend is None:
        return []
    model = Tokenizer.from_str(backend.to_str())
    model.no_truncation()
    model.no_padding()
    found, right = (json.loads(each.to_str()) for each in (tokenizer, model))
    parts = ((f"{part} of its model", *(e["model"].get(part) for e in (found, right))) for part in right["model"])
    whole = ((part, found.get(part), right[part]) for part in right if part not in ("version", "model"))
    wrong = []
    for name, actual, expected in (*parts, *whole):
        if actual != expected and name != "vocab of its model":  # words are compared above
            if isinstance(actual, list) and isinstance(expected, list):
                place = next(
                    (i for i, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), -1
                )
                name, actual, expected = (
                    f"number {place} of {name}",
                    *((e[place:] or [None])[0] for e in (actual, expected)),
                )
            wrong.append(f"{name} is {json.dumps(actual)[:SHOWN]}, the model's {json.dumps(expected)[:SHOWN]}")
    return wrong


def _check_saved(package: Package, own: Any) -> Check:
    """The package's tokenizer as transformers reads it, with tokenizer_config.json and chat_template.jinja."""
    from transformers import AutoTokenizer

    name = "the tokenizer that transformers reads of the package is the model's"
    try:
        saved = AutoTokenizer.from_pretrained(package.path, trust_remote_code=False)
    except Exception as error:  # of half a dozen libraries
        return Check(name, False, f"it cannot be read: {' '.join(str(error).split())[:200]}", TOKENIZER_CONFIG)
    ids = [f"{kind}_token_id" for kind in ("bos", "eos", "pad", "unk")]
    wrong = [
        f"{what} is {_place_of_difference(found, right)}"
        for what in ("chat_template", *ids, *SAVED)
        if str(right := getattr(own, what, None)) != str(found := getattr(saved, what, None))
    ]
    for text in (*KINDS, *saved.get_added_vocab()):
        right, found = ([*each(text)["input_ids"]] for each in (own, saved))
        if right != found:
            wrong.append(_first_difference(text, right, found))
        elif (here := saved.decode(found)) != (there := own.decode(right)):
            wrong.append(f"the tokens of {text[:SHOWN]!r} become {here[:SHOWN]!r}, the model's {there[:SHOWN]!r}")
    return Check.of(name, [(TOKENIZER_CONFIG, text) for text in wrong])


def _own_tokenizer(source: Path, verdict: Verdict) -> Any:
    """The model's tokenizer by transformers; a GGUF file's by this project, because transformers drops its splitting rule."""
    if source.is_file():
        from still_export.models.load import load_tokenizer

        verdict.add(_check_gguf_words(source))
        verdict.not_asked.append(
            "how texts are split, by another reader: transformers drops the rule of tokenizer.ggml.pre, so this project's own was asked"
        )
        return load_tokenizer(str(source))
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        try:
            own = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except ValueError:  # the folder has its own class, whose code is never run
            if not (source / TOKENIZER).is_file():
                raise
            own = PreTrainedTokenizerFast.from_pretrained(source)
        if getattr(own, "is_fast", False) and getattr(own.backend_tokenizer.model, "dropout", None):
            own.backend_tokenizer.model.dropout = None  # for training: each answer would be another
        return own
    except Exception as error:  # of half a dozen libraries
        reason = " ".join(str(error).split())[:200]
        verdict.not_asked.append(f"texts: transformers cannot read the model's tokenizer ({reason})")
        return None


def _check_gguf_words(source: Path) -> Verdict:
    """Compare the words and chat template of a GGUF file by the gguf package; words that it calls unused may be missing."""
    from gguf import GGUFReader, TokenType

    from still_export.models.load import load_tokenizer

    reader = GGUFReader(source)
    field, kinds = (reader.get_field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if field is None:
        return Verdict(not_asked=["the words of the GGUF file: it has none"])
    read = load_tokenizer(str(source))
    words, known = field.contents(), read.convert_ids_to_tokens
    unused = {i for i, kind in enumerate(kinds.contents() if kinds else ()) if kind == TokenType.UNUSED}
    wrong = [
        f"token {number} is {found!r}, the file's {word!r}"
        for number, (word, found) in enumerate(zip(words, known(list(range(len(words)))), strict=True))
        if word != found and not (found or "").startswith("<0x") and (found is not None or number not in unused)
    ]
    template, found = reader.get_field("tokenizer.chat_template"), getattr(read, "chat_template", None)
    found = found.get("default") if isinstance(found, Mapping) else found
    if found != (right := None if template is None else template.contents()):
        wrong.append(f"the chat template is {str(found)[:SHOWN]!r}, the file's {str(right)[:SHOWN]!r}")
    name = "the tokenizer's words and chat template are the file's"
    return Verdict.of([Check.of(name, [("", text) for text in wrong])])


def _place_of_difference(found: Any, right: Any) -> str:
    """Both sides around the first character in which they differ."""
    actual, expected = str(found), str(right)
    place = next((i for i, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, place - SHOWN // 2)
    return f"{actual[start : start + SHOWN]!r}, the model's {expected[start : start + SHOWN]!r}"


def _first_difference(text: str, right: Sequence[int], found: Sequence[int]) -> str:
    place = next(
        (i for i, pair in enumerate(zip(right, found, strict=False)) if pair[0] != pair[1]), min(len(right), len(found))
    )
    actual, expected = (list(ids[place : place + 4]) for ids in (found, right))
    counts = f"{len(found)} tokens, the model's {len(right)}"
    return f"{text[:SHOWN]!r} becomes {counts}; from number {place} on {actual}, the model's {expected}"


def _check_chat(package: Package, tokenizer: Any, own: Any) -> Verdict:
    """Compare the package's chats with the model's template: texts and tokens."""
    name = "the chat format is the model's"
    template, chat = bool(getattr(own, "chat_template", None)), package.manifest.get("chat")
    if not template or not chat:
        wrong = ["the model has none"] * (not template and bool(chat)) + ["the model has one"] * (template and not chat)
        return Verdict.of([Check(name, False, wrong[0], "manifest.json: chat")] if wrong else [])
    text, compared = Text(Silent(package.path, package.manifest)), 0  # type: ignore[arg-type]
    wrong = [
        f"{what} is {_place_of_difference(chat.get(what), right)}"
        for what, right in _chat_of(own).items()
        if chat.get(what) != right
    ]
    for messages, more in CHATS:
        try:
            right = own.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **more)
        except Exception as error:  # of a template, which may raise anything
            right = None
            reason = str(error)
        try:
            found = text.dialogue(messages, **more)
        except RunError as error:
            if right is not None:
                wrong.append(f"{len(messages)} messages are refused ({error})")
            continue
        if right is None:
            wrong.append(f"{len(messages)} messages are accepted that the model's template refuses ({reason})")
            continue
        compared += 1
        if (ids := own(right, add_special_tokens=False)["input_ids"]) != found:
            wrong.append(_first_difference(f"{len(messages)} messages", ids, found))
    if not compared and not wrong:
        return Verdict(not_asked=["chats: the model's template accepts none of those that are asked"])
    return Verdict.of([Check.of(name, [("manifest.json: chat", text) for text in wrong])])


def _chat_of(own: Any) -> dict[str, Any]:
    """The manifest's chat format for a tokenizer with a template."""
    own_template = own.chat_template
    templates = dict(own_template) if isinstance(own_template, Mapping) else {"default": str(own_template)}
    found = ChatFormat(templates, dict(own.special_tokens_map))
    start = ""
    with contextlib.suppress(RunError):  # the template does not accept a single message
        start = found.start()
    return {**found.to_dict(), "start": start}


def _check_ends(package: Package, source: Path) -> Verdict:
    """End tokens and generation settings."""
    known = set(package.manifest["eos_token_ids"])
    if source.is_file():
        from gguf import GGUFReader

        reader = GGUFReader(source)
        fields = {name: reader.get_field(f"tokenizer.ggml.{name}_token_id") for name in GGUF_IDS}
        ids = {name: int(f.contents()) for name, f in fields.items() if f is not None}
        settings = {own: ids[name] for name, own in GGUF_IDS.items() if own and name in ids}
        right, more = ({ids[name] for name in part if name in ids} for part in (("eos",), ("eos", "eot", "eom")))
        kinds = reader.get_field("tokenizer.ggml.token_type")
        more |= set() if kinds is None else {i for i, kind in enumerate(kinds.contents()) if kind in CONTROL}
    else:
        config = _json(source / "config.json")
        config = {**config.get("text_config", {}), **config}
        own = {name: config[name] for name in (*SINGLE, "eos_token_id") if config.get(name) is not None}
        if "eos_token_id" not in config:
            own["eos_token_id"] = _end_of_class(source)
        settings = _json(source / GENERATION) or own
        right = _ids(settings.get("eos_token_id"))
        more = right | _ids(_end_of_tokenizer(source))
    saved, where = _ids(_json(package.path / GENERATION).get("eos_token_id")), "manifest.json: eos_token_ids"
    wrong = "" if right <= known <= more else f"they are {sorted(known)}, the model's {sorted(right)}"
    if not wrong and saved != known:
        wrong, where = f"they are {sorted(saved)} in {GENERATION} and {sorted(known)} in manifest.json", GENERATION
    ends = Check("end tokens are the model's", not wrong, wrong, where * bool(wrong))
    return Verdict.of([_check_settings(package, settings, not (source / GENERATION).is_file()), ends])


def _end_of_class(source: Path) -> Any:
    """The end tokens that transformers' configuration has where config.json names none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config().eos_token_id
    except Exception:  # a class that transformers lacks
        return None


def _end_of_tokenizer(source: Path) -> int | None:
    entry = _json(source / TOKENIZER_CONFIG).get("eos_token")
    token = entry.get("content") if isinstance(entry, Mapping) else entry
    words = _json(source / TOKENIZER).get("added_tokens") or []
    return next((int(word["id"]) for word in words if word.get("content") == token), None)


def _check_settings(package: Package, settings: Mapping[str, Any], configured: bool) -> Check:
    """Compare generation settings in both directions; a model without them (`configured`) may have token ids of its class."""
    from transformers import GenerationConfig

    first = {name: _first(settings[name]) for name in SINGLE if name in settings}
    right, found = (
        GenerationConfig(**{k: v for k, v in each.items() if k not in APART}).to_dict()
        for each in ({**settings, **first}, _json(package.path / GENERATION))
    )
    names = set(settings) | {name for name in found.keys() | right.keys() if not (configured and name.endswith(IDS))}
    wrong = [
        f"{name} is {found.get(name)!r}, the model's {right.get(name)!r}"
        for name in sorted(names.difference(APART))
        if found.get(name) != right.get(name)
    ]
    return Check("generation settings are the model's", not wrong, "; ".join(wrong[:4]), GENERATION * bool(wrong))


def _first(value: Any) -> Any:
    return (value or [None])[0] if isinstance(value, list) else value


def _ids(value: Any) -> set[int]:
    """Token ids without negative ones."""
    found = () if value is None else value if isinstance(value, (list, tuple)) else (value,)
    return {int(x) for x in found if int(x) >= 0}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
