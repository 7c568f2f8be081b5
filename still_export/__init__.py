"""Linearize LLMs with STILL hybrid attention, export them with their state, and prove every target against PyTorch.

Names are imported when they are first used, so that running an exported package needs neither torch nor transformers. Transformers'
Auto classes load STILL models from then on (still_export/auto_classes.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from still_export.auto_classes import register_when_needed
from still_export.version import __version__ as __version__

if TYPE_CHECKING:
    from still_export.api import load as load
    from still_export.evaluation.bench import BenchOptions as BenchOptions
    from still_export.evaluation.bench import bench as bench
    from still_export.evaluation.evaluate import EvaluationOptions as EvaluationOptions
    from still_export.evaluation.models import evaluate as evaluate
    from still_export.evaluation.prove import ProveOptions as ProveOptions
    from still_export.evaluation.prove import prove as prove
    from still_export.folders.demo import demo_model_path as demo_model_path
    from still_export.graph.options import ExportOptions as ExportOptions
    from still_export.loading.language_model import LanguageModel as LanguageModel
    from still_export.mixers.config import StillConfig as StillConfig
    from still_export.models import attach_untrained as attach_untrained
    from still_export.models import forward_with_state as forward_with_state
    from still_export.models.load import load_model as load_model
    from still_export.models.load import load_tokenizer as load_tokenizer
    from still_export.proof.package import VerifyOptions as VerifyOptions
    from still_export.proof.package import verify as verify
    from still_export.targets.export import export as export
    from still_export.targets.lower import lower as lower

_HOME = {
    "api": ("load",),
    "evaluation.bench": ("BenchOptions", "bench"),
    "evaluation.evaluate": ("EvaluationOptions",),
    "evaluation.models": ("evaluate",),
    "evaluation.prove": ("ProveOptions", "prove"),
    "folders.demo": ("demo_model_path",),
    "graph.options": ("ExportOptions",),
    "loading.language_model": ("LanguageModel",),
    "mixers.config": ("StillConfig",),
    "models": ("attach_untrained", "forward_with_state"),
    "models.load": ("load_model", "load_tokenizer"),
    "proof.package": ("VerifyOptions", "verify"),
    "targets.export": ("export",),
    "targets.lower": ("lower",),
}
_MODULES = {name: f"still_export.{module}" for module, names in _HOME.items() for name in names}

__all__ = sorted(_MODULES)


register_when_needed()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'still_export' has no attribute {name!r}")
