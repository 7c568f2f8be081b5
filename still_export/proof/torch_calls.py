"""What PyTorch calls when it computes a model, recorded without computing: this project's ops with settings, functions, numbers.

The model is the reference's, from the user's config.json. Nothing of the package is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from still_export.mixers.cache import empty_states, state_table
from still_export.models.ahead import AheadMixin
from still_export.models.load import Source
from still_export.models.step import forward_with_state
from still_graphs.ops import OPS
from still_graphs.spec import AttributeValue

TOKENS, CAPACITY_PERIODS = 5, 4
"""Sizes of the recorded call: more than one token, no whole chunk."""


@dataclass
class TorchCalls:
    """Calls of ops and functions.

    Args:
        ops: By the ONNX name of an op, the attributes of each of its calls, in order.
        functions: Number of calls of each of PyTorch's own functions, by name without overload.
        numbers: Occurrences of each number among their arguments.
        words: Occurrences of each (function, string argument), such as `gelu`'s "tanh".
        tensors: Names of the model's parameters and buffers.
    """

    ops: dict[str, list[Mapping[str, AttributeValue]]] = field(default_factory=dict)
    functions: Counter[str] = field(default_factory=Counter)
    numbers: Counter[float] = field(default_factory=Counter)
    words: Counter[tuple[str, str]] = field(default_factory=Counter)
    tensors: frozenset[str] = frozenset()

    def __add__(self, other: TorchCalls) -> TorchCalls:
        ops = {name: [*self.ops.get(name, ()), *other.ops.get(name, ())] for name in self.ops | other.ops}
        return TorchCalls(ops, self.functions + other.functions, self.numbers + other.numbers, self.words + other.words)


def torch_calls(source: Source) -> TorchCalls:
    """What one call of the model, or of its MTP head, calls in all layers."""
    from torch._export.utils import _compiling_state_context

    model = source.outline()
    config = model.config
    capacity = state_table(config, model.dtype).period * CAPACITY_PERIODS
    watch = _Watch()
    watch.calls.tensors = frozenset(n for named in (model.named_parameters(), model.named_buffers()) for n, _ in named)
    # Like in a trace, this project's ops are called on tensors with shapes and no values.
    with next(model.parameters()).fake_mode, torch.no_grad(), _compiling_state_context(), watch:
        states = empty_states(config, 1, model.dtype, capacity)
        ids, count = torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        hidden = torch.zeros(1, TOKENS, config.hidden_size, dtype=model.dtype)
        inputs = {"hidden": hidden} if isinstance(model, AheadMixin) else None
        forward_with_state(model, ids, count + TOKENS, count, states, extra_inputs=inputs)
    return watch.calls


class _Watch(TorchDispatchMode):
    """Records every called op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = TorchCalls()
        self.names = {f"{spec.domain}::{spec.torch_name}": name for name, spec in OPS.items() if spec.traced}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op_name = func._schema.name
        if (name := self.names.get(op_name.removesuffix("_"))) is not None:
            attributes = OPS[name].attributes
            values = args[len(args) - len(attributes) :] if attributes else ()
            found = dict(zip((a.name for a in attributes), values, strict=True))
            self.calls.ops.setdefault(name, []).append(found)
        else:
            self._function(op_name.partition("::")[2].strip("_"), func._schema.arguments, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _function(self, name: str, arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.functions[name] += 1
        values = {a.name: a.default_value for a in arguments} | kwargs
        values |= dict(zip((a.name for a in arguments), args, strict=False))
        for value in values.values():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(part, (int, float)) and not isinstance(part, bool):
                    self.calls.numbers[float(part)] += 1
                elif isinstance(part, str):
                    self.calls.words[name, part] += 1
