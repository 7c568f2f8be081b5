"""The environment of a process that runs vLLM with our plugin, of this tree, which need not be installed."""

from __future__ import annotations

import os
from pathlib import Path

from still_export.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def environment(out: Path) -> dict[str, str]:
    """This tree on the path, and what an installation would have written for vLLM to find the plugin by, in `out`."""
    metadata = out / "entry" / f"still_export-{__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: still-export\nVersion: {__version__}\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\nstill = still_export.serving.vllm:register\n")
    paths = [metadata.parent, ROOT, ROOT / "graphs", ROOT / "kernels", os.environ.get("PYTHONPATH", "")]
    quiet = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return {**quiet, **os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OUT": str(out)}
