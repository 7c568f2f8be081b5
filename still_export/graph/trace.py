"""Trace a STILL model: one ExportedProgram for prefill and decode, tokens and states in, logits and states out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from still_export.graph.garbage import few_collections
from still_export.graph.repeat import Constants, Hidden, constants_of, like, only
from still_export.mixers.cache import empty_states, state_table
from still_export.models.ahead import AheadMixin
from still_export.models.base import first_names, last_rows
from still_export.models.step import decode_with_state, rows_left
from still_graphs.states import IMAGE_INPUTS, LAST_HIDDEN, State, StateTable, rows_after

TRACE_BATCH, TRACE_TOKENS, TRACE_CAPACITY_PERIODS = 3, 5, 4
"""Example sizes of the trace, all different and none 1, so that no dimension is specialised or confused."""


@dataclass(frozen=True)
class TracedModel:
    """An ExportedProgram with the names of the model's inputs and outputs in order.

    `weight_names` gives the model's name of each of the program's weights; one that is tied has the name that comes first. `weights` has
    the values by the model's names. `alike` gives for each layer the one in the program that it is like; the program ends in the hidden
    states of those (still_export.graph.repeat). `constants` are the layers' own.
    """

    program: torch.export.ExportedProgram
    input_names: list[str]
    output_names: list[str]
    states: StateTable
    weight_names: dict[str, str]
    weights: dict[str, Tensor]
    alike: list[int]
    constants: list[Constants]


@contextmanager
def tracing() -> Iterator[None]:
    """Without gradients, with few garbage collections, and without parts of a trace that no exporter reads.

    Those are stack traces, memory layouts, gradient switches with their subgraphs, and torch's cache of shape operations, which costs more
    than it saves.
    """
    from torch._dynamo import config

    with few_collections(), torch.no_grad(), config.patch(fake_tensor_cache_enabled=False), ExitStack() as stack:
        for place, name, value in SPARED:
            owner = importlib.import_module(place) if importlib.util.find_spec(place) else None
            if hasattr(owner, name):  # not every PyTorch has each
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
        yield


def _without_switches(module: torch.fx.GraphModule, signature: Any) -> tuple[torch.fx.GraphModule, Any]:
    """A graph without gradient switches."""
    for node in [node for node in module.graph.nodes if node.target is torch._C._set_grad_enabled]:
        module.graph.erase_node(node)
    module.recompile()
    return module, signature


SPARED: tuple[tuple[str, str, Any], ...] = (
    ("torch.fx.config", "do_not_emit_stack_traces", True),
    ("torch.fx.experimental.proxy_tensor", "_extract_tensor_metadata", lambda _: None),
    ("torch._export.passes.replace_set_grad_with_hop_pass", "replace_set_grad_with_hop_pass", _without_switches),
)
"""Work of torch.export that no exporter reads: module, name, replacement."""


def _name(state: State) -> str:
    return state.name.rsplit(".", 1)[0]


def _varies(states: StateTable, dimension: str) -> bool:
    """Whether the number of rows depends on the tokens; without a row per token, or with a fixed capacity, it is constant."""
    rule, few = states.growths[dimension], states.period * TRACE_CAPACITY_PERIODS
    return len({rows_after(rule, tokens, states.capacity_tokens) for tokens in (few, few + states.period)}) > 1


class _StatefulForward(nn.Module):
    """`forward_with_state` with its states as one flat argument list."""

    def __init__(self, model: Any, states: StateTable, keep: int, alike: list[int], ahead: bool) -> None:
        super().__init__()
        self.model, self.ahead = model, ahead
        self.states = [state for state in states if alike[state.layer] == state.layer]
        self.keep = keep
        self.alike = alike
        self.hidden = Hidden()

    def forward(
        self,
        input_ids: Tensor,
        new_tokens: Tensor,
        past_length: Tensor,
        past: list[Tensor],
        seen: list[Tensor],
        hidden: Tensor | None = None,
    ) -> list[Tensor]:
        states: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.alike}
        for key, tensor in zip(self.states, past, strict=True):
            states[key.layer][_name(key)] = tensor
        layers = [states[layer] for layer in self.alike]
        self.hidden.states.clear()
        extra_inputs = dict(zip(IMAGE_INPUTS, seen, strict=False)) | ({} if hidden is None else {"hidden": hidden})
        every, present = decode_with_state(self.model, input_ids, new_tokens, past_length, layers, **extra_inputs)
        last = last_rows(every, new_tokens, rows_left(input_ids, self.keep))
        present_states = [present[key.layer][_name(key)] for key in self.states]
        more = [(every if hidden is None else last).float()] if self.ahead else []
        return [self.model.logits(last).float(), *present_states, past_length + new_tokens, *more, *self.hidden.states]


def trace_model(model: Any, keep: int = 1, whole: bool = False, ahead: bool = False) -> TracedModel:
    """Trace `model` with dynamic batch, tokens and rows of the states that grow.

    Args:
        model: A STILL model of any family, on the CPU; stand-ins for its weights will do.
        keep: Of how many of each sequence's last new tokens there are logits; 0: of all.
        whole: Trace all layers, also those that are like others.
        ahead: A head guesses tokens ahead of the model, or `model` is one.

    Returns:
        The program; inputs `input_ids [B,T]`, `new_tokens [B]`, `past_length [B]`, `past_<state>.<layer>`, of a model that sees images
        IMAGE_INPUTS; outputs `logits` (float32), `present_<state>.<layer>`, `present_length [B]`. With `ahead` also the output
        `last_hidden [B,T,C]` (float32) that heads read; of a head the input `hidden` and, of the tokens that have logits, the output
        `last_hidden`.
    """
    config = model.config
    states = state_table(config, model.dtype)
    layers = empty_states(config, TRACE_BATCH, model.dtype, capacity=states.period * TRACE_CAPACITY_PERIODS)
    alike = list(range(config.num_hidden_layers)) if whole else like(model, states)
    wrapper = _StatefulForward(model, states, keep, alike, ahead).eval()
    past = [layers[state.layer][_name(state)] for state in wrapper.states]

    batch = torch.export.Dim("batch", min=1, max=1 << 16)
    tokens = torch.export.Dim("tokens", min=1, max=1 << 24)
    growing = {name: torch.export.Dim(name, min=2, max=1 << 24) for name in states.growths if _varies(states, name)}
    named = {"batch": batch, **growing}
    shapes = [{axis: named[d] for axis, d in enumerate(state.shape) if d in named} for state in wrapper.states]
    counts = torch.zeros(TRACE_BATCH, dtype=torch.int64)
    ids = torch.zeros(TRACE_BATCH, TRACE_TOKENS, dtype=torch.int64)
    # Of dimensions of 1, as their defaults: batch and tokens must not be read from optional inputs.
    seen = [torch.zeros(1, 1, config.hidden_size, dtype=model.dtype), torch.full((3, 1, 1), -1)]
    seen = seen if getattr(config, "vision_config", None) else []
    of_head = [torch.zeros(TRACE_BATCH, TRACE_TOKENS, config.hidden_size)] if isinstance(model, AheadMixin) else []
    arguments = (ids, counts + TRACE_TOKENS, counts, past, seen, *of_head)
    names, weights = (
        {name: own.removeprefix("model.") for name, own in first_names(wrapper).items()},
        dict(model.named_parameters()),
    )
    with tracing(), only(model, alike) as wrapper.hidden:
        program = torch.export.export(
            wrapper,
            arguments,
            dynamic_shapes=(
                {0: batch, 1: tokens},
                {0: batch},
                {0: batch},
                shapes,
                [None] * len(seen),
                *[{0: batch, 1: tokens} for _ in of_head],
            ),
            strict=False,
        )
    return TracedModel(
        program,
        [
            *("input_ids", "new_tokens", "past_length", *(key.past for key in states)),
            *(*IMAGE_INPUTS[: len(seen)], *(["hidden"] if of_head else [])),
        ],
        ["logits", *(key.present for key in states), "present_length", *([LAST_HIDDEN] if ahead else [])],
        states,
        names,
        weights,
        alike,
        [constants_of(layer) for layer in model.model.layers],
    )
