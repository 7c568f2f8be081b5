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
BASE = "transformers.modeling_utils"
"""What models are made of. Where it is what loads the configurations, nothing can be registered before its own end."""
REGISTERS = "still_export.models"


class _AfterLoading(Loader):
    """Loads a module as `loader` does, then registers."""

    within_base = late = False
    """Whether BASE is loading, and whether registering waits for its end."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        _AfterLoading.within_base |= name == BASE
        self.loader.exec_module(module)
        _AfterLoading.within_base &= name != BASE
        # The module of models loads that of configurations: while it does, its own end is awaited.
        if _AfterLoading.within_base:
            _AfterLoading.late = True
        elif _AfterLoading.late if name == BASE else name == MODELS or MODELS not in sys.modules:
            _register()


class _Finder(MetaPathFinder):
    """Finds the modules of the Auto classes, once each, where the other finders do."""

    def __init__(self) -> None:
        self.awaited = {CONFIGURATIONS, MODELS, BASE}

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
