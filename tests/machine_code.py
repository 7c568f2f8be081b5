"""Machine code of compiled kernels as text, for tests that look for what an assembler must not do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple


def disassembly(cubin: bytes, folder: Path) -> str:
    """What cuobjdump, which Triton brings, makes of a cubin; `folder` takes a file."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Line(NamedTuple):
    """One instruction; `predicate` is "" where it is always executed."""

    address: int
    predicate: str
    name: str
    operands: str


def lines(text: str) -> list[Line]:
    """The instructions of a disassembly of one kernel."""
    found = re.findall(
        r"^\s+/\*([0-9a-f]{4,6})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)[ \t]*([^;\n]*);", text, re.MULTILINE
    )
    return [Line(int(address, 16), predicate, name, operands) for address, predicate, name, operands in found]


def inner_loops(code: list[Line], name: str) -> list[list[list[Line]]]:
    """Innermost loops around instructions whose name begins with `name`, as blocks without a branch: natural loops, for assemblers put
    parts of one anywhere."""
    at = {line.address: i for i, line in enumerate(code)}
    joins: dict[str, int] = {}
    after: list[list[int]] = []
    for i, line in enumerate(code):
        last = line.operands.replace("`(", "").replace(")", "").split(",")[-1].strip()
        if line.name.startswith("BSSY"):
            joins[line.operands.split(",")[0].strip()] = at[int(last, 16)]
        goes = [at[int(last, 16)]] if line.name.startswith(("BRA", "CALL")) and last.startswith("0x") else []
        if line.name.startswith("BSYNC"):
            goes = [joins[line.operands.split(",")[0].strip()]]
        stays = line.name.startswith(("BRA", "BSYNC", "EXIT", "RET", "BRX")) and not line.predicate
        stays = stays and not re.match(r"!?U?P\w+\s*,", line.operands)
        after.append(goes + ([] if stays or i + 1 == len(code) else [i + 1]))
    heads = sorted({0} | {j for i, to in enumerate(after) if to != [i + 1] for j in [*to, i + 1] if j < len(code)})
    block = {head: n for n, head in enumerate(heads)}
    ends = [*heads[1:], len(code)]
    to = [[block[j] for j in after[end - 1]] for end in ends]
    before: list[list[int]] = [[] for _ in heads]
    for n, some in enumerate(to):
        for m in some:
            before[m].append(n)
    roots: set[int] = set()
    reached: set[int] = set()
    for n in range(len(heads)):  # a table of jumps leads to what nothing else does
        if n not in reached:
            roots.add(n)
            left = [n]
            while left:
                m = left.pop()
                if m not in reached:
                    reached.add(m)
                    left += to[m]
    every = set(range(len(heads)))
    over = [{n} if n in roots else set(every) for n in range(len(heads))]  # blocks on every way to one
    changed = True
    while changed:
        changed = False
        for n in range(len(heads)):
            if n not in roots:
                new = {n} | set.intersection(*(over[m] for m in before[n]))
                changed |= new != over[n]
                over[n] = new
    loops: dict[int, set[int]] = {}
    for n, some in enumerate(to):
        for head in some:
            if head in over[n]:
                body, back = loops.setdefault(head, {head}), [n]
                while back:
                    m = back.pop()
                    if m not in body:
                        body.add(m)
                        back += before[m]
    wanted = {
        head: body
        for head, body in loops.items()
        if any(line.name.startswith(name) for n in body for line in code[heads[n] : ends[n]])
    }
    inner = [body for head, body in wanted.items() if not any(other < body for other in wanted.values())]
    return [[code[heads[n] : ends[n]] for n in sorted(body)] for body in inner]
