"""The user's own files, read by somebody else: transformers, PEFT, the gguf package, or safetensors itself.

What this project's loader makes of them is compared tensor by tensor, and where another program has the model, logit by logit. So a fault
of the loader is seen, which reads the files for the package and for the reference alike.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from still_export.mixers.cache import state_table
from still_export.mixers.layers import FULL, HYBRID, WINDOWED
from still_export.mixers.projections import ProjectedAttention
from still_export.models.read.weights import Deferred, value_of
from still_export.proof.chains import Chain, nothing
from still_export.proof.layerwise import LayerwiseModel
from still_export.proof.verdict import Check, Verdict

if TYPE_CHECKING:
    from still_export.graph.options import ExportOptions
    from still_export.models.load import Source

PROMPTS = (1, 7, 48)
"""Tokens of the prompts that both models answer."""
OFF = 1e-3
"""Of the largest logit that two float32 runs of a model may differ by: sums in another order gave up to 3e-5 in models of 40 layers."""
SUMMED = 2.0**-16
"""Of the largest number of a row that a merged adapter may differ by: its product is summed in another order."""
ROOM = 0.5
"""Of the free memory that another program's model may take."""
SHOWN = 4
_LAYER = re.compile(r"\.(?:layers|h|blocks|blk)\.(\d+)\.")
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "backbone.", "transformer.", "")
_NO_WEIGHTS = ("rotary_emb.inv_freq", ".rope.freqs")


@dataclass(frozen=True)
class Theirs:
    """A model as another program reads it.

    Args:
        by: Which one.
        tensors: By its names, float.
        logits: Answers prompts of tokens [1, T] with [T, V]; None: it cannot.
        merged: Adapters were added.
        why: Why it cannot, or what it left out.
    """

    by: str
    tensors: Mapping[str, Tensor]
    logits: Callable[[Tensor], Tensor] | None = None
    merged: bool = False
    why: list[str] = field(default_factory=list)


def check_source(source: Source, options: ExportOptions, path: Path, overlays: Sequence[Path]) -> Verdict:
    """Compare what this project's loader reads with what others read.

    Args:
        source: As the loader has it, in float32.
        options: Of the export.
        path: The model's folder or GGUF file.
        overlays: Folders of adapters.
    """
    verdict = Verdict()
    with _quiet():
        theirs = read_theirs(path, overlays, source)
        verdict.not_asked += theirs.why
        verdict.add(_check_tensors(source, theirs, _fresh(source) if options.attach_untrained else frozenset()))
        prompts = _prompts(source, options)
        if theirs.logits is not None and not prompts:
            verdict.not_asked.append(
                "logits by another program: it has softmax where this model has layers that are linear"
            )
        right = [] if theirs.logits is None else [theirs.logits(ids) for ids in prompts]
        by = theirs.by
        del theirs  # one model at a time
    if right:
        verdict.checks.append(_check_logits(source, by, prompts, right))
    return verdict


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
    """Tensors that no file has: untrained attention starts with them."""
    modules = [(n, m) for n, m in source.outline().named_modules() if isinstance(m, ProjectedAttention)]
    return frozenset(f"{prefix}.{name}" for prefix, module in modules for name in module.fresh_names())


def _check_tensors(source: Source, theirs: Theirs, fresh: frozenset[str]) -> Verdict:
    """Every tensor that has a counterpart by name, and those that have one by what they hold; `fresh` are in no file."""
    wrong: list[tuple[str, str]] = []
    unknown: list[str] = []
    computes = theirs.logits is None and source.family.published.tensors is not None
    used: set[str] = set()
    by_layer: dict[str | None, list[str]] = {}
    for name in theirs.tensors:
        by_layer.setdefault(_layer_of(name), []).append(name)
    for name, weight in source.weights.items():
        value = value_of(weight).detach().float()
        adapted = theirs.merged or (isinstance(weight, Deferred) and weight.adapted is not None)
        other = _counterpart(name, theirs.tensors)
        if other is not None and theirs.tensors[other].numel() == value.numel():
            used.add(other)
            right = theirs.tensors[other].float().reshape(value.shape)
            if (found := _difference(value, right, adapted)) is None:
                continue
            if computes:
                unknown.append(name)
            else:
                wrong.append((name, f"{name}{found}, by {theirs.by} in {other}" * bool(found)))
            continue
        held = next((n for n in by_layer.get(_layer_of(name), ()) if _holds(theirs.tensors[n], value, adapted)), None)
        if held is not None:
            used.add(held)
        elif name not in fresh:
            unknown.append(name)
    lost = [name for name in theirs.tensors if name not in used and not name.endswith(_NO_WEIGHTS)]
    tied = source.config.tie_word_embeddings
    lost = [name for name in lost if not (tied and name.endswith("lm_head.weight"))]
    if (
        not unknown and not source.others and not computes
    ):  # else they may be parts of what this project computes of several
        wrong += [(name, f"{name} is in the file and no part of the model that was read") for name in lost]
    known = len(source.weights) - len(unknown) - len(fresh.intersection(source.weights))
    name = f"{known} tensors are what {theirs.by} reads"
    first = wrong[0] if wrong else ("", "")
    what = first[1] + (f"; {len(wrong)} tensors are not" if len(wrong) > 1 else "")
    check = Check(name, not wrong, what, first[0], notes=tuple(text for _, text in wrong[1 : 1 + SHOWN]))
    verdict = Verdict.of([check] if theirs.tensors else [])
    if unknown and theirs.tensors:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        verdict.not_asked.append(
            f"{len(unknown)} tensors by another reader ({some}): it has none of these names, so they are computed of several"
        )
    return verdict


def _layer_of(name: str) -> str | None:
    match = _LAYER.search(f".{name}")
    return match[1] if match else None


def _counterpart(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """The name that a tensor of a model has in `tensors`: its own, or with another beginning."""
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


def _holds(whole: Tensor, part: Tensor, adapted: bool) -> bool:
    """Whether `part`, as it is or transposed, is rows of `whole` or all of it."""
    for value in (part, part.transpose(-1, -2)) if part.dim() > 1 else (part,):
        if whole.numel() == value.numel():
            if _difference(value.reshape(-1), whole.float().reshape(-1), adapted) is None:
                return True
            continue
        if value.dim() == 0 or whole.dim() == 0 or whole.shape[-1] != value.shape[-1] or whole.numel() < value.numel():
            continue
        rows, wanted = whole.float().reshape(-1, whole.shape[-1]), value.reshape(-1, value.shape[-1])
        tiny = wanted[:1].abs().amax() * SUMMED if adapted else 0.0
        for start in ((rows - wanted[:1]).abs().amax(-1) <= tiny).nonzero()[:, 0].tolist():
            piece = rows[start : start + len(wanted)]
            if piece.shape == wanted.shape and _difference(wanted, piece, adapted) is None:
                return True
    return False


def read_theirs(path: Path, overlays: Sequence[Path], source: Source) -> Theirs:
    """The model as another program reads it: transformers with PEFT, the gguf package, or safetensors alone."""
    if path.is_file():
        return _read_gguf(path, overlays)
    reason = _not_transformers(path, source)
    adapters = [overlay for overlay in overlays if (overlay / "adapter_config.json").is_file()]
    others = [overlay for overlay in overlays if overlay not in adapters]
    if not reason and not others and not any(_is_ours(overlay) for overlay in adapters):
        return _read_transformers(path, adapters)
    if overlays:
        reason = reason or "an overlay has feature maps of this project"
        return Theirs(
            "safetensors", {}, why=[f"the files by another reader: {reason}, and its merge is this project's own"]
        )
    why = [f"logits by another program: {reason}"]
    if (path / "config.json").is_file() and "quantization_config" in (path / "config.json").read_text(encoding="utf-8"):
        return Theirs("safetensors", {}, why=[*why, "the file's codes by another reader: no library here undoes them"])
    return Theirs("safetensors", _read_safetensors(path), why=why)


def _is_ours(overlay: Path) -> bool:
    return "still_config" in (overlay / "adapter_config.json").read_text(encoding="utf-8")


def _not_transformers(path: Path, source: Source) -> str:
    """Why transformers cannot be asked; "": it can."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
        kind = kind[0] if isinstance(kind, tuple) else kind
    except Exception as error:  # what it cannot read it refuses in many ways
        return f"transformers has no class for it ({type(error).__name__})"
    if not kind.__module__.startswith("transformers."):
        return f"transformers has no class of its own for {config.model_type}"
    if getattr(config, "quantization_config", None) is not None:
        return "transformers needs the library of its quantization"
    size = 4 * sum(math.prod(weight.shape) for weight in source.weights.values())
    if size > ROOM * (free := _free_memory()):
        return f"transformers' model takes {size / 2**30:.1f} GB, {free / 2**30:.1f} are free"
    return ""


def _free_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


def _read_transformers(path: Path, adapters: Sequence[Path]) -> Theirs:
    from transformers import AutoModelForCausalLM

    by = "transformers"
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
        )
        model, info = loaded
        if lacks := sorted(info["missing_keys"]):
            return Theirs(
                by, _read_safetensors(path), why=[f"logits by another program: transformers finds no {lacks[0]}"]
            )
        for adapter in adapters:
            from peft import PeftModel

            by = "PEFT"
            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    except Exception as error:  # of whole libraries
        reason = " ".join(str(error).split())[:200]
        return Theirs(by, {}, why=[f"the files by another reader: {by} cannot read them ({reason})"])
    return Theirs(by, dict(model.state_dict()), _logits_of(model.float().eval()), merged=bool(adapters))


def _logits_of(model: Any) -> Callable[[Tensor], Tensor]:
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"  # the others want sizes that are multiples

    def logits(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
            return found

    return logits


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a folder by the rule of the format's own library: model.safetensors, or the shards that its index names."""
    import json

    from safetensors import safe_open

    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        files = [single]
    elif index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [path / name for name in sorted(set(named.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))[:1]
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def _read_gguf(path: Path, overlays: Sequence[Path]) -> Theirs:
    """A GGUF file by the gguf package, under transformers' names by its own table."""
    import gguf

    reader = gguf.GGUFReader(path)
    field_of = reader.get_field("general.architecture")
    assert field_of is not None
    family = str(field_of.contents())
    if overlays:
        return Theirs("gguf", {}, why=["the file by another reader: an adapter is added to it"])
    logits, why = _gguf_logits(path, reader, family)
    arch = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    count = reader.get_field(f"{family}.block_count")
    assert count is not None
    table = gguf.get_tensor_name_map(arch, int(count.contents()))
    names: dict[str, str] = {}
    for stem in _GGUF_STEMS:
        for number in range(int(count.contents())) if "{" in stem else (0,):
            full = stem.format(number)
            if (known := table.get_name(full)) is not None:
                names.setdefault(known, full)
    heads = {part: _gguf_number(reader, f"{family}.attention.head_count{part}") for part in ("", "_kv")}
    tensors = {}
    for tensor in reader.tensors:
        stem, _, kind = tensor.name.rpartition(".")
        if stem not in names:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = torch.from_numpy(np.array(values, np.float32)).reshape([int(n) for n in reversed(tensor.shape)])
        if family == "llama" and stem.rpartition(".")[2] in ("attn_q", "attn_k"):
            # llama.cpp rotates neighbouring channels, transformers those half a head apart.
            count_of = heads[""] if stem.endswith("attn_q") else heads["_kv"] or heads[""]
            rows = value.shape[0] // int(count_of)
            order = np.arange(value.shape[0]).reshape(-1, rows // 2, 2).transpose(0, 2, 1).reshape(-1)
            value = value[torch.from_numpy(order)]
        tensors[f"{names[stem]}.{kind}"] = value
    return Theirs("the gguf package", tensors, logits, why=why)


def _gguf_logits(path: Path, reader: Any, family: str) -> tuple[Callable[[Tensor], Tensor] | None, list[str]]:
    """transformers' answers to a GGUF file, whose scaling of positions it leaves out: that is set by llama.cpp's rules."""
    from transformers import AutoModelForCausalLM

    said = {
        name: reader.get_field(f"{family}.rope.{name}") for name in ("scaling.type", "scaling.factor", "scale_linear")
    }
    kind, factor, old = (None if held is None else held.contents() for held in said.values())
    factor = float(factor or old or 1)
    if kind not in (None, "none", "linear"):
        return None, [f"logits by another program: the file's rope scaling {kind} is not set by hand"]
    size = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if size > ROOM * _free_memory():
        return None, [
            f"logits by another program: transformers' model takes {size / 2**30:.1f} GB, more than half of what is free"
        ]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # of whole libraries
        return None, [
            f"logits by another program: transformers cannot read the file ({' '.join(str(error).split())[:200]})"
        ]
    model = loaded.eval()
    if kind != "none" and factor != 1:
        theta = model.config.rope_parameters["rope_theta"]
        model.config.rope_parameters = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return _logits_of(model), []


_ATTENTION = tuple(
    f"model.layers.{{}}.self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
)
_FEED_FORWARD = tuple(f"model.layers.{{}}.mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj"))
_NORMS = ("model.layers.{}.input_layernorm", "model.layers.{}.post_attention_layernorm")
_GGUF_STEMS = ("model.embed_tokens", "model.norm", "lm_head", *_ATTENTION, *_FEED_FORWARD, *_NORMS)


def _gguf_number(reader: Any, name: str) -> int:
    found = reader.get_field(name)
    return 0 if found is None else int(found.contents())


def _prompts(source: Source, options: ExportOptions) -> list[Tensor]:
    """Tokens that both models answer: where STILL attention is attached untrained, no more than it answers as the model does."""
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
    """Without the reports of loading of other libraries."""
    from transformers.utils import logging as reports

    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity_error()
    reports.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the gguf reader's bar asks nobody
            yield
    finally:
        logging.disable(logging.NOTSET)
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()
