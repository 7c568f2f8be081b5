#!/usr/bin/env python3
"""Fetch ONNX Runtime's C headers, which no wheel has, from Debian's package libonnxruntime-dev (85 KB, MIT licence).

  python tools/get_ort_headers.py build/onnxruntime-include      # prints the folder
  still-export MODEL --to onnx --native --onnxruntime-include build/onnxruntime-include -o DIR

Only the headers are unpacked; nothing is installed. Debian 13 installs the same with apt.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import tarfile
import urllib.request
from pathlib import Path

NAME = "libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb"  # the headers are the same on every architecture
URL = f"http://deb.debian.org/debian/pool/main/o/onnxruntime/{NAME}"
SHA256 = "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"
TIMEOUT_S = 60


def members(archive: bytes) -> dict[str, bytes]:
    """Files of an ar archive, which a .deb is, by name."""
    found, at = {}, 8
    while at + 60 <= len(archive):
        name, size = archive[at : at + 16].decode().strip().rstrip("/"), int(archive[at + 48 : at + 58])
        found[name] = archive[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the headers go; left as it is when it has them")
    folder = parser.parse_args().folder
    if not (folder / "onnxruntime_c_api.h").is_file():
        try:
            with urllib.request.urlopen(URL, timeout=TIMEOUT_S) as answer:
                package = answer.read()
        except OSError as error:
            print(f"{URL}: {error}. Fetch onnxruntime_c_api.h of ONNX Runtime 1.18 or later yourself.", file=sys.stderr)
            return 1
        if hashlib.sha256(package).hexdigest() != SHA256:
            print(f"{URL} is not the file that was expected: its SHA-256 differs.", file=sys.stderr)
            return 1
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(members(package)["data.tar.xz"])) as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isfile() and entry.name.endswith(".h") else None
                if content is not None:
                    (folder / Path(entry.name).name).write_bytes(content.read())
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
