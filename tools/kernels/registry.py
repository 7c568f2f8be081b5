"""What bench and tune know of each op: `WORK` or, of an op without a state, `CALLS` of its file in `ops`."""

from __future__ import annotations

from importlib import import_module

from still_graphs.ops import OPS
from still_kernels.registry import op_of
from tools.kernels.calls import work_of_calls
from tools.kernels.work import OpWork


def work_of(name: str) -> OpWork:
    """What bench and tune ask of an op that has kernels, by its name in ONNX."""
    op, file = op_of(name), import_module(f"tools.kernels.ops.{OPS[name].torch_name}")
    found: OpWork = file.WORK if hasattr(file, "WORK") else work_of_calls(op, file.CALLS)
    return found
