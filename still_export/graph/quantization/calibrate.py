"""GPTQ codes and bit budgets, calibrated on text with the very model that is exported.

All rows of text go through the model together. Each weight is rounded right before its layer multiplies, against inputs that earlier
layers computed with their codes. So every mixer is calibrated as it is, adapter included, and only the places of linear layers need be
known. Source: GPTQ, arXiv:2210.17323, by GPTQModel.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from still_export.errors import ConfigError, DataError, UnsupportedError
from still_export.extras import demand
from still_export.graph.quantization.forms import EXACT, Form
from still_export.graph.quantization.policy import DEFAULT_METHOD, GPTQ, Quantization
from still_export.graph.quantization.quantizers import quantize
from still_export.graph.quantization.stored import StoredWeight
from still_export.models.load import Source
from still_export.models.read.blocks import BlockWeight, pack
from still_export.models.read.weights import value_of
from still_export.texts.files import read_text
from still_export.texts.texts import python_documentation, tokenize
from still_kernels.forms import pytorch_forms

ROWS, ROW_TOKENS = 32, 512
"""Rows of text for GPTQ, and tokens of each."""
HELD_OUT_ROWS = 8
"""Rows of other text, on which losses are measured."""
LONGEST_TOKEN = 16
"""Characters a token has at most on average: only this much of a text is tokenized."""
LIBRARY = "gptqmodel"
GAIN = 3
"""Largest factor by which rounding to nearest loses more than GPTQ."""
TRIES = 5
"""Measurements of a loss when bits are chosen."""
BYTES_ON_A_GPU = 16
"""Bytes for each parameter: original, current, the change by its codes, and temporaries."""


@dataclass(frozen=True)
class Texts:
    """Rows of tokens spread evenly over texts: `calibration` and `held_out`, int64 [B, T], without common text."""

    calibration: Tensor
    held_out: Tensor


def read_rows(paths: Sequence[str], tokenizer: Any, vocab_size: int) -> Texts:
    """Rows of text files, or of Python's documentation without files: the first tokens of evenly spread parts.

    Raises:
        DataError: A file is no text, or they have too few tokens.
    """
    text = "\n\n".join(read_text(Path(path)) for path in paths) or python_documentation()
    size = len(text) // (ROWS + HELD_OUT_ROWS)
    rows = []
    for start in range(0, size * (ROWS + HELD_OUT_ROWS), size or 1):
        ids = tokenize(text[start : start + min(size, LONGEST_TOKEN * ROW_TOKENS)], tokenizer, vocab_size)[:ROW_TOKENS]
        if len(ids) < ROW_TOKENS:
            raise DataError(
                f"the text to calibrate with ({', '.join(paths)}) is too short: each of its {ROWS + HELD_OUT_ROWS} parts should have "
                f"{ROW_TOKENS} tokens, and one has {len(ids)}. Give more with --calibrate."
            )
        rows.append(torch.from_numpy(ids.astype(np.int64)))
    every = len(rows) // HELD_OUT_ROWS
    held_out = [number % every == every - 1 for number in range(len(rows))]
    found = [
        torch.stack([row for row, out in zip(rows, held_out, strict=True) if out == wanted]) for wanted in (False, True)
    ]
    return Texts(*found)


def calibrate(
    source: Source,
    forms: Mapping[str, Form],
    policy: Quantization,
    texts: Texts,
    budget: float | None = None,
    say: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> tuple[dict[str, Form], dict[str, Any]]:
    """Round the 4-bit weights in advance.

    Args:
        budget: Largest relative growth of the loss on held-out text. Weights with the largest loss for their bytes get 8 bits. None: no
            limit.
        say: Called with each step, the work done, and the total.

    Returns:
        (forms, entry): all forms, with codes or 8 bits for rounded weights; and an entry for the manifest.

    Raises:
        ConfigError: No weight is rounded to 4 bits; or the budget cannot be met.
        UnsupportedError: The inputs of a weight are not finite.
        ModuleNotFoundError: The library is missing.
    """
    if policy.method == GPTQ:
        demand(LIBRARY)
    wanted = {n: form for n, form in forms.items() if form.bits == 4 and form.base is not None and form.method != EXACT}
    if not wanted:
        raise ConfigError(
            f"--quantize-method {GPTQ} and --quantize-budget are for weights that are rounded to 4 bits, and none is: they are the "
            "source's own codes, or have 8 bits. Leave them out, or merge an adapter with --lora merged."
        )
    say("reading the model to calibrate", 0, 0)
    rounding = Rounding(source, wanted, policy, say)
    entry: dict[str, Any] = {"tokens": texts.calibration.numel()}
    wide: list[str] = []
    with pytorch_forms():  # backward needs kernels for every layer, which not every device has
        if budget is None:
            rounding.by_library(texts.calibration)
        else:
            wide, lost = _choose_wide(rounding, texts, budget)
            entry |= {"budget": budget, "loss": lost, "eight_bits": wide}
    # Experts are in no linear layer; they are rounded to nearest when written.
    left = {n: replace(form, method=DEFAULT_METHOD) for n, form in wanted.items() if form.method == GPTQ}
    made = {name: replace(wanted[name], codes=codes) for name, codes in rounding.made.items()}
    return {**forms, **left, **made, **{name: _in_eight(wanted[name]) for name in wide}}, entry


def loss_of(model: Any, rows: Tensor) -> float:
    """Mean loss in nats of every token except the first, rows [B, T]."""
    with torch.no_grad():
        return sum(float(_nats(model, row[None])) for row in rows) / _predicted(rows)


def fewest(loss: Callable[[int], float], expected: Sequence[float], limit: float) -> int:
    """The smallest count with loss(count) <= limit that TRIES calls find, with one more call for the largest; -1: even the largest exceeds
    it.

    Args:
        expected: What the loss of each count may be but for a factor, falling; the factor is learned from calls.
    """
    most = len(expected) - 1
    low, high, factor = -1, most + 1, 1.0  # loss at `low` exceeds the limit; at `high`, if it is a count, it does not
    for tried in range(TRIES + 1):
        within = [count for count in range(low + 1, high) if factor * expected[count] <= limit]
        if high <= most and (tried == TRIES or not within):
            break
        guess = within[0] if within and tried < TRIES else most
        lost = loss(guess)
        low, high = (low, guess) if lost <= limit else (guess, high)
        if low == most:
            break
        if lost > 0 < expected[guess]:
            factor = lost / expected[guess]
    return high if high <= most else -1


def _choose_wide(rounding: Rounding, texts: Texts, budget: float) -> tuple[list[str], float]:
    """Names of the weights that need 8 bits to keep the growth of the held-out loss within `budget`, and that growth."""
    rows, model = texts.held_out, rounding.model
    whole = loss_of(model, rows)
    rounding.to_nearest()
    harms = {name: harm / _predicted(rows) / whole for name, harm in rounding.harms(rows).items()}
    order = sorted(harms, key=lambda name: harms[name] / rounding.originals[name].numel(), reverse=True)
    expected = [sum(harms[name] for name in order[count:]) for count in range(len(order) + 1)]
    least = 0
    if rounding.policy.method == GPTQ:
        # Certain 8-bit weights are set before later layers are calibrated on their outputs.
        least = next(count for count, lost in enumerate(expected) if lost <= GAIN * budget or count == len(order))
        rounding.by_library(texts.calibration, order[:least])
    losses: dict[int, float] = {}

    def loss(more: int) -> float:
        rounding.say("measuring the loss", len(losses), TRIES + 1)
        rounding.give(order[: least + more])
        losses[least + more] = loss_of(model, rows) / whole - 1
        return losses[least + more]

    more = fewest(loss, expected[least:], budget)
    if more < 0:
        raise ConfigError(
            f"--quantize-budget +{budget:.3%} cannot be met: with 8 bits in the place of 4 everywhere bits per byte of held-out text grow "
            f"by {losses[len(order)]:+.3%}. Ask for that at least."
        )
    return order[: least + more], losses[least + more]


def calibrated_forms(forms: Mapping[str, Form], eight_bits: Collection[str]) -> dict[str, Form]:
    """The forms that `calibrate` returned, without its codes: `eight_bits` are those of its entry."""
    found = {}
    for name, form in forms.items():
        wanted = form.bits == 4 and form.base is not None and form.method != EXACT
        if wanted and name in eight_bits:
            form = _in_eight(form)
        elif wanted and form.base is not None and form.base.dim() > 2:  # experts are rounded to nearest
            form = replace(form, method=DEFAULT_METHOD)
        found[name] = form
    return found


def _in_eight(form: Form) -> Form:
    return replace(form, bits=8, method=DEFAULT_METHOD, zero_points=False)


def _nats(model: Any, row: Tensor) -> Tensor:
    row = row.to(model.get_input_embeddings().weight.device)
    logits = model(row, use_cache=False).logits[0, :-1].float()
    return nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum")


def _roomy_device(parameters: int) -> torch.device:
    """A GPU with enough memory for a model of this size; else the CPU."""
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= BYTES_ON_A_GPU * parameters:
        return torch.device("cuda")
    return torch.device("cpu")


def _predicted(rows: Tensor) -> int:
    return len(rows) * (rows.shape[1] - 1)


class Rounding:
    """A float32 model whose weights can be switched between their original, 4-bit and 8-bit values.

    layers, originals, made: Its linear layers, their original weights, and the 4-bit codes, by name.

    Args:
        wanted: Forms of the weights; those outside of linear layers, such as experts, do not change.
    """

    def __init__(
        self, source: Source, wanted: Mapping[str, Form], policy: Quantization, say: Callable[[str, int, int], None]
    ) -> None:
        self.wanted, self.policy, self.say = wanted, policy, say
        self.model = source.model({name: value_of(weight).float() for name, weight in source.weights.items()})
        self.device = _roomy_device(sum(parameter.numel() for parameter in self.model.parameters()))
        self.model.requires_grad_(False).to(self.device)
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        self.layers = {name: layer for layer in linear if (name := named.get(id(layer.weight), "")) in wanted}
        self.originals = {name: layer.weight.data for name, layer in self.layers.items()}
        self.made: dict[str, BlockWeight] = {}
        self._bits = dict.fromkeys(self.layers, 0)  # 0: the original values

    def base(self, name: str) -> Tensor:
        """The part of a weight that is rounded, [N, K]: without LoRA pairs that stay separate."""
        base = self.wanted[name].base
        assert base is not None
        return value_of(base).detach().float().to(self.device)

    def change(self, name: str, bits: int = 4) -> Tensor:
        """The change of a weight [N, K] by its codes."""
        made, whole = self.made.get(name), self.wanted[name].base
        if bits == 8:
            assert whole is not None
            made = StoredWeight(name, whole, _in_eight(self.wanted[name]), self.policy, "", {}).made
        assert made is not None
        return torch.from_numpy(made.dequantized()).to(self.device) - self.base(name)

    def give(self, wide: Sequence[str]) -> None:
        """Put the codes into the model; weights in `wide` get 8 bits."""
        for name in self.layers:
            self._give(name, 8 if name in wide else 4)

    def _give(self, name: str, bits: int) -> None:
        if self._bits[name] != bits:
            change = self.change(name, bits) if bits else 0
            self.layers[name].weight.data, self._bits[name] = self.originals[name] + change, bits

    def to_nearest(self) -> None:
        """Make codes by rounding to nearest, without text."""
        for name in self.layers:
            self.say("rounding", len(self.made), len(self.layers))
            self.made[name] = quantize(self.base(name).cpu(), 4, self.policy.block_size, self.policy.layout.zero_points)

    def by_library(self, rows: Tensor, wide: Sequence[str] = ()) -> None:
        """Make GPTQ codes for all weights except `wide` (8 bits), each right before the model multiplies with it, on activations of
        `rows` computed with the codes before."""
        done = set(wide)
        for name in wide:
            self._give(name, 8)

        def before(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if name not in done:
                self.made[name] = by_library(name, self.base(name), inputs[0].flatten(0, -2), self.policy)
                self._give(name, 4)
                done.add(name)
                self.say("calibrating", len(done), len(self.layers))

        with self._hooked(lambda name, layer: layer.register_forward_pre_hook(partial(before, name))), torch.no_grad():
            self.model.model(rows.to(self.device), use_cache=False)

    def harms(self, rows: Tensor) -> dict[str, float]:
        """Expected loss in nats from each weight's codes alone, to second order.

        Half the squared product of the loss's gradient and the change of a token's outputs, summed over tokens (empirical Fisher
        information).
        """
        found, changes = dict.fromkeys(self.layers, 0.0), {name: self.change(name) for name in self.layers}

        def after(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            changed = nn.functional.linear(inputs[0].detach(), changes[name])

            def add(slope: Tensor) -> None:
                found[name] += float((slope * changed).sum(-1).square().sum()) / 2

            output.register_hook(add)

        embedding = self.model.get_input_embeddings()
        start = embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        with self._hooked(lambda name, layer: layer.register_forward_hook(partial(after, name))), torch.enable_grad():
            for number, row in enumerate(rows):
                self.say("measuring what each weight loses", number, len(rows))
                _nats(self.model, row[None]).backward()
        start.remove()
        return found

    @contextlib.contextmanager
    def _hooked(self, hook: Callable[[str, nn.Linear], Any]) -> Iterator[None]:
        handles = [hook(name, layer) for name, layer in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def by_library(name: str, weight: Tensor, inputs: Tensor, policy: Quantization) -> BlockWeight:
    """`weight` [N, K] in blocks by GPTQModel, for inputs [T, K]."""
    if not bool(inputs.isfinite().all()):
        raise UnsupportedError(
            f"{name} reads values that are no numbers, so nothing can be rounded by them: the model is broken for the text. Export with "
            "--quantize-method rtn, or give other text with --calibrate."
        )
    with _quiet():
        from gptqmodel.quantization import GPTQ as Rounder
        from gptqmodel.quantization import QuantizeConfig

        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
        layer.weight.data = weight
        how = {"bits": 4, "group_size": policy.block_size, "sym": not policy.layout.zero_points, "desc_act": False}
        rounder = Rounder(layer, QuantizeConfig(**how, offload_to_disk=False, fallback=None))
        rounder.quantizer.configure(perchannel=True)
        rounder.add_batch(inputs, None)
        values, scales, zero = (found.cpu() for found in rounder.quantize()[:3])
    groups = values.float().unflatten(1, (-1, policy.block_size))
    codes = torch.round(groups / scales[..., None] + zero[..., None])
    assert torch.equal((codes - zero[..., None]) * scales[..., None], groups), name
    return BlockWeight(
        pack(codes.numpy().astype(np.uint8), 4),
        scales.float().contiguous().numpy(),
        pack(zero.numpy().astype(np.uint8), 4) if policy.layout.zero_points else None,
        4,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence GPTQModel, which prints to stdout and configures logging at import."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
