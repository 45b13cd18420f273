"""Errors begin with the name of the function that was called. No GPU."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from s2o_cupy import Schedule, gather_attention, gather_attention_paged
from s2o_cupy.errors import ArgumentTypeError, ArgumentValueError, arguments_of
from s2o_cupy.methods import MeanPoolingConfig, select, sparse_attention

MEAN = MeanPoolingConfig()
RULES = {"seqlen_q": 128, "seqlen_k": 128, "segment": 128}


def schedule():
    return Schedule.from_block_mask(np.ones((1, 1, 1, 1), bool), **RULES)


def by_select(q, k, v, **options):
    return select(q, k, MEAN, **options)


def by_sparse(q, k, v, **options):
    return sparse_attention(q, k, v, config=MEAN, **options)


def by_gather(q, k, v, **options):
    return gather_attention(q, k, v, schedule(), **options)


CALLS = {"select": by_select, "sparse_attention": by_sparse, "gather_attention": by_gather}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda q, k, v: (q, "k", v), {}, TypeError, "k is a str"),
        (lambda q, k, v: (q, k[..., :4], v[..., :4]), {}, ValueError, "q has head_dim 8, k and v have 4"),
        (lambda q, k, v: (q, k, v), {"scale": "1"}, TypeError, "scale is '1'"),
        (lambda q, k, v: (q, k, v), {"backend": "cupy"}, ValueError, 'backend is "cupy"'),
        (lambda q, k, v: (q, k, v), {"layout": "SBHD"}, ValueError, "layout is 'SBHD'"),
    ],
)
def test_whoever_finds_the_mistake(name, change, options, error, message):
    q, k, v = change(*np.zeros((3, 1, 2, 128, 8)))
    with pytest.raises(error, match=f"^{name}: {message}"):
        CALLS[name](q, k, v, **options)


def test_what_only_attention_is_told():
    q, k, v = np.zeros((3, 1, 2, 128, 8))
    for name in ("sparse_attention", "gather_attention"):
        with pytest.raises(TypeError, match=f"^{name}: softcap is None"):
            CALLS[name](q, k, v, softcap=None)
        with pytest.raises(ValueError, match=f"^{name}: out has shape"):
            CALLS[name](q, k, v, out=np.zeros((1, 2, 1, 8)))
    pages, table = np.zeros((2, 64, 2, 8)), np.zeros((1, 2), np.int64)
    with pytest.raises(TypeError, match="^gather_attention_paged: page_table"):
        gather_attention_paged(q, pages, pages, table.astype(float), schedule())
    with pytest.raises(ValueError, match="^gather_attention: the schedule is for seqlen_q 128; accepted: 64"):
        gather_attention(q[:, :, :64], k, v, schedule())


def test_the_caller_of_others_is_named():
    @arguments_of("inner")
    def inner():
        raise ArgumentValueError("x is 1; accepted: 2")

    with pytest.raises(ValueError, match="^inner: x is 1; accepted: 2$"):
        inner()
    with pytest.raises(ValueError, match="^outer: x is 1; accepted: 2$") as found, arguments_of("outer"):
        inner()
    for other in (copy.copy(found.value), pickle.loads(pickle.dumps(found.value))):
        assert type(other) is ArgumentValueError
        assert str(other) == str(found.value)


def test_what_has_an_owner_keeps_it():
    with pytest.raises(TypeError, match="^Owner: x is 1$"), arguments_of("function"):
        raise ArgumentTypeError("x is 1", "Owner")
    with pytest.raises(ValueError, match="^plain: x is 1$"), arguments_of("function"):
        raise ValueError("plain: x is 1")
