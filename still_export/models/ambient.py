"""What a caller's process may have set and reading, tracing and writing a model must not depend on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside the block new tensors are float32 and on the CPU, and no inference mode is on; also a decorator."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(dtype)


def import_without_docstrings() -> None:
    """Let transformers be imported by `python -OO` (PYTHONOPTIMIZE=2), which drops the docstrings that it completes at import."""
    if sys.flags.optimize < 2:
        return
    completing = import_module("transformers.utils.auto_docstring")
    for name in ("auto_method_docstring", "auto_class_docstring"):
        setattr(completing, name, lambda obj, *_, **__: obj)
