"""Chat as training text: prompts of our own, answered by the base model itself, in its chat template.

  python -m tools.write_chats BASE chat.txt          # chat.jsonl: for linearize --chat-file

So LoRA keeps what the base says in a chat while it is trained on other text. Answers are sampled, every second conversation has a second
turn. Prompts are a function of the seed; the answers also depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from still_export.errors import ConfigError, StillExportError
from still_export.models.load import load_tokenizer
from tools.gguf_folder import write_folder

ANSWER_TOKENS, TEMPERATURE, ROWS = 224, 0.7, 1536
PLACES = (
    "France Germany Italy Spain Portugal Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Finland Poland Greece Turkey "
    "Australia Argentina Chile Peru Cuba Iceland Ireland Austria Hungary Russia Ukraine Thailand Vietnam Morocco Nigeria Ethiopia"
).split()
PEOPLE = (
    "Isaac Newton,Marie Curie,Albert Einstein,William Shakespeare,Leonardo da Vinci,Charles Darwin,Ada Lovelace,Jane Austen,Mozart,"
    "Galileo Galilei,Cleopatra,Julius Caesar,Nikola Tesla,Vincent van Gogh,Mark Twain,Aristotle,Alan Turing,Florence Nightingale"
).split(",")
THINGS = (
    "cats,dogs,volcanoes,the moon,black holes,bread,coffee,rainbows,glaciers,bees,whales,gravity,photosynthesis,the internet,electricity,"
    "democracy,money,music,chess,football,bicycles,trains,airplanes,bridges,castles,paper,glass,gold,salt,sleep,dreams,memory,climate,"
    "earthquakes,oceans,deserts,forests,mountains,the human heart,the brain,vaccines,bacteria,DNA,atoms,light,sound,time,friendship,"
    "courage,honesty,gardening,cooking,painting,poetry,mathematics,statistics,computers,robots,neural networks,operating systems"
).split(",")
FUNCTIONS = (
    "reverses a string,adds two numbers,checks whether a number is prime,sorts a list,counts the words of a text,computes a factorial,"
    "finds the largest number of a list,removes duplicates from a list,reads a file,computes Fibonacci numbers,merges two dictionaries"
).split(",")
FORMS = (
    ("What is the capital of {place}?", 3),
    ("What is the capital of {place}, and what is it known for?", 3),
    ("Tell me about {place}.", 2),
    ("Which languages are spoken in {place}?", 2),
    ("What should I see on a journey to {place}?", 2),
    ("Compare {place} and {place2}.", 1),
    ("Who was {person}?", 3),
    ("What is {person} famous for?", 2),
    ("Write a short letter to {person}.", 1),
    ("What are {thing}?", 2),
    ("Explain {thing} to a child.", 3),
    ("Write one sentence about {thing}.", 2),
    ("Write a short story about {thing} and {thing2}.", 3),
    ("Write a poem about {thing}.", 2),
    ("Give me three facts about {thing}.", 3),
    ("Why are {thing} important?", 2),
    ("What do {thing} and {thing2} have in common?", 2),
    ("List five ideas for a talk on {thing}.", 2),
    ("Write a Python function that {function}.", 2),
    ("Write a function that {function} in JavaScript and explain it.", 1),
    ("What is {a} + {b}?", 1),
    ("What is {a} times {b}? Show the steps.", 1),
    ("I have {a} apples and give away {b}. How many are left?", 1),
    ("Write an email that asks for {a} days of vacation.", 1),
    ("Hello! How are you?", 1),
    ("Give me a recipe with {a} grams of flour.", 1),
    ("How can I learn about {thing} in {b} weeks?", 2),
    ("Summarize what you know of the history of {place} in {b} sentences.", 2),
)
FURTHER = (
    "Can you make that shorter?",
    "Explain it in other words.",
    "Give an example.",
    "Why is that so?",
    "Tell me more.",
    "Thank you! What should I read next?",
    "Write it as a list.",
    "What did I ask you first?",
    "Are you sure?",
)


def prompts(count: int, seed: int) -> list[str]:
    """So many questions."""
    rng = random.Random(seed)
    forms, weights = zip(*FORMS, strict=True)
    found = []
    for form in rng.choices(forms, weights, k=count):
        place, place2 = rng.sample(PLACES, 2)
        thing, thing2 = rng.sample(THINGS, 2)
        values = {"place": place, "place2": place2, "thing": thing, "thing2": thing2, "person": rng.choice(PEOPLE)}
        found.append(form.format(**values, function=rng.choice(FUNCTIONS), a=rng.randint(5, 99), b=rng.randint(2, 9)))
    return found


def softmax_model(base: str) -> Any:
    """The base as transformers' own model on the best device."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_folder(Path(base), Path(temporary)) if Path(base).is_file() else base
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def answers(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]]) -> list[str]:
    """A sampled answer to each chat."""
    found: list[str] = []
    for start in range(0, len(chats), ROWS):
        texts = [
            tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
            for c in chats[start : start + ROWS]
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False).to(
            model.device
        )
        ids = model.generate(
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=ANSWER_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        new = ids[:, batch["input_ids"].shape[1] :]
        found += [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]
    return found


def write_chats(base: str, output: Path, conversations: int = 3000, seed: int = 0) -> tuple[int, int]:
    """Write conversations to `output`; how many, and how many bytes they are.

    Args:
        base: Model folder or GGUF file with a chat template.
        output: A .jsonl file gets the messages of a conversation in each line, for `linearize --chat-file`; any other one running text
            in the chat template.
        conversations: How many.
        seed: Of the prompts and of what is sampled.

    Raises:
        ConfigError: The tokenizer has no chat template.
    """
    tokenizer = load_tokenizer(base)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"{base} has no chat template, so it cannot answer in one; take a model that was trained to chat."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = softmax_model(base)
    torch.manual_seed(seed)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts(conversations, seed)]
    rng = random.Random(seed + 1)
    for turn in range(2):
        asked = chats[::2] if turn else chats
        if turn:
            for chat in asked:
                chat.append({"role": "user", "content": rng.choice(FURTHER)})
        for chat, answer in zip(asked, answers(model, tokenizer, asked), strict=True):
            chat.append({"role": "assistant", "content": answer})
    if output.suffix == ".jsonl":
        text = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    else:
        text = "".join(tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats)
    output.write_text(text, encoding="utf-8")
    return len(chats), len(text.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.write_chats", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("base", help="model folder or GGUF file with a chat template")
    parser.add_argument("output", type=Path, help="a .jsonl file for linearize --chat-file; any other is running text")
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and the answers")
    given = parser.parse_args(arguments)
    try:
        count, size = write_chats(given.base, given.output, given.conversations, given.seed)
    except StillExportError as error:
        parser.error(str(error))
    print(f"{given.output}: {count} conversations, {size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
