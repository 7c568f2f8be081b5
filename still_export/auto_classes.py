"""Registers STILL models with transformers' Auto classes when this package is imported, without importing transformers.

Importing transformers and torch takes seconds. So models are registered after the modules of the Auto classes are loaded, or at once if
they are already. These modules import each other in circles, so registration waits until the outermost import ends. Standard library only.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from still_export.errors import StillExportError

PACKAGE = "transformers"
AUTO = {"transformers.models.auto.configuration_auto", "transformers.models.auto.modeling_auto"}
REGISTERS = "still_export.models"


class _Counted(Loader):
    """Loads a module with `loader`; registers after the outermost import if one of the Auto classes' modules was in it."""

    depth = 0
    """Number of transformers modules being loaded."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader  # Python's import system reads sources and resources through it
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        _Counted.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            _Counted.depth -= 1
        if not _Counted.depth and AUTO & sys.modules.keys():
            register_when_needed()


class _Finder(MetaPathFinder):
    """Finds transformers' modules with the other finders."""

    def __init__(self) -> None:
        self.searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != PACKAGE or fullname in self.searching:
            return None
        self.searching.add(fullname)  # prevents recursion in the next line
        try:
            spec = find_spec(fullname)
        finally:
            self.searching.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Counted(spec.loader)
        return spec


_FINDER = _Finder()


def _register() -> None:
    """Register, with a warning if this package cannot work with the installed transformers."""
    try:
        importlib.import_module(REGISTERS)
    except (ImportError, StillExportError) as error:
        warnings.warn(f"STILL models are unknown to transformers' Auto classes: {error}", stacklevel=2)


def register_when_needed() -> None:
    """Register STILL's families as soon as transformers' Auto classes are loaded."""
    if AUTO & sys.modules.keys():
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        _register()
    elif _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
