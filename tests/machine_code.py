"""Machine code of compiled kernels as text, for tests that look for what an assembler must not do."""

from __future__ import annotations

import subprocess
from pathlib import Path


def disassembly(cubin: bytes, folder: Path) -> str:
    """What cuobjdump, which Triton brings, makes of a cubin; `folder` takes a file."""
    from triton import knobs

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
