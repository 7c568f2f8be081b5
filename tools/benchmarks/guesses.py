"""Answers with guessed tokens beside plain ones: 40 tasks of editing and copying, 40 free chats, 10 texts that are gone on with.

  python -m tools.benchmarks.guesses PACKAGE --threads 2 --tokens 96

PACKAGE was exported with --speculate. Each prompt is answered greedily with guesses and without, in turns. Where the answers part, `lead`
is by how much the model prefers its own token to the other there: two roundings of one logit.

  python -m tools.benchmarks.guesses PACKAGE --equal 2000 --tokens 64

answers random prompts plainly and with guesses at every step, some of which hold, and counts the answers that part; exit code 1 where one
does by more than --tie.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from pathlib import Path
from random import Random
from typing import Any

import still_export
from still_export.loading.language_model import LanguageModel
from still_export.package.trust import trust_package
from still_export.runtime.speculation import Guesser, Lookup, Speculation
from still_export.runtime.text import Answer
from tools.benchmarks.common import Findings, parser_of

SOURCES = (
    "def area(width, height):\n    size = width * height\n    return size\n\ndef edge(width, height):\n    return 2 * (width + height)\n",
    "def mean(values):\n    total = 0\n    for value in values:\n        total = total + value\n    return total / len(values)\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n",
    "name: Ada Klein\nstreet: 12 Mill Road\ntown: Norwich\nphone: 01603 555 210\norder: two lamps and a ladder\n",
    "invoice 4471\ndate: 3 March 2021\nclient: Harbour Books\namount: 318.40\ndue: 2 April 2021\nnote: paid in two parts\n",
    "The ferry leaves at eight, crosses the sound in forty minutes and waits for the bus. In winter it leaves at nine, and on "
    "days of strong wind it does not leave at all.\n",
    "Boil the beans for an hour, pour off the water and let them cool. Cut the onions fine, warm the oil in a wide pan, and "
    "turn the onions in it until they are soft and brown.\n",
    "The well was dug by the first settlers, and its walls are of the same grey stone as the church. Nobody knows how deep it "
    "is, though many children have dropped stones and counted.\n",
    '{"id": 17, "title": "Night train", "year": 1959, "length": 99, "tags": ["drama", "rail", "sea"], "seen": true}\n',
    "[server]\nhost = 10.0.0.12\nport = 8080\nworkers = 4\n\n[log]\npath = /var/log/app.log\nlevel = warning\nkeep = 14\n",
)
EDITS = (
    "Repeat this text exactly, without changes:\n\n{}",
    "Copy this text twice:\n\n{}",
    "Here is a text:\n\n{0}\nWrite it again with its first line left out.",
    "Text:\n\n{0}\nQuote the text, then say in one sentence what it is.",
)
SUBJECTS = (
    "a fox",
    "the sea",
    "an old clock",
    "bread",
    "a long winter",
    "chess",
    "the moon",
    "a lost key",
    "trains",
    "rain",
)
CHATS = (
    "Tell me a short story about {}.",
    "What do people like about {}?",
    "Give me three facts about {}.",
    "Write a letter to a friend about {}.",
)


def prompts(kinds: tuple[str, ...], parts: tuple[str, ...]) -> list[str]:
    return [kind.format(part) for kind, part in itertools.product(kinds, parts)]


def seconds(answer: Answer) -> float:
    """Of the tokens behind the first one."""
    return (len(answer.tokens) - 1) / answer.decode_tokens_per_s if answer.decode_tokens_per_s else 0.0


def asked(model: LanguageModel, name: str, prompt: str) -> list[int]:
    """Token ids of a prompt: a message, or a text of its own."""
    return model.text.encode(prompt) if name == "texts" else model.text.dialogue([{"role": "user", "content": prompt}])


def lead(model: LanguageModel, prompt: list[int], ours: list[int], theirs: list[int]) -> float | None:
    """How far the likelier token is ahead where two answers part; None: they do not."""
    place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    model.runner.start()
    logits = model.runner.prefill(prompt + ours[:place])
    return abs(float(logits[ours[place]] - logits[theirs[place]]))


class Spoiled(Speculation):
    """Guesses a known answer at every step, any number of its tokens, up to a random place.

    Args:
        most: Guesses of a step at most.
        vocabulary: Tokens to take wrong ones from.
    """

    def __init__(self, most: int, vocabulary: int) -> None:
        super().__init__(most)
        self.random, self.vocabulary = Random(0), vocabulary
        self.prompt, self.answer = list[int](), list[int]()

    def guess(self, guesser: Guesser, most: int, sequences: int = 1) -> list[int]:
        """As of Speculation."""
        assert isinstance(guesser, Lookup)
        said, count = len(guesser.tokens) - len(self.prompt), self.random.randint(0, min(most, self.most))
        right = self.answer[said : said + count]
        hold = self.random.choice((0, len(right), self.random.randint(0, len(right))))
        return right[:hold] + [self.random.randrange(self.vocabulary) for _ in range(count - hold)]


def equal(plain: LanguageModel, guessing: LanguageModel, count: int, tokens: int, seed: int) -> dict[str, Any]:
    """Of `count` random prompts, how many answers with guesses part from the plain ones, and by how much."""
    vocabulary = plain.runner.manifest["model"]["vocab_size"]
    spoiled = guessing.runner.speculation = Spoiled(guessing.runner.guesses, vocabulary)
    random, leads = Random(seed), list[float]()
    for _ in range(count):
        spoiled.prompt = [random.randrange(vocabulary) for _ in range(random.randint(1, 4 * tokens))]
        spoiled.answer = plain.generate(spoiled.prompt, max_tokens=tokens).tokens
        found = guessing.generate(spoiled.prompt, max_tokens=tokens).tokens
        ahead = lead(plain, spoiled.prompt, spoiled.answer, found)
        if ahead is not None:
            leads.append(ahead)
    said = {name: value for name, value in spoiled.to_dict().items() if name != "won_s"}
    return {"prompts": count, "parted": len(leads), "greatest_lead": round(max(leads, default=0.0), 5), **said}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--sets", default="edits,chats,texts", help="which of them")
    parser.add_argument("--every", type=int, default=1, help="ask every so many of the prompts")
    parser.add_argument("--equal", type=int, default=0, help="compare the answers to so many random prompts")
    parser.add_argument("--seed", type=int, default=1, help="of the random prompts")
    parser.add_argument(
        "--tie", type=float, default=1e-3, help="most by which the tokens may differ where answers part"
    )
    given = parser.parse_args()
    found = Findings()
    trust_package(given.package)
    where: dict[str, Any] = {"threads": given.threads, "provider": given.provider}
    plain = still_export.load(given.package, guess="none", **where)
    if given.equal:
        guessing = still_export.load(given.package, **where)
        figures = equal(plain, guessing, given.equal, given.tokens, given.seed)
        found.add(**figures)
        found.record(given.record, "equal tokens", {"package": given.package.name})
        return int(figures["greatest_lead"] > given.tie)
    sets = {
        "edits": prompts(EDITS, SOURCES),
        "chats": prompts(CHATS, SUBJECTS),
        "texts": prompts(("{0}\n{0}\n{0}\n",), SOURCES),
    }
    for name, texts in [(name, sets[name]) for name in given.sets.split(",")]:
        guessing = still_export.load(given.package, **where)
        rates, leads = list[float](), list[float]()
        spent = {"plain": 0.0, "guessing": 0.0}
        for number, prompt in enumerate(texts[:: given.every]):
            ids = asked(plain, name, prompt)
            answers = {}
            for kind, model in [("plain", plain), ("guessing", guessing)][:: 1 - 2 * (number % 2)]:
                answers[kind] = model.generate(ids, max_tokens=given.tokens)
            times = {kind: seconds(answer) / max(1, len(answer.tokens) - 1) for kind, answer in answers.items()}
            if all(times.values()):
                rates.append(times["plain"] / times["guessing"])
                for kind, time in times.items():
                    spent[kind] += time
            ahead = lead(plain, ids, answers["plain"].tokens, answers["guessing"].tokens)
            if ahead is not None:
                leads.append(ahead)
        assert guessing.runner.speculation is not None
        found.add(
            prompts=name,
            count=len(rates),
            times_plain=round(spent["plain"] / spent["guessing"], 3),
            median_times_plain=round(statistics.median(rates), 3),
            least_times_plain=round(min(rates), 3),
            parted=len(leads),
            greatest_lead=round(max(leads, default=0.0), 4),
            **guessing.runner.speculation.to_dict(),
        )
    found.record(given.record, "guesses", {"package": given.package.name})
    return 0


if __name__ == "__main__":
    sys.exit(main())
