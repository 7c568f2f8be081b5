"""Descriptors of shared memory in sm_90 machine code: what matrix instructions get must be descriptors.

ptxas 12.8, which Triton 3.6 and 3.7 bring for sm_90, can take a wrong register when it adds an offset to a descriptor that is the
same throughout a kernel. The sums are followed here as ranges of what registers may hold: where a descriptor is right, its upper
word (stride and swizzle) is one of three constants, and its lower word an address within the kernel's shared memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.machine_code import disassembly

Range = tuple[int, int]
State = dict[str, Range]
"""What is known at one place: least and greatest value by register ("UR4", "UP0", "L8" for what was spilled at 8)."""

WORD = 2**32
ANY: Range = (0, WORD - 1)
UPPER = (0x40000040, 0x80000020, 0xC0000010)
"""Upper words of descriptors with rows of 128, 64 and 32 bytes."""
BASE = 0x400
"""Where a kernel's shared memory begins on sm_90."""
REACH = 16  # instructions between the parts of an exchange
PATIENCE = 6  # times that a range may grow at one place before it counts as unknown
NO_RESULT = re.compile(
    r"(ST|RED|BAR|EXIT|BRA|BS|NOP|MEMBAR|FENCE|WARP|DEPBAR|LDGDEPBAR|LDGSTS|ERRBAR|CCTL|ACQ|PREEXIT|RET|YIELD)"
)


class Instruction(NamedTuple):
    """One line of machine code; a predicate of "" is always true."""

    address: int
    predicate: str
    name: str
    operands: list[str]


def instructions(cubin: bytes, folder: Path) -> list[Instruction]:
    """Machine code of a kernel."""
    text = disassembly(cubin, folder)
    lines = re.findall(
        r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)[ \t]*([^;\n]*);", text, re.MULTILINE
    )
    return [
        Instruction(int(at, 16), predicate, name, re.sub(r"\.reuse|\s", "", rest).split(",") if rest.strip() else [])
        for at, predicate, name, rest in lines
    ]


def with_swaps(code: list[Instruction]) -> list[Instruction]:
    """Code in which three exclusive ors that exchange two registers are one instruction, where the last of them was."""
    code = list(code)
    for i, first in enumerate(code):
        if not is_xor(first) or first.operands[0] != first.operands[1]:
            continue
        a, b = first.operands[1:3]
        near = [j for j in range(i + 1, min(i + REACH, len(code))) if {a, b} & set(code[j].operands)][:2]
        if [code[j].operands[:3] for j in near if is_xor(code[j])] == [[b, a, b], [a, a, b]]:
            nothing = Instruction(0, "", "NOP", [])
            code[i] = nothing._replace(address=first.address)
            code[near[0]] = nothing._replace(address=code[near[0]].address)
            code[near[1]] = code[near[1]]._replace(name="SWAP", operands=[a, b])
    return code


def is_xor(code: Instruction) -> bool:
    return re.fullmatch(r"U?LOP3\.LUT", code.name) is not None and code.operands[3:5] in (
        ["URZ", "0x3c"],
        ["RZ", "0x3c"],
    )


def is_predicate(operand: str) -> bool:
    return re.fullmatch(r"!?U?P(T|\d)", operand) is not None


def registers(first: str, count: int) -> list[str]:
    """`count` registers from the one named; none for anything else."""
    found = re.fullmatch(r"(UR|R)(\d+)", first)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(count)] if found else []


def width(name: str) -> int:
    """Registers that an instruction writes."""
    if name.startswith("HGMMA"):
        return int(re.findall(r"64x(\d+)x", name)[0]) // 2
    if found := re.search(r"M88\.(\d)", name):
        return int(found[1])
    if "MMA" in name or ".128" in name:
        return 4
    return 2 if re.search(r"\.64|WIDE|\.F64|^CS2R$", name) else 1


def added(*terms: Range) -> tuple[Range, Range]:
    """Sum and carry of words."""
    low, high = (sum(term[i] for term in terms) for i in (0, 1))
    if low // WORD == high // WORD:
        return (low % WORD, high % WORD), (low // WORD, low // WORD)
    return ANY, (0, len(terms) - 1)


def value(operand: str, state: State) -> Range:
    """What a word may be."""
    plain = operand.lstrip("-")
    if plain in ("RZ", "URZ"):
        return (0, 0)
    known = (int(plain, 16),) * 2 if plain.startswith("0x") else state.get(plain, ANY)
    if operand.startswith("-"):
        return (-known[0] % WORD,) * 2 if known[0] == known[1] else ANY
    return known


def carry_in(operand: str, state: State) -> Range:
    return (0, 0) if operand in ("!PT", "!UPT") else state.get(operand, (0, 1))


def words(operand: str, state: State) -> tuple[Range, Range]:
    """Both words of a 64-bit operand; immediates are extended by their sign."""
    plain = operand.lstrip("-")
    if pair := registers(plain, 2):
        low, high = value(pair[0], state), value(pair[1], state)
        if operand == plain:
            return low, high
        if low[0] != low[1] or high[0] != high[1]:
            return ANY, ANY
        number = -(high[0] * WORD + low[0])
    else:
        number = int(operand, 16) if "0x" in operand else 0
        number -= WORD if number >= WORD // 2 else 0
    return (number % WORD,) * 2, (number // WORD % WORD,) * 2


def results(name: str, written: list[str], terms: list[str], state: State) -> State:
    """What an instruction writes, where this file knows; `written` has its registers, then predicates."""
    got = [value(term, state) for term in terms]
    to = written[0]
    match name:
        case "MOV" | "R2UR":
            return {to: got[0]}
        case "IMAD.MOV.U32" | "IMAD.U32" if terms[0] == "RZ":
            return {to: got[2]}
        case "CS2R" if terms[0] == "SRZ":
            return dict.fromkeys(written, (0, 0))
        case "S2UR" | "S2R" if terms[0] == "SR_CgaCtaId":
            return {to: (0, 0)}
        case "IADD3" | "VIADD":
            total, carry = added(*got[:3])
            plain = len(written) == 2 and "-" not in "".join(terms)
            return {to: total, **({written[1]: carry} if plain else {})}
        case "IADD3.X":
            return {to: added(*got[:3], *(carry_in(term, state) for term in terms[3:]))[0]}
        case "IMAD.X" if got[0][1] * got[1][1] < WORD:
            return {to: added((got[0][0] * got[1][0], got[0][1] * got[1][1]), got[2], carry_in(terms[3], state))[0]}
        case "IADD3.64":
            low, high = zip(*(words(term, state) for term in terms[:3]), strict=True)
            total, carry = added(*low)
            return {to: total, registers(to, 2)[1]: added(*high, carry)[0]}
        case "LEA" if terms[2].startswith("0x") and got[0][1] << got[2][0] < WORD:
            return {to: added((got[0][0] << got[2][0], got[0][1] << got[2][0]), got[1])[0]}
        case "SHF.R.U32.HI" if terms[0] in ("RZ", "URZ") and terms[1].startswith("0x"):
            return {to: (got[2][0] >> got[1][0], got[2][1] >> got[1][0])}
        case "SGXT.U32":
            most = 2 ** got[1][0] - 1
            return {
                to: got[0] if got[0][1] <= most else (got[0][0] & most,) * 2 if got[0][0] == got[0][1] else (0, most)
            }
        case "SEL":
            return {to: (min(got[0][0], got[1][0]), max(got[0][1], got[1][1]))}
    return {}


def after(code: Instruction, state: State) -> State:
    """State behind an instruction."""
    _, predicate, name, operands = code
    if name.startswith(("STL", "LDL")):
        place, kept = operands if name.startswith("STL") else reversed(operands)
        offset = int((re.findall(r"\[R1\+(0x\w+)\]", place) or ["0"])[0], 16)
        slots = [f"L{offset + 4 * i}" for i in range(width(name))]
        moved = registers(kept, len(slots)) or ["RZ"] * len(slots)
        from_to = zip(moved, slots, strict=True) if name.startswith("STL") else zip(slots, moved, strict=True)
        new = {to: value(source, state) for source, to in from_to}
    elif name.startswith("R2P"):
        new = {f"P{i}": (0, 1) for i in range(7)}
    elif name == "SWAP":
        new = {a: state.get(b, ANY) for a, b in (operands, operands[::-1])}
    elif NO_RESULT.match(name) or not operands:
        return state
    elif is_predicate(operands[0]):
        new = {}
        for operand in operands[:2]:
            new |= {operand: (0, 1)} if is_predicate(operand) else dict.fromkeys(registers(operand, width(name)), ANY)
    else:
        written = registers(operands[0], width(name))
        terms = operands[1:]
        while terms and is_predicate(terms[0]) and re.match(r"U?(IADD3|LEA|IMAD|R2UR|VOTE|LOP3|ATOM)", name):
            written.append(terms.pop(0))
        new = {register: (0, 1) if is_predicate(register) else ANY for register in written}
        if written:
            new |= results(name.removeprefix("U"), written, terms, state)
    if predicate:
        new = {x: (min(r[0], state.get(x, ANY)[0]), max(r[1], state.get(x, ANY)[1])) for x, r in new.items()}
    return {x: r for x, r in {**state, **new}.items() if r != ANY}


def successors(code: list[Instruction]) -> list[list[int]]:
    """By instruction, the ones that may follow."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    joins: dict[str, str] = {}
    following = []
    for i, (_, predicate, name, operands) in enumerate(code):
        if name.startswith("BSSY"):
            joins[operands[0]] = operands[1]
        leaves = [joins[operands[0]]] if name.startswith("BSYNC") else operands[-1:] if name.startswith("BRA") else []
        always = re.match(r"BRA|BSYNC|EXIT|RET", name) and not predicate and not any(map(is_predicate, operands))
        following.append([index[int(x, 16)] for x in leaves] + ([] if always or i + 1 == len(code) else [i + 1]))
    return following


def states(code: list[Instruction]) -> dict[int, State]:
    """What is known ahead of each instruction."""
    following = successors(code)
    heads = {j for i, after_i in enumerate(following) if after_i != [i + 1] for j in [*after_i, i + 1]}
    at: dict[int, State] = {0: {}}
    grown: dict[int, int] = {}
    waiting = {0}
    while waiting:
        i = min(waiting)
        waiting.remove(i)
        while True:
            state = after(code[i], at[i])
            if following[i] != [i + 1] or i + 1 in heads:
                break
            i += 1
            at[i] = state
        for j in following[i]:
            old = at.get(j)
            if old is None:
                at[j] = state
            else:
                both = {
                    x: (min(old[x][0], state[x][0]), max(old[x][1], state[x][1])) for x in old.keys() & state.keys()
                }
                at[j] = {x: r for x, r in both.items() if r == old[x] or grown.get(j, 0) < PATIENCE}
                grown[j] = grown.get(j, 0) + 1
            if at[j] != old:
                waiting.add(j)
    return at


def descriptors(code: list[Instruction], shared_bytes: int) -> tuple[int, list[str]]:
    """How many a kernel uses, and those that are wrong or cannot be followed."""
    code = with_swaps(code)
    at = states(code)
    count, wrong = 0, []
    for i, (address, _, name, operands) in enumerate(code):
        place = next((k for k, operand in enumerate(operands) if operand.startswith("gdesc[")), None)
        if not name.startswith("HGMMA") or i not in at or place is None:
            continue
        first = int(re.findall(r"gdesc\[UR(\d+)", operands[place])[0])
        for low in (first, first + 2) if place == 1 else (first + 2,):  # left operand, if not in registers; right one
            lower, upper = (at[i].get(f"UR{n}", ANY) for n in (low, low + 1))
            count += 1
            outside = lower[0] == lower[1] and not BASE <= 16 * (lower[0] % 2**14) < BASE + shared_bytes
            if upper[0] != upper[1] or upper[0] not in UPPER or outside:
                wrong.append(f"{address:#x} UR{low}: {lower[0]:#x}-{lower[1]:#x}, {upper[0]:#x}-{upper[1]:#x}")
    return count, wrong
