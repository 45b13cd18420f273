"""Texts that hold an answer somewhere, and a question at their end: needles, and variables to follow.

In the style of RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024,
arXiv:2404.06654), made anew here: its noise sentences and forms of question, with words and numbers from a seed.

- needle: one number that stands for a key; its key is asked for (RULER's niah_single).
- needles: four keys with a number each, of which one is asked for (niah_multikey).
- variables: a number is given to a variable, and that to another, over four hops; all five names are asked for
  (variable tracking).
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Encode = Callable[[str], list[int]]

NOISE = (
    "The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.",
)  # fmt: skip
FIRST = ("amber", "brave", "calm", "distant", "early", "frozen", "gentle", "hollow", "idle", "jolly", "late", "quiet")
SECOND = ("anchor", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "ladder", "mirror")
KEYS, HOPS = 4, 4


@dataclass(frozen=True)
class Question:
    """What a text is made of; ``facts`` stand in this order at random places among other sentences."""

    before: str
    facts: list[str]
    after: str
    answer: str


@dataclass(frozen=True)
class Sample:
    """``ids`` of a text and its answer, which is the last ``answer`` of them."""

    ids: list[int]
    answer: int


def needle(rng: np.random.Generator, keys: int = 1) -> Question:
    places = rng.choice(len(FIRST) * len(SECOND), keys, replace=False)
    names = [f"{FIRST[i // len(SECOND)]}-{SECOND[i % len(SECOND)]}" for i in places]
    numbers = rng.integers(1_000_000, 10_000_000, keys)
    asked = int(rng.integers(keys))
    wanted = f"the special magic number for {names[asked]} mentioned in the provided text"
    return Question(
        "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
        "about the numbers afterwards.\n",
        [f"One of the special magic numbers for {x} is: {n}." for x, n in zip(names, numbers, strict=True)],
        f"\nWhat is {wanted}? {wanted[0].upper()}{wanted[1:]} is:",
        f" {numbers[asked]}",
    )


def needles(rng: np.random.Generator) -> Question:
    return needle(rng, KEYS)


def variables(rng: np.random.Generator) -> Question:
    """With a short example of the same kind before it, answered, as RULER's has."""
    example, asked = _chain(rng), _chain(rng)
    before = "Memorize and track the chain of assignments in the following text.\n"
    shown = f"{before}{' '.join((*NOISE, *example.facts))}{example.after}{example.answer}\n\n"
    return Question(shown + before, asked.facts, asked.after, asked.answer)


def _chain(rng: np.random.Generator) -> Question:
    names = ["".join(letters) for letters in rng.choice(list(string.ascii_uppercase), (HOPS + 1, 5))]
    number = int(rng.integers(10_000, 100_000))
    given = [f"VAR {names[0]} = {number}."]
    given += [f"VAR {name} = VAR {other}." for other, name in itertools.pairwise(names)]
    asked = f"\nQuestion: Find all variables that are assigned the value {number} in the text above."
    told = f" Answer: {HOPS + 1} variables are assigned the value {number}, they are:"
    return Question("", given, asked + told, "".join(f" {name}" for name in names))


TASKS: dict[str, Callable[[np.random.Generator], Question]] = {
    "needle": needle, "needles": needles, "variables": variables,
}  # fmt: skip


def sample(
    task: str,
    encode: Encode,
    length: int,
    seed: Sequence[int],
    haystack: Sequence[str] = NOISE,
    start: Sequence[int] = (),
) -> Sample:
    """One text of exactly ``length`` ids, its answer included; the same for the same seed, sentences and tokenizer.

    Sentences of ``haystack`` come in turns, from a random one on, each with a space before it; one more, cut so that
    the text has its length, before them. ``start``: ids that every text of the model begins with.
    """
    rng = np.random.default_rng(list(seed))
    question = TASKS[task](rng)
    before, after, answer = encode(question.before), encode(question.after), encode(question.answer)
    facts = [encode(" " + fact) for fact in question.facts]
    left = length - sum(map(len, (start, before, *facts, after, answer)))
    if left < 0:
        raise ValueError(f"{task} in {length} tokens; accepted: {length - left} or more")
    at = int(rng.integers(len(haystack)))
    hay: list[list[int]] = []
    while left > 0:
        hay.append(encode(" " + haystack[at % len(haystack)]))
        left, at = left - len(hay[-1]), at + 1
    if left < 0:
        hay.insert(0, hay.pop()[-left:])
    places = np.sort(rng.integers(0, len(hay) + 1, len(facts)))
    for place, fact in zip(places[::-1], facts[::-1], strict=True):  # from the end, so that places stay
        hay.insert(place, fact)
    ids = [*start, *before, *(i for part in hay for i in part), *after, *answer]
    return Sample(ids, len(answer))
