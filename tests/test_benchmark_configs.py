"""How benchmarks take configurations from the command line and tell them, and how rows' errors are summed up."""

from __future__ import annotations

import argparse

import benchmark_modules as benchmark_modules
import numpy as np
import pytest

from s2o_cupy import S2OConfig
from s2o_cupy.reference import dense_attention

# isort: split
import _common
import _exact
import _kinds


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        ("tau=0.02,segment=512", {"tau": 0.02, "segment": 512}),
        ("tau=1e-3,rank=max,pooled_queries=None", {"tau": 0.001, "rank": "max", "pooled_queries": None}),
        ("tail=none,path=portable,dense_up_to=0", {"tail": "none", "path": "portable", "dense_up_to": 0}),
    ],
)
def test_fields(text, found):
    assert _common.fields(text) == found
    config = S2OConfig(**found)
    again = _common.text_of_fields(config)
    assert S2OConfig(**_common.fields("" if again == "default" else again)) == config


def test_told_fields_are_those_that_decide():
    assert _common.text_of_fields(S2OConfig()) == "default"
    assert _common.text_of_fields(S2OConfig(rank="mean")) == "rank=mean"  # its pooled_queries follows
    assert _common.text_of_fields(S2OConfig(segment=256)) == "segment=256"
    assert _common.text_of_fields(S2OConfig(segment=128, rank="mean")) == "segment=128,rank=mean"
    assert _common.text_of_fields(S2OConfig(rank="max", pooled_queries=4)) == "rank=max,pooled_queries=4"


def test_configs():
    parser = argparse.ArgumentParser()
    _kinds.add_arguments(parser)
    options = ["--base", "dense_up_to=0", "--set", "tau=0.5", "--set", "dense_up_to=7", "--set", "tau=0.5"]
    args = parser.parse_args(options)
    configs = [S2OConfig(dense_up_to=0), S2OConfig(dense_up_to=0, tau=0.5), S2OConfig(dense_up_to=7)]
    assert _kinds.configs(args) == configs
    assert _kinds.kinds(args) == ["cudnn", "flash2", *configs]
    assert _kinds.configs(parser.parse_args([])) == [S2OConfig()]
    assert [_kinds.described(config, 1000)["default"] for config in (S2OConfig(), configs[0])] == [True, False]


def test_a_command_names_no_folder():
    words = ["/some/where/model.py", "--models", "A=/x/y.py:../z.npz:w.npy", "--set", "tau=0.1", "--json", "./m.json"]
    told = "python benchmarks/model.py --models A=y.py:z.npz:w.npy --set tau=0.1 --json m.json"
    assert _common.told(words) == told


def test_errors_of_rows(rng):
    o, exact = rng.standard_normal((2, 2, 3, 50, 8)).astype(np.float32)
    exact[0, 0, :2], o[0, 0, 0] = 0, 0
    found = _exact.by_row(o, exact)
    assert (found[0, 0, 0], found[0, 0, 1]) == (0, np.inf)  # nothing of nothing, something of nothing
    for b, h, row in ((0, 0, 2), (1, 2, 49)):
        one, right = (x[b, h, row].astype(float) for x in (o, exact))
        assert found[b, h, row] == pytest.approx(np.linalg.norm(one - right) / np.linalg.norm(right), rel=1e-12)
    errors = np.linspace(0, 1, 1001).reshape(1, 7, 143)
    expected = {"row_median": 0.5, "row_p99": 0.99, "row_p999": 0.999, "rows_above_half": 500 / 1001}
    assert _exact.rows(errors) == pytest.approx(expected)


def test_dense_takes_a_scale(qkv):
    q, k, v = qkv(30, 40, heads=4, kv_heads=2, head_dim=16)
    expected = dense_attention(q, k, v, scale=0.7)[0]
    np.testing.assert_allclose(_exact.dense(q, k, v, scale=0.7), expected, atol=1e-5)
