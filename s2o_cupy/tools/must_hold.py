"""What a setting must keep of a model's predictions: of all, where it is hardest, where the model is unsure, where text
is copied, and of answers; on the part of the texts that it is chosen on, and on the part that is held back.

Of every prediction two numbers count. Its loss beyond dense attention's may be below 0 by luck. How far it moved, the
Kullback-Leibler divergence, is not: where a model's probabilities are right it is what the loss grows by. Both are next
to nothing where the model is sure, whatever attention loses: hence the tokens that it is unsure of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .far_copies import far_copies

__all__ = [
    "Bound", "Lost", "Part", "Predictions", "Row", "cut", "how_easy", "judge", "mean_and_error", "plain", "prices",
    "runs",
]  # fmt: skip

MEAN, HARDEST, UNSURE, COPIED, ANSWERS = "all", "hardest part", "unsure", "copied", "answers"
RIGHT = "answers right"
TIMES = {MEAN: 1, HARDEST: 2, UNSURE: 2, COPIED: 4, ANSWERS: 4}  # the asked loss that each may lose
ENTROPY, FEWEST = 1.0, 0.01  # nats of an unsure prediction; if they are fewer than this share, the most unsure of all
LOST_ANSWERS = 0.01  # of the answers' tokens so many fewer may be the likeliest
STRETCHES, LEAST = 16, 512  # equal parts of a text; of fewer predictions than LEAST for each, not so many
RUN = 128  # neighbours are lost or kept together: a tile of queries stops as one
COPIES, NEAR = 32, 4096  # fewer copies are not looked at; a copy is from over so many tokens before, or an eighth


class Row(NamedTuple):
    """One sequence of a text."""

    ids: np.ndarray  # [seqlen]
    answers: np.ndarray | None = None  # bool [seqlen]: tokens that answer something
    there: np.ndarray | None = None  # bool [seqlen]: not padding; None: all


@dataclass(frozen=True, eq=False)
class Predictions:
    """Of every prediction of the texts, sequence behind sequence: what it is of. Arrays [predictions]."""

    sequence: np.ndarray
    place: np.ndarray  # of the predicted token
    stretch: np.ndarray  # numbered over all sequences
    held_back: np.ndarray  # bool
    copied: np.ndarray  # bool: from far away
    repeated: np.ndarray  # bool: of something that stood anywhere before
    answer: np.ndarray  # bool

    @property
    def run(self) -> np.ndarray:
        """A number for each run of neighbours."""
        return runs(self.sequence, self.place)

    def where(self, stretch: int) -> str:
        here = self.stretch == stretch
        places = self.place[here]
        return f"text {self.sequence[here][0] + 1}, tokens {places[0]:,} to {places[-1]:,}"


def runs(sequence: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Of predictions, in which sequence and of the token at which place, a number for each run of neighbours."""
    return np.unique(sequence * (1 << 40) + place // RUN, return_inverse=True)[1]


class Lost(NamedTuple):
    """What a setting did to every prediction. Arrays [predictions]."""

    loss: np.ndarray  # nats beyond dense attention's
    moved: np.ndarray  # nats, at least 0: how far the prediction is from dense attention's
    right: np.ndarray  # whether the likeliest token came: 1 if only now, -1 if only with dense attention, else 0
    entropy: np.ndarray  # nats: how unsure dense attention's prediction is


@dataclass(frozen=True)
class Bound:
    """One thing that must hold.

    Attributes
    ----------
    name : str
        "all", "hardest part", "unsure", "copied", "answers" or "answers right".
    tokens : int
        Predictions that it is of.
    value, most : float
        What was measured, and what is accepted: nats a token, of "answers right" a share of the answers' tokens.
    where : str
        Which stretch of the texts the hardest one is.
    """

    name: str
    tokens: int
    value: float
    most: float
    where: str = ""


@dataclass(frozen=True)
class Part:
    """What a setting does to one part of the texts.

    Attributes
    ----------
    tokens : int
        Predictions.
    loss_difference, standard_error : float
        Mean nats beyond dense attention's, and its standard error, runs of 128 tokens taken for independent.
    moved : float
        Mean nats that predictions moved.
    bounds : tuple of Bound
    """

    tokens: int
    loss_difference: float
    standard_error: float
    moved: float
    bounds: tuple[Bound, ...]

    @property
    def value(self) -> float:
        """The larger of the mean's two numbers, nats a token."""
        return float(np.maximum(self.loss_difference, self.moved))

    @property
    def holds(self) -> bool:
        return all(x.value <= x.most for x in self.bounds)

    @property
    def tightest(self) -> Bound:
        """The bound that is reached first, or passed by most."""
        return max(self.bounds, key=lambda x: x.value / x.most)


def cut(rows: Sequence[Row], held_back: float) -> Predictions:
    """What the predictions of some sequences are of.

    A sequence is cut into equal stretches. Of these every so many-th is held back, from one sequence to the next
    another one: so both parts have predictions with few keys and with many, and of everything that a text goes
    through, yet whole stretches, of which only the first tokens lean on the other part. If anything is to be held back,
    each part has one stretch at least, of all sequences together, unless there is but one.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in Predictions.__dataclass_fields__}
    stretches = 0
    for number, row in enumerate(rows):
        there = np.ones(len(row.ids), bool) if row.there is None else row.there
        place = 1 + np.flatnonzero(there[:-1] & there[1:])
        count = int(np.clip(len(place) // LEAST, 4, STRETCHES))
        stretch = np.arange(len(place)) * count // max(1, len(place))
        # Stretches held back up to each: a step wherever the product passes an integer.
        steps = np.floor((np.arange(count + 1) + number) * held_back + 1e-9)
        copied, repeated = (far_copies(row.ids, distance=x)[place - 1] for x in (min(NEAR, len(row.ids) // 8), 0))
        answers = np.zeros(len(row.ids), bool) if row.answers is None else row.answers
        for name, values in (
            ("sequence", np.full(len(place), number)), ("place", place), ("stretch", stretches + stretch),
            ("held_back", np.diff(steps).astype(bool)[stretch]), ("copied", copied), ("repeated", repeated),
            ("answer", answers[place]),
        ):  # fmt: skip
            found[name].append(values)
        stretches += count
    of = {name: np.concatenate(values) for name, values in found.items()}
    there = np.unique(of["stretch"])
    if held_back > 0 and len({*of["held_back"].tolist()}) == 1:
        of["held_back"] = (of["stretch"] == there[len(there) // 2]) & (len(there) > 1)
    return Predictions(**of)


def judge(of: Predictions, lost: Lost, loss: float) -> tuple[Part, Part | None]:
    """What is chosen on, and what is held back, if anything is, for a loss that was asked for."""
    chosen = ~of.held_back
    return _part(of, lost, loss, chosen, 2.0), _part(of, lost, loss, of.held_back, 0.0) if not chosen.all() else None


def _part(of: Predictions, lost: Lost, loss: float, here: np.ndarray, errors: float) -> Part:
    """``errors``: standard errors that the mean leaves room for, as of many tries the one that just fits owes some of
    it to chance. Others are the largest of several, or of few tokens: of their loss two standard errors are taken off,
    so that noise decides nothing; what predictions moved by has little of it."""
    run = of.run

    def of_group(group: np.ndarray, errors: float) -> float:
        mean, error = mean_and_error(lost.loss[group], run[group])
        return float(np.maximum(mean + errors * error, lost.moved[group].mean()))  # NaN, which holds nowhere, stays

    mean, error = mean_and_error(lost.loss[here], run[here])
    bounds = [Bound(MEAN, int(here.sum()), of_group(here, errors), TIMES[MEAN] * loss)]
    parts = {n: here & (of.stretch == n) for n in np.unique(of.stretch[here]).tolist()}
    values = {n: of_group(part, -2.0) for n, part in parts.items()}
    worst = [*values][int(np.argmax([*values.values()]))]
    bounds.append(Bound(HARDEST, int(parts[worst].sum()), values[worst], TIMES[HARDEST] * loss, of.where(worst)))
    unsure, copied, answer = _unsure(lost.entropy, here), here & of.copied, here & of.answer
    bounds.append(Bound(UNSURE, int(unsure.sum()), of_group(unsure, -2.0), TIMES[UNSURE] * loss))
    if copied.sum() >= COPIES:
        bounds.append(Bound(COPIED, int(copied.sum()), of_group(copied, -2.0), TIMES[COPIED] * loss))
    if answer.any():
        count = int(answer.sum())
        bounds.append(Bound(ANSWERS, count, of_group(answer, -2.0), TIMES[ANSWERS] * loss))
        bounds.append(Bound(RIGHT, count, -float(lost.right[answer].mean()), LOST_ANSWERS))
    return Part(int(here.sum()), mean, error, float(lost.moved[here].mean()), tuple(bounds))


def mean_and_error(values: np.ndarray, run: np.ndarray) -> tuple[float, float]:
    """And its standard error, runs taken for independent."""
    mean = float(values.mean())
    sums = np.bincount(np.unique(run, return_inverse=True)[1], values - mean)
    if len(sums) == 1:
        return mean, float(values.std() / np.sqrt(values.size))
    return mean, float(np.sqrt(np.square(sums).sum() * len(sums) / (len(sums) - 1)) / values.size)


def _unsure(entropy: np.ndarray, here: np.ndarray) -> np.ndarray:
    """bool [predictions]: of these the unsure ones."""
    return here & (entropy >= min(ENTROPY, float(np.quantile(entropy[here], 1 - FEWEST))))


def prices(of: Predictions, entropy: np.ndarray) -> np.ndarray:
    """What a nat counts for in each prediction, [predictions], when one setting is weighed against another: the means
    of what is chosen on, of unsure tokens there, of copies and of answers, each by what it may lose. Of what is held
    back nothing."""
    here = ~of.held_back
    found = here / here.sum()
    for name, group, least in (
        (UNSURE, _unsure(entropy, here), 1), (COPIED, of.copied, COPIES), (ANSWERS, of.answer, 1),
    ):  # fmt: skip
        if (here & group).sum() >= least:
            found = found + (here & group) / (here & group).sum() / TIMES[name]
    return found


def how_easy(of: Predictions, loss: np.ndarray, sequence: int) -> tuple[float, float]:
    """Of one sequence the mean loss with dense attention, and the share of repeats."""
    here = of.sequence == sequence
    return float(loss[here].mean()), float(of.repeated[here].mean())


def plain(part: Part | None) -> dict[str, Any] | None:
    """For JSON."""
    if part is None:
        return None
    return {
        "tokens": part.tokens, "loss_difference": part.loss_difference, "standard_error": part.standard_error,
        "moved": part.moved, "holds": part.holds, "bounds": [vars(x) for x in part.bounds],
    }  # fmt: skip
