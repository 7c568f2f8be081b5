"""What a caller's process may have set and reading, tracing and writing a model must not depend on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch

from still_export.errors import ConfigError


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside the block new tensors are float32 and on the CPU, and neither autocast nor an inference mode is on; also a decorator.

    Raises:
        ConfigError: A caller's mode makes parameters without content, as FakeTensorMode and accelerate's init_empty_weights do.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False):
            module = torch.nn.Module()
            module.register_parameter("made", torch.nn.Parameter(torch.empty(0)))
            if (made := module.made.data).is_meta or type(made) is not torch.Tensor:
                raise ConfigError(
                    f"a mode of PyTorch or accelerate is on that makes parameters without content ({type(made).__name__} on "
                    f"{made.device}). Call this outside of its block."
                )
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
