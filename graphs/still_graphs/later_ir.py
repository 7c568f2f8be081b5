"""onnx_ir, imported when a step first edits a graph: programs that only run packages read the targets' records, too, and go without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir
else:

    class _Later:
        def __getattr__(self, name: str) -> Any:
            import onnx_ir

            return getattr(onnx_ir, name)

    ir = _Later()

__all__ = ["ir"]
