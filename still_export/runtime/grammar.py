"""Answers that follow a JSON Schema, or are calls of tools: grammars of llguidance over the model's tokens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from still_export.runtime.sampling import GrammarError, RunError
from still_export.runtime.text import Text

MOST_CHARACTERS = 200_000
"""Of a grammar; larger ones take seconds to compile."""
OBJECT = {"type": "object"}
NOTHING: dict[str, Any] = {**OBJECT, "properties": {}}
"""Parameters of a tool that names none."""
_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON as json.dumps writes it: otherwise an unsure model writes blanks without an end. oneOf is taken as anyOf."""
_MARKS = (("<tool_call>", "</tool_call>"), ("<|tool_call_start|>", "<|tool_call_end|>"))
"""Marks around calls that may be JSON objects. Other models' calls are written as JSON without marks."""
_LOCK = threading.Lock()
_TOKENIZERS: WeakKeyDictionary[Text, Any] = WeakKeyDictionary()
Tools = Sequence[Mapping[str, Any]]


class LarkGrammar:
    """A grammar that an answer follows; one object for each answer.

    Args:
        text: Tokenizer of the model.
        vocabulary: Tokens of the model.
        lark: In llguidance's dialect of Lark.

    Raises:
        RunError: llguidance is not installed, or refuses the grammar.
    """

    def __init__(self, text: Text, vocabulary: int, lark: str) -> None:
        if len(lark) > MOST_CHARACTERS:
            raise RunError(f"the schema has more than {MOST_CHARACTERS:,} characters. Give a smaller one.")
        library = _library()
        tokenizer, self._never = _tokenizer(text, vocabulary)
        self._matcher = library.LLMatcher(tokenizer, lark, log_level=0)
        self._bits = self._matcher.compute_bitmask()  # some schemas fail only here, such as one that requires itself
        self._check("the schema is not one that answers can follow")
        self.ended = False

    def allowed(self) -> np.ndarray:
        """Tokens that may come next, bool [V]."""
        found = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little").astype(bool)
        if self._never is not None:
            found[self._never] = False
        return found

    def take(self, token: int) -> None:
        """Add a token of the answer."""
        self._matcher.consume_token(token)
        self.ended = self._matcher.is_stopped() or (self._never is not None and self._matcher.is_accepting())
        if not self.ended:
            self._bits = self._matcher.compute_bitmask()
        self._check("the grammar of this answer failed")

    def _check(self, what: str) -> None:
        if fault := self._matcher.get_error():
            reason = re.sub(r"^at \d+\(\d+\): ", "", fault.strip().partition("\n")[0])
            raise GrammarError(f"{what}: {reason[:300]}.")


def answer_lark(
    text: Text,
    prompt: Sequence[int],
    response_format: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
    tool_choice: str | None = None,
    one_call: bool = False,
) -> str:
    """The grammar of an answer to `prompt`; "": it is free.

    Args:
        response_format: As in OpenAI's API: {"type": "json_schema", "json_schema": {"schema": ...}}, or of type json_object or text.
        tools: As in OpenAI's API; calls of those with "strict": true follow the schemas of their parameters.
        tool_choice: none, auto, required, or a tool's name.
        one_call: At most one call.

    Raises:
        RunError: A field is not what it must be.
    """
    schema, named = _schema(response_format), dict[str, Mapping[str, Any]]()
    for tool in tools or ():
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RunError("a tool has no function with a name.")
        if not isinstance(function.get("parameters", {}), Mapping | None):
            raise RunError(f"the parameters of the tool {function['name']!r:.60} are no JSON Schema.")
        named[function["name"]] = {**function, "parameters": function.get("parameters") or NOTHING}
    forced = tool_choice not in (None, "none", "auto")
    if forced and tool_choice != "required":
        named = {name: function for name, function in named.items() if name == tool_choice}
    if forced and not named:
        raise RunError(f"tool_choice is {tool_choice!r:.60}, and tools has no such function.")
    if not named or tool_choice == "none":
        return "" if schema is None else _start(text, prompt, "answer", f"answer: {_json(schema)}")
    if forced:
        return tools_lark(text, list(named.values()), prompt, most_one=one_call or tool_choice != "required")
    if schema is None and not (any(f.get("strict") for f in named.values()) and _marks(text)):
        return ""
    loose = [function if function.get("strict") else {"name": name} for name, function in named.items()]
    return tools_lark(text, loose, prompt, schema is not None, one_call, schema)


def _schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The answer's JSON Schema; None: it is free."""
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return None
    form = response_format or {}
    if kind == "json_object":  # with a schema as llama.cpp, Together and Fireworks have it
        schema = form.get("schema") or OBJECT
    else:
        inner = form.get("json_schema")
        schema = inner.get("schema", {}) if isinstance(inner, Mapping) else None
    if kind not in ("json_schema", "json_object") or not isinstance(schema, Mapping):
        raise RunError(
            f"response_format of type {kind!r:.40}: give text, json_object, or json_schema with json_schema.schema."
        )
    return schema


def _start(text: Text, prompt: Sequence[int], start: str, *rules: str) -> str:
    """A grammar of `start`, after the model's reasoning if it has any."""
    return "\n".join([f"start: {_thought(text, prompt)} ({start})", "TEXT: /(.|\\n)*/", *rules])


def _marks(text: Text) -> tuple[str, str] | None:
    """The marks around the model's calls; None: it has no known ones."""
    templates = "\n".join((text.chat.templates if text.chat else {}).values())
    return next((marks for marks in _MARKS if _known(text, marks[0]) or marks[0] in templates), None)


def tools_lark(
    text: Text,
    functions: Sequence[Mapping[str, Any]],
    prompt: Sequence[int],
    required: bool = True,
    most_one: bool = False,
    schema: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of calls of `functions` in the model's notation.

    Args:
        required: Nothing but calls; otherwise any text, in which a call that has begun is one of these.
        most_one: One call.
        schema: Of an answer without calls, which is allowed too; None: there is none.
    """
    marks, rules, other = _marks(text), list[str](), ""
    if schema is not None:
        rules, other = [f"answer: {_json(schema)}"], " | answer"
    xml = marks is not None and any(
        "<parameter=" in template for template in (text.chat.templates if text.chat else {}).values()
    )
    for number, function in enumerate(functions):
        name, parameters = function["name"], function.get("parameters") or OBJECT
        start = _quoted(f'{{"name": {json.dumps(name)}, "arguments": ')
        body = _xml(rules, number, name, parameters) if xml else f'{start} {_json(parameters)} "}}"'
        rules.append(f"call_{number}: {body}")
    calls = " | ".join(f"call_{n}" for n in range(len(functions)))
    if marks is None:
        more = "" if most_one else f'(", " ({calls}))*'
        return _start(text, prompt, f'"[" ({calls}) {more} "]"{other}', *rules)
    begin, end, line = _mark(text, marks[0]), _mark(text, marks[1]), _quoted("\n")
    rules.append(f"call: {line} ({calls}) {line} {end}")
    if not required:
        return "\n".join(["start: (before call)* TEXT", "TEXT: /(.|\\n)*/", _until("before", text, marks[0]), *rules])
    more = "" if most_one else f"({line} {begin} call)*"
    return _start(text, prompt, f"{begin} call {more}{other}", *rules)


def _xml(rules: list[str], number: int, name: str, schema: Mapping[str, Any]) -> str:
    """`<function=NAME>` with a `<parameter=NAME>` for each property; adds rules for their values."""
    parts = [_quoted(f"<function={name}>\n")]
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        raise RunError(f"the parameters of the tool {name!r:.60} are no JSON Schema.")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for place, (key, inner) in enumerate(properties.items()):
        choices = inner.get("enum") if isinstance(inner, Mapping) else None
        rule, end = f"value_{number}_{place}", "\n</parameter>\n"
        if (
            isinstance(inner, Mapping)
            and inner.get("type") == "string"
            and not {"enum", "const", "pattern"} & set(inner)
        ):
            rules.append(f"{rule}[lazy]: /(.|\\n)*/ {_quoted(end)}")
        elif isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
            rules.append(f"{rule}: ({' | '.join(map(_quoted, choices))}) {_quoted(end)}")
        else:
            rules.append(
                f"{rule}: {_json({**inner, **definitions} if isinstance(inner, Mapping) else {})} {_quoted(end)}"
            )
        opening = _quoted(f"<parameter={key}>\n")
        parts.append(f"({opening} {rule}){'' if key in required else '?'}")
    return " ".join([*parts, _quoted("</function>")])


def _thought(text: Text, prompt: Sequence[int]) -> str:
    """What comes before the answer: reasoning that the prompt has opened, or that the model may open."""
    thoughts = text.chat.thoughts if text.chat else None
    if thoughts is None:
        return ""
    begin, end = thoughts
    if text.reasoning(prompt).opened:
        return f"{_inner(text, end)} /\\s{0, 3}/"
    return f"({_mark(text, begin)} {_inner(text, end)} /\\s{0, 3}/)?"


def _inner(text: Text, end: str) -> str:
    """Text up to a mark."""
    if _special(text, end) is not None:
        return f"TEXT {_mark(text, end)}"
    return f"/(.|\\n)*?{_expression(end)}/"


def _until(rule: str, text: Text, end: str) -> str:
    if _special(text, end) is not None:
        return f"{rule}: TEXT {_mark(text, end)}"
    return f"{rule}[lazy]: /(.|\\n)*/ {_quoted(end)}"


def _expression(text: str) -> str:
    return "".join(c if c.isalnum() or c in "<> _" else f"\\{c}" for c in text)


def _json(schema: Mapping[str, Any]) -> str:
    several = any(isinstance(found.get("allOf"), list) and len(found["allOf"]) > 1 for found in _objects(schema))
    return f"%json {json.dumps({**(schema if several else _closed(schema)), 'x-guidance': _OPTIONS})}"


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it names, unless it says so: small models go on adding others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {"enum", "const", "default", "examples", "required"}
    found = {key: value if key in kept else _closed(value) for key, value in schema.items()}
    named = isinstance(schema.get("properties"), Mapping) and schema.get("type") == "object"
    if named and not {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & set(schema):
        found["additionalProperties"] = False
    return found


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects within a value of JSON."""
    if isinstance(value, Mapping):
        yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _objects(item)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _known(text: Text, word: str) -> bool:
    return text.tokenizer.token_to_id(word) is not None


def _special(text: Text, word: str) -> int | None:
    """The added token of a mark; None: it is text."""
    token = text.tokenizer.token_to_id(word)
    return token if token is not None and token in text.tokenizer.get_added_tokens_decoder() else None


def _mark(text: Text, word: str) -> str:
    token = _special(text, word)
    return _quoted(word) if token is None else f"<[{token}]>"


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise RunError(
            'answers by a grammar (response_format, --json-schema, required or strict tools) need llguidance: pip install "llguidance>=1.7"'
        ) from error
    return llguidance


def _tokenizer(text: Text, vocabulary: int) -> tuple[Any, int | None]:
    """llguidance's view of a tokenizer, made once, and a token that must never be chosen."""
    with _LOCK:
        if text not in _TOKENIZERS:
            # A model without an end token gets one that is never chosen; its answers end where the grammar first allows it.
            added = text.tokenizer.get_added_tokens_decoder()
            ends = sorted(text.ends) or [max(added, default=text.tokenizer.get_vocab_size() - 1)]
            try:
                made = _library().LLTokenizer(text.tokenizer.to_str(), n_vocab=vocabulary, eos_token=ends)
            except ValueError as error:
                raise RunError(f"llguidance does not read this tokenizer: {error}. Ask without a grammar.") from error
            _TOKENIZERS[text] = made, None if text.ends else ends[0]
        return _TOKENIZERS[text]
