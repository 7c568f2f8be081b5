"""Files as a compiler's, that say what arguments a kernel takes and hold no code."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from still_kernels.common.cubin import CLUSTER, PARAMETER


def info(sizes: Sequence[int], cluster: tuple[int, int, int] | None = None) -> bytes:
    """Attributes of a kernel, its arguments from the last to the first, as ptxas writes them, between others."""
    entries, offset = [struct.pack("<BBH", 3, 0x1B, 255)], 0
    for place, size in enumerate(sizes):
        alignment = min(size, 64)
        offset += -offset % alignment
        entries.insert(0, struct.pack("<BBHIHHI", 4, PARAMETER, 12, 0, place, offset, size << 18 | 0x1F000))
        offset += size
    if cluster:
        entries.append(struct.pack("<BBHIII", 4, CLUSTER, 12, *cluster))
    return b"".join([*entries, struct.pack("<BBHI", 4, 0x1E, 4, 0)])


def cubin(content: bytes, symbol: str = "copy_kernel", code: bytes = bytes(24)) -> bytes:
    """An ELF file whose sections are names, code and the kernel's attributes."""
    names = [".shstrtab", f".text.{symbol}", f".nv.info.{symbol}"]
    words = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    bodies, start, headers = [words, code, content], 64, b""
    for name, body in zip(names, bodies, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", words.index(name.encode()), 1, 0, 0, start, len(body), 0, 0, 1, 0)
        start += len(body)
    head = b"\x7fELF\x02\x01\x01".ljust(40, b"\0") + struct.pack("<QIHHHHHH", start, 0, 64, 0, 0, 64, len(names), 0)
    return head + b"".join(bodies) + headers
