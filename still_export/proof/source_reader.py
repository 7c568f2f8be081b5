"""Compare what this project's loader reads of a model with other readers: transformers, PEFT, the gguf package, safetensors.

Tensors are compared one by one, and logits if another program has the model. The loader reads the files for the package and for the
reference, so a fault of the loader is seen nowhere else.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import state_table
from still_export.mixers.experts.module import Router
from still_export.mixers.layers import FULL, HYBRID, WINDOWED
from still_export.mixers.projections import ProjectedAttention
from still_export.models.read.weights import Deferred, value_of
from still_export.proof.chains import Chain, nothing
from still_export.proof.layerwise import LayerwiseModel
from still_export.proof.other_readers import Reading, other_reading
from still_export.proof.verdict import Check, Verdict

if TYPE_CHECKING:
    from still_export.graph.options import ExportOptions
    from still_export.models.load import Source

PROMPTS = (1, 7, 48)
"""Lengths of the prompts that both models answer."""
OFF = 1e-3
"""Allowed difference of two float32 runs of a model, relative to the largest logit. Other orders of sums gave up to 3e-5 in models of 40
layers."""
APART = 0.02
"""Least standard deviation of what moves equal rows apart: that of new weights."""
SUMMED = 2.0**-16
"""Allowed difference of a merged adapter, relative to the row's largest number: its product is summed in another order."""
_LAYER = re.compile(r"\.(?:layers|h|blocks|blk)\.(\d+)\.")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "backbone.", "transformer.", "")
_NO_WEIGHTS = ("rotary_emb.inv_freq", ".rope.freqs")


def check_source(source: Source, options: ExportOptions, path: Path, overlays: Sequence[Path]) -> Verdict:
    """Compare what this project's loader reads with what others read.

    Args:
        source: As the loader has it, in float32.
        path: The model's folder or GGUF file.
        overlays: Folders of adapters.
    """
    verdict = Verdict()
    with _quiet():
        reading = other_reading(path, overlays, source)
        verdict.not_asked += reading.why
        verdict.add(_check_tensors(source, reading, _fresh(source) if options.attach_untrained else frozenset()))
        prompts = _prompts(source, options)
        if reading.logits is not None:
            source = _with_routers_apart(_as_trained(source), reading, verdict)
        if reading.logits is not None and not prompts:
            verdict.not_asked.append(
                "logits by another program: it has softmax where this model has layers that are linear"
            )
        right = [] if reading.logits is None else [reading.logits(ids) for ids in prompts]
        by = reading.by
        del reading  # one model at a time
    if right:
        verdict.checks.append(_check_logits(source, by, prompts, right))
    return verdict


def _as_trained(source: Source) -> Source:
    """`source` without what an export chose for running it: small caches and short capacities are in no file, and cost what they cost."""
    config, still = copy.copy(source.config), source.config.still
    wide = replace(still.deployment, cache=None, capacity_tokens=None, overflow="error")
    config.still_config = replace(still, deployment=wide).to_dict()
    return replace(source, config=config)


def _with_routers_apart(source: Source, reading: Reading, verdict: Verdict) -> Source:
    """`source` with equal rows of routers moved apart, here and in the other program's model: which of equally good experts either takes is
    defined nowhere, and another one is no fault of reading."""
    moved: dict[str, Tensor] = {}
    for name in [f"{name}.weight" for name, module in source.outline().named_modules() if isinstance(module, Router)]:
        rows, other = value_of(source.weights[name]).float(), _counterpart(name, reading.tensors)
        if other is None or reading.read or len(rows.unique(dim=0)) == len(rows):
            continue
        noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(moved)))
        moved[name] = rows + noise * max(float(rows.std()), APART)
        reading.tensors[other].copy_(moved[name])
    if moved:
        verdict.not_asked.append(
            f"which expert of equal rows of {next(iter(moved))} is taken: {len(moved)} routers were moved for logits by another program"
        )
    return replace(source, weights={**source.weights, **moved}) if moved else source


def _check_logits(source: Source, by: str, prompts: Sequence[Tensor], right: Sequence[Tensor]) -> Check:
    layers = LayerwiseModel({"model": {"all_logits": True}}, source)
    chains = []
    for ids in prompts:
        feed = layers.empty_feed(1, ids.shape[1])
        feed |= {"input_ids": ids.numpy(), "new_tokens": np.array([ids.shape[1]])}
        chains.append(Chain.of(feed, nothing))
    worst, where = 0.0, ""
    for ids, expected, calls in zip(prompts, right, layers.run(chains), strict=True):
        found = torch.from_numpy(calls[0]["logits"][0])
        error = (found - expected).abs().amax(-1) / expected.abs().max().clamp_min(1e-30)
        error = error.nan_to_num(nan=math.inf)
        if float(error.max()) > worst:
            worst, where = float(error.max()), f"token {int(error.argmax())} of {ids.shape[1]}"
    name = f"the model that was read answers as {by} does"
    what = "its logits differ, of the largest one" if worst > OFF else ""
    return Check(name, worst <= OFF, what, where if worst > OFF else "", worst, OFF)


def _fresh(source: Source) -> frozenset[str]:
    """Tensors that are in no file, such as those of untrained attention."""
    modules = [(n, m) for n, m in source.outline().named_modules() if isinstance(m, ProjectedAttention)]
    return frozenset(f"{prefix}.{name}" for prefix, module in modules for name in module.fresh_names())


def _check_tensors(source: Source, reading: Reading, fresh: frozenset[str]) -> Verdict:
    """Compare every tensor that has a counterpart by name or by content; `fresh` tensors are in no file."""
    wrong: list[tuple[str, str]] = []
    unknown: list[str] = []
    computes = reading.logits is None and source.family.published.tensors is not None
    used: set[str] = set()
    by_layer: dict[str | None, list[str]] = {}
    for name in reading.tensors:
        by_layer.setdefault(_layer_of(name), []).append(name)
    for name, weight in source.weights.items():
        value = value_of(weight).detach().float()
        adapted = reading.merged or (isinstance(weight, Deferred) and weight.adapted is not None)
        other = _counterpart(name, reading.tensors)
        if other is not None and reading.tensors[other].numel() == value.numel():
            used.add(other)
            right = reading.tensors[other].float().reshape(value.shape)
            if (found := _difference(value, right, adapted)) is None:
                continue
            if computes:
                unknown.append(name)
            else:
                wrong.append((name, f"{name}{found}, by {reading.read or reading.by} in {other}" * bool(found)))
            continue
        match = next(
            (n for n in by_layer.get(_layer_of(name), ()) if _contains(reading.tensors[n], value, adapted)), None
        )
        if match is not None:
            used.add(match)
        elif name not in fresh:
            unknown.append(name)
    known_tensors = {
        _place(reading.tensors[name]) for name in used
    }  # layers that share one have it under several names
    lost = [n for n, x in reading.tensors.items() if _place(x) not in known_tensors and not n.endswith(_NO_WEIGHTS)]
    tied = source.config.tie_word_embeddings
    lost = [name for name in lost if not (tied and name.endswith("lm_head.weight"))]
    # Tensors computed from several may contain others; those that the model lists are left out.
    if not unknown and not computes and len(lost) > sum(source.others.values()):
        wrong += [(name, f"{name} is in the file and no part of the model that was read") for name in lost]
    known = len(source.weights) - len(unknown) - len(fresh.intersection(source.weights))
    name = f"{known} tensors are what {reading.read or reading.by} reads"
    verdict = Verdict.of([Check.of(name, wrong)] if reading.tensors else [])
    if unknown and reading.tensors:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        verdict.not_asked.append(
            f"{len(unknown)} tensors by another reader ({some}): it has none of these names, so they are computed of several"
        )
    return verdict


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _layer_of(name: str) -> str | None:
    match = _LAYER.search(f".{name}")
    return match[1] if match else None


def _counterpart(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """A tensor's name in `tensors`: its own, or one with another prefix."""
    if name in tensors:
        return name
    bare = name.removeprefix("model.")
    return next((found for prefix in _PREFIXES if (found := f"{prefix}{bare}") in tensors), None)


def _difference(value: Tensor, right: Tensor, adapted: bool) -> str | None:
    """Where two tensors differ most; None: nowhere."""
    allowed: Tensor | float = 0.0
    if adapted:
        allowed = (right.abs().amax(-1, keepdim=True) if right.dim() else right.abs()) * SUMMED
    same = (value - right).abs() <= allowed
    if bool(same.all()):
        return None
    error = (value - right).abs().nan_to_num(nan=math.inf).masked_fill(same, -1)
    at = tuple(int(x) for x in np.unravel_index(int(error.argmax()), error.shape))
    return f"{list(at)} is {float(value[at]):.6g}, {float(right[at]):.6g}; {int((~same).sum()):,} numbers differ"


def _contains(whole: Tensor, part: Tensor, adapted: bool) -> bool:
    """Whether `part`, or its transpose, is all of `whole` or a range of its rows."""
    for value in (part, part.transpose(-1, -2)) if part.dim() > 1 else (part,):
        if whole.numel() == value.numel():
            if _difference(value.reshape(-1), whole.float().reshape(-1), adapted) is None:
                return True
            continue
        if value.dim() == 0 or whole.dim() == 0 or whole.shape[-1] != value.shape[-1] or whole.numel() < value.numel():
            continue
        rows, expected = whole.float().reshape(-1, whole.shape[-1]), value.reshape(-1, value.shape[-1])
        tiny = expected[:1].abs().amax() * SUMMED if adapted else 0.0
        for start in ((rows - expected[:1]).abs().amax(-1) <= tiny).nonzero()[:, 0].tolist():
            piece = rows[start : start + len(expected)]
            if piece.shape == expected.shape and _difference(expected, piece, adapted) is None:
                return True
    return False


def _prompts(source: Source, options: ExportOptions) -> list[Tensor]:
    """Tokens that both models answer; with untrained STILL attention no more than it answers exactly."""
    most = max(PROMPTS)
    if options.attach_untrained:
        still = source.config.still
        kinds = {still.layer_type(number) for number in range(source.config.num_hidden_layers)}
        if not kinds <= {HYBRID, FULL, WINDOWED}:
            return []
        growths = [state.growth for state in state_table(source.config, torch.float32) if state.growth]
        most = min([most, *(2 * int(growth["per"]) for growth in growths if growth["lag"])])
    generator = torch.Generator().manual_seed(0)
    sizes = sorted({min(size, most) for size in PROMPTS})
    return [torch.randint(int(source.config.vocab_size), (1, size), generator=generator) for size in sizes]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without other libraries' loading reports."""
    from transformers.utils import logging as reports

    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # no progress bar of the gguf reader
            yield
    finally:
        logging.disable(logging.NOTSET)
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()
