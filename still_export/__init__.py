"""Linearize LLMs with STILL hybrid attention, export them with their state, and prove every target against PyTorch.

Names are imported when they are first used, so that running an exported package needs neither torch nor transformers. Transformers'
Auto classes load STILL models from then on (still_export/auto_classes.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from still_export.auto_classes import register_when_needed
from still_export.version import __version__ as __version__

if TYPE_CHECKING:
    from still_export.api import load
    from still_export.evaluation.bench import BenchOptions, bench
    from still_export.evaluation.evaluate import EvaluationOptions
    from still_export.evaluation.models import evaluate
    from still_export.evaluation.prove import ProveOptions, prove
    from still_export.folders.demo import demo_model_path
    from still_export.graph.options import ExportOptions
    from still_export.loading.language_model import LanguageModel
    from still_export.mixers.config import StillConfig
    from still_export.models import attach_untrained, forward_with_state
    from still_export.models.load import load_model, load_tokenizer
    from still_export.proof.package import VerifyOptions, verify
    from still_export.targets.export import export
    from still_export.targets.lower import lower

_HOME = {
    "BenchOptions": "still_export.evaluation.bench",
    "EvaluationOptions": "still_export.evaluation.evaluate",
    "ExportOptions": "still_export.graph.options",
    "LanguageModel": "still_export.loading.language_model",
    "ProveOptions": "still_export.evaluation.prove",
    "StillConfig": "still_export.mixers.config",
    "VerifyOptions": "still_export.proof.package",
    "attach_untrained": "still_export.models",
    "bench": "still_export.evaluation.bench",
    "demo_model_path": "still_export.folders.demo",
    "evaluate": "still_export.evaluation.models",
    "export": "still_export.targets.export",
    "forward_with_state": "still_export.models",
    "load": "still_export.api",
    "load_model": "still_export.models.load",
    "load_tokenizer": "still_export.models.load",
    "lower": "still_export.targets.lower",
    "prove": "still_export.evaluation.prove",
    "verify": "still_export.proof.package",
}

__all__ = [
    "BenchOptions",
    "EvaluationOptions",
    "ExportOptions",
    "LanguageModel",
    "ProveOptions",
    "StillConfig",
    "VerifyOptions",
    "attach_untrained",
    "bench",
    "demo_model_path",
    "evaluate",
    "export",
    "forward_with_state",
    "load",
    "load_model",
    "load_tokenizer",
    "lower",
    "prove",
    "verify",
]


register_when_needed()


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'still_export' has no attribute {name!r}")
