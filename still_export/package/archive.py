"""The archive of kernels that a library of still-export carries, as plugins/core/archive.h describes it.

Standard library only: exports copy this file into packages, for run_trt.py.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

MAGIC = b"STILLAR1"
"""The first bytes; then the length of the index, the index (JSON), and the kernels."""


def kernels_in(library: Path) -> dict[str, set[str]] | None:
    """Architectures of the kernels by op, such as {"Attention": {"sm_90"}}; None: the file has no archive, so it is no library of ours."""
    content, at = library.read_bytes(), -1
    while (at := content.find(MAGIC, at + 1)) >= 0:
        begin = at + len(MAGIC) + 8
        try:
            (length,) = struct.unpack_from("<Q", content, at + len(MAGIC))
            indexes = json.loads(content[begin : begin + length])["indexes"]
        except (struct.error, ValueError, TypeError, KeyError, OverflowError):
            continue  # the library's code contains the magic too
        found: dict[str, set[str]] = {}
        for index in indexes:
            own = found.setdefault(index["op"].rpartition(":")[2], set())
            own.update(variant["arch"] for variant in index["variants"])
        return found
    return None
