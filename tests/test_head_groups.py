"""Heads with several configurations: every head gets its own, and each call obeys grouped-query attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s2o_cupy import S2OConfig
from s2o_cupy.integrations.head_groups import HeadGroup, LayerConfigs, head_groups
from s2o_cupy.methods import XAttentionConfig

CONFIGS = [S2OConfig(tau=tau, segment=segment) for tau in (0.0, 0.01) for segment in (128, 256)]
A, B, C = (S2OConfig(segment=segment) for segment in (128, 256, 512))
OTHER = XAttentionConfig()


def of_heads(groups, heads):
    """The config of each head, whichever call it is in."""
    found = {}
    for group in groups:
        members = np.arange(heads)[group.heads].tolist()
        if group.config.tau is None:
            found |= dict.fromkeys(members, group.config)
            continue
        taus = group.config.taus(len(members), 1000)
        assert len(taus) == len(members)
        found |= {h: group.config.with_tau(tau) for h, tau in zip(members, taus, strict=True)}
    return tuple(found[h] for h in range(heads))


@given(st.data(), st.integers(1, 6), st.integers(1, 5))
def test_every_head_is_in_one_regular_group(data, kv_heads, shared):
    heads = kv_heads * shared
    configs = tuple(data.draw(st.lists(st.sampled_from(CONFIGS), min_size=heads, max_size=heads)))
    seen = []
    for group in head_groups(configs, kv_heads):
        members, kv = np.arange(heads)[group.heads], np.arange(kv_heads)[group.kv_heads]
        assert len(members) % len(kv) == 0
        each = len(members) // len(kv)
        # What s2o_attention will read for its i-th query head is what the model meant.
        assert [int(kv[i // each]) for i in range(len(members))] == [int(h) // shared for h in members]
        seen += members.tolist()
    assert sorted(seen) == list(range(heads))
    assert of_heads(head_groups(configs, kv_heads), heads) == configs


def test_even_heads_are_views():
    """Slices, as a list of heads would copy keys and values."""
    assert head_groups((A,) * 8, 2) == (HeadGroup(A, slice(0, 8, 1), slice(0, 2, 1)),)
    assert head_groups((A, A, B, B), 2) == (
        HeadGroup(A, slice(0, 2, 1), slice(0, 1, 1)), HeadGroup(B, slice(2, 4, 1), slice(1, 2, 1))
    )  # fmt: skip
    assert head_groups((A, B, A, B), 2) == (
        HeadGroup(A, slice(0, 3, 2), slice(0, 2, 1)), HeadGroup(B, slice(1, 4, 2), slice(0, 2, 1))
    )  # fmt: skip
    assert head_groups((A, A, B, B, A, A), 2) == (
        HeadGroup(A, [0, 1, 4, 5], slice(0, 2, 1)), HeadGroup(B, slice(2, 4, 1), slice(0, 2, 1))
    )  # fmt: skip


def test_the_default_tau_has_a_call_of_its_own():
    """As it is not one number: it falls with the earlier keys."""
    named = S2OConfig(tau=0.02)
    assert head_groups((S2OConfig(), named) * 2, 2) == (
        HeadGroup(S2OConfig(), slice(0, 3, 2), slice(0, 2, 1)), HeadGroup(named, slice(1, 4, 2), slice(0, 2, 1))
    )  # fmt: skip


def test_heads_that_differ_in_tau_share_a_call():
    taus = [S2OConfig(tau=tau) for tau in (0.1, 0.0, 0.1, 0.3)]
    (group,) = head_groups((*taus,), 2)
    assert group == HeadGroup(S2OConfig(tau=(0.1, 0.0, 0.1, 0.3)), slice(0, 4, 1), slice(0, 2, 1))
    (group,) = head_groups((*(S2OConfig(error=x) for x in (0.1, 0.2)),), 1)
    assert group.config == S2OConfig(error=(0.1, 0.2))
    groups = head_groups((*taus[:3], S2OConfig(error=0.1)), 1)
    assert [x.config for x in groups] == [S2OConfig(tau=(0.1, 0.0, 0.1)), S2OConfig(error=0.1)]


def test_one_head_of_a_layer_with_a_tau_for_each():
    configs = LayerConfigs.parse(S2OConfig(tau=(0.1, 0.2, 0.3, 0.4)), {(1, 2): S2OConfig(tau=0)})
    (group,) = configs.groups(1, 4, 2)
    assert group.config == S2OConfig(tau=(0.1, 0.2, 0.0, 0.4))
    with pytest.raises(ValueError, match="tau of layer 1 has 4 numbers; accepted: one, or 8, one for each query head"):
        configs.groups(1, 8, 2)


def test_configs_of_layers_and_heads():
    configs = LayerConfigs.parse(A, {0: None, 1: B, (2, 1): C, (3, 0): C, 3: B})
    assert configs.groups(0, 4, 2) is None
    for layer, expected in ((1, (B,) * 4), (2, (A, C, A, A)), (3, (C, B, B, B)), (4, (A,) * 4)):
        groups = configs.groups(layer, 4, 2)
        assert of_heads(groups, 4) == expected
    assert configs.last_layer == 3
    assert LayerConfigs.parse(None, None).last_layer == -1
    assert LayerConfigs.parse(None, None).groups(0, 4, 2)[0].config == S2OConfig()


def test_what_is_refused():
    for error, match, arguments in (
        (TypeError, "config is a dict; accepted: None, S2OConfig, MeanPoolingConfig, ", ({}, None)),
        (TypeError, "per_layer is a list; accepted: a mapping", (A, [A])),
        (TypeError, r"per_layer\[1\] is a float; accepted: None .the model's .*, S2OConfig, Mean", (A, {1: 0.1})),
        (TypeError, r"per_layer\[\(1, 0\)\] is a NoneType; accepted: S2OConfig$", (A, {(1, 0): None})),
        (ValueError, r"per_layer has the key '1'; accepted: a layer or a \(layer, head\)", (A, {"1": A})),
        (ValueError, "has the key True", (A, {True: A})),
        (ValueError, "has the key -1", (A, {-1: A})),
        (ValueError, r"has the key \(1, 2, 3\)", (A, {(1, 2, 3): A})),
        (TypeError, r"per_layer\[\(1, 0\)\] is a XAttentionConfig; accepted: S2OConfig$", (A, {(1, 0): OTHER})),
        (ValueError, "layer 1 has xattention, and there are entries for heads of it", (A, {1: OTHER, (1, 0): A})),
        (ValueError, "layer 3 has xattention, and there are entries for heads of it", (OTHER, {1: A, (3, 0): A})),
        (ValueError, r"per_layer\[1\] is None, and there are entries for heads of layer 1", (A, {1: None, (1, 0): A})),
    ):
        with pytest.raises(error, match=match):
            LayerConfigs.parse(*arguments)
    with pytest.raises(ValueError, match="names head 4 of layer 2; accepted: 0 to 3"):
        LayerConfigs.parse(A, {(2, 4): B}).groups(2, 4, 2)
