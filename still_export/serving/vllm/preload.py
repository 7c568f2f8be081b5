"""Imports shared by all processes of an engine; only for the process that they are forked from (`engine.in_process`)."""

from __future__ import annotations

import contextlib
import os
from importlib import import_module

from still_export.serving.vllm.engine import ENVIRONMENT

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 1)
os.dup2(_nowhere, 2)
with contextlib.suppress(Exception):  # which the engine meets again, where it is heard
    for _module in ("vllm.entrypoints.llm", "vllm.v1.worker.gpu_worker", "still_export.serving.vllm.model"):
        import_module(_module)
