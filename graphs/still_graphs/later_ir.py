"""onnx_ir, imported at the first edit of a graph: programs that only run packages read targets' records and lack it."""

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
