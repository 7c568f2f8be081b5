"""What each layer loses by attention to fewer tokens, measured before any training, and how a size of state is spent on layers."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from still_export.errors import ConfigError
from still_export.linearization.losses import head_losses
from still_export.linearization.measure import last_hidden
from still_export.mixers.trainable import SOFTMAX, STUDENT, Trainable, attention_mode
from still_export.texts.forms import NaturalWriter
from still_export.texts.tasks import TaskWriter, task_named
from still_export.texts.turns import turn_pieces

if TYPE_CHECKING:
    from still_export.linearization.run import LinearizationRun

TOKENS, SHORT = 4096, 1024
"""Longest row and prompt, and that of short prompts: a small base finds facts in natural sentences there, and hardly at 4,096 tokens."""
FEWEST, MOST = 2, 12
"""Rounds of one row of text, two long prompts and three short ones."""
ROUND = 75_000
"""Tokens of forward passes that a round of full length takes, each with a backward pass and students."""
FACTS = 10.0
"""Weight of answers' harm beside that of text. An emulation by masks kept 99% of SmolLM2's needles at 4,096 tokens and 97% of its facts at
1,024 with 10, 96% and 88% with 1, for 0.1% of text. By the kernels it kept 98% of needles in 480 prompts with 10."""
MEASURED = (1 / 16, 1 / 4, 1 / 2)
"""Shares of a chunk that are salient when harms are measured; those between are interpolated."""
STEPS = 16
"""Salient tokens are chosen in steps of so many parts of a chunk, up to a half; then follows softmax. The kernels have at most 32."""


@dataclass(frozen=True)
class Harms:
    """The expected increase of the loss by layer and by number of salient tokens per chunk (`levels`), as shares of all layers' at the
    middle level: of text, and of answers to questions about facts in the text, the mean of several kinds of prompts. `rounds` were asked
    for."""

    chunk: int
    levels: list[int]
    text: dict[int, list[float]]
    facts: dict[int, list[float]]
    rounds: int = 0

    @classmethod
    def read(cls, values: dict[str, Any]) -> Harms:
        """From JSON, whose keys are texts."""
        tables = {n: {int(layer): row for layer, row in values[n].items()} for n in ("text", "facts")}
        return cls(values["chunk"], values["levels"], **tables, rounds=values["rounds"])

    @property
    def choices(self) -> list[int]:
        """Numbers of salient tokens to choose from; the last is a whole chunk, softmax."""
        few = sorted({max(1, self.chunk * part // STEPS) for part in range(1, STEPS // 2 + 1)} - {self.chunk})
        return [*few, self.chunk]

    def of(self, layer: int, salient: int) -> float:
        """Harm of text and facts together if a layer has so many salient tokens; 0 if it is softmax."""
        if salient >= self.chunk:
            return 0.0
        both = [text + FACTS * fact for text, fact in zip(self.text[layer], self.facts[layer], strict=True)]
        return math.exp(float(np.interp(salient, self.levels, np.log(np.maximum(both, 1e-12)))))

    def spend(self, state: float, prices: dict[int, float]) -> dict[int, int]:
        """Salient tokens of each layer within a size of state. Again and again, the increase that avoids most harm for its size is taken.

        Args:
            state: Largest size, in the unit of the prices; the least of all layers is taken even beyond it.
            prices: Size of one layer by number of salient tokens.
        """
        chosen = dict.fromkeys(self.text, min(self.choices, key=lambda salient: (prices[salient], salient)))
        left = state - sum(prices[salient] for salient in chosen.values())
        while True:
            best: tuple[float, int, int, float] | None = None
            for layer, now in chosen.items():
                for salient in self.choices:
                    more = prices[salient] - prices[now]
                    avoided = self.of(layer, now) - self.of(layer, salient)
                    if salient <= now or avoided <= 0 or more > left:
                        continue
                    worth = avoided / max(more, 1e-12)
                    if best is None or worth > best[0]:
                        best = worth, layer, salient, more
            if best is None:
                return chosen
            _, layer, salient, more = best
            chosen[layer] = salient
            left -= more

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def harms_of(
    run: LinearizationRun, model: Any, attentions: Sequence[Trainable], rounds: int = MOST, seconds: float = math.inf
) -> Harms:
    """Harms in a run's untrained model with all layers linearized, over rows of its training text and questions about facts in them.

    Args:
        seconds: If FEWEST rounds would take longer, rows and prompts are shorter; the rounds end then, one at least.
    """
    chunk = run.still.chunk_size
    levels = sorted({max(1, int(chunk * share)) for share in MEASURED})
    tokens = min(TOKENS, run.context, len(run.corpus.train))
    device = run.accelerator.device
    train, rng = run.corpus.train, np.random.default_rng((run.recipe.seed, tokens))
    natural = NaturalWriter(run.tokenizer, train, turn_pieces(run.tokenizer))
    plain, needle = TaskWriter(run.tokenizer, train), task_named("needle")
    short, begin = min(tokens, SHORT), time.monotonic()

    def harm(ids: np.ndarray, answer: int = 0) -> Tensor:
        return damages(model, attentions, torch.from_numpy(ids.astype(np.int64))[None].to(device), levels, answer)

    for _ in range(2 if seconds < math.inf else 0):  # the first run allocates
        begin = time.monotonic()
        harm(train[:short])
    a_token = (time.monotonic() - begin) / short
    while tokens > short and FEWEST * 3 * (tokens + short) * a_token > seconds:
        tokens = max(short, tokens // 2)
    kinds: list[tuple[int, Callable[[float], tuple[np.ndarray, int]]]] = [
        (2, lambda depth: plain.prompt(needle, tokens, depth, rng)),
        (2, lambda depth: natural.prompt(short, depth, rng)),
        (1, lambda depth: plain.prompt(needle, short, depth, rng)),
    ]
    text = torch.zeros(len(attentions), len(levels))
    answers = [torch.zeros_like(text) for _ in kinds]
    for number in range(rounds):
        start = (len(train) - tokens) * number // max(1, rounds - 1)
        text += harm(train[start : start + tokens])
        for found, (count, write) in zip(answers, kinds, strict=True):
            for at in range(count):
                with contextlib.suppress(ConfigError):  # with byte tokens even one fact may exceed a small context
                    found += harm(*write((number * count + at + 0.5) / (rounds * count) * 0.8))
        if time.monotonic() - begin > seconds:
            break

    def shares(values: Tensor) -> np.ndarray:
        # More tokens cannot harm more: where they seem to, it is noise.
        rows = np.maximum.accumulate(values.numpy()[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(rows / (float(rows[:, len(levels) // 2].sum()) or 1.0))

    def by_layer(rows: np.ndarray) -> dict[int, list[float]]:
        return {a.layer_idx: row.tolist() for a, row in zip(attentions, rows, strict=True)}

    facts = np.mean([shares(found) for found in answers], axis=0)
    return Harms(chunk, levels, by_layer(shares(text)), by_layer(facts), rounds)


def damages(
    model: Any, attentions: Sequence[Trainable], ids: Tensor, levels: Sequence[int | None], answer: int = 0
) -> Tensor:
    """By linearized layer and level, the second-order change of the loss of ids [1, T] if the layer's softmax became the untrained
    student's, [layers, levels].

    All layers run with the inputs of softmax layers, in both modes. One backward pass weighs the difference by the gradient of the loss. It
    is squared, because differences in either direction move away from the base's distribution (the empirical Fisher information).

    Args:
        levels: Salient tokens per chunk of the student; None: those that it has.
        answer: The loss is that of the last `answer` tokens together; 0: that of each token.
    """
    found = torch.zeros(len(attentions), len(levels))
    hooks = []

    def compare(index: int) -> Any:
        def hook(module: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            output = result[0] if isinstance(result, tuple) else result
            if not output.requires_grad:
                return
            changes = []
            with torch.no_grad(), attention_mode([module], STUDENT):
                for level in levels:
                    with salient_tokens(module, level):
                        student = module.forward(*arguments, **kwargs)
                    changes.append((student[0] if isinstance(student, tuple) else student) - output.detach())

            def weigh(gradient: Tensor) -> None:
                for place, change in enumerate(changes):
                    by_token = (gradient * change).sum(-1).float()
                    found[index, place] = float(by_token.sum().square() if answer else by_token.square().sum())

            output.register_hook(weigh)

        return hook

    for index, attention in enumerate(attentions):
        hooks.append(attention.register_forward_hook(compare(index), with_kwargs=True))  # type: ignore[attr-defined]
    embeddings = model.get_input_embeddings()
    hooks.append(embeddings.register_forward_hook(lambda module, kwargs, output: output.requires_grad_(True)))
    head = model.get_output_embeddings().weight
    try:
        with attention_mode(attentions, SOFTMAX), torch.enable_grad():
            losses = head_losses(last_hidden(model, ids), head, ids.roll(-1, dims=1))
            losses[:, -answer - 1 if answer else 0 : -1].sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextlib.contextmanager
def salient_tokens(module: Any, count: int | None) -> Iterator[None]:
    """Inside the block a hybrid layer has `count` salient tokens per chunk; None: its own number."""
    before = module.still if count is not None else None
    if before is not None:
        module.still = replace(before, salient_per_chunk=count)
    try:
        yield
    finally:
        if before is not None:
            module.still = before
