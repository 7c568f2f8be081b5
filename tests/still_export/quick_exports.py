"""torch's exporters without what they do again and again: models that differ in the values of their weights alone are traced, translated
and optimized once a process, the library of translations is read once, and so are the signatures made that each of its functions has, and a
rule that rewrites nodes is tried on those of its own kind: onnxscript looks for all other nodes of each rule of several before it looks at
the one that it begins with.

What is traced for the first time is traced as ever, and all that this project does with a graph is done each time. Two models are alike if
nothing tells them apart that a trace can see: classes, attributes and shapes of all modules, ties, values of buffers, the configuration,
the states, the example inputs, and the functions of the classes and of the files that these stand in, which tests replace. A model with an
attribute that does not say what it is is traced each time.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from still_export.graph.trace import _StatefulForward

PLAIN = (bool, int, float, str, type, torch.dtype, torch.device, torch.Size, type(None))

IGNORED = ("hidden", "carried", "training", "generation_config")
"""Attributes that are empty before a call, or that no forward pass reads."""


_functions: dict[int, Any] = {}
"""By id, so that no id is given again."""


class _Unknown(Exception):
    """Something does not say what it is."""


@functools.cache
def install() -> None:
    """From now on, in this process, once; `__wrapped__` of each function is torch's own."""
    from torch.onnx._internal.exporter import _registration

    trace, translate = torch.export.export, torch.onnx.export
    traced: dict[str, Any] = {}
    translated: dict[tuple[Any, ...], Any] = {}
    optimized: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(trace)
    def traced_once(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        key = key_of(model, arguments, options) if isinstance(model, _StatefulForward) else None
        if key is None:  # transformers' exporters, which name their arguments
            return trace(model, *arguments, **options)
        if key not in traced:
            traced[key] = trace(model, *arguments, **options)
        return traced[key]

    @functools.wraps(translate)
    def translated_once(program: Any, *arguments: Any, **options: Any) -> Any:
        if arguments or not any(program is known for known in traced.values()):
            return translate(program, *arguments, **options)
        key = (id(program), repr(sorted((name, _plain(value)) for name, value in options.items())))
        if key not in translated:
            translated[key] = translate(program, **options)
        return Optimized(_clone(translated[key].model), program, key)

    class Optimized(torch.onnx.ONNXProgram):
        """A program that is optimized once with the same weights left out."""

        def __init__(self, model: Any, program: Any, key: tuple[Any, ...]) -> None:
            super().__init__(model, program)
            self.key = key

        def optimize(self) -> None:
            absent = [name for name, value in self.model.graph.initializers.items() if value.const_value is None]
            key = (*self.key, *absent)
            if key not in optimized:
                super().optimize()
                optimized[key] = _clone(self.model)
            self.model = _clone(optimized[key])

    _registration.onnxscript_apis.get_torchlib_ops = functools.cache(_registration.onnxscript_apis.get_torchlib_ops)
    torch.export.export, torch.onnx.export = traced_once, translated_once
    _registration.ONNXRegistry.from_torchlib = classmethod(_registry(_registration.ONNXRegistry.from_torchlib))
    _begin_with_the_kind()


def _clone(model: Any) -> Any:
    """A copy in which what is added gets the names that it gets in `model`."""
    found = model.clone()
    found.graph._name_authority = copy.deepcopy(model.graph._name_authority)
    return found


def _registry(read: Any) -> Any:
    """A registry with the lists of one that was read once: an export adds its own to it."""
    known = functools.cache(read)

    def registry(kind: Any, *version: int, **named: int) -> Any:
        found = copy.copy(known(*version, **named))
        found.functions = {target: list(each) for target, each in found.functions.items()}
        return found

    return registry


def _begin_with_the_kind() -> None:
    """A rule whose pattern's node is of another kind than the one at hand does not match: it would be found out last."""
    from onnxscript.rewriter._matcher import SimplePatternMatcher
    from onnxscript.rewriter._rewrite_rule import RewriteRule

    rewrite = RewriteRule.try_rewrite

    def begun(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        begins = type(self._matcher) is not SimplePatternMatcher or self._target_pattern.output_nodes[0].op.matches(
            node.op_type
        )
        return rewrite(self, model, graph, node, **options) if begins else None

    RewriteRule.try_rewrite = begun  # type: ignore[method-assign]


def _plain(value: Any) -> Any:
    """Of an option of torch's: a table of translations is known by the ops in it."""
    return sorted(map(str, value)) if isinstance(value, dict) else value


def key_of(wrapper: _StatefulForward, arguments: Any, options: Any) -> str | None:
    """All that a trace can see of a model but the values of weights; None: it cannot be told."""
    try:
        return repr([*_parts(wrapper), _said(arguments), repr(options), torch.get_default_dtype()])
    except _Unknown:
        return None


def _parts(wrapper: _StatefulForward) -> Iterator[Any]:
    for name, module in wrapper.named_modules():
        yield name, type(module), module.training
        for key, value in vars(module).items():
            passing = key == "forward" and isinstance(
                value, functools.partial
            )  # of still_export.graph.repeat: counts hidden states
            if not (key.startswith("_") or passing or key in IGNORED):
                yield key, _said(value)
    kinds = {kind for module in wrapper.modules() for kind in type(module).__mro__}
    places = {sys.modules[kind.__module__] for kind in kinds if kind.__module__.startswith("still_")}
    for place in sorted({*kinds, *places}, key=lambda place: (place.__name__, repr(place))):
        own = {id(each): each for each in vars(place).values() if callable(each)}
        _functions.update(own)
        yield sorted(own)
    first: dict[int, str] = {}
    for name, weight in wrapper.named_parameters(remove_duplicate=False):
        yield name, type(weight), weight.shape, weight.dtype, weight.device, first.setdefault(id(weight), name)
    for name, buffer in wrapper.named_buffers():
        yield name, buffer.dtype, buffer.shape, buffer.device, None if buffer.is_meta else buffer.tolist()


def _said(value: Any) -> Any:
    """What `value` is, without an address of this process in it."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_said(part) for part in value]
    if isinstance(value, dict):
        return [(_said(key), _said(part)) for key, part in value.items()]
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        return type(value), value.shape, value.dtype  # an example input
    if hasattr(value, "to_dict") and hasattr(value, "_attn_implementation"):
        return type(value), repr(value.to_dict()), value._attn_implementation
    if is_dataclass(value):
        return type(value), _said(vars(value))
    if isinstance(value, functools.partial):
        return _said(value.func), _said(value.args), _said(value.keywords)
    if callable(value) and hasattr(value, "__qualname__") and "<" not in value.__qualname__:
        return value.__module__, value.__qualname__
    raise _Unknown(type(value))
