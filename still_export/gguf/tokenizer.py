"""The tokenizer of a GGUF file, with llama.cpp's defaults for missing keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from still_export.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from still_export.gguf.architectures import turn_ends
from still_export.gguf.container import Container, open_gguf
from still_export.gguf.rules import rule_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5
_SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "mask")
"""Spelled as in the keys."""
_SPACE = "\u2581"


@dataclass(frozen=True)
class _Vocabulary:
    """Tokens of a file by id, with their kinds."""

    path: Path
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int | None]

    @property
    def added(self) -> list[tuple[str, bool]]:
        """Returns (token, whether decoders drop it) of tokens that are found in a text before it is split."""
        marked = {token for token in self.ids.values() if token is not None}
        return [
            (token, kind != _USER)
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if token and (kind in (_UNKNOWN, _CONTROL, _USER) or number in marked)
        ]

    def named(self, name: str) -> str | None:
        """The text of a special token."""
        token = self.ids.get(name)
        return None if token is None else self.tokens[token]


@dataclass(frozen=True)
class Facts:
    """What a file's keys say of its tokenizer.

    Attributes:
        names: Special tokens under transformers' names: bos_token, eos_token, unk_token, pad_token.
        begins: Whether each text begins with bos.
        adds_eos: Whether eos follows each text, where there is one.
    """

    vocabulary: _Vocabulary
    names: dict[str, str]
    begins: bool
    adds_eos: bool


def read_facts(file: Container) -> Facts:
    """Read the keys of a GGUF file's tokenizer without building it, which takes seconds for large vocabularies.

    Raises:
        CheckpointError: Its parts do not fit together.
        UnsupportedModelError: Its kind or its rule for splitting texts is not supported.
        ModelNotFoundError: The file has no tokenizer.
    """
    path = file.path
    kind = str(file.value("tokenizer.ggml.model", "none"))
    if kind in ("none", "no_vocab", "rwkv"):
        why = f"no library's ({kind})" if kind == "rwkv" else "none"
        raise ModelNotFoundError(f"the tokenizer of {path} is {why}.")
    if kind not in _MAKERS:
        raise UnsupportedModelError(
            f"the tokenizer of {path} has kind {kind!r} (tokenizer.ggml.model); supported: {', '.join(_MAKERS)}. "
            "Use the model's Hugging Face folder."
        )
    vocabulary = _vocabulary(file)
    pieces = kind == "llama"
    adds_bos = pieces or rule_of(file.value("tokenizer.ggml.pre", None), path).adds_bos
    key = "tokenizer.ggml.scores" if pieces else "tokenizer.ggml.merges"
    found = file.fields.get(key)
    if found is None or not found.contents(slice(1)):
        _demand_plain(vocabulary, key)
    adds_bos = bool(file.value("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(file.value("tokenizer.ggml.add_eos_token", False))
    fields = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    names = {field: token for field, name in fields.items() if (token := vocabulary.named(name)) is not None}
    return Facts(vocabulary, names, adds_bos and "bos_token" in names, adds_eos)


def make_tokenizer(file: Container) -> tuple[Tokenizer, Facts]:
    """Make the tokenizer of a GGUF file; errors: see `read_facts`."""
    facts = read_facts(file)
    vocabulary = facts.vocabulary
    try:
        made = _MAKERS[str(file.value("tokenizer.ggml.model"))](file, vocabulary)
    except (CheckpointError, UnsupportedModelError):
        raise
    except BaseException as error:  # the library's panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"the tokenizer of {file.path} cannot be built: {' '.join(str(error).split())}. The file is damaged; fetch it again."
        ) from error
    _add(made, vocabulary)
    _check(made, vocabulary)
    _surround(made, facts)
    return made, facts


def read_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file for transformers; errors: see `make_tokenizer`."""
    from transformers import PreTrainedTokenizerFast

    file = open_gguf(path)
    made, facts = make_tokenizer(file)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **facts.names)
    named = templates(file)
    tokenizer.chat_template = named if named.keys() - {"default"} else named.get("default")
    return tokenizer


def _vocabulary(file: Container) -> _Vocabulary:
    """Tokens that have an embedding in the model."""
    tokens = [str(token) for token in file.value("tokenizer.ggml.tokens")]
    kinds = [int(kind) for kind in file.value("tokenizer.ggml.token_type", [1] * len(tokens))]
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"the tokenizer of {file.path} has {len(tokens)} tokens and {len(kinds)} types of tokens. The file is damaged; fetch it again."
        )
    embedding = file.tensors.get("token_embd.weight")
    rows = len(tokens) if embedding is None else int(embedding.shape[1])
    beyond = [token for token, kind in zip(tokens[rows:], kinds[rows:], strict=True) if kind != _UNUSED]
    if beyond:
        raise CheckpointError(
            f"the tokenizer of {file.path} has {len(tokens)} tokens, the model embeddings of {rows}: {beyond[0]!r} lies outside of its "
            "vocabulary. They belong to different models; fetch the file again."
        )
    tokens, kinds = tokens[:rows], kinds[:rows]
    ids = {name: file.token(name) for name in _SPECIAL}
    ids |= {f"turn {number}": token for number, token in enumerate(turn_ends(file))}  # of any kind
    ids = {name: None if token is None or token >= len(tokens) else int(token) for name, token in ids.items()}
    seen: set[str] = set()
    for number, token in enumerate(tokens):
        if token in seen:  # a duplicate; texts give the first one
            tokens[number] = f"<token {number} of the vocabulary>"
        seen.add(token)
    return _Vocabulary(file.path, tokens, kinds, ids)


def _byte_level(file: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """Merges of bytes, as in GPT-2."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    rule = rule_of(file.value("tokenizer.ggml.pre", None), file.path)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = _pairs(file, file.value("tokenizer.ggml.merges", []), ids)
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=rule.ignore_merges))
    made.pre_tokenizer, made.decoder = rule.pre_tokenizer(), decoders.ByteLevel()
    if rule.composed:
        made.normalizer = normalizers.NFC()
    return made


def _demand_plain(vocabulary: _Vocabulary, key: str) -> None:
    """Raise CheckpointError if tokens need merges or scores that are missing under `key`."""
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True):
        if kind == _NORMAL and len(token) > 1:
            raise CheckpointError(
                f"{vocabulary.path} lacks the key {key}, which defines tokens such as {token!r}. Its tokenizer was lost; fetch "
                "another file, or use the model's Hugging Face folder."
            )


def _pairs(file: Container, merges: Sequence[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Merges as (left, right), split at the first space; the library panics where they make no token."""
    pairs = []
    for merge in merges:
        left, _, right = str(merge).partition(" ")
        if not all(part in ids for part in (left, right, left + right)):
            raise CheckpointError(
                f"the tokenizer of {file.path} has the merge {merge!r}, which is not a pair of tokens that make another. The file is "
                "damaged; fetch it again."
            )
        pairs.append((left, right))
    return pairs


def _sentence_piece(file: Container, vocabulary: _Vocabulary) -> Tokenizer:
    """Merges by the score of the result, with bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    scores = file.value("tokenizer.ggml.scores", None) or [0.0] * len(tokens)
    plain = {token: number for number, token in enumerate(tokens) if kinds[number] == _NORMAL}
    merges = []
    for token, number in plain.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in plain and right in plain:
                merges.append((-scores[number], number, cut, (left, right)))
    merges.sort()
    unknown = vocabulary.named("unknown") or next(
        (token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None
    )
    ids = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(
        models.BPE(ids, [pair for *_, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefixed = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return made


_MAKERS = {"gpt2": _byte_level, "llama": _sentence_piece}
"""By `tokenizer.ggml.model`."""


def _add(made: Tokenizer, vocabulary: _Vocabulary) -> None:
    from tokenizers import AddedToken

    special = [AddedToken(token, normalized=False, special=True) for token, hidden in vocabulary.added if hidden]
    made.add_special_tokens(special)
    made.add_tokens([AddedToken(token, normalized=False) for token, hidden in vocabulary.added if not hidden])


def _check(made: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Raise CheckpointError if a token that texts may name has another id than in the model."""
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    for token, _ in vocabulary.added:
        if (found := made.encode(token, add_special_tokens=False).ids) != [ids[token]]:
            raise CheckpointError(
                f"the tokenizer of {vocabulary.path} reads its token {token!r} ({ids[token]}) as {found}. The file is damaged; "
                "fetch another."
            )


def _surround(made: Tokenizer, facts: Facts) -> None:
    """Add the tokens that the file requires before and after each text."""
    from tokenizers import processors

    vocabulary = facts.vocabulary
    begin = vocabulary.named("bos") if facts.begins else None
    end = vocabulary.named("eos") if facts.adds_eos else None
    if begin is None and end is None:
        return
    around = [token for token in (begin, "$A", end) if token is not None]
    again = [token.replace("$A", "$B") for token in around]
    known = [(token, vocabulary.tokens.index(token)) for token in dict.fromkeys((begin, end)) if token is not None]
    made.post_processor = processors.TemplateProcessing(single=around, pair=around + again, special_tokens=known)


def templates(file: Container) -> dict[str, str]:
    """Chat templates by name; most files have only "default"."""
    names = file.value("tokenizer.chat_templates", [])
    default = file.value("tokenizer.chat_template", None)
    named = {str(name): str(file.value(f"tokenizer.chat_template.{name}")) for name in names}
    return {**({} if default is None else {"default": str(default)}), **named}
