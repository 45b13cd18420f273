"""S2OConfig: what its fields take, and a dataclass like any other, in another process too."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.methods import PBSConfig

INTEGERS = [f.name for f in fields(S2OConfig) if f.name not in ("tau", "error", "rank", "path", "tail")]
INDEX = {field.name: n for n, field in enumerate(fields(S2OConfig))}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("kind", [np.int64, np.uint32])
def test_integers_of_numpy_become_python_s(name, kind):
    value = {"workspace_bytes": 1 << 20, "clusters": 2}.get(name, 64)
    config = S2OConfig(**{name: kind(value)})
    assert config == S2OConfig(**{name: value})
    assert type(config.values[INDEX[name]]) is int


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [True, np.True_, 64.0, np.float64(64), "64", np.array([64])], ids=repr)
def test_what_is_no_integer_is_refused(name, bad):
    with pytest.raises(TypeError, match=rf"S2OConfig: {name} is .* \({type(bad).__name__}\); accepted: an integer"):
        S2OConfig(**{name: bad})


@pytest.mark.parametrize("tau", [10**400, -(10**400), 10**5000, Fraction(10**400)], ids=["+", "-", "long", "fraction"])
def test_a_tau_beyond_any_float(qkv, tau):
    for owner, call in (
        ("S2OConfig", lambda: S2OConfig(tau=tau)),
        ("s2o_attention", lambda: s2o_attention(*qkv(10), tau=tau)),
    ):
        with pytest.raises(ValueError, match=f"{owner}: tau is beyond what a float holds; accepted: a number >= 0"):
            call()


def test_an_unknown_field_names_the_accepted_ones():
    everything = ", ".join(field.name for field in fields(S2OConfig))
    for make in (S2OConfig, lambda **given: replace(S2OConfig(), **given)):
        with pytest.raises(TypeError, match=f"segmnt is not a field; did you mean segment\\? accepted: {everything}"):
            make(segmnt=3)
        with pytest.raises(TypeError, match=f"zzz is not a field; accepted: {everything}"):
            make(zzz=3)


def test_values_without_a_name():
    """S2OConfig takes its fields in their order, methods take theirs by name."""
    count = len(fields(S2OConfig))
    assert S2OConfig(64, 0.1) == S2OConfig(segment=64, tau=0.1)
    with pytest.raises(TypeError, match=f"S2OConfig: {count + 1} arguments come without .*; accepted: up to {count}"):
        S2OConfig(*range(count + 1))
    with pytest.raises(TypeError, match="PBSConfig: 1 argument comes without a name; accepted: by name: path, works"):
        PBSConfig(128)


def test_antidiagonals_have_blocks_of_128():
    with pytest.raises(ValueError, match="block is 64 with scores='antidiagonal'; accepted: 128"):
        PBSConfig(block=64, scores="antidiagonal")


def test_a_config_is_a_dataclass_like_any_other():
    config = S2OConfig(512, 0.5, tail="none")
    assert (config.segment, config.tau, config.tail) == (512, 0.5, "none")
    assert replace(config, tau=0.25) == S2OConfig(512, 0.25, tail="none")
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert list(inspect.signature(S2OConfig).parameters) == [field.name for field in fields(S2OConfig)]


def test_a_config_in_another_process():
    """Names have another hash in each process: that of a config is not passed on, and dictionaries find it."""
    config = S2OConfig(segment=64)
    assert hash(config) == hash(copy.copy(config))
    code = (
        "import pickle, sys; from s2o_cupy import S2OConfig; config = pickle.load(sys.stdin.buffer);"
        "assert {S2OConfig(segment=64): 1}[config]; from dataclasses import replace;"
        "assert replace(config, pooled_queries=16).rank == 'weight'"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(config), env=environment, check=True)
