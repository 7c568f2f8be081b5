"""Linearize LLMs with STILL hybrid attention, export them with their state, and prove every target against PyTorch.

Names are imported when they are first used, so that running an exported package needs neither torch nor transformers. Transformers'
Auto classes load STILL models from then on (still_export/auto_classes.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from still_export.auto_classes import register_when_needed
from still_export.package import telemetry as telemetry
from still_export.version import __version__ as __version__

if TYPE_CHECKING:
    from still_export.api import bench as bench
    from still_export.api import evaluate as evaluate
    from still_export.api import export as export
    from still_export.api import load as load
    from still_export.api import lower as lower
    from still_export.api import prove as prove
    from still_export.api import verify as verify
    from still_export.folders.demo import demo_model_path as demo_model_path
    from still_export.graph.options import ExportOptions as ExportOptions
    from still_export.loading.language_model import LanguageModel as LanguageModel
    from still_export.mixers.config import StillConfig as StillConfig
    from still_export.models import attach_untrained as attach_untrained
    from still_export.models import forward_with_state as forward_with_state
    from still_export.models.load import load_model as load_model
    from still_export.models.load import load_tokenizer as load_tokenizer

_HOME = {
    "api": ("bench", "evaluate", "export", "load", "lower", "prove", "verify"),
    "folders.demo": ("demo_model_path",),
    "graph.options": ("ExportOptions",),
    "loading.language_model": ("LanguageModel",),
    "mixers.config": ("StillConfig",),
    "models": ("attach_untrained", "forward_with_state"),
    "models.load": ("load_model", "load_tokenizer"),
}
_MODULES = {name: f"still_export.{module}" for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULES)


register_when_needed()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'still_export' has no attribute {name!r}")
