"""Triton's interpreter without what it does again and again: a third of the time of these tests.

At each call of a jitted function it looks through all of triton.language for what it has to replace, which inside of a kernel is
replaced already; and it makes a table of types for each type that it looks up.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replaced: dict[Any, str] = {}  # of each package, a name that the interpreter replaces


def install() -> None:
    """From now on, in this process."""
    patch, lookup = interpreter._patch_builtin, interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def patch_once(package: Any, builder: Any, scope: Any) -> None:
        name = _replaced.get(package)
        if name is not None and not tl.core.is_builtin(getattr(package, name)):
            return  # and will be put back by the scope that replaced it
        if name is None:
            names = (name for name in dir(package) if tl.core.is_builtin(getattr(package, name, None)))
            _replaced[package] = next(names, "__name__")
        patch(package, builder, scope)

    def known_dtype(kind: Any) -> Any:
        kind = kind.scalar
        if isinstance(kind, tl.pointer_type):
            return lookup(kind)
        if kind not in known:
            known[kind] = lookup(kind)
        return known[kind]

    interpreter._patch_builtin = patch_once
    interpreter._get_np_dtype = known_dtype
