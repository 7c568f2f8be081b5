"""Words of the field that mean one thing each: where the product defines them. A word that gets a second meaning gets another name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("still_export", "kernels", "graphs", "plugins")
OP = r"kernels/still_kernels/\w+/(?:cpu/\w+\.(?:h|cpp)|body(?:/layer)?\.py)"
WORDS = {
    "Target": ("what a package is for", r"still_export/targets/target\.py"),
    "Pass": ("an edit of a graph, with its reason", r"graphs/still_graphs/pipelines\.py"),
    "Step": ("an entry of a plan", r"kernels/still_kernels/plan/parts\.py|plugins/core/plan\.h"),
    "Plan": ("what an op launches", r"kernels/still_kernels/plan/__init__\.py|plugins/core/plan\.h"),
    "Launch": ("of a kernel, in a plan and made", r"kernels/still_kernels/plan/parts\.py|plugins/core/launches\.h"),
    "Call": (
        "a call of an op: its sizes and tensors",
        r"kernels/still_kernels/plan/parts\.py|plugins/core/call\.h|kernels/still_kernels/\w+/cpu/\w+\.cpp",
    ),
    "State": (
        "an entry of a package's table of states",
        r"graphs/still_graphs/states\.py|still_export/package/manifest\.py|plugins/runner/states\.h|still_export/mixers/kernel_state\.py",
    ),
    "Layer": ("attributes and sizes of an op's node", OP),
    "FAR": ("a logit below every other", r"kernels/still_kernels/hybrid_attention/.*"),
    "TIE": ("the lead below which two choices are alike", r"kernels/still_kernels/ties\.py"),
}
"""By word its meaning, and the files that may define it: in Python, in C++, and a kernel for each op."""
LEFT = set(
    "told untold tell tells said says given follow follows shelf shelved elsewhere beside brings brought wants nobody whose holders "
    "ours theirs went".split()
)
"""Words that say nothing of what a name stands for: what is told is reported, beside a model stands a second one."""


def definitions(text: str) -> set[str]:
    """Classes, structs and constants that a source names, at any depth."""
    classes = re.findall(r"^[ \t]*(?:class|struct)\s+(\w+)\b(?!::|;)", text, re.M)
    names = re.findall(r"^(?:constexpr \w+ )?((?:[A-Z]\w*, )*[A-Z]\w*)(?:: [^=\n]*)? = ", text, re.M)
    return {*classes, *(name for each in names for name in each.split(", "))}


def test_a_word_means_one_thing() -> None:
    wrong, used = [], set()
    for path in (p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu")):
        name = path.relative_to(ROOT).as_posix()
        for word in definitions(path.read_text(encoding="utf-8")) & set(WORDS):
            used.add(word)
            if not re.fullmatch(WORDS[word][1], name):
                wrong.append(f"{name}: {word} is {WORDS[word][0]}")
    assert not wrong
    assert used == set(WORDS)


def names(text: str) -> Iterator[str]:
    """Classes, functions, parameters, variables and attributes that a module defines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def words(name: str) -> set[str]:
    return set(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().split("_"))


def test_names_are_words_of_the_field() -> None:
    sources = [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    found = {
        f"{p.relative_to(ROOT)}: {n}" for p in sources for n in names(p.read_text(encoding="utf-8")) if words(n) & LEFT
    }
    assert not found


def test_a_name_is_found() -> None:
    """The test above can fail."""
    text = "class WasTold:\n    a_shelf: int = 1\n    def who(self, said): beside = self.given = said\nBESIDE, X = 1, 2"
    assert {n for n in names(text) if words(n) & LEFT} == {"WasTold", "a_shelf", "said", "beside", "given", "BESIDE"}


def test_a_definition_is_found() -> None:
    """The test above can fail."""
    text = "class Step(Base):\nFAR, EQUAL = 1, 2\nTIE: float = 8.0\nState = TypeVar('State')\n    struct Call\nif Plan == 3:\nclass Plan;"
    assert definitions(text) == {"Step", "FAR", "EQUAL", "TIE", "State", "Call"}
