"""Quality of models: bits per byte of texts, retrieval by depth and length; for a STILL model also with parts switched off."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from still_export.errors import ConfigError, DataError, NotLinearizedError, unknown
from still_export.evaluation.intervals import share
from still_export.evaluation.positions import perplexity_by_position
from still_export.evaluation.served import AT_ONCE
from still_export.evaluation.synthetic import MAKERS, PromptWriter, replied, words_of
from still_export.mixers.config import StillConfig
from still_export.mixers.layers import FULL
from still_export.mixers.registry import MIXERS, mixer_of
from still_export.models.load import load_model, open_source
from still_export.options import check_options, option
from still_export.texts.files import read_text
from still_export.texts.tasks import TaskWriter, task_named
from still_export.texts.texts import check_ids, tokenize

VARIANTS = ("still", *(part for mixer in MIXERS.values() for part in mixer.parts))
TEACHER = "teacher"
TOKENS_AT_ONCE = {"cuda": 1 << 16, "cpu": 1 << 13}
"""Tokens of one forward pass. It limits the logits: 1.6 GB for 8K tokens of a 49K vocabulary."""


DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of an evaluation; each field is a flag of `still-export evaluate`.

    Bits per byte of `texts` use independent blocks of `context_lengths`. Retrieval has `samples` prompts for each task, length and depth
    (0 = far, 1 = near the question). Replies to RULER's tasks and BABILong's (`synthetic.MAKERS`) are in words, in a chat if the tokenizer
    has a template.
    """

    texts: tuple[str, ...] = option((), "Text file for bits per byte and as filler; repeatable.", flag="--text")
    context_lengths: tuple[int, ...] = option(
        (1024,), "Context lengths for bits per byte.", flag="--contexts", commas=True, shown="1024"
    )
    by_position: int = option(0, "Block length for perplexity by position in each text; 0 = none.", least=0)
    text_tokens: int = option(1 << 17, "Most tokens of each text.", least=2)
    tasks: tuple[str, ...] = option(
        ("needle", "passkey", "key_value"),
        f"Retrieval tasks: needle, passkey, key_value, {', '.join(MAKERS)}; empty: none.",
        commas=True,
        shown="needle,passkey,key_value",
    )
    lengths: tuple[int, ...] = option(
        (1024, 2048, 4096), "Prompt lengths of retrieval.", commas=True, shown="1024,2048,4096"
    )
    depths: int = option(10, "Depths at which the fact is hidden.", least=1)
    samples: int = option(4, "Prompts for each task, length and depth.", least=1)
    seed: int = option(0, "Seed of the prompts.")
    variants: tuple[str, ...] = option(VARIANTS, "Variants of a STILL model.", commas=True, shown="all that it has")
    teacher: str | None = option(None, "The softmax model that MODEL was made from.")
    tokenizer: str | None = option(None, "Folder of the tokenizer, if it is not next to the model.")
    dtype: str = option("auto", "auto, float32, float16 or bfloat16.")
    device: str = option("auto", "auto, cpu or cuda; a package runs on its runtime's device.", choices=DEVICES)
    runtime: str | None = option(None, "Runtime of packages: ort, trt or torch.", shown="the package's target")
    provider: str = option("cpu", "ONNX Runtime's provider: cpu or cuda.")
    threads: int = option(0, "Threads for packages; 0 = the runtime's choice.", least=0)

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.tasks:
            if name not in MAKERS:
                task_named(name, MAKERS)
        for name in self.variants:
            if name not in VARIANTS:
                raise unknown(name, VARIANTS, f"the variant {name!r}")
        if min((*self.context_lengths, *self.lengths, self.by_position or 2)) < 2:
            raise ConfigError("--lengths, --contexts and --by-position must be at least 2 tokens.")


@dataclass
class Evaluation:
    """Results by variant.

    bits_per_byte: variant -> "file @ context" -> value. perplexity: variant -> file -> "first-end" of positions -> value.
    retrieval: variant -> task -> length -> accuracy by depth. prompts: Per task and length, over all depths.
    costs: package -> measure -> value (`packages.costs`).
    """

    bits_per_byte: dict[str, dict[str, float]] = field(default_factory=dict)
    perplexity: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    retrieval: dict[str, dict[str, dict[int, list[float]]]] = field(default_factory=dict)
    costs: dict[str, dict[str, float]] = field(default_factory=dict)
    prompts: int = 0

    def add(self, other: Evaluation) -> None:
        """Add results of other models."""
        for name in ("bits_per_byte", "perplexity", "retrieval", "costs"):
            getattr(self, name).update(getattr(other, name))
        self.prompts = self.prompts or other.prompts

    def accuracy(self, variant: str, task: str, length: int) -> float:
        row = self.retrieval[variant][task][length]
        return sum(row) / len(row)

    def table(self) -> str:
        """A Markdown table with one row per variant; shares with 95% confidence intervals."""
        variants = list(dict.fromkeys([*self.bits_per_byte, *self.perplexity, *self.retrieval]))
        texts = list(next(iter(self.bits_per_byte.values()), {}))
        cells = [(t, n) for t, row in next(iter(self.retrieval.values()), {}).items() for n in row]
        costs = list(next(iter(self.costs.values()), {}))
        spans = [(t, s) for t, row in next(iter(self.perplexity.values()), {}).items() for s in row]
        head = [
            "model",
            *(f"bits/byte {t}" for t in texts),
            *(f"perplexity {t}, {s}" for t, s in spans),
            *(f"{t} {n}" for t, n in cells),
            *costs,
        ]
        lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        for variant in variants:
            bits = [f"{self.bits_per_byte[variant][t]:.4f}" for t in texts]
            bits += [f"{self.perplexity[variant][t][s]:.3f}" for t, s in spans]
            found = [share(self.accuracy(variant, t, n), self.prompts) for t, n in cells]
            cost = [f"{self.costs[variant][c]:.3g}" if variant in self.costs else "" for c in costs]
            lines.append(f"| {' | '.join([variant.replace('_', ' '), *bits, *found, *cost])} |")
        return "\n".join(lines)


def measure(
    models: dict[str, Any],
    tokenizer: Any,
    options: EvaluationOptions,
    *,
    device: torch.device | str = "cpu",
    advance: Callable[[str], None] = lambda _: None,
) -> Evaluation:
    """Measure every model.

    Args:
        models: By name: "still" is measured in the options' variants, others unchanged; a package is a `packages.PackageModel`.
        tokenizer: Common to all models.

    Raises:
        DataError: A text is unusable, or the tokenizer does not fit.
        ConfigError: A task does not fit into a length.
    """
    result = Evaluation(prompts=options.depths * options.samples)
    texts = {Path(path).name: read_text(Path(path)) for path in options.texts}
    for name, model in models.items():
        model.to(device)
        names = options.variants if name == "still" else (name,)
        for variant in names:
            with without(model, variant):
                for file, text in texts.items():
                    for context in options.context_lengths:
                        bits = bits_per_byte(model, tokenizer, text, context, options.text_tokens)
                        result.bits_per_byte.setdefault(variant, {})[f"{file} @ {context}"] = bits
                        advance(f"{variant}, {file} at {context}")
                    if options.by_position:
                        rows = perplexity_by_position(model, tokenizer, text, options.by_position, options.text_tokens)
                        result.perplexity.setdefault(variant, {})[file] = rows
                        advance(f"{variant}, {file} by position")
                for task in options.tasks:
                    for length in options.lengths:
                        shares = by_depth(model, tokenizer, task, length, options, texts)
                        result.retrieval.setdefault(variant, {}).setdefault(task, {})[length] = shares
                        advance(f"{variant}, {task} at {length}")
    return result


def by_depth(
    model: Any, tokenizer: Any, task: str, length: int, options: EvaluationOptions, texts: dict[str, str]
) -> list[float]:
    """Share of right answers to a task at one length, by depth."""
    if task not in MAKERS:
        return retrieval(model, tokenizer, task, length, options, texts)
    hay = [text[: 200 * length] for text in texts.values()] or [DEFAULT_HAYSTACK]
    fillers = [tokenize(text, tokenizer, int(model.config.vocab_size)) for text in hay]
    rng = np.random.default_rng((options.seed, length, 1))
    writer = PromptWriter(tokenizer, task, fillers, words_of(hay))
    return replied(model, writer, length, options.depths, options.samples, rng, prompts_at_once(model, length))


def prompts_at_once(model: Any, length: int) -> int:
    """Prompts of `length` tokens per call; a few at a time for a server."""
    return AT_ONCE if hasattr(model, "complete_all") else max(1, TOKENS_AT_ONCE[model.device.type] // length)


def load_any(
    source: str | None,
    teacher: str | None,
    dtype: str,
    generates: bool = False,
    tokens: int = 0,
    overlays: Sequence[str | Path] = (),
) -> dict[str, Any]:
    """Models to evaluate, by name: "still" is a STILL model, "teacher" a softmax one or `teacher`.

    Args:
        generates: The models will write, which needs a cache; without it a softmax model is faster on long texts.
        tokens: Longest sequence. A STILL model with a smaller capacity gets a larger one, beyond its training.
    """

    def softmax(path: str) -> Any:
        if generates:
            layers = load_model(path, attach_untrained=True, dtype=dtype).config.num_hidden_layers
            full = StillConfig(layer_types=(FULL,) * layers)
            return load_model(path, attach_untrained=True, still_config=full, dtype=dtype)
        # The loader checks files and reads GGUF. Softmax mode does not use the attached maps and gates.
        model = load_model(path, attach_untrained=True, dtype=dtype)
        for mixer in MIXERS.values():
            mixer.restore_base(model)
        return model

    models = {} if teacher is None else {TEACHER: softmax(teacher)}
    if source is None:
        return models
    try:
        opened = open_source(source, dtype=dtype, overlays=overlays)
        if tokens > opened.config.still.deployment.capacity(opened.config):
            opened = open_source(source, dtype=dtype, overlays=overlays, deployment={"capacity_tokens": tokens})
        if inserted := getattr(opened.config, "feeding", {}).get("inserted"):
            raise ConfigError(
                f"{source} needs an extra token after every {inserted['every']}, which only runners insert. Export it and evaluate the "
                f"package: still-export {source} -o PACKAGE"
            )
        models["still"] = opened.read()
    except NotLinearizedError:
        models[TEACHER] = softmax(source)
    return models


def pick_device(name: str) -> torch.device:
    """The device named `name`; auto is CUDA if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in DEVICES:
        raise unknown(name, DEVICES, f"--device {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: PyTorch finds no CUDA device here. Leave it out to use the CPU.")
    return torch.device(name)


def measurements(models: Sequence[str], options: EvaluationOptions) -> int:
    """Number of times `evaluate` will call `advance`."""
    variants = sum(len(options.variants) if name == "still" else 1 for name in models)
    texts = len(options.texts) * (len(options.context_lengths) + bool(options.by_position))
    tasks = len(options.tasks) * len(options.lengths)
    return variants * (texts + tasks)


def variants_of(model: Any) -> tuple[str, ...]:
    """Variants of a STILL model: itself, and without each part of its layers."""
    layers = range(model.config.num_hidden_layers)
    return tuple(dict.fromkeys(("still", *(part for i in layers for part in mixer_of(model.config, i).parts))))


def without(model: Any, variant: str) -> contextlib.AbstractContextManager[None]:
    """Inside the block `model` is `variant`: one part of its layers is switched off by their mixers."""
    owner = next((mixer for mixer in MIXERS.values() if variant in mixer.parts), None)
    return contextlib.nullcontext() if owner is None else owner.without(model, variant)


@torch.no_grad()
def bits_per_byte(model: Any, tokenizer: Any, text: str, context: int, limit: int) -> float:
    """Bits per UTF-8 byte of the first `limit` tokens of `text`, in independent blocks of `context` tokens.

    The first token of a block is not predicted.

    Raises:
        ConfigError: The text is shorter than one block.
    """
    # Tokens average more than a byte; text beyond the limit is not tokenized.
    ids = tokenize(text[: 16 * limit], tokenizer, int(model.config.vocab_size))[:limit]
    blocks = len(ids) // context
    if blocks == 0:
        raise ConfigError(f"the text has {len(ids)} tokens, fewer than a context of {context}. Use smaller --contexts.")
    rows = torch.from_numpy(ids[: blocks * context].reshape(blocks, context).astype(np.int64))
    size = len(tokenizer.decode(rows.flatten().tolist(), clean_up_tokenization_spaces=False).encode())
    nats, device = 0.0, model.device
    for part in rows.split(max(1, TOKENS_AT_ONCE[device.type] // context)):
        part = part.to(device)
        logits = model(part, use_cache=False).logits
        for row, row_logits in zip(part, logits, strict=True):
            nats += float(nn.functional.cross_entropy(row_logits[:-1].float(), row[1:], reduction="sum"))
    predicted = (context - 1) / context
    return nats / math.log(2) / (size * predicted)


@torch.no_grad()
def retrieval(
    model: Any, tokenizer: Any, task: str, length: int, options: EvaluationOptions, texts: dict[str, str]
) -> list[float]:
    """Share of answers that greedy decoding would generate, by depth."""
    haystack = next(iter(texts.values()), None) or DEFAULT_HAYSTACK
    filler = tokenize(haystack[: 200 * length], tokenizer, int(model.config.vocab_size))
    writer = TaskWriter(tokenizer, filler)
    # One seed for all variants, so that all models get the same questions.
    rng = np.random.default_rng((options.seed, length))
    found = []
    for depth in range(options.depths):
        place = depth / max(1, options.depths - 1)
        prompts = [writer.prompt(task_named(task), length, place, rng) for _ in range(options.samples)]
        hits = 0
        at_once = prompts_at_once(model, length)
        for start in range(0, len(prompts), at_once):
            part = prompts[start : start + at_once]
            ids = np.stack([row for row, _ in part])
            check_ids(ids, int(model.config.vocab_size))
            check_answers(tokenizer, part)
            hits += answered(model, tokenizer, ids, [count for _, count in part])
        found.append(hits / len(prompts))
    return found


def check_answers(tokenizer: Any, prompts: Sequence[tuple[np.ndarray, int]]) -> None:
    """Raise DataError unless the last tokens of each prompt are a number that occurs exactly once before."""
    for ids, count in prompts:
        text, answer = (tokenizer.decode(part.tolist()) for part in (ids[:-count], ids[-count:]))
        if not answer.strip().isdigit() or len(re.findall(rf"(?<!\d){answer.strip()}(?!\d)", text)) != 1:
            raise DataError(
                f"a prompt of {len(ids)} tokens does not have its answer {answer!r} once: the tokenizer splits numbers, or the text "
                "has the number. Use another --text or --seed."
            )


@torch.no_grad()
def answered(model: Any, tokenizer: Any, ids: np.ndarray, counts: Sequence[int]) -> int:
    """Number of rows of `ids` [B, T] with the last `counts` tokens each the most likely; a served model answers with text."""
    if hasattr(model, "complete_all"):
        pairs = [(row[:-count].tolist(), row[-count:].tolist()) for row, count in zip(ids, counts, strict=True)]
        texts = model.complete_all([(prompt_ids, len(rest)) for prompt_ids, rest in pairs])
        return sum(text.strip() == tokenizer.decode(rest).strip() for text, (_, rest) in zip(texts, pairs, strict=True))
    rows, longest = torch.from_numpy(ids).to(model.device), max(counts)
    likely = model(rows, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1].argmax(-1)
    right = likely == rows[:, -longest:]
    return sum(bool(row[longest - count :].all()) for row, count in zip(right, counts, strict=True))


DEFAULT_HAYSTACK = " ".join(
    [
        "The road climbs from the village to the old mill and turns east along the ridge.",
        "In spring the farmers repair the walls and lead the sheep back to the upper fields.",
        "A narrow bridge of oak crosses the stream, and boys fish there when the water is low.",
        "The baker opens before dawn, and by noon the shelves are empty.",
        "Letters arrive twice a week with the boat, together with lamp oil, salt and newspapers.",
        "When fog covers the bay, the keeper rings a bell until the last ship has passed.",
    ]
    * 40
)
"""Filler for retrieval without a text."""


def write_evaluation(result: Evaluation, options: EvaluationOptions, folder: Path, command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "options": asdict(options), **asdict(result)}
    from still_export.package.staging import write_json, write_whole

    write_json(folder / "evaluation.json", content)
    write_whole(folder / "evaluation.md", f"{result.table()}\n\n`{command}`\n")
