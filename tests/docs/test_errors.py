"""Messages and classes of errors that troubleshooting quotes are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/guide/troubleshooting.md"
FOLDERS = ("still_export", "kernels/still_kernels", "graphs/still_graphs")


def sources() -> Iterator[ast.Module]:
    """The syntax trees of the three packages."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))


def constants(tree: ast.Module) -> dict[str, str]:
    """Texts that a module gives names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def written(part: ast.expr, named: dict[str, str]) -> str:
    """A part of an f-string: what it says, … for what it puts in."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    return named.get(value.id, "…") if isinstance(value, ast.Name) else "…"


@cache
def messages() -> str:
    """Every text of the code, one a line."""
    found = []
    for tree in sources():
        named = constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(written(part, named) for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def cells() -> list[str]:
    """First cells of the rows of the page's tables."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [row.split("|")[1].strip() for row in rows]


def quoted() -> list[str]:
    """The messages that troubleshooting has a row for, without the class before them."""
    spans = [span for cell in cells() for span in re.findall(r"`([^`]+)`", cell) if cell.startswith("`")]
    return [re.sub(r"^\w+Error: ", "", span) for span in spans if " " in span]


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_are_the_codes(message: str) -> None:
    pieces = [re.escape(piece.strip()) for piece in message.split("…") if piece.strip()]
    assert re.search(".*".join(pieces), messages()), f"no text of the code has {message}"


def test_every_class_of_errors_is_explained() -> None:
    """Private ones reach no user."""
    defined = {
        node.name
        for tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and not node.name.startswith("_")
    }
    explained = {name for cell in cells() for name in re.findall(r"`(\w+Error)`", cell)}
    assert explained == defined
