"""What a compiled kernel says of itself: the sizes of its arguments and of a cluster, from `.nv.info` of its cubin, an ELF file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from still_graphs.errors import ConfigError

PARAMETER, CLUSTER = 0x17, 0x3D
"""EIATTR_KPARAM_INFO, one for each argument, and EIATTR_CTA_PER_CLUSTER, as `cuobjdump --dump-elf` calls them."""
WITH_SIZE = 0x04
"""Format of attributes behind whose head a size and so many bytes stand; others are four bytes long."""
DESCRIPTOR = (128, 4, 4, 8, 8)
"""A tensor map, then both sizes and both strides of its matrix."""
SIZES = {"ptr": (8,), "i32": (4,), "f32": (4,), "i64": (8,), "descriptor": DESCRIPTOR}
"""Bytes that a launch passes for an argument of the index, by its type."""


@dataclass(frozen=True)
class Entry:
    """Sizes of a kernel's arguments in bytes, in order, and blocks of a cluster along x, y and z."""

    sizes: tuple[int, ...]
    cluster: tuple[int, ...] = (1, 1, 1)


def read_entry(cubin: bytes, symbol: str) -> Entry:
    """What the kernel `symbol` says.

    Raises:
        ConfigError: The file is no whole cubin of that kernel.
    """
    try:
        attributes = list(_attributes(_section(cubin, f".nv.info.{symbol}")))
        found = [struct.unpack("<IHHI", data) for kind, data in attributes if kind == PARAMETER]
        found_cluster = [struct.unpack("<III", data) for kind, data in attributes if kind == CLUSTER]
    except (struct.error, IndexError, KeyError, ValueError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the cubin of {symbol} does not say what arguments it takes ({error or type(error).__name__})."
        ) from error
    ordered = sorted((ordinal, offset, flags >> 18) for _, ordinal, offset, flags in found)
    ends = [0, *(offset + size for _, offset, size in ordered)]
    if [place for place, *_ in ordered] != list(range(len(ordered))) or any(
        offset < end for (_, offset, _), end in zip(ordered, ends, strict=False)
    ):
        raise ConfigError(f"the cubin of {symbol} does not say of each argument how large it is.")
    return Entry(tuple(size for *_, size in ordered), found_cluster[0] if found_cluster else (1, 1, 1))


def trailing_pointers(entry: Entry, symbol: str, types: Sequence[str], cluster: int = 1) -> int:
    """How many pointers a kernel takes behind the arguments that a launch plan passes; a launch gives them as null.

    Args:
        types: Of the plan's arguments, in order, as the index has them.
        cluster: Blocks of a cluster that the index says, along x.

    Raises:
        ConfigError: The kernel takes other arguments, or another cluster of blocks.
    """
    passed = [size for kind in types for size in SIZES[kind]]
    rest = entry.sizes[len(passed) :]
    if list(entry.sizes[: len(passed)]) != passed or set(rest) - {8}:
        raise ConfigError(
            f"the compiled {symbol} takes arguments of {list(entry.sizes)} bytes; its launch plan passes {passed}, and pointers behind "
            "them. This version of Triton gives kernels other arguments: install one that pyproject.toml names."
        )
    if entry.cluster != (cluster, 1, 1):
        raise ConfigError(
            f"the compiled {symbol} is of a cluster of {list(entry.cluster)} blocks; hosts launch {[cluster, 1, 1]}."
        )
    return len(rest)


def _section(cubin: bytes, name: str) -> bytes:
    """The bytes of a section of a 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    _, _, _, _, start, length = sections[names]
    words = cubin[start : start + length]
    for place, _, _, _, start, length in sections:
        if words[place : words.index(b"\0", place)].decode() == name:
            if start + length > len(cubin):
                raise ValueError("it ends early")
            return cubin[start : start + length]
    raise KeyError(name)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, place)
        place += 4
        held = size if form == WITH_SIZE else 0
        if place + held > len(info):
            raise ValueError("an attribute ends early")
        yield kind, info[place : place + held]
        place += held
