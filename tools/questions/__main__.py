"""Ask a model what `still-export evaluate` does not: facts in forms that no training row has, files of code, and a chat's ends.

  python -m tools.questions MODEL --text enwik8.test.txt --tasks unseen --lengths 2048,4096 -o OUT.json
  python -m tools.questions MODEL --text sqlalchemy.txt --tasks code --lengths 16384 --depths 5 --samples 8
  python -m tools.questions MODEL --text enwik8.test.txt --tasks "" --chat 20 --chat-lengths 0,4096

All are asked in a chat. "unseen" hides a fact in the text; "code" asks about files of code, in the first text, of half to the whole of a
length. Of --chat answers it counts how many end by themselves and what they repeat, behind --chat-lengths tokens of the first text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from still_export.errors import ConfigError
from still_export.evaluation.bench import BenchOptions
from still_export.evaluation.evaluate import (
    TOKENS_AT_ONCE,
    EvaluationOptions,
    answered,
    by_depth,
    load_any,
    pick_device,
    without,
)
from still_export.evaluation.packages import open_model
from still_export.evaluation.synthetic import MAKERS
from still_export.models.load import load_tokenizer
from still_export.package.folder import is_package, open_package
from still_export.texts.files import read_text
from still_export.texts.texts import tokenize
from tools.benchmarks.common import numbers, parser_of
from tools.questions.chats import CHAT_TOKENS, chat_ends, template
from tools.questions.code import code_prompts
from tools.questions.facts import CHAT, about_texts, unseen


def about_code(model: Any, tokenizer: Any, length: int, options: EvaluationOptions, text: str) -> list[float]:
    """Share of right answers about files of source code, by the place of what is asked for."""
    rng = np.random.default_rng((options.seed, length, 2))
    rows = code_prompts(tokenizer, template(tokenizer), text, length, options.depths, options.samples, rng)
    # Prompts differ in length, and padding is not worth while for a few.
    return [sum(answered(model, tokenizer, ids[None], [count]) for ids, count in part) / len(part) for part in rows]


def ends_behind(model: Any, tokenizer: Any, length: int, count: int, text: str) -> dict[str, float]:
    """How answers to `count` questions end, behind `length` tokens of a text."""
    questions: Sequence[str] = CHAT[:count]
    if length:
        tokens = tokenize(text[: 16 * length * count], tokenizer, int(model.config.vocab_size))
        if len(tokens) < length:
            raise ConfigError(f"the text has {len(tokens)} tokens, fewer than --chat-lengths {length}.")
        questions = about_texts(tokenizer, tokens[: length * count], length, count)
    return chat_ends(model, tokenizer, questions, TOKENS_AT_ONCE[model.device.type])


def ask(model: Any, tokenizer: Any, given: argparse.Namespace) -> dict[str, Any]:
    """Shares by task, length and depth; how answers of a chat end, by length."""
    template(tokenizer)
    options = EvaluationOptions(tasks=(), depths=given.depths, samples=given.samples, seed=given.seed)
    texts = {path.name: read_text(path) for path in given.text}
    first, found = next(iter(texts.values()), ""), {}
    for task in filter(None, given.tasks.split(",")):
        for length in numbers(given.lengths):
            one = about_code(model, tokenizer, length, options, first) if task == "code" else None
            found.setdefault(task, {})[length] = one or by_depth(model, tokenizer, task, length, options, texts)
    if given.chat:
        rows = {length: ends_behind(model, tokenizer, length, given.chat, first) for length in given.chat_lengths}
        found["chat"] = rows
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("model", help="a package, a model's folder or GGUF file")
    parser.add_argument("--teacher", help="the softmax model that MODEL was made from, asked too")
    parser.add_argument("--variants", default="still", help="of a STILL model, as of still-export evaluate")
    parser.add_argument("--text", type=Path, action="append", default=[], help="filler; of code the files")
    parser.add_argument("--tasks", default="unseen")
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", type=int, default=0, choices=range(len(CHAT) + 1), metavar="N")
    parser.add_argument("--chat-lengths", type=numbers, default=[0])
    parser.add_argument("--tokenizer", help="folder or GGUF file of the tokenizer, if there is none beside MODEL")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto", help="of a model; of a package: cpu or cuda")
    parser.add_argument("-o", "--output", type=Path, help="file of JSON")
    given = parser.parse_args(arguments)
    MAKERS["unseen"] = unseen
    if is_package(Path(given.model)):
        setting = BenchOptions(provider="cuda" if given.device == "cuda" else "cpu")
        models = {"package": open_model(open_package(Path(given.model)), setting)}
    else:
        longest = max([*numbers(given.lengths), *(length + CHAT_TOKENS for length in given.chat_lengths)])
        models = load_any(given.model, given.teacher, given.dtype, generates=True, tokens=longest)
        models = {name: model.to(pick_device(given.device)) for name, model in models.items()}
    tokenizer = load_tokenizer(given.tokenizer or given.model)
    found = {}
    for name, model in models.items():
        for variant in given.variants.split(",") if name == "still" else (name,):
            with without(model, variant):
                found[variant] = ask(model, tokenizer, given)
    content = json.dumps({"command": " ".join(sys.argv), **found}, indent=1)
    print(content)
    if given.output is not None:
        given.output.write_text(content + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
