"""Questions about whole files of Python source, with exact answers: a default, a constant, a base class somewhere in the file."""

from __future__ import annotations

import ast
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from still_export.errors import ConfigError

_FILE = re.compile(r"^# (\S+\.py)$", re.MULTILINE)
"""Stands before every file of a text of source code, as `python -m tools.fetch_texts` writes them."""


@dataclass(frozen=True)
class Question:
    """Something that a file says once: what is asked, how a reply begins, the `answer` as the source has it.

    name: Of the function, class or variable. place: Where it stands in the file, 0 to 1.
    """

    name: str
    text: str
    reply: str
    answer: str
    place: float


def files(text: str) -> list[str]:
    """The files of a text of source code, without the lines that name them."""
    parts = _FILE.split(text)
    return [part.strip() for part in parts[2::2]]


def questions(source: str) -> list[Question]:
    """What can be asked of a file: defaults of parameters, constants, base classes; of names that it defines once, with answers that
    are not guessed (0, 1, True, None, "", Exception)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    asked: list[tuple[str, str, str, ast.expr, int]] = []
    names: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names[node.name] += 1
            for argument, default in _defaults(node.args):
                if _telling(default):
                    text = f"What is the default value of the parameter `{argument}` of the function `{node.name}`?"
                    asked.append((node.name, text, f"The default value of `{argument}` is `", default, node.lineno))
        elif isinstance(node, ast.ClassDef):
            names[node.name] += 1
            if len(node.bases) == 1 and ast.unparse(node.bases[0]) not in ("object", "Exception"):
                text = f"From which class is the class `{node.name}` derived?"
                asked.append(
                    (node.name, text, f"The class `{node.name}` is derived from `", node.bases[0], node.lineno)
                )
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names[name] += 1
            if len(name) > 3 and _telling(node.value):
                text = f"What value is assigned to the variable `{name}`?"
                asked.append((name, text, f"The variable `{name}` is set to `", node.value, node.lineno))
    lines = source.count("\n") + 1
    found = []
    for name, text, reply, node, line in asked:
        answer = ast.get_source_segment(source, node)
        if names[name] == 1 and answer and len(answer) <= 40 and "\n" not in answer and "`" not in answer:
            found.append(Question(name, text, reply, answer, line / lines))
    return found


def _defaults(given: ast.arguments) -> list[tuple[str, ast.expr]]:
    """Parameters that have a default, with it."""
    positional = [*given.posonlyargs, *given.args]
    pairs = [*zip(positional[len(positional) - len(given.defaults) :], given.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None]
    return [(argument.arg, default) for argument, default in pairs]


def _telling(node: ast.expr) -> bool:
    """Whether a value is a number or a short text that is not the first that comes to mind."""
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, str):
        return 2 <= len(value) <= 30
    return isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1)


def code_prompts(
    tokenizer: Any, chat: dict[str, str], text: str, length: int, depths: int, samples: int, rng: np.random.Generator
) -> list[list[tuple[np.ndarray, int]]]:
    """`samples` prompts for each depth: ids int64 [half of length .. length] with the answer at their end, and its number of tokens.

    Every question is about another name, and about another file as long as there are files.

    Args:
        chat: Pieces of the chat template, as of `turn_pieces`.
        text: Source code of files that are named (`files`).
        length: Tokens of a prompt at most; files of fewer than half of it are left out.
        depths: The file is cut into so many parts; a question of the first is about its beginning.

    Raises:
        ConfigError: The text has too few such files.
    """

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False)["input_ids"]

    usable = []
    for source in files(text):
        # Tokens of code are between one and six bytes; only files that may fit are tokenized.
        if length // 2 < len(source) < 6 * length and (known := questions(source)):
            size = len(encode(source))
            if length // 2 <= size <= length - 200:
                usable.append((source, known))
    by_depth: list[list[tuple[np.ndarray, int]]] = []
    asked: Counter[int] = Counter()
    used: set[tuple[int, str]] = set()
    for depth in range(depths):
        rows: list[tuple[np.ndarray, int]] = []
        choices = [
            (number, question)
            for number, (_, known) in enumerate(usable)
            for question in known
            if depth <= question.place * depths <= depth + 1
        ]
        order = [choices[i] for i in rng.permutation(len(choices))]
        while len(rows) < samples:
            left = [(number, question) for number, question in order if (number, question.name) not in used]
            if not left:
                raise ConfigError(
                    f"the text has too few files of {length // 2} to {length} tokens for {depths * samples} questions about code. "
                    "Give source code with a line `# path.py` before each file, or ask fewer."
                )
            number, question = min(left, key=lambda choice: asked[choice[0]])
            asked[number] += 1
            used.add((number, question.name))
            before = f"{chat['start']}```python\n{usable[number][0]}\n```\n\n{question.text}{chat['user_to_assistant']}{question.reply}"
            answer = encode(question.answer)
            rows.append((np.array(encode(before) + answer, np.int64), len(answer)))
        by_depth.append(rows)
    return by_depth
