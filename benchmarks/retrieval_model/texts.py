"""Texts with statements and questions all over them, for the retrieval model: made of ids alone, by NumPy, from a seed.

Prose is of a language of its own: each word has 16 successors, which depend on the word before it too. Between its
words stand groups of statements, and the question that belongs to each group, with its answer. The kinds of groups are
in the terms of RULER (Hsieh et al., 2024, arXiv:2404.06654):

- single: a key of three tokens has a value of four; the key is asked for.
- multi_key: six keys that share two tokens with one of them, of which one is asked for.
- multi_value: a key has a first, a second and a third value; all three are asked for, in order of appearance.
- multi_query: four keys, all asked for in one question.
- variables: a variable has a value, another has the name of the first, and so on, four in all; the last is asked for,
  and the answer spells each hop back to the value.
- frequent_words: a key has twelve words of three tokens, which are six times the same; that word is asked for.

A statement is a marker, its key, what it says of it, and an end: NEEDLE k k k v v v v END. A question says its key and
then the same: ASK k k k v v v v END. No key is asked for twice in a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

Array = np.ndarray

BEGIN, END, NEEDLE, VARIABLE, MARKED, ASK, AND, TRACE, MOST = range(9)
ORDINALS = np.arange(9, 12)
KEYS, VALUES, WORDS, VOCABULARY = 16, 272, 528, 1024  # where each range of ids begins, and the end of the last
KEY, VALUE, WORD = 3, 4, 3  # tokens of each

KINDS = ("single", "multi_key", "multi_value", "multi_query", "variables", "frequent_words")
STATEMENTS = (1, 6, 3, 4, 4, 12)  # of a group
COPIES = np.repeat(np.arange(4), (6, 3, 2, 1))  # which of its four words each statement of frequent_words has
TOKENS = (18, 63, 56, 69, 51, 104)  # of a group with its question
WIDTH = 33  # the longest question

NEAREST = 16  # tokens from a question back to its statements, at least about so many
PROMPT_SHARE = 0.12  # of a prompt to measure by, said by statements and questions
SENTENCE, SUCCESSORS, CLASSES = 32, 16, 8
POSITIONS = 1 << 17


class Texts(NamedTuple):
    """Of some texts side by side, arrays [rows, length]; ``kinds`` [questions] are indices of `KINDS`.

    ``question`` is 1 + the index of the question whose answer a token belongs to, and 0 of all other tokens;
    ``distance`` is of a token of an answer the number of tokens back to the statement that it is read from, and of
    frequent_words to the first statement of the group.
    """

    ids: Array
    question: Array
    distance: Array
    kinds: Array


# ---------------------------------------------------------------- prose


@cache
def _language() -> tuple[Array, Array]:
    """Successors of (word, class of the word before), and the rank of a successor for each of 256 equal chances."""
    rng = np.random.default_rng(0)  # the same language whatever a text's seed
    words = VOCABULARY - WORDS
    frequency = 1 / np.arange(1, words + 1)
    successors = rng.choice(words, (words * CLASSES, SUCCESSORS), p=frequency / frequency.sum())
    share = 1 / np.arange(1, SUCCESSORS + 1)
    ranks = np.searchsorted(np.cumsum(share / share.sum()), (np.arange(256) + 0.5) / 256)
    return successors.astype(np.int32), ranks


def prose(rng: np.random.Generator, length: int) -> Array:
    """So many ids, in sentences that each begin anew."""
    successors, ranks = _language()
    sentences = -(-length // SENTENCE)
    chances = ranks[rng.integers(0, 256, (SENTENCE, sentences), dtype=np.uint8)]
    before = np.zeros(sentences, np.int32)
    word = rng.integers(0, VOCABULARY - WORDS, sentences, dtype=np.int32)
    found = np.empty((sentences, SENTENCE), np.int32)
    for i in range(SENTENCE):
        found[:, i] = word
        before, word = word, successors[word * CLASSES + before % CLASSES, chances[i]]
    return found.reshape(-1)[:length] + WORDS


# ---------------------------------------------------------------- groups


class _Blocks(NamedTuple):
    """Of n groups of one kind: statements [n, S, up to WIDTH], a question [n, up to WIDTH], and for each of the
    question's tokens the statement that it is read from, -1 where it is no answer, and S where it is all of them."""

    statements: Array
    question: Array
    source: Array


def _keys(rng: np.random.Generator, rows: Array, kinds: Array) -> Array:
    """Six keys for each group, [groups, 6, KEY], of which no two that are used in a row are the same."""
    used = np.array([1, 6, 1, 4, 4, 1])[kinds]
    keys = np.empty((len(kinds), 6, KEY), np.int64)
    wrong = np.ones(len(kinds), bool)
    while wrong.any():
        drawn = rng.integers(KEYS, VALUES, (int(wrong.sum()), 6, KEY))
        family = drawn[:, :1].repeat(6, 1)
        for i in range(1, 6):
            family[:, i, i % KEY] = drawn[:, i, 0]
        keys[wrong] = np.where((kinds[wrong] == KINDS.index("multi_key"))[:, None, None], family, drawn)
        code = ((rows[:, None] * 1024 + keys[..., 0]) * 1024 + keys[..., 1]) * 1024 + keys[..., 2]
        of_used = np.arange(6) < used[:, None]
        first = np.zeros(int(of_used.sum()), bool)
        first[np.unique(code[of_used], return_index=True)[1]] = True
        fresh = np.ones_like(of_used)
        fresh[of_used] = first
        wrong = ~fresh.all(1)
    return keys


def _blocks(rng: np.random.Generator, kind: str, keys: Array) -> _Blocks:
    n, count = len(keys), STATEMENTS[KINDS.index(kind)]
    values = rng.integers(VALUES, WORDS, (n, count, VALUE))
    column = lambda token: np.full((n, 1), token)  # noqa: E731
    asked: list[tuple[Array, int]] = []  # parts of the question with the statement each is read from, or -1

    def statement(marker: int, *parts: Array) -> Array:
        block = np.concatenate([column(marker), *parts, column(END)], 1)
        return np.pad(block, ((0, 0), (0, WIDTH - block.shape[1])), constant_values=-1)

    if kind == "single":
        said = [statement(NEEDLE, keys[:, 0], values[:, 0])]
        asked = [(column(ASK), -1), (keys[:, 0], -1), (values[:, 0], 0)]
    elif kind == "multi_key":
        keys = np.take_along_axis(keys, _orders(rng, n, count)[..., None], 1)
        said = [statement(NEEDLE, keys[:, i], values[:, i]) for i in range(count)]
        asked = [(column(ASK), -1), (keys[:, 0], -1), (values[:, 0], 0)]
    elif kind == "multi_value":
        said = [statement(NEEDLE, keys[:, 0], column(ORDINALS[i]), values[:, i]) for i in range(count)]
        asked = [(column(ASK), -1)]
        for i in range(count):
            asked += [(keys[:, 0], -1), (column(ORDINALS[i]), -1), (values[:, i], i)]
    elif kind == "multi_query":
        said = [statement(NEEDLE, keys[:, i], values[:, i]) for i in range(count)]
        for i in range(count):
            asked += [(column(AND if i else ASK), -1), (keys[:, i], -1), (values[:, i], i)]
    elif kind == "variables":
        said = [statement(VARIABLE, keys[:, 0], values[:, 0])]
        said += [statement(VARIABLE, keys[:, i], keys[:, i - 1]) for i in range(1, count)]
        asked = [(column(TRACE), -1), (keys[:, count - 1], -1)]
        asked += [(keys[:, i - 1], i) for i in range(count - 1, 0, -1)] + [(values[:, 0], 0)]
    else:
        words = rng.integers(VALUES, WORDS, (n, 4, WORD))
        quarter = (WORDS - VALUES) // 4  # so that no two of its words begin alike
        words[..., 0] = VALUES + quarter * np.arange(4) + rng.integers(0, quarter, (n, 4))
        words = words[np.arange(n)[:, None], _orders(rng, n, 4)]
        which = rng.permuted(np.tile(COPIES, (n, 1)), axis=1)  # [n, 12]
        said = [statement(MARKED, keys[:, 0], words[np.arange(n), which[:, i]]) for i in range(count)]
        asked = [(column(MOST), -1), (keys[:, 0], -1), (words[:, 0], count)]
    question = np.concatenate([part for part, _ in asked] + [column(END)], 1)
    source = np.concatenate([np.full(part.shape[1], i) for part, i in asked] + [[-1]])
    pad = (0, WIDTH - question.shape[1])
    return _Blocks(
        np.stack(said, 1),
        np.pad(question, ((0, 0), pad), constant_values=-1),
        np.pad(source, pad, constant_values=-1),
    )


def _orders(rng: np.random.Generator, n: int, of: int) -> Array:
    return rng.permuted(np.tile(np.arange(of), (n, 1)), axis=1)


def _places(rng: np.random.Generator, asked: Array, statements: int) -> Array:
    """[groups, statements], in order of appearance, before the questions at ``asked``: half of the groups with
    distances that are as likely from 1,000 to 2,000 as from 10,000 to 20,000, half anywhere."""
    shape = (len(asked), statements)
    reach = np.maximum(asked, 2 * NEAREST)[:, None]
    by_scale = np.exp(rng.uniform(math.log(NEAREST), np.log(reach), shape))
    distance = np.where(rng.random((len(asked), 1)) < 0.5, by_scale, rng.uniform(0, reach, shape))
    return np.sort(np.maximum(asked[:, None] - distance, asked[:, None] * rng.uniform(0, 0.05, shape)), 1)


def prompt(length: int, seed: int) -> Texts:
    """One text to measure a model by: mostly prose, up to eight of its questions at its very end."""
    groups = round(length * PROMPT_SHARE * len(KINDS) / sum(TOKENS))
    return made(np.random.default_rng((1 << 20, seed)), 1, length, PROMPT_SHARE, at_end=min(8, groups // 2))


def made(
    rng: np.random.Generator, rows: int, length: int, share: float, kinds: Sequence[str] = KINDS, at_end: int = 0
) -> Texts:
    """Texts of ``length`` tokens each, of which about ``share`` are of statements and questions; ``at_end`` of each
    text's questions stand at its very end, the others anywhere."""
    chosen = np.array([KINDS.index(kind) for kind in kinds])
    tokens = np.array(TOKENS)[chosen]
    count = max(1, round(length * share / tokens.mean()))
    whole, rest = divmod(count, len(chosen))
    needed = whole * tokens.sum() + np.sort(tokens)[::-1][:rest].sum() + 1
    if needed > length or at_end > count:
        raise ValueError(f"{count} groups of {needed} tokens, {at_end} at the end, in {length}; accepted: fewer")
    # Of each kind as many, and of some one more; in random order, so that any of them is asked at the end.
    some = _orders(rng, rows, len(chosen))[:, :rest]
    turns = np.concatenate([np.tile(np.arange(len(chosen)), (rows, whole)), some], 1)
    kind = chosen[rng.permuted(turns, axis=1)]  # [rows, count]
    asked = rng.uniform(min(0.1, 64 / length) * length, length, (rows, count))
    asked[:, count - at_end :] = length
    row = np.arange(rows).repeat(count)
    kind, asked = kind.reshape(-1), asked.reshape(-1)
    keys = _keys(rng, row, kind)

    # Of all statements and questions, one a line: row, place, block, question (or -1), and the questions' statements.
    lines: list[tuple[Array, Array, Array, Array]] = []
    read: list[tuple[Array, Array, Array]] = []  # questions, lines of their statements, sources
    total = 0
    for k in np.unique(kind):
        of = np.flatnonzero(kind == k)
        blocks, statements = _blocks(rng, KINDS[k], keys[of]), STATEMENTS[k]
        place = _places(rng, asked[of], statements)
        if KINDS[k] in ("single", "multi_key", "multi_query", "frequent_words"):  # in any order
            place = rng.permuted(place, axis=1)
        n = len(of)
        lines.append((row[of].repeat(statements), place.reshape(-1), blocks.statements.reshape(-1, WIDTH),
                      np.full(n * statements, -1)))  # fmt: skip
        lines.append((row[of], asked[of], blocks.question, of))
        read.append((of, total + np.arange(n * statements).reshape(n, statements), blocks.source))
        total += n * (statements + 1)
    line_row, place, block, question = (np.concatenate(parts) for parts in zip(*lines, strict=True))
    begins = _begins(rng, line_row, place, (block >= 0).sum(1), rows, length)
    return _laid_out(rng, (rows, length), line_row, begins, block, question, read, kind)


def _begins(rng: np.random.Generator, row: Array, place: Array, sizes: Array, rows: int, length: int) -> Array:
    """Where each line begins in its row: in the order of their places, and between them as much prose as they want."""
    order = np.lexsort((rng.random(len(row)), place, row))
    ends = np.cumsum(sizes[order])
    of_row = np.bincount(row, sizes, rows).astype(np.int64)
    before = ends - sizes[order] - (np.cumsum(of_row) - of_row)[row[order]]
    left = (length - 1 - of_row)[row[order]]  # of prose, behind BEGIN
    begins = np.empty(len(row), np.int64)
    begins[order] = 1 + before + np.minimum((place[order] / length * (left + 1)).astype(np.int64), left)
    return begins


def _laid_out(
    rng: np.random.Generator, shape: tuple[int, int], row: Array, begins: Array, block: Array, question: Array,
    read: Sequence[tuple[Array, Array, Array]], kinds: Array,
) -> Texts:  # fmt: skip
    at = row[:, None] * shape[1] + begins[:, None] + np.arange(WIDTH)  # [lines, WIDTH]
    said = block >= 0
    ids = np.full(shape[0] * shape[1], -1, np.int32)
    ids[:: shape[1]] = BEGIN
    ids[at[said]] = block[said]
    gaps = ids < 0
    ids[gaps] = prose(rng, int(gaps.sum()))
    answer, distance = np.zeros((2, ids.size), np.int32)
    line_of = np.empty(len(kinds), np.int64)
    line_of[question[question >= 0]] = np.flatnonzero(question >= 0)
    for of, statements, source in read:
        marked = np.flatnonzero(source >= 0)
        every = begins[statements]  # [n, S]
        origin = np.concatenate([every, every.min(1, keepdims=True)], 1)[:, source[marked]]  # [n, tokens]
        places = at[line_of[of]][:, marked]
        answer[places] = 1 + of[:, None]
        distance[places] = begins[line_of[of]][:, None] + marked - origin
    return Texts(ids.reshape(shape), answer.reshape(shape), distance.reshape(shape), kinds)


def jumps(rng: np.random.Generator, ids: Array, count: float = 3) -> Array:
    """Positions [rows, length] for ids, which jump about ``count`` times between words of prose, so that a short text
    reaches over up to `POSITIONS`; one jump is as likely from 1,000 to 2,000 as from 10,000 to 20,000."""
    rows, length = ids.shape
    of_prose = ids >= WORDS
    of_prose[:, 1:] &= of_prose[:, :-1] | (ids[:, :-1] == END)
    here = of_prose & (rng.random(ids.shape) * of_prose.sum(1, keepdims=True) < count)
    far = np.where(here, np.exp(rng.uniform(0, math.log(POSITIONS), ids.shape)), 0)
    total, room = far.sum(1, keepdims=True), POSITIONS - length
    far *= np.minimum(1, room * rng.uniform(0.5, 1, (rows, 1)) / np.maximum(total, 1))
    positions = np.arange(length) + np.cumsum(far.astype(np.int64), 1)
    free = POSITIONS - 1 - positions[:, -1:]
    return positions + (free * rng.random((rows, 1)) * (rng.random((rows, 1)) < 0.5)).astype(np.int64)
