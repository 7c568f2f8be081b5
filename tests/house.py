"""Write the first half of docs/notebook/house.md and its pictures: rooms with their imports, lines, and the walks of four commands.

    python -m tests.house

"Before" is the tree of BEFORE, "now" that of HEAD, both read from git. The page from BY_HAND on stays as it is. It takes a minute or
two, most of it verify under a profiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import networkx

from tests.floors import PACKAGES, ROOT, Sources, lines_of

BEFORE = "16dc5ab9^"
"""The last commit before ops and systems became folders of their own."""
PAGE = ROOT / "docs/notebook/house.md"
BY_HAND = "## What left"
"""Heading of the page's second half, which is written by hand."""
TREES = ("before", "now")
COUNTED = ("still_export", "kernels", "graphs", "plugins", "tests", "tools", "web", "docs")
EXPORT = ("export", "MODEL", "--to")
WALKS = {
    "a model's path to a package": (*EXPORT, "onnx", "-o", "PACKAGE", "--no-native"),
    "what `--to web` adds": (*EXPORT, "web", "-o", "WEB"),
    "what `--quantize int8` adds": (*EXPORT, "onnx", "--quantize", "int8", "-o", "INT8", "--no-native"),
    "a case of `verify`": ("verify", "PACKAGE", "--lengths", "5", "--decode-steps", "2"),
}
"""Commands over a tiny random model; "what .. adds" leaves out pairs of files that the first command has, too."""
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
"""Which blocks of 32 divide."""
BELOW = {"still_graphs": -2, "still_kernels": -1}
"""Levels of the packages that still_export's rooms import."""
WIDE, HIGH, GAP = 128, 22, 46


class Tree:
    """One checkout.

    Args:
        root: Its folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {name: Sources(root / place / name) for name, place in PACKAGES.items()}

    def room(self, module: str) -> str:
        """Of a module: of still_export its first folder or file, else the package."""
        name = module.partition(".")[0]
        return self.sources[name].room(module) if name == "still_export" else name

    def graph(self) -> networkx.DiGraph:
        """Who imports whom, by still_export's rooms."""
        own, found = self.sources["still_export"], networkx.DiGraph()
        found.add_nodes_from(map(own.room, own.files))
        pairs = ((own.room(a.source), own.room(a.target)) for a in own.arrows)
        found.add_edges_from(pair for pair in pairs if pair[0] != pair[1])
        return found

    def levels(self) -> dict[str, int]:
        """How many rooms lie below each, one on the other; those of a circle have one level."""
        whole = networkx.condensation(self.graph())
        level: dict[int, int] = {}
        for part in reversed(list(networkx.topological_sort(whole))):
            level[part] = 1 + max((level[below] for below in whole.successors(part)), default=-1)
        return {room: level[part] for part, data in whole.nodes(data=True) for room in data["members"]}

    def circles(self) -> list[list[str]]:
        """Rooms that import one another."""
        return sorted(sorted(p) for p in networkx.strongly_connected_components(self.graph()) if len(p) > 1)

    def lines(self) -> dict[str, int]:
        """Lines of still_export's rooms."""
        found: dict[str, int] = {}
        for module, path in self.sources["still_export"].files.items():
            found[self.room(module)] = found.get(self.room(module), 0) + lines_of(path)[0]
        return found


def draw(tree: Tree) -> str:
    """Rooms by levels and their imports, an SVG; imports within a circle are red. Those that follow from others are left out."""
    graph, levels = tree.graph(), tree.levels()
    circle = {room: n for n, part in enumerate(tree.circles()) for room in part}
    inside = {(a, b) for a, b in graph.edges if a in circle and circle[a] == circle.get(b)}
    apart = graph.copy()
    apart.remove_edges_from(inside)
    shown = [*sorted(networkx.transitive_reduction(apart).edges), *sorted(inside)]
    rows = [sorted(r for r in levels if levels[r] == n) for n in range(max(levels.values()), -1, -1)]
    most = max(map(len, rows))
    places = {
        room: ((most - len(row)) * WIDE / 2 + i * WIDE + WIDE / 2, 12 + y * GAP)
        for y, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    lines = []
    for source, target in shown:
        (x, y), (u, v) = places[source], places[target]
        color = "#c33" if (source, target) in inside else "#99a"
        bend = 40 if y == v else 0
        curve = (
            f"M{x:g} {y + HIGH:g} Q{(x + u) / 2:g} {(y + v) / 2 + HIGH + bend:g} {u:g} {v + (HIGH if bend else 0):g}"
        )
        lines.append(f'<path d="{curve}" fill="none" stroke="{color}"/>')
    for room, (x, y) in places.items():
        lines.append(
            f'<rect x="{x - WIDE / 2 + 6:g}" y="{y:g}" width="{WIDE - 12}" height="{HIGH}" rx="4" fill="#eef" stroke="#557"/>'
            f'<text x="{x:g}" y="{y + 15:g}" text-anchor="middle" font-family="sans-serif" font-size="12">{room}</text>'
        )
    size = f'width="{most * WIDE}" height="{len(rows) * GAP + 20}"'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', white, *lines, "</svg>\n"])


def checkout(commit: str, folder: Path) -> Path:
    """The files of a commit in `folder`."""
    folder.mkdir()
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder


def walks(tree: Tree, model: Path, folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Of each walk the pairs of files, caller and callee.

    Raises:
        CalledProcessError: A command fails.
    """
    folder.mkdir()
    paths = os.pathsep.join(str((tree.root / place).resolve()) for place in PACKAGES.values())
    found: dict[str, list[tuple[str, str]]] = {}
    for name, words in WALKS.items():
        own = [str(model) if w == "MODEL" else str(folder / w) if w.isupper() else w for w in words]
        command = [sys.executable, str(ROOT / "tests/walk.py"), str(folder / "pairs.json"), *own]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.DEVNULL)
        pairs = [(a, b) for a, b in json.loads((folder / "pairs.json").read_text(encoding="utf-8"))]
        first = set(found[next(iter(WALKS))]) if "adds" in name else set()
        found[name] = [pair for pair in pairs if pair not in first]
    return found


def walk_row(tree: Tree, pairs: list[tuple[str, str]]) -> str:
    """Cells of a walk: files, rooms in the order in which they are entered, and calls from one room into one above it."""
    levels = BELOW | tree.levels()
    files = {file for pair in pairs for file in pair}
    rooms = dict.fromkeys(tree.room(file) for pair in pairs for file in pair)
    apart = {(tree.room(a), tree.room(b)) for a, b in pairs}
    back = [(a, b) for a, b in apart if levels[b] > levels[a]]
    return f"{len(files)} | {len(rooms)}: {', '.join(rooms)} | {len(back)}"


def page(trees: Mapping[str, Tree], found: Mapping[str, Mapping[str, list[tuple[str, str]]]]) -> str:
    """The page's first half."""
    lines = [
        "# The house: rooms, imports, lines",
        "",
        "A room is a folder or file of `still_export`. `python -m tests.house` writes this page up to *What left*, and its pictures.",
        f"*Before* is `{BEFORE}`, where an op was in five places and research systems were among the families; *now* is HEAD.",
        "",
        "## Imports",
        "",
        "An arrow points from a room to one that it imports. Arrows that follow from others are not drawn. Red arrows form a circle.",
        "",
    ]
    for name, tree in trees.items():
        circles = "; ".join(", ".join(part) for part in tree.circles()) or "none"
        lines += [f"{name.capitalize()}, circles: {circles}.", "", f"![Rooms {name}]({PAGE.stem}/{name}.svg)", ""]
    lines += ["## Lines", "", "| room of still_export | before | now |", "|---|---|---|"]
    counted = {name: tree.lines() for name, tree in trees.items()}
    level = trees["now"].levels()
    for room in sorted({r for each in counted.values() for r in each}, key=lambda r: (level.get(r, -1), r)):
        lines.append(
            f"| `{room}` | " + " | ".join(f"{counted[t][room]:,}" if room in counted[t] else "" for t in TREES) + " |"
        )
    lines += ["", "| folder, all files of text | before | now |", "|---|---|---|"]
    for folder in COUNTED:
        lines.append(f"| `{folder}` | " + " | ".join(f"{lines_below(trees[t].root / folder):,}" for t in TREES) + " |")
    lines += [
        "",
        "## Walks",
        "",
        "Calls between files of the three packages, in commands over a random Llama of three layers, two of them hybrid. A return is a",
        "pair of rooms whose lower one calls the upper one, through an object or function that it was passed.",
        "",
        "| walk | | files | rooms, in the order of the calls | returns |",
        "|---|---|---|---|---|",
    ]
    for walk in WALKS:
        lines += [f"| {walk} | {name} | {walk_row(trees[name], found[name][walk])} |" for name in TREES]
    return "\n".join(lines) + "\n\n"


def lines_below(folder: Path) -> int:
    """Lines of the files of a folder that are text, but builds and recorded answers."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not {"__pycache__", "node_modules", "golden"} & set(path.parts):
            try:
                total += len(path.read_text(encoding="utf-8").splitlines())
            except UnicodeDecodeError:
                continue
    return total


def main() -> int:
    """Write the page."""
    import torch

    from tests.still_export.tiny import MIXED, still_model

    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model = place / "model"
        still_model("llama", torch.float32, sizes=SIZES, layer_types=MIXED).save_pretrained(model)
        trees = {"before": Tree(checkout(BEFORE, place / "before")), "now": Tree(checkout("HEAD", place / "now"))}
        found = {name: walks(tree, model, place / f"{name}-packages") for name, tree in trees.items()}
        for name, tree in trees.items():
            (PAGE.with_suffix("") / f"{name}.svg").parent.mkdir(exist_ok=True)
            (PAGE.with_suffix("") / f"{name}.svg").write_text(draw(tree), encoding="utf-8")
        written = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page(trees, found) + written[written.index(BY_HAND) :], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
