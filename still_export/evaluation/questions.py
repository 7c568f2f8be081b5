"""Questions for evaluation alone: facts in forms that no training row has, asked in a chat, and a chat's questions without a text.

Nothing here may be used to train, or to choose a recipe: relations, words and what stands around a fact differ from those of
`still_export.texts.forms`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

WORDS = {
    "who": "Agatha Bruno Clement Dorothea Emil Frieda Gustav Henrietta Ignatius Josephine Konrad Lavinia Mortimer Ottilie Percival "
    "Rosalind Sigmund Tabitha Ulrich Winifred",
    "place": "Norhaven Kelmouth Sandvik Brackwater Tolsted Eastmere Lindholm Varnsea Ostrava Pelworm Grimsby Falster",
    "object": "doormat flowerpot barrel statue bench saddle mattress bookcase wheelbarrow clock",
    "food": "lentils barley butter almonds raisins mustard spinach noodles oatmeal beetroot",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "topic": "pensions firewood parking uniforms insurance noise holidays vaccines budgets elevators",
    "spot": "tram bakery theatre stable elevator chapel museum pharmacy canteen bank",
    "cause": "ice flooding fog construction mudslides strikes rust sparks wind termites",
    "boat": "Seagull Marigold Perseverance Bluebell Kingfisher Aurora Nightingale Starfish Tempest Galatea",
}
FACTS = (
    (
        "The ferry to {place} leaves from pier {n} after sunset.",
        "From which pier does the ferry to {place} leave?",
        "n",
    ),
    (
        "Before the storm {who} hid the spare keys under the {object}.",
        "Under what did {who} hide the spare keys?",
        "object",
    ),
    ("At the auction {who} paid {n} crowns for a fossil.", "How many crowns did {who} pay for a fossil?", "n"),
    ("The soup of {who} needs {n} grams of {food}.", "How many grams of {food} does the soup of {who} need?", "n"),
    ("They moved the meeting about {topic} to {day}.", "To which day did they move the meeting about {topic}?", "day"),
    ("{who} left an umbrella in the {spot}.", "Where did {who} leave an umbrella?", "spot"),
    ("In the final {who} lost against {who2}.", "Against whom did {who} lose in the final?", "who2"),
    ("The lighthouse of {place} has {n} steps.", "How many steps does the lighthouse of {place} have?", "n"),
    ("The bridge to {place} is closed because of {cause}.", "Why is the bridge to {place} closed?", "cause"),
    ("Bus {n} stops in front of the house of {who}.", "Which bus stops in front of the house of {who}?", "n"),
    ("{who} christened the new boat {boat}.", "What is the name of the new boat of {who}?", "boat"),
    ("A parcel for {who} arrived from {place}.", "From where did a parcel for {who} arrive?", "place"),
)
AROUND = (
    "\n;; {}\n",
    "\n-- {}\n",
    "\n    :note: {}\n",
    "\n<!-- {} -->\n",
    '\n    logger.debug("{}")\n',
    "\n    print('{}')\n",
    "\n* {}\n",
    "\nP.S. {}\n",
    "\n\t{}\n",
    "\n=== {} ===\n",
)
ABOUT_TEXT = (
    "What is the text above about?",
    "Summarize the text above in a few sentences.",
    "List the most important names of the text above, and say what each of them is.",
    "Continue the text above.",
)
LONGEST_QUESTION = 64
"""Tokens of one of them with what a chat puts around."""
CHAT = tuple(
    """What is the boiling point of water?
Why is the sky blue?
Name three rivers in Africa.
How do I boil an egg?
What does a blacksmith do?
Who wrote Don Quixote?
What is the largest planet of the solar system?
Give me two synonyms of "happy".
How many minutes has a day?
What is the opposite of "generous"?
Translate "good morning" into Spanish.
Which animals lay eggs?
What is a haiku?
Tell me a joke about a penguin.
How does a refrigerator work?
Why do leaves fall in autumn?
What should I pack for a weekend at the sea?
Describe a thunderstorm in two sentences.
What is inflation?
Name a fruit that is yellow.
How do I remove a coffee stain?
What is the difference between a frog and a toad?
Write a birthday greeting for my aunt.
Explain what a lighthouse is for.
How long does the Earth take to go around the sun?
What are the primary colours?
Suggest a name for a hamster.
What is the plural of "mouse"?
Is a tomato a fruit or a vegetable?
Why do we yawn?
How do bakers make bread rise?
What is a prime number?
Write a sentence with the word "nevertheless".
Which instrument has 88 keys?
What is the currency of Switzerland?
How can I fall asleep faster?
What does "carpe diem" mean?
Name the seasons of the year.
How do magnets work?
What is the tallest mountain on Earth?
Give me a riddle and its solution.
What do bats eat?
How many legs has a spider?
Why is exercise healthy?
What is a good breakfast?
Write two lines that rhyme about rain.
How do I change a flat tyre?
What happened in the year 1969 on the moon?
What is the purpose of a passport?
How should I greet a new neighbour?""".splitlines()
)


def unseen_fact(rng: np.random.Generator) -> tuple[str, str, str]:
    """What is hidden, with what stands around it; the question; the answer that a reply must hold."""
    sentence, question, kind = FACTS[int(rng.integers(len(FACTS)))]
    values = {name: str(rng.choice(words.split())) for name, words in WORDS.items()}
    values |= {
        "n": str(rng.integers(11, 990)),
        "who2": str(rng.choice([w for w in WORDS["who"].split() if w != values["who"]])),
    }
    around = AROUND[int(rng.integers(len(AROUND)))]
    return around.format(sentence.format(**values)), question.format(**values), values[kind]


def holds(reply: str, answer: str) -> bool:
    """Whether a reply holds the answer as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", reply, re.IGNORECASE) is not None


def about_texts(tokenizer: Any, tokens: np.ndarray, length: int, count: int) -> list[str]:
    """`count` questions, each behind another part of a text of `tokens`; part and question have about `length` tokens together."""
    part = length - LONGEST_QUESTION
    starts = np.linspace(0, len(tokens) - part, count).astype(int)
    return [
        f"{tokenizer.decode(tokens[start : start + part].tolist())}\n\n{ABOUT_TEXT[row % len(ABOUT_TEXT)]}"
        for row, start in enumerate(starts)
    ]


def repeated(tokens: Sequence[int], size: int = 4) -> float:
    """Share of the n-grams of `tokens` that occurred before."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
