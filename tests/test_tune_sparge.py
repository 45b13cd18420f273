"""SpargeAttn's thresholds found on given arrays."""

from __future__ import annotations

import numpy as np
import pytest
from test_methods import draw

from s2o_cupy.methods import PBSConfig, SpargeConfig, select, sparse_attention
from s2o_cupy.reference import dense_attention
from s2o_cupy.tools import metrics, tune_sparge
from s2o_cupy.tools import sparge_tuning as module


@pytest.mark.parametrize("is_causal", [True, False])
def test_tuned_thresholds_keep_to_the_bound(rng, is_causal):
    """Of each head the sparsest pair of the grid that does; one whose keys are noise is dense."""
    examples = [draw(rng, 500, heads=2, kv_heads=2) for _ in range(2)]
    for _, k, _ in examples:
        k[:, 1] = rng.standard_normal(k[:, 1].shape)
    grid = {"taus": (0.5, 0.8), "thetas": (-1, 0.5)}
    found = tune_sparge(examples, rel_l1=0.15, value_skips=(), is_causal=is_causal, **grid)
    assert found.config.value_skip is None and np.array_equal(found.value_density, found.density)
    assert found.density[0] < 0.95 and found.density[1] == 1.0 and (found.rel_l1 < 0.15).all()
    assert found.rel_l1[0] > 0 and isinstance(found.config.tau, tuple)
    density, error = [], []
    for q, k, v in examples:
        head = [x[:, :1] for x in (q, k, v)]
        dense = dense_attention(*head, is_causal=is_causal)[0]
        config = SpargeConfig(tau=found.config.tau[0], theta=found.config.theta[0])
        o, stats = sparse_attention(*head, config=config, is_causal=is_causal, return_stats=True)
        density.append(stats.density)
        error.append(metrics.rel_l1(o, dense))
    assert found.density[0] == pytest.approx(np.mean(density)) and found.rel_l1[0] == pytest.approx(np.mean(error))
    together = tune_sparge(examples, rel_l1=0.15, per_head=False, is_causal=is_causal, **grid)
    assert isinstance(together.config.tau, float) and together.rel_l1.mean() < 0.15


@pytest.mark.parametrize(
    ("per_head", "is_causal"),
    [(True, True), (False, False), *(pytest.param(x, not x, marks=pytest.mark.slow) for x in (True, False))],
)
def test_then_values_are_left_out(rng, is_causal, per_head):
    """With the thresholds that are found without; as much as the second bound allows, none of which is above 0."""
    examples = [draw(rng, 700, heads=2, kv_heads=2) for _ in range(2)]
    grid = {"taus": (0.5, 0.8), "thetas": (-1, 0.5), "is_causal": is_causal, "per_head": per_head}
    plain = tune_sparge(examples, rel_l1=0.15, value_skips=(), **grid)
    found = tune_sparge(examples, rel_l1=0.15, value_rel_l1=0.25, value_skips=(-0.2, -1.0, -4.0), **grid)
    assert (found.config.tau, found.config.theta) == (plain.config.tau, plain.config.theta)
    assert np.array_equal(found.density, plain.density) and found.value_density.mean() < found.density.mean()
    assert (found.rel_l1 < 0.25).all() if per_head else found.rel_l1.mean() < 0.25
    of_call = []
    for q, k, v in examples:
        _, stats = sparse_attention(q, k, v, config=found.config, is_causal=is_causal, return_stats=True)
        of_call.append(stats.value_density)
    assert found.value_density.mean() == pytest.approx(np.mean(of_call))
    other = SpargeConfig(topk=0.2, theta=0.5)  # both thresholds are found, whichever these were
    assert tune_sparge(examples, rel_l1=0.15, value_skips=(), config=other, **grid).config == plain.config
    none = tune_sparge(examples, rel_l1=1e-9, value_rel_l1=1e-9, value_skips=(-0.2,), **grid)
    assert none.config.value_skip is None and (none.value_density == 1).all()


def test_errors_are_of_dense_attention_whatever_the_method_gives(rng, monkeypatch):
    """The output to compare with is not the method's own, at thresholds that should choose all."""
    monkeypatch.setattr(module, "select", lambda q, k, _, **options: select(q, k, FEW, **options))
    q, k, v = draw(rng, 700)
    found = tune_sparge([(q, k, v)], taus=(1,), thetas=(-1,), value_skips=(), per_head=False)
    expected = metrics.rel_l1(sparse_attention(q, k, v, config=FEW), dense_attention(q, k, v)[0])
    assert expected > 0.05 and found.rel_l1.mean() == pytest.approx(expected, rel=0.1)


FEW = SpargeConfig(tau=0.05, theta=-1)
ONE = tuple(draw(np.random.default_rng(0), 200))
TWO_HEADS = tuple(draw(np.random.default_rng(0), 200, heads=2))
NO_QUERIES = tuple(np.zeros((1, 4, n, 16)) for n in (0, 300, 300))
NO_KEYS = tuple(np.zeros((1, 4, n, 16)) for n in (200, 0, 0))
TRIPLES = r"accepted: a list or tuple of \(q, k, v\)"


@pytest.mark.parametrize(
    ("inputs", "options", "error", "message"),
    [
        ([ONE], {"rel_l1": 0}, ValueError, "rel_l1 is 0; accepted: a number above 0"),
        ([ONE], {"value_rel_l1": 0.07}, ValueError, r"value_rel_l1 is 0.07; accepted: None, or a number from rel_l1"),
        ([ONE], {"value_skips": (0,)}, ValueError, r"value_skips\[0\] is 0; accepted: numbers below 0"),
        ([], {}, ValueError, f"inputs is empty; {TRIPLES}, one or more"),
        (ONE, {}, TypeError, r"inputs\[0\] is a ndarray; accepted: \(q, k, v\), as inputs is a list"),
        ((x for x in [ONE]), {}, TypeError, f"inputs is a generator; {TRIPLES}"),
        (None, {}, TypeError, f"inputs is a NoneType; {TRIPLES}"),
        ([ONE, ONE[:2]], {}, TypeError, r"inputs\[1\] is a tuple of 2; accepted: \(q, k, v\)"),
        ([ONE, ("q", "k", "v")], {}, TypeError, r"inputs\[1\] is not accepted: .*q is a str"),
        ([ONE, (ONE[0], ONE[1], ONE[2][:, :, 1:])], {}, ValueError, r"inputs\[1\] is not accepted: .*v is"),
        ([ONE, TWO_HEADS], {}, ValueError, r"inputs\[1\] has 2 query heads and inputs\[0\] has 4; accepted"),
        ([ONE, NO_QUERIES], {}, ValueError, r"inputs\[1\] has .* 0 queries and 300 keys; accepted: at least one"),
        ([NO_KEYS], {"is_causal": False}, ValueError, r"inputs\[0\] has .* 0 keys; accepted: at least one"),
        ([ONE], {"taus": 0.5}, TypeError, r"taus is 0.5 \(float\); accepted: a sequence of numbers above 0, up to 1"),
        ([ONE], {"taus": np.array(0.5)}, TypeError, r"taus is array\(0.5\) \(ndarray\); accepted: a sequence"),
        ([ONE], {"thetas": "0.5"}, TypeError, r"thetas is '0.5' \(str\); accepted: a sequence of finite numbers"),
        ([ONE], {"taus": ()}, ValueError, "taus is empty; accepted: one or more numbers above 0, up to 1"),
        ([ONE], {"taus": (0.5, 2)}, ValueError, r"taus\[1\] is 2; accepted: numbers above 0, up to 1"),
        ([ONE], {"thetas": (None,)}, TypeError, r"thetas\[0\] is None"),
        ([ONE], {"config": PBSConfig()}, TypeError, "config is a PBSConfig; accepted: None, or a SpargeConfig"),
        ([ONE], {"per_head": 1}, TypeError, "tune_sparge: per_head is 1; accepted: True or False"),
        ([ONE], {"layout": "SBHD"}, ValueError, r"layout is 'SBHD'"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(monkeypatch, inputs, options, error, message):
    """Before anything is computed."""
    for name in ("s2o_attention", "select", "gather_attention"):
        monkeypatch.setattr(module, name, None)
    with pytest.raises(error, match=message):
        tune_sparge(inputs, **options)


def test_arrays_of_numbers_are_a_grid(rng):
    inputs = [draw(rng, 600)]
    found = tune_sparge(inputs, taus=np.array([0.5, 0.9]), thetas=np.array([-1.0]), rel_l1=0.9, per_head=False)
    assert found.config == tune_sparge(inputs, taus=[0.5, 0.9], thetas=[-1.0], rel_l1=0.9, per_head=False).config
    assert found.config.tau == 0.5


def test_a_value_skip_that_is_kept_counts(rng):
    """Where none is looked for: what the config's own leaves out, also of a head that no pair serves."""
    inputs = [draw(rng, 600)]
    config = SpargeConfig(tau=1, theta=-1, value_skip=-0.1)
    found = tune_sparge(inputs, config=config, taus=[0.5], thetas=[-1.0], value_skips=(), rel_l1=1e-6)
    _, stats = sparse_attention(*inputs[0], config=found.config, return_stats=True)
    assert found.config.value_skip == -0.1 and stats.value_density < 1
    assert found.value_density.mean() == pytest.approx(stats.value_density)
