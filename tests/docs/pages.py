"""README, the pages of docs and those of assets, read as Markdown: blocks of code, commands, prose, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("assets/*/README.md")),
]
README, GUIDE = ROOT / "README.md", ROOT / "docs/guide/README.md"
SHELL = ("", "sh", "bash")
"""Languages of fenced blocks that hold commands; indented blocks have none."""
CONSOLE = "console"
"""That of blocks with a command and its output."""


def name(page: Path) -> str:
    """A page as tests and messages call it."""
    return page.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" where it names none) and its lines."""

    language: str
    lines: tuple[str, ...]


def parts(text: str) -> Iterator[str | Block]:
    """The lines of prose and the blocks of code of a page, in order."""
    lines, at = text.splitlines(), 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith("```"):
            while lines[end] != "```":
                end += 1
            yield Block(line[3:].strip(), tuple(lines[at + 1 : end]))
            end += 1
        elif line.startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield Block("", tuple(code[4:] for code in lines[at:end] if code.strip()))
        else:
            yield line
        at = end


def prose(page: Path) -> list[str]:
    """Lines that are neither code nor rows of a table."""
    found = parts(page.read_text(encoding="utf-8"))
    return [part for part in found if isinstance(part, str) and not part.startswith("|")]


def blocks(page: Path, languages: tuple[str, ...]) -> list[Block]:
    """Blocks of code in one of `languages`."""
    found = parts(page.read_text(encoding="utf-8"))
    return [part for part in found if isinstance(part, Block) and part.language in languages]


def commands(page: Path) -> list[str]:
    """Every command of the page as a reader would type it, without its comment; one that ends with a backslash goes on below. Those of
    still-export that are shown with their output, unless that is an error, are among them."""
    found = blocks(page, (*SHELL, CONSOLE))
    text = "\n".join(line for block in found for line in (block.lines if block.language != CONSOLE else _typed(block)))
    typed = (re.sub(r"\s+#\s.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [re.sub(r"\s+", " ", line) for line in typed if line and not line.startswith("#")]


def outputs(page: Path) -> dict[str, list[str]]:
    """What the page shows of its commands, by command; "..." stands for more."""
    return {command: lines for command, *lines in map(_session, blocks(page, (CONSOLE,)))}


def _session(block: Block) -> list[str]:
    """The command of a block of language "console", which begins with "$ ", and the lines of its output."""
    typed, *lines = "\n".join(block.lines).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+", " ", typed.removeprefix("$ ")), *lines]


def _typed(block: Block) -> list[str]:
    command, *lines = _session(block)
    return [command] if command.startswith("still-export ") and not re.match(r"\w+Error: ", lines[0]) else []


def links(page: Path) -> list[str]:
    """Targets of links and images within the repository."""
    text = "\n".join(part for part in parts(page.read_text(encoding="utf-8")) if isinstance(part, str))
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text))
    return [target for target in targets if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """What `#...` may name in the page: its headings, as Markdown's usual readers write them."""
    headings = (line.lstrip("#") for line in prose(page) if re.match("#+ ", line))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def guide() -> list[Path]:
    """The pages of docs/guide in the order of its first page."""
    return [GUIDE, *(GUIDE.parent / link for link in links(GUIDE) if not {"/", "#"} & set(link))]


SESSIONS = {"README": [README], "guide": guide()}
"""Pages whose commands run, one after the other in one folder."""
USERS = [page for pages in SESSIONS.values() for page in pages]
