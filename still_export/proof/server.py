"""Prove that a running server answers as a model file does, for every way in which a prompt reaches it.

The server may be any program. transformers reads the model file, and the reference is evaluated along the server's own tokens, so that a
near tie does not change the tokens after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from still_export.package.files import is_gguf
from still_export.proof.constants import FLOAT32
from still_export.proof.server_client import Answer

ANSWER_TOKENS = 24
LENGTHS = (5, 40, 64, 65, 129, 300)
"""Prompt lengths around the ends of chunks of 64 tokens and of llama.cpp's blocks."""
TOGETHER = 8
"""Concurrent requests of the way "in a batch"."""
LIKELIEST = 32
"""Number of likely tokens that are tried as the next one of the server's text; the others are less likely by nats."""
TIMES = 3.0
"""Allowed multiple of the largest error of PyTorch's own run in the file's type. Two roundings differ by 2; a fault of position or state
costs tenths of nats to nats."""
SENTENCES = (
    "The ferry leaves the island at nine and comes back before dark.",
    "A baker in the old town sells rye bread, rolls and plum cake.",
    "def total(prices, tax=0.19):\n    return sum(prices) * (1 + tax)",
    "Nobody had opened the window since the storm in March.",
    "If the water boils, take the pot off the stove and wait.",
    "The train from Lyon was late, so we missed the last bus.",
    "Her brother keeps bees; he gives us honey every autumn.",
    "for name in sorted(names):\n    print(name.title())",
    "In 1969 two people walked on the moon and left a flag there.",
    "The key is under the third stone, behind the blue gate.",
    "| city | people |\n| Bern | 134,000 |\n| Graz | 302,000 |",
    "Once upon a time a small dog lived in a house by the sea.",
    "The committee met on Tuesday and voted eleven to four.",
    "Rain fell all night, and in the morning the river had risen.",
    "SELECT name, price FROM goods WHERE price < 20 ORDER BY price;",
    "She wrote the letter twice before she sent it to Oslo.",
)
"""Texts that prompts are cut from: prose, code, a table."""


class Server(Protocol):
    tokens: bool

    def ask(self, prompt: str | list[int], most: int) -> Answer: ...


@dataclass(frozen=True)
class ReferenceRun:
    """The reference along one answer.

    Args:
        best: The likeliest token's log-probability at each place, [n].
        chosen: That of the server's token, [n].
        reported: Log-probabilities that the server reports, [n] or empty.
        own: Errors of PyTorch's own run in the file's type: of the server's and the likeliest token's log-probability, [2, n], or empty.
        lost: The place at which no likely token continues the server's text, in words.
    """

    best: np.ndarray
    chosen: np.ndarray
    reported: np.ndarray
    own: np.ndarray
    lost: str = ""


@dataclass
class WayReport:
    """The verdict on one way of asking.

    Args:
        near_ties: Tokens within the bound of the reference's likeliest.
        changed: Answers whose text differs from that of the same prompt alone, because of near ties.
        worst: The largest difference of a log-probability, or distance of a token to the likeliest.
        wrong: One line for each wrong answer.
    """

    name: str
    requests: int = 0
    tokens: int = 0
    near_ties: int = 0
    changed: int = 0
    worst: float = 0.0
    bound: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.wrong


class Reference:
    """A model file as transformers reads it.

    Args:
        model: In float32.
        own: The same model in the file's type or with 8-bit activations, whose errors bound the server's; None: the server computes in
            float32.
    """

    def __init__(
        self, model: Any, tokenizer: Any, own: Callable[[Sequence[int]], np.ndarray] | None, ends: Sequence[int]
    ) -> None:
        self.model, self.tokenizer, self.own, self.ends = model, tokenizer, own, tuple(ends)

    def ids(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds."""
        return list(self.tokenizer(text)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the whole vocabulary after each of `ids`, float64 [n, V]."""
        return logprobs_of(self.model, ids)

    def evaluate(self, prompt: list[int], answer: Answer) -> ReferenceRun:
        """The reference's log-probabilities along the server's tokens."""
        context = prompt[-8:]
        before = self.text(context)

        def text_of(ids: list[int]) -> str:
            return self.text(context + ids)[len(before) :].rstrip("\ufffd")

        ids: list[int] = []
        table = np.empty((0, 0))
        lost = ""
        while (answer.count is not None and len(ids) < answer.count) or (
            answer.count is None and text_of(ids) != answer.text
        ):
            if len(ids) % ANSWER_TOKENS == 0 or table.shape[0] <= len(ids):
                guess = self._rest(ids, text_of(ids), answer)
                assumed = [*ids, *guess]
                table = self.logprobs([*prompt, *assumed])[len(prompt) - 1 :]
            row = table[len(ids)]
            likely = np.argpartition(row, -min(LIKELIEST, len(row)))[-LIKELIEST:]
            fitting = [int(t) for t in likely if answer.text.startswith(text_of([*ids, int(t)]))]
            if answer.ended and text_of(ids) == answer.text:
                fitting = [t for t in self.ends if t < len(row)] or fitting
            if not fitting:
                going_on, likeliest = answer.text[len(text_of(ids)) :][:24], self.text([int(row.argmax())])
                lost = f"after {len(ids)} tokens it says {going_on!r}; the file's likeliest is {likeliest!r}"
                break
            ids.append(max(fitting, key=lambda t: row[t]))
            if len(assumed) < len(ids) or assumed[len(ids) - 1] != ids[-1]:
                table = table[: len(ids)]
        places = np.arange(len(ids))
        chosen = table[places, ids] if ids else np.empty(0)
        best = table[: len(ids)].max(-1) if ids else np.empty(0)
        reported = np.array(answer.logprobs if len(answer.logprobs) == len(ids) else ())
        own = np.empty((2, 0))
        if self.own is not None and ids:
            half = self.own([*prompt, *ids])[len(prompt) - 1 : -1]
            exact = table[: len(ids)]
            both = np.stack([np.array(ids), exact.argmax(-1)])
            own = np.abs(half[places, both] - exact[places, both])
        return ReferenceRun(best, chosen, reported, own, lost)

    def _rest(self, ids: list[int], text: str, answer: Answer) -> list[int]:
        """Guess the tokens of the remaining text, so that one pass covers all places."""
        rest = answer.text[len(text) :]
        return list(self.tokenizer(rest, add_special_tokens=False)["input_ids"]) if rest else []


def logprobs_of(model: Any, ids: Sequence[int]) -> np.ndarray:
    """Log-probabilities of the whole vocabulary after each of `ids`, float64 [n, V], in one call without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def prompts_of(reference: Reference, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Prose and code of about these lengths in tokens, each with another beginning."""
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        text = f"{random.integers(10**6)}. "
        ids = reference.ids(text)
        while len(ids) < length:
            text += SENTENCES[int(random.integers(len(SENTENCES)))] + str(random.choice([" ", "\n", "\n\n"]))
            ids = reference.ids(text)
        made.append(ids[:length])
    return made


@dataclass
class ServerProof:
    """Compares a server's answers with a model file, in every way of asking."""

    server: Server
    reference: Reference
    lengths: Sequence[int] = LENGTHS
    seed: int = 0
    answer_tokens: int = ANSWER_TOKENS

    def run(self, done: Callable[[str], None] = lambda _: None) -> list[WayReport]:
        """The verdict on each way; `done` is called with each way's name."""
        ways: dict[str, Callable[[], Iterator[tuple[list[int], Answer, Answer | None]]]] = {
            "alone": self._alone,
            "again": self._again,
            "in turns": self._turns,
            "edited": self._edited,
            "in pieces": self._pieces,
            "in a batch": self._batch,
        }
        rows_by_way: dict[str, list[tuple[list[int], Answer, Answer | None]]] = {}
        for name, way in ways.items():
            rows_by_way[name] = list(way())
            done(name)
        runs = {n: [self.reference.evaluate(ids, answer) for ids, answer, _ in rows] for n, rows in rows_by_way.items()}
        bound = bound_of([f for rows in runs.values() for f in rows])
        return [judge(name, rows, runs[name], bound) for name, rows in rows_by_way.items()]

    def _ask(self, ids: list[int], most: int | None = None) -> Answer:
        return self.server.ask(ids if self.server.tokens else self.reference.text(ids), most or self.answer_tokens)

    def _prompts(self, way: int) -> list[list[int]]:
        made = prompts_of(self.reference, self.lengths, self.seed * 100 + way)
        return made if self.server.tokens else [self._as_served(ids) for ids in made]

    def _as_served(self, ids: list[int]) -> list[int]:
        """The ids of the text that is sent to a server that accepts no ids."""
        return self.reference.ids(self.reference.text(ids))

    def _alone(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """New prompts, one after another."""
        self._cold = [(ids, self._ask(ids)) for ids in self._prompts(0)]
        yield from ((ids, answer, None) for ids, answer in self._cold)

    def _again(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """The same prompts again, so that the server uses its cache."""
        yield from ((ids, self._ask(ids), answer) for ids, answer in self._cold)

    def _turns(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """A conversation: prompt, answer and more text, up to twice."""
        for number, ids in enumerate(self._prompts(1)):
            text = self.reference.text(ids)
            for turn in range(3):
                sent = ids if turn == 0 else self.reference.ids(text)
                if len(sent) > 2 * max(self.lengths):  # the growing text must fit the prompt lengths
                    break
                answer = self._ask(sent)
                yield sent, answer, None
                text += answer.text + "\n" + SENTENCES[(number + 5 * turn) % len(SENTENCES)][:20] + "\n"

    def _edited(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """A prompt, then the same with another end, then with another middle and a shorter end."""
        for number, ids in enumerate(self._prompts(2)):
            self._ask(ids, 4)
            more = self.reference.tokenizer(SENTENCES[number % len(SENTENCES)], add_special_tokens=False)["input_ids"]
            cut = max(1, len(ids) - 3)
            middle = max(1, len(ids) // 2)
            for edited in ([*ids[:cut], *more[:5]], [*ids[:middle], *more[:3], *ids[middle : cut - 1]]):
                sent = edited if self.server.tokens else self._as_served(edited)
                yield sent, self._ask(sent), None

    def _pieces(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """A prompt after its prefixes of odd lengths."""
        random = np.random.default_rng(self.seed)
        for ids in self._prompts(3):
            cuts = (
                sorted({int(c) for c in random.integers(1, len(ids), 3)} | {max(1, len(ids) - 1)})
                if len(ids) > 1
                else []
            )
            for cut in cuts:
                self._ask(ids[:cut], 1)
            yield ids, self._ask(ids), None

    def _batch(self) -> Iterator[tuple[list[int], Answer, Answer | None]]:
        """Other prompts and those of "alone", all at the same time."""
        fresh = self._prompts(4)
        prompts = [*fresh, *(ids for ids, _ in self._cold)]
        alone: list[Answer | None] = [*(None for _ in fresh), *(answer for _, answer in self._cold)]
        with ThreadPoolExecutor(TOGETHER) as pool:
            yield from zip(prompts, pool.map(self._ask, prompts), alone, strict=True)


def bound_of(runs: Sequence[ReferenceRun]) -> float:
    """Allowed error of a log-probability."""
    own = [f.own for f in runs if f.own.size]
    return max(FLOAT32, TIMES * max(float(x.max()) for x in own)) if own else FLOAT32


def judge(
    name: str, rows: Sequence[tuple[list[int], Answer, Answer | None]], runs: Sequence[ReferenceRun], bound: float
) -> WayReport:
    """Compare the answers of one way with the reference along them."""
    report = WayReport(name, requests=len(rows), bound=bound)
    for number, ((ids, answer, alone), found) in enumerate(zip(rows, runs, strict=True)):
        behind = found.best - found.chosen
        errors = np.abs(found.reported - found.chosen) if found.reported.size else np.zeros(1)
        worst = max(float(behind.max(initial=0)), float(errors.max(initial=0)))
        report.tokens += len(behind)
        report.worst = max(report.worst, worst)
        report.near_ties += int(((behind > 0) & (behind <= 2 * bound)).sum())
        report.changed += alone is not None and alone.text != answer.text
        label = f"{name}, request {number} ({len(ids)} tokens)"
        finite = bool(np.isfinite(found.reported).all()) and bool(np.isfinite(behind).all())
        if found.lost:
            report.wrong.append(f"{label}: {found.lost}")
        elif not finite:
            report.wrong.append(f"{label}: log-probabilities that are no numbers")
        elif behind.max(initial=0) > 2 * bound:
            place = int(behind.argmax())
            report.wrong.append(
                f"{label}: token {place} lies {behind[place]:.2g} nats behind the file's likeliest, bound {2 * bound:.2g}"
            )
        elif errors.max() > bound:
            place = int(errors.argmax())
            report.wrong.append(
                f"{label}: the log-probability of token {place} is {errors[place]:.2g} off, bound {bound:.2g}"
            )
        elif not len(behind) and not answer.ended:
            report.wrong.append(f"{label}: nothing was said")
    return report


def read_reference(file: str | Path) -> tuple[Reference, list[str]]:
    """(the reference of a model folder, hub id or GGUF file, notes about it, one a line).

    Raises:
        StillExportError: The file cannot be read.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from still_export.models.load import load_model, load_tokenizer, source_dtype
    from still_export.proof.other_readers import by_pytorch

    path, notes, own_reader = Path(file), [], False
    where: dict[str, Any] = {"gguf_file": path.name} if is_gguf(path) else {}
    source = str(path.parent) if where else str(file)
    try:
        own_code: dict[str, Any] = {"trust_remote_code": False}  # without asking the user
        model = by_pytorch(
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **where, **own_code).eval()
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **where, **own_code)
        if not type(model).__module__.startswith("transformers."):
            notes.append("transformers has no class of this family: the reference is this project's own class")
    except (ValueError, KeyError, NotImplementedError, OSError):
        model, tokenizer, own_reader = load_model(file, dtype="float32"), load_tokenizer(file), True
        notes.append("transformers does not read this file: the reference was read by this project's own reader")
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    ends = ends if ends is not None else tokenizer.eos_token_id
    kind = source_dtype(file) if own_reader else _stored_type(path if path.is_dir() and not where else None)
    stored = str(kind).removeprefix("torch.")
    own: Callable[[Sequence[int]], np.ndarray] | None = None
    if where:

        def own(ids: Sequence[int]) -> np.ndarray:
            with activations_in_8_bits(model):
                return logprobs_of(model, ids)

        notes.append("a GGUF file's runtime may round activations to 8 bits: bounds follow PyTorch's run that does")
    elif stored != "float32":
        half = (
            load_model(file, dtype=stored)
            if own_reader
            else by_pytorch(AutoModelForCausalLM.from_pretrained(source, dtype=stored).eval())
        )
        own = lambda ids: logprobs_of(half, ids)  # noqa: E731
    return Reference(model, tokenizer, own, [ends] if isinstance(ends, int) else list(ends or ())), notes


def _stored_type(folder: Path | None) -> Any:
    """Type in the folder's configuration; float32 if there is none."""
    import torch
    from transformers import AutoConfig

    if folder is None:
        return torch.float32
    return getattr(AutoConfig.from_pretrained(folder), "dtype", None) or torch.float32


@contextmanager
def activations_in_8_bits(model: Any) -> Iterator[None]:
    """Round the input of each linear layer to 8 bits, 32 numbers a scale, as llama.cpp and ONNX Runtime do."""
    import torch

    from still_export.graph.quantization.read import eight_bits

    def rounded(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return inputs if inputs[0].shape[-1] % 32 else (eight_bits(inputs[0], 32), *inputs[1:])

    handles = [m.register_forward_pre_hook(rounded) for m in model.modules() if isinstance(m, torch.nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def to_dict(reports: Sequence[WayReport], notes: Sequence[str]) -> dict[str, Any]:
    ways = [asdict(report) | {"passed": report.passed} for report in reports]
    return {"passed": all(report.passed for report in reports), "ways": ways, "not_asked": list(notes)}
