"""The ops of the domain "still": every folder of still_kernels with a spec.py is one. Loads the specs alone."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from still_graphs.spec import DOMAIN, OpSpec

PACKAGE = "still_kernels"


def _found() -> dict[str, OpSpec]:
    package = find_spec(PACKAGE)
    roots = [Path(root) for root in package.submodule_search_locations or ()] if package else []
    folders = sorted(path.parent.name for root in roots for path in root.glob("*/spec.py"))
    specs = [vars(import_module(f"{PACKAGE}.{folder}.spec"))[folder.upper()] for folder in folders]
    return {spec.name: spec for spec in specs}


OPS: dict[str, OpSpec] = _found()
"""Every op by its ONNX name. Tests and other packages add their own, with `home`."""
OPSET, FUSED_OPSET = 23, 27
"""Opset of ai.onnx in portable graphs, and the first opset with ops that bodies can use."""

__all__ = ["DOMAIN", "FUSED_OPSET", "OPS", "OPSET", "OpSpec"]
