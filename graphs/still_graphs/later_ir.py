"""onnx_ir, imported on first use. Programs that only run packages import the targets and do not need it."""

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
