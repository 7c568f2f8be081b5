"""PyTorch's answers to many calls at once, layer by layer, with the weights of one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from still_export.mixers.cache import StillCache, state_table
from still_export.models.base import first_names, last_rows
from still_export.models.load import Source
from still_export.models.read.weights import Weight, narrow_value_of, row_pieces
from still_export.models.step import decode_with
from still_export.package.calls import Arrays
from still_export.proof.cases import are_zeros
from still_export.proof.chains import Chain, empty_feed, zeros
from still_export.proof.spill import rooms_for
from still_kernels.codes import near_codes
from still_kernels.forms import pytorch_forms
from still_kernels.ties import CHOSEN

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 8192
"""Rows of an embedding or head that are read and cast at once."""


FEWER_BITS = ("float16", "bfloat16", "int32")
"""Types of states with fewer bits than float32; int32: words of four codes."""
MARGINS = "margins"
"""Name of the output `present_margins.<layer>`: router scores of each token, then 1 for the chosen experts. No package has it."""


NEARER = 1e-3
"""Factor by which a token selected by PyTorch counts as nearer to a key, so that it wins among equal tokens."""


class LayerwiseModel:
    """A STILL model that loads the weights of one layer at a time.

    Args:
        source: The model in the type it computes in. In float16 on a CPU, linear layers compute in float32 and round their outputs, because
            half arithmetic is slow on most processors.
        prepare: Changes the model before its weights are read.
        dtype: Type of the computation; None: the source's types.
        scalars: Type to which factors that are Python numbers are rounded, as a graph in that type stores them.

    Attributes:
        either: How far from halfway between two numbers of a cache's type, in parts of a row's largest, a number is stored either way, and
            what draws which (`near_codes`). None: every number is stored as the nearest.
        disturbed: Draws what each number of the embedding is multiplied by, 1 within the root of the type's epsilon. None: nothing is.
    """

    def __init__(
        self,
        manifest: dict[str, Any],
        source: Source,
        prepare: Callable[[Any], None] | None = None,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        scalars: torch.dtype | None = None,
    ) -> None:
        self.disturbed: torch.Generator | None = None
        self.scalars = scalars
        self.either: tuple[float, torch.Generator] | None = None
        self.source, self.prepare, self.device = source, prepare, torch.device(device)
        self.config = source.config
        self.compute_dtype, self.dtype = dtype, dtype or next(iter(source.weights.values())).dtype
        self.table = state_table(self.config, self.dtype)
        self.all_logits = bool(manifest["model"]["all_logits"])

    @property
    def rounds_states(self) -> bool:
        """Whether caches have fewer bits than float32, in which it computes: two right runs may store neighbouring numbers."""
        return self.dtype == torch.float32 and any(state.dtype in FEWER_BITS for state in self.table)

    @property
    def rounds(self) -> bool:
        """Whether linear layers sum in a wider type and round."""
        return self.dtype == torch.float16

    def empty_feed(self, batch: int, capacity: int) -> Arrays:
        return empty_feed(self.table, batch, capacity)

    def run(self, chains: Sequence[Chain]) -> list[list[Arrays]]:
        """Outputs of every call: `logits` float32, `present_length`, and the states that the call keeps; float64 as float32."""
        passage = self.begin(chains)
        for index in range(self.layers):
            passage.through(index)
        passage.answer()
        return passage.outputs

    def begin(self, chains: Sequence[Chain]) -> Passage:
        """`chains` before the first layer, for callers that read each layer's outputs."""
        return Passage(self, chains)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    def outline(self, tokens: np.ndarray) -> Any:
        """The model without layers and head: embedding rows of `tokens` (ascending) only, other weights complete, meta tensors
        elsewhere."""
        weights = self.source.weights
        apart = ("model.layers.", EMBEDDING, HEAD)
        tensors = {n: self._stand_in(w) if n.startswith(apart) else self._value(w) for n, w in weights.items()}
        model = self.source.model(tensors).to(self.device)
        if self.prepare is not None:
            self.prepare(model)
        embedding, found, first = model.model.embed_tokens, [], 0
        for piece in row_pieces(weights[EMBEDDING], ROWS):
            inside = tokens[(tokens >= first) & (tokens < first + len(piece))] - first
            found.append(self._widened(piece[torch.from_numpy(inside)], weights[EMBEDDING]))
            first += len(piece)
        rows = torch.cat(found)
        if self.disturbed is not None:
            share = 2 * torch.rand(rows.shape, generator=self.disturbed, dtype=torch.float64).to(rows.device) - 1
            rows = (rows * (1 + torch.finfo(rows.dtype).eps ** 0.5 * share)).to(rows.dtype)
        embedding.weight, embedding.padding_idx = torch.nn.Parameter(rows, requires_grad=False), None
        return model

    def heads(self, model: Any) -> Iterator[slice]:
        """Slices of the head's rows; `model` has one slice at a time."""
        weight, first = self.source.weights.get(HEAD, self.source.weights[EMBEDDING]), 0
        for piece in row_pieces(weight, ROWS):
            model.lm_head.weight = torch.nn.Parameter(self._widened(piece, weight), requires_grad=False)
            yield slice(first, first := first + len(piece))

    @contextmanager
    def layer(self, model: Any, index: int) -> Iterator[None]:
        """Load the weights of layer `index`."""
        prefix = f"model.layers.{index}."
        names = {name: first for name, first in first_names(model).items() if name.startswith(prefix)}
        weights = {name.removeprefix(prefix): self.source.weights[first] for name, first in names.items()}
        layer = model.model.layers[index]
        layer.load_state_dict({n: self._value(w) for n, w in weights.items()}, strict=False, assign=True)
        yield
        layer.load_state_dict({n: self._stand_in(w) for n, w in weights.items()}, strict=False, assign=True)

    def _value(self, weight: Weight) -> Tensor:
        return self._widened(narrow_value_of(weight), weight)

    def _widened(self, part: Tensor, weight: Weight) -> Tensor:
        """A part of a weight in the computation's type, cast on the device to copy half the bytes."""
        return part.to(self.device).to(self.compute_dtype or weight.dtype)

    def _stand_in(self, weight: Weight) -> Tensor:
        return torch.zeros((), dtype=self.compute_dtype or weight.dtype, device=self.device).expand(weight.shape)

    def states_of(self, index: int) -> dict[str, torch.dtype]:
        """Types of a layer's states by name."""
        wide = torch.promote_types(self.dtype, torch.float32)
        names = {s.name for s in self.table if s.layer == index}

        def kind(name: str, dtype: str) -> torch.dtype:
            of, _, layer = name.rpartition(".")
            scale = of.endswith("_scale") and f"{of.removesuffix('_scale')}.{layer}" in names
            return getattr(torch, dtype) if dtype != "float32" or scale else wide

        return {s.name.rpartition(".")[0]: kind(s.name, s.dtype) for s in self.table if s.layer == index}


class Passage:
    """Chains that run through a model layer by layer.

    Attributes:
        outputs: See `LayerwiseModel.run`; those so far. The caller may remove what it has read.
    """

    def __init__(self, layers: LayerwiseModel, chains: Sequence[Chain]) -> None:
        self._layers, self._linear = layers, _Linear()
        every = np.concatenate([call.tokens.ravel() for chain in chains for call in chain.calls])
        tokens = np.unique(every.clip(0))  # -1 stands for an image's embedding and reads any row
        with torch.no_grad():
            self._model = layers.outline(tokens)
        self._linear.attach(self._model)
        self._work = [_Chain(chain, tokens, layers.device, layers.dtype) for chain in chains]
        self._cache = StillCache.empty(layers.config)
        self.outputs = [chain.outputs for chain in self._work]

    @property
    def unsure(self) -> list[bool]:
        """For each chain, whether a selected key so far could belong to more than one token."""
        return [chain.unsure for chain in self._work]

    @property
    def overflows(self) -> list[int | None]:
        """For each chain, the first layer whose hidden states are not finite; None: none so far."""
        return [chain.overflow for chain in self._work]

    @torch.no_grad()
    def through(self, index: int) -> None:
        of = self._layers
        # PyTorch is the reference, also on a GPU: the package's kernels must not check themselves.
        codes = near_codes(*of.either) if of.either else nullcontext()
        scalars = _RoundedScalars(of.scalars) if of.scalars else nullcontext()
        with pytorch_forms(), codes, scalars, of.layer(self._model, index):
            last = index == of.layers - 1
            layer = _LayerRun(self._model, self._cache, index, last, of.states_of(index), self._linear)
            for chain in self._work:
                chain.through(index, layer)
        self._linear.forget()

    @torch.no_grad()
    def answer(self) -> None:
        """Compute the logits of every call from the last layer's output."""
        calls = []
        vocabulary = self._layers.source.weights[EMBEDDING].shape[0]
        for chain in self._work:
            of_chain = [*chain.head_inputs(self._layers.all_logits)]
            rooms = rooms_for([(*hidden.shape[:2], vocabulary) for hidden, _ in of_chain], np.float32)
            for (_, outputs), room in zip(of_chain, rooms, strict=True):
                outputs["logits"] = room
            calls += of_chain
        for rows in self._layers.heads(self._model):
            for hidden, outputs in calls:
                outputs["logits"][..., rows] = self._model.logits(hidden).float().cpu().numpy()
            self._linear.forget()
        for chain in self._work:
            chain.hidden = []


class _Reached(Exception):
    """Stops the model after the layer."""


class _LayerRun:
    """Runs one layer the way its family calls it: earlier layers are skipped, later ones not reached."""

    def __init__(
        self, model: Any, cache: StillCache, index: int, last: bool, states: dict[str, torch.dtype], linear: _Linear
    ) -> None:
        self.model, self.cache, self.index, self.last, self.states = model, cache, index, last, states
        self.linear = linear
        self.seen: dict[str, Tensor] = {}
        self.experts: Tensor | None = None
        self.tokens_to_select: Tensor | None = None
        self.unsure: Tensor | None = None
        self.inputs: dict[str, Tensor] = {}
        watched = [module for module in model.model.layers[index].modules() if hasattr(module, "watch")]
        selecting = [module for module in watched if hasattr(module, "selects")]
        for module in [module for module in watched if module not in selecting][-1:]:
            module.watch = self._route  # second choice of a layer: experts, which come after attention
        for module in selecting:
            module.watch = self._select if module.selects else None

    def _route(self, margins: Tensor) -> Tensor | None:
        """Record router scores [B, T, ., E] and choices; returns the experts, or blocks, [B, T, k] to use."""
        chosen = margins[..., -1:, :] > 0
        experts = self.experts
        if experts is not None:
            count = chosen.shape[-1]
            places = torch.where((experts < 0) | (experts >= count), count, experts)
            one_hot = chosen.new_zeros(*chosen.shape[:-1], count + 1).scatter_(-1, places[:, :, None], True)[
                ..., :count
            ]
            chosen = torch.where((experts < 0).all(-1)[..., None, None], chosen, one_hot)
        self.seen[MARGINS] = torch.cat([margins, chosen.to(margins.dtype)], dim=-2)
        return experts

    def _select(self, number: Tensor, keys: Tensor, selected: Tensor) -> Tensor:
        """Replace `selected` by `tokens_to_select`, if set, and record the tokens' places (arguments: see `Watch`)."""
        if self.tokens_to_select is not None:
            selected, unsure = _selected(self.tokens_to_select, number, keys, selected)
            self.unsure = unsure if self.unsure is None else self.unsure | unsure
        number = number[:, None, :, None]
        found = torch.where(number >= 0, number * keys.shape[3] + selected, -1)
        earlier = self.seen.get(CHOSEN)
        self.seen[CHOSEN] = found if earlier is None else torch.cat([earlier, found], dim=2)
        return selected

    def __call__(
        self, hidden: Any, tokens: Tensor, new: Tensor, length: Tensor, states: dict[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """(the layer's output, normalized after the last layer, its states); `hidden` is the output of the layer before."""
        cache, layers = self.cache, self.model.model.layers
        self.seen.clear()
        cache.progress.length = length
        cache.progress.begin(new, None)
        # Also a sequence without new tokens has logits: those of its first column.
        real = torch.arange(tokens.shape[1], device=tokens.device) < new[:, None].clamp_min(1)
        self.linear.real = None if bool(real.all()) else real
        if states:
            cache.layers[self.index].load(states)
            cache.layers[self.index].is_initialized = True
        found: list[Any] = []
        own = layers[self.index].forward

        def compute(layer_input: Tensor, *args: Any, **kwargs: Any) -> Any:
            at = layer_input if hidden is None else hidden[0] if isinstance(hidden, tuple) else hidden
            found.append(own(at, *args, **kwargs))
            if not self.last:
                raise _Reached
            return found[0]

        def skip(layer_input: Tensor, *args: Any, **kwargs: Any) -> Any:
            return (layer_input, *hidden[1:]) if isinstance(hidden, tuple) else layer_input

        for layer in layers[: self.index]:
            layer.forward = skip
        layers[self.index].forward = compute
        positions = length[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        try:
            result = decode_with(self.model, positions, cache, tokens, self.inputs).last_hidden_state
        except _Reached:
            result = found[0]
        finally:
            for layer in layers[: self.index + 1]:
                del layer.forward
        return result, cache.layers[self.index].states() if self.states else {}


class _Chain:
    """A chain on its way through the layers."""

    def __init__(self, chain: Chain, tokens: np.ndarray, device: torch.device, dtype: torch.dtype) -> None:
        self.chain, self.device, self.dtype = chain, device, dtype
        self.hidden: list[Any] = [None] * len(chain.calls)
        self.carried: list[dict[int, Tensor]] = [{} for _ in chain.calls]
        places = [np.where(call.tokens < 0, call.tokens, np.searchsorted(tokens, call.tokens)) for call in chain.calls]
        self.tokens = [self._tensor(place) for place in places]
        self.new = [self._tensor(call.new_tokens) for call in chain.calls]
        lengths = np.cumsum([chain.start["past_length"], *(call.new_tokens for call in chain.calls)], axis=0)
        self.lengths = [self._tensor(length) for length in lengths]
        self.outputs: list[Arrays] = [{"present_length": length.astype(np.int64)} for length in lengths[1:]]
        self.unsure = False
        self.overflow: int | None = None

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)

    def through(self, index: int, layer: _LayerRun) -> None:
        start = self.chain.start
        states = {name: self._state(start[f"past_{name}.{index}"], kind) for name, kind in layer.states.items()}
        experts, tokens = self.chain.choices.get(~index), self.chain.choices.get(index)
        layer.tokens_to_select = None if tokens is None else torch.from_numpy(tokens).to(self.device)
        layer.unsure = None
        for i, call in enumerate(self.chain.calls):
            layer.experts = None if experts is None else self._at(experts, i)
            layer.inputs = {name: torch.from_numpy(x).to(self.device) for name, x in call.images.items()}
            if (carried := getattr(layer.model, "carried", None)) is not None:
                carried.values = self.carried[i]
            self.hidden[i], states = layer(self.hidden[i], self.tokens[i], self.new[i], self.lengths[i], states)
            self._keep(i, states | layer.seen, index)
        if self.overflow is None and not all(map(self._is_finite, self.hidden, self.new)):
            self.overflow = index
        self.unsure |= layer.unsure is not None and bool(layer.unsure)

    @staticmethod
    def _is_finite(hidden: Any, new: Tensor) -> bool:
        """Whether a layer's output is finite outside padding."""
        values = hidden[0] if isinstance(hidden, tuple) else hidden
        real = torch.arange(values.shape[1], device=values.device) < new[:, None]
        return bool(values[real].isfinite().all())

    def _state(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        if are_zeros(array):  # to save a transfer
            return torch.zeros(array.shape, dtype=dtype, device=self.device)
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(self.device, dtype)

    def _at(self, choices: np.ndarray, number: int) -> Tensor:
        """`choices` for the tokens of a call."""
        places = self.lengths[number][:, None] + torch.arange(self.tokens[number].shape[1], device=self.device)
        chosen = self._tensor(choices)
        within = (places < chosen.shape[1])[..., None]
        found = chosen.gather(1, places.clamp_max(chosen.shape[1] - 1)[..., None].expand(-1, -1, chosen.shape[2]))
        return torch.where(within, found, -1)

    def _keep(self, number: int, states: dict[str, Tensor], index: int) -> None:
        """Store the states and margins that the call keeps."""
        keep = self.chain.calls[number].keep
        named = _named({name: x for name, x in states.items() if keep(_present(name, index))}, index)
        self.outputs[number].update({name: _compact(x) for name, x in named.items()})

    def head_inputs(self, all_logits: bool) -> Iterator[tuple[Tensor, Arrays]]:
        """For every call: (hidden states whose logits are needed, its outputs)."""
        for call, outputs, hidden, new in zip(self.chain.calls, self.outputs, self.hidden, self.new, strict=True):
            yield last_rows(hidden, new, 0 if all_logits or call.every else 1), outputs


class _RoundedScalars(TorchDispatchMode):
    """Rounds factors that are Python numbers to a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.div, torch.ops.aten.mul_):
            args = tuple(float(torch.tensor(x, dtype=self.dtype)) if isinstance(x, float) else x for x in args)
        return func(*args, **(kwargs or {}))


class _Linear:
    """Lets a model's linear layers leave out padding, and in half precision on a CPU compute in float32 and round.

    Attributes:
        real: Mask [B, T] of the call's tokens that are not padding; None: all.
    """

    def __init__(self) -> None:
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}
        self.real: Tensor | None = None

    def attach(self, model: Any) -> None:
        """Replace the computation of every linear layer of `model`."""
        for module in model.modules():
            if type(module) is nn.Linear:
                setattr(module, "forward", partial(self._called, module))  # noqa: B010 - mypy: no assignment to a method

    def _called(self, module: nn.Linear, x: Tensor) -> Tensor:
        if self.real is not None and x.shape[:-1] == self.real.shape:
            found = self._product(x[self.real], module.weight, module.bias)
            return found.new_zeros(*self.real.shape, found.shape[-1]).masked_scatter(self.real[..., None], found)
        return self._product(x, module.weight, module.bias)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype != torch.float16 or x.device.type != "cpu":
            return functional.linear(x, weight, bias)
        return functional.linear(x.float(), self._widened(weight), self._widened(bias)).to(x.dtype)

    def _widened(self, weight: Any) -> Any:
        if weight is None:
            return None
        if id(weight) not in self._wide:
            self._wide[id(weight)] = weight, weight.float()
        return self._wide[id(weight)][1]

    def forget(self) -> None:
        """Drop the cast weights and the last call."""
        self._wide.clear()
        self.real = None


def _selected(chosen: Tensor, number: Tensor, keys: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
    """(`selected` with the chosen tokens of each chunk that has as many, whether a chosen key could belong to more than one token)."""
    few, unsure = selected.shape[3], torch.zeros((), dtype=torch.bool, device=keys.device)
    if chosen.is_floating_point():
        chosen = chosen[:, :, : chosen.shape[2] // few * few].unflatten(2, (-1, few)).to(keys.dtype)
    chunks = chosen.shape[2]
    if not chunks or chosen.shape[3] < few:
        return selected, unsure
    known = ((number >= 0) & (number < chunks))[:, None, :, None]
    at = number.clamp(0, chunks - 1).reshape(len(number), 1, -1, *[1] * (chosen.dim() - 3))
    chosen = chosen.gather(2, at.expand(-1, chosen.shape[1], -1, *chosen.shape[3:]))
    if chosen.is_floating_point():
        known = known & (chosen.isfinite().all(-1) & chosen.any(-1)).all(-1, keepdim=True)
        apart = torch.cdist(chosen.nan_to_num(), keys)
        own = torch.zeros_like(apart).scatter_(4, selected[:, :, :, None].expand(*apart.shape[:4], -1), 1.0)
        chosen = _in_order(apart * (1 - NEARER * own))
        others = apart.scatter(4, chosen[..., None], torch.inf).amin(-1)
        unsure = (known & (2 * apart.gather(4, chosen[..., None])[..., 0] > others)).any()
    known = known & (chosen >= 0).all(-1, keepdim=True) & (chosen.diff(dim=-1) > 0).all(-1, keepdim=True)
    return torch.where(known, chosen, selected), unsure


def _in_order(apart: Tensor) -> Tensor:
    """Ascending tokens [..., S] with the smallest sum of distances [..., S, C] to S keys: a shortest path."""
    # Keys are stored in the order of their tokens, so neighbours identify a key that rounding moved far.
    sums, before = apart[..., 0, :], []
    for distance in apart.unbind(-2)[1:]:
        least, at = sums.cummin(-1)
        before.append(at)
        sums = distance + functional.pad(least[..., :-1], (1, 0), value=torch.inf)
    places = [sums.argmin(-1, keepdim=True)]
    for at in reversed(before):
        places.append(at.gather(-1, (places[-1] - 1).clamp_min(0)))
    return torch.cat(places[::-1], dim=-1)


def _compact(x: np.ndarray) -> np.ndarray:
    """A copy without the base of a view; zeros without memory, because states of short prompts are mostly zeros."""
    return np.ascontiguousarray(x) if not are_zeros(x) and x.any() else zeros(x.shape, x.dtype)


def _single(x: Tensor) -> np.ndarray:
    x = x.float() if x.dtype == torch.float64 else x
    if x.device.type != "cpu" and not x.any():  # zeros need no transfer
        return zeros(x.shape, torch.empty(0, dtype=x.dtype).numpy().dtype)
    return np.asarray(x.cpu().numpy())


def _named(states: dict[str, Tensor], index: int) -> Arrays:
    return {_present(name, index): _single(x) for name, x in states.items()}


def _present(name: str, index: int) -> str:
    return f"present_{name}.{index}"
