"""GGUF files that claim more than they have, or lists without end."""

import struct
from pathlib import Path

import pytest

from still_export.errors import CheckpointError
from still_export.gguf.container import open_gguf

pytest.importorskip("gguf")
U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


FAMILY = entry(b"general.architecture", STRING, text(b"llama"))


@pytest.mark.parametrize("claim", [10**13, 2**63])
@pytest.mark.parametrize("what", ["tensors", "entries", "numbers", "texts", "text", "depth", "shape"])
def test_a_claim_is_one_sentence(what: str, claim: int, tmp_path: Path) -> None:
    tensors, entries, content = {
        "tensors": (claim, 0, b""),
        "entries": (0, claim, FAMILY),
        "numbers": (0, 2, FAMILY + entry(b"x", ARRAY, struct.pack("<IQ", U32, claim))),
        "texts": (0, 2, FAMILY + entry(b"x", ARRAY, struct.pack("<IQ", STRING, claim))),
        "text": (0, 1, entry(b"general.architecture", STRING, struct.pack("<Q", claim) + b"ll")),
        "depth": (0, 2, FAMILY + entry(b"x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)),
        "shape": (1, 1, FAMILY + text(b"t") + struct.pack("<IQQIQ", 2, claim // 2, claim // 2, 0, 0)),
    }[what]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, entries) + content + bytes(4096))
    with pytest.raises(
        CheckpointError, match=r"model.gguf \([\d,]+ bytes\) is not an intact GGUF file: .*fetch it again\.$"
    ):
        open_gguf(path)
