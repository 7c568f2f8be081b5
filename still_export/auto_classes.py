"""Transformers' Auto classes know STILL models once this package was imported, and importing it stays cheap.

Registering needs transformers and torch, which take seconds; it happens when the module of an Auto class is loaded, or at once where
that was before. Standard library only.
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

CONFIGURATIONS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
REGISTERS = "still_export.models"


class _AfterLoading(Loader):
    """Loads a module as `loader` does, then registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        # The module of models loads that of configurations: while it does, its own end is awaited.
        if module.__name__ == MODELS or MODELS not in sys.modules:
            _register()


class _Finder(MetaPathFinder):
    """Finds the modules of the Auto classes, once each, where the other finders do."""

    def __init__(self) -> None:
        self.awaited = {CONFIGURATIONS, MODELS}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.awaited:
            return None
        self.awaited.remove(fullname)  # so that the next line does not come back here
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterLoading(spec.loader)
        return spec


def _register() -> None:
    """Import what registers. A transformers that this package cannot work with must not become unusable by it."""
    try:
        importlib.import_module(REGISTERS)
    except ImportError as error:
        warnings.warn(f"STILL models are unknown to transformers' Auto classes: {error}", stacklevel=2)


def register_when_needed() -> None:
    """Register STILL's families as soon as transformers' Auto classes are there."""
    if MODELS in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
