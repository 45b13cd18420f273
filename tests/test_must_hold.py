"""What a setting must keep of a model's predictions, and which of several is taken, on losses that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from s2o_cupy.tools.far_copies import far_copies
from s2o_cupy.tools.loss_search import Trial, fastest
from s2o_cupy.tools.must_hold import Lost, Row, cut, judge, mean_and_error, prices

LENGTH = 8193  # 16 stretches of 512 predictions


@pytest.fixture
def ids(rng):
    """Ids that do not come again, but for 200 that stand at 1,000 and again at 3,000, an eighth of the text later."""
    found = rng.permutation(100_000)[:LENGTH]
    found[3000:3200] = found[1000:1200]
    return found


def nothing(of):
    """A setting that changes nothing, where the model is unsure of all."""
    n = len(of.place)
    return Lost(np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, 2.0))


def bounds(part):
    return {x.name: x for x in part.bounds}


# ---------------------------------------------------------------- the parts of texts


@pytest.mark.parametrize("held_back", [0, 0.25, 1 / 3, 0.5])
def test_whole_stretches_are_held_back(ids, held_back):
    of = cut([Row(ids), Row(ids), Row(ids[:500])], held_back)
    assert len(of.place) == 2 * (LENGTH - 1) + 499 and of.place[0] == 1
    assert len(np.unique(of.stretch)) == 16 + 16 + 4
    for n in np.unique(of.stretch):
        here = of.stretch == n
        assert len({*of.held_back[here]}) == 1 and len({*of.sequence[here]}) == 1
        assert (np.diff(of.place[here]) == 1).all()
    assert of.held_back.mean() == pytest.approx(held_back, abs=0.04)
    if held_back:  # at all lengths, and at others from one text to the next
        first, second = (of.held_back[of.sequence == n] for n in (0, 1))
        assert first[: LENGTH // 2].any() and first[LENGTH // 2 :].any() and (first != second).any()


@pytest.mark.parametrize("length", [2500, 4999, LENGTH])
@pytest.mark.parametrize("held_back", [0.01, 0.05, 0.1, 0.2])
def test_a_small_share_is_one_stretch_at_least(ids, held_back, length):
    of = cut([Row(ids[:length])], held_back)
    stretches = [*np.unique(of.stretch[of.held_back])]
    assert len(stretches) == max(1, int(len(np.unique(of.stretch)) * held_back))
    assert not cut([Row(ids[:length])], 0).held_back.any()


def test_something_is_left_to_choose_on(ids):
    """Of the fourth row, which alone predicts anything, the first stretch would be held back."""
    short = [Row(ids[:4], there=np.arange(4) < n) for n in (1, 1, 1, 2)]
    of = cut(short, 0.25)
    assert len(of.place) == 1 and not of.held_back.any()
    assert judge(of, nothing(of), 0.005)[0].holds
    of = cut([*short, Row(ids[:3])], 0.5)
    assert {*of.held_back.tolist()} == {False, True}


def test_padding_is_no_part_of_a_text(ids):
    there = np.ones(LENGTH, bool)
    there[:1000] = False
    of = cut([Row(ids, there=there)], 0.25)
    assert of.place.min() == 1001 and len(of.place) == LENGTH - 1001


def test_what_predictions_are_of(ids):
    answers = np.zeros(LENGTH, bool)
    answers[[0, 7, 2048]] = True  # the first token is not predicted
    of = cut([Row(ids, answers)], 0.25)
    assert of.place[of.answer].tolist() == [7, 2048]
    # After eight of the same, 2,000 tokens on: an eighth of the text is 1,024.
    assert of.place[of.copied].tolist() == list(range(3008, 3200)) == of.place[of.repeated].tolist()
    near = np.tile(ids[:300], 10)
    assert not cut([Row(near)], 0.25).copied.any() and cut([Row(near)], 0.25).repeated.sum() == len(near) - 308
    assert (far_copies(near, distance=300)).sum() == 0
    assert cut([Row(np.full(1000, 7))], 0.25).repeated.sum() == 1000 - 9  # one token again and again


def test_a_run_of_neighbours_counts_as_one(rng):
    values, run = np.repeat(rng.standard_normal(200), 128), np.repeat(np.arange(200), 128)
    mean, error = mean_and_error(values, run)
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values[::128].std(ddof=1) / 200**0.5)
    assert mean_and_error(values[:5], run[:5])[1] == pytest.approx(values[:5].std() / 5**0.5)


def test_runs_of_two_texts_are_apart(ids):
    of = cut([Row(ids), Row(ids)], 0)
    first, second = (set(of.run[of.sequence == n].tolist()) for n in (0, 1))
    assert len(first) == len(second) == LENGTH // 128 + 1 and not first & second


# ---------------------------------------------------------------- what must hold


def test_the_mean_is_of_losses_or_of_movements(ids):
    """Whichever is larger; of the part chosen on with two standard errors of the loss."""
    of = cut([Row(ids)], 0.25)
    lost = nothing(of)
    for loss, moved in ((0.003, 0.001), (-0.1, 0.004), (0.001, 0.002)):
        chosen, held = judge(of, lost._replace(loss=lost.loss + loss, moved=lost.moved + moved), 0.005)
        assert chosen.holds and held.holds and chosen.tokens + held.tokens == LENGTH - 1
        for part in (chosen, held):
            assert part.value == bounds(part)["all"].value == pytest.approx(max(loss, moved))
            assert (part.loss_difference, part.moved) == (pytest.approx(loss), pytest.approx(moved))
        assert not judge(of, lost._replace(moved=lost.moved + 0.0051), 0.005)[0].holds
    for name in ("loss", "moved"):  # a model that gives NaN anywhere
        broken = getattr(lost, name).copy()
        broken[100] = np.nan
        assert not judge(of, lost._replace(**{name: broken}), 0.005)[0].holds
    noise = np.where(of.place // 128 % 2, 0.02, -0.02)
    chosen, held = judge(of, lost._replace(loss=0.004 + noise), 0.005)
    assert bounds(chosen)["all"].value == pytest.approx(chosen.loss_difference + 2 * chosen.standard_error)
    assert bounds(chosen)["all"].value > 0.005 > chosen.loss_difference
    assert bounds(held)["all"].value == held.loss_difference


def test_the_hardest_part_decides(ids):
    """One stretch of sixteen, on whichever side it lies."""
    of = cut([Row(ids)], 0.25)
    for stretch in (2, 3):
        here = of.stretch == stretch
        chosen, held = judge(of, nothing(of)._replace(moved=np.where(here, 0.011, 0.0)), 0.005)
        hit, other = (held, chosen) if of.held_back[here].all() else (chosen, held)
        assert other.holds and not hit.holds and hit.tightest.name == "hardest part" and hit.value < 0.005
        assert hit.tightest.where == f"text 1, tokens {of.place[here][0]:,} to {of.place[here][-1]:,}"
        assert hit.tightest.tokens == here.sum() and hit.tightest.most == 0.01
    # A loss that may be noise does not: 0.012 as the mean of a few runs of tokens.
    noise = np.where(of.place // 128 % 2, 0.03, -0.006) * (of.stretch == 2)
    assert noise[of.stretch == 2].mean() > 0.01 and judge(of, nothing(of)._replace(loss=noise), 0.005)[0].holds
    assert not judge(of, nothing(of)._replace(loss=0.012 * (of.stretch == 2)), 0.005)[0].holds


def test_unsure_tokens_decide(ids):
    """Where the model is sure of all others, which then say nothing; a hundredth at least."""
    of = cut([Row(ids)], 0)
    unsure = of.place % 50 == 0
    lost = nothing(of)._replace(moved=np.where(unsure, 0.011, 0.0), entropy=np.where(unsure, 1.0, 0.99))
    chosen, held = judge(of, lost, 0.005)
    assert held is None and chosen.value < 0.001 and not chosen.holds and chosen.tightest.name == "unsure"
    assert chosen.tightest.tokens == unsure.sum() and chosen.tightest.value == pytest.approx(0.011)
    assert judge(of, lost._replace(moved=0.9 * lost.moved), 0.005)[0].holds
    entropy = of.place / LENGTH  # sure of all: of the last least
    last = of.place > 0.99 * LENGTH
    chosen, _ = judge(of, lost._replace(moved=0.011 * last, entropy=entropy), 0.005)
    assert bounds(chosen)["unsure"].tokens == pytest.approx(last.sum(), abs=2) and not chosen.holds


def test_copied_tokens_decide(ids):
    of = cut([Row(ids)], 0)
    lost = nothing(of)._replace(loss=np.where(of.copied, 0.021, 0.0))
    chosen, _ = judge(of, lost, 0.005)
    assert not chosen.holds and chosen.tightest.name == "copied" and chosen.tightest.tokens == 192
    assert judge(of, lost._replace(loss=0.9 * lost.loss), 0.005)[0].holds
    uneven = np.where(of.place // 128 % 2, 0.03, 0.02) * of.copied
    mean, error = mean_and_error(uneven[of.copied], of.run[of.copied])
    assert bounds(judge(of, lost._replace(loss=uneven), 0.005)[0])["copied"].value == pytest.approx(mean - 2 * error)
    few = cut([Row(np.where(np.arange(LENGTH) < 3030, ids, np.arange(LENGTH) + 200_000))], 0)  # 22 copies
    assert "copied" not in bounds(judge(few, nothing(few), 0.005)[0])


def test_answers_decide(ids):
    """By their loss, and by how many of them are the likeliest token."""
    answers = np.zeros(LENGTH, bool)
    answers[100:300] = True
    of = cut([Row(ids, answers)], 0.5)
    assert not of.held_back[of.answer].any()  # they are in the first stretch
    lost = nothing(of)
    chosen, held = judge(of, lost._replace(loss=np.where(of.answer, 0.021, 0.0)), 0.005)
    assert not chosen.holds and chosen.tightest.name == "answers" and held.holds and "answers" not in bounds(held)
    wrong = lost.right.copy()
    for count, holds in ((2, True), (3, False)):
        wrong[np.flatnonzero(of.answer)[: count + 1]] = -1
        wrong[np.flatnonzero(of.answer)[-1]] = 1  # which was not before
        chosen, _ = judge(of, lost._replace(right=wrong), 0.005)
        assert chosen.holds == holds and bounds(chosen)["answers right"].value == pytest.approx(count / 200)
    assert chosen.tightest.name == "answers right"


def test_prices_are_of_what_is_chosen_on(ids):
    """A nat a token everywhere costs what all the means do; where nothing is chosen on, nothing."""
    answers = np.arange(LENGTH) % 100 == 0
    of = cut([Row(ids, answers)], 0.25)
    price = prices(of, np.full(LENGTH - 1, 2.0))
    assert not price[of.held_back].any() and price.sum() == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 4)
    assert price[of.answer & ~of.held_back].min() > price[~of.answer & ~of.copied].max()


# ---------------------------------------------------------------- which setting is taken


@pytest.fixture
def trial(ids):
    """Of a setting with which predictions move by so much on both parts."""
    of = cut([Row(ids)], 0.25)

    def made(chosen, held_back):
        moved = np.where(of.held_back, held_back, chosen)
        parts = judge(of, nothing(of)._replace(moved=moved), 0.005)
        return Trial(0.5, 0.5, 0.0, 0.0, *parts)

    return made


def test_the_fastest_that_holds_on_both_parts(trial):
    """Whatever the two parts lose, falling from choice to choice: none faster holds, few are measured."""
    steps = np.geomspace(0.05, 1e-4, 40)
    for worse in (0.5, 1.0, 1.5, 4.0, 30.0):
        seen = []

        def measure(n, worse=worse, seen=seen):
            seen.append(n)
            return trial(steps[n], worse * steps[n])

        n, found = fastest(range(40), measure)
        assert n == next(n for n in range(40) if max(1, worse) * steps[n] <= 0.005) and found.holds
        assert len(seen) == len({*seen}) <= 12
        assert found.held_back_worse == pytest.approx((worse - 1) * steps[n])


def test_nothing_holds(trial):
    assert fastest([1, 2, 3], lambda _: trial(0.001, 0.006)) is None
    assert fastest([1, 2, 3], lambda _: trial(0.006, 0.001)) is None
    assert fastest([1], lambda _: trial(0.001, 0.001))[0] == 1


def test_what_is_missed_is_of_the_part_that_fails(trial):
    for chosen, held_back, told in ((0.006, 0.001, "0.006 all"), (0.001, 0.006, "0.006 all, held back"),
                                    (0.007, 0.006, "0.007 all")):  # fmt: skip
        found = trial(chosen, held_back)
        assert f"{found.missed.value:.3f} {found.missed.name}{found.of_held_back}" == told


def test_a_trial_says_what_was_measured(trial):
    found = trial(0.004, 0.0049)
    lines = found.table()
    assert lines[1].split() == ["what", "must", "hold", "at", "most", "chosen", "on", "held", "back"]
    assert lines[2].split() == ["all", "0.0050", "0.0040", "0.0049"] and "text 1, tokens" in lines[3]
    assert lines[-2] == "the part held back is 0.0009 nats a token worse than the other"
    assert "too much" not in found.line() and trial(0.004, 0.006).line().endswith("too much: all, held back")
    assert trial(0.006, 0.007).line().endswith("too much: all")
    assert "better than the other" in trial(0.004, 0.001).table()[-2]
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["held_back_worse"] == pytest.approx(0.0009) and plain["held_back"]["holds"]
    assert plain["chosen_on"]["bounds"][0] | {"tokens": 0} == {
        "name": "all", "tokens": 0, "value": pytest.approx(0.004), "most": 0.005, "where": ""
    }  # fmt: skip
    alone = replace(found, held_back=None)
    assert alone.holds and alone.held_back_worse is None and alone.to_dict()["held_back"] is None
    assert "held back" not in "\n".join(alone.table())
