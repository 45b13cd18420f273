"""What selections on the GPU are handed, without a GPU: the reference stands for the kernels, and reads and writes
memory by the addresses and strides that they would be given."""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from pretended import array_at, pretend_gpu

import s2o_cupy.methods
from s2o_cupy.caches import clear_cache
from s2o_cupy.methods import (
    AShapeConfig,
    FlexPrefillConfig,
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    VerticalSlashConfig,
    XAttentionConfig,
    select,
)
from s2o_cupy.methods.base import Site
from s2o_cupy.methods.registry import METHODS
from s2o_cupy.plan.build import lay_out
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.kernels import Inputs
from s2o_cupy.problem import Problem
from s2o_cupy.reference.methods import blocks
from s2o_cupy.tools.catalogue import kernels_for

CONFIGS = [
    MeanPoolingConfig(), PBSConfig(share="kv_head"), SpargeConfig(tau=0.5, theta=0.1),
    SpargeConfig(tau=0.5, theta=0.1, permutation=(2, 8, 16)), XAttentionConfig(), PBSConfig(scores="antidiagonal"),
    FlexPrefillConfig(), VerticalSlashConfig(verticals=30, slashes=30),
]  # fmt: skip


def is_causal_of(config):
    return getattr(config, "permutation", None) is None


@pytest.fixture
def kernels(monkeypatch):
    calls = []

    def run(q, k, made, problem, config, *, stream, memory):
        calls.append(problem)
        q, k = (array_at(x.pointer, np.float16, x.shape, x.strides).astype(np.float32) for x in (q, k))
        method = importlib.import_module(f"s2o_cupy.reference.methods.{config.reference}")
        grid = config.grid(problem)
        found = method.chosen(q, k, config, grid, problem.scale)
        arrays = dict(zip(("entries", "begins", "keys"), blocks.written(found.columns, grid), strict=True))
        arrays |= {"k_order": found.k_order, "q_order": found.q_order}
        for name, address in made.items():
            array_at(address, arrays[name].dtype, arrays[name].shape)[...] = arrays[name]

    pretend_gpu(monkeypatch)
    module = types.ModuleType("s2o_cupy.methods.launches")
    module.run = run
    monkeypatch.setitem(sys.modules, "s2o_cupy.methods.launches", module)
    monkeypatch.setattr(s2o_cupy.methods, "launches", module, raising=False)
    return calls


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "every second element"])
def test_arrays_as_they_lie(rng, kernels, config, layout, monkeypatch):
    is_causal = is_causal_of(config)
    q, k = (rng.standard_normal((2, h, 400, 64)).astype(np.float16) for h in (4, 2))
    expected = select(q, k, config, is_causal=is_causal, backend="numpy")
    placed = [q, k]
    if layout == "BSHD":
        placed = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in placed]
    elif layout != "BHSD":
        placed = [np.repeat(x, 2, axis=-1)[..., ::2] for x in placed]
    found = select(*placed, config, is_causal=is_causal, layout="BSHD" if layout == "BSHD" else "BHSD")
    assert len(kernels) == 1 and found.form == expected.form
    assert found.arrays.keys() == expected.arrays.keys()
    for name, x in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], x)


def test_only_the_dtypes_of_the_kernels(rng, kernels):
    q, k = rng.standard_normal((2, 1, 2, 300, 64))
    with pytest.raises(TypeError, match="float64; accepted on backend 'cupy': float16, bfloat16"):
        select(q, k, MeanPoolingConfig())


# ---------------------------------------------------------------- launches


def site(config, seqlen=5000, capability=90, *, aligned=True, heads=8, is_causal=True):
    problem = Problem(2, heads, heads // 4, seqlen, seqlen, 128, "bfloat16", is_causal, 0.1)
    operands = {name: types.SimpleNamespace(strides=(1, 2, 3), is_compact=lambda: True) for name in "qk"}
    limits = DeviceLimits.of_architecture(capability)
    inputs = Inputs("bfloat16", 128, aligned)
    return Site(problem, config.grid(problem), inputs, limits, operands, config.workspace_bytes)


def launches(config, **options):
    stages = config.stages(site(config, **options))
    memory = lay_out((), [array for stage in stages for array in stage.arrays])
    return [x for stage in stages for x in stage.launches(memory)], memory


def rows_of(step):
    return int(step.params["rows"]) if step.kernel.function == "choose_blocks" else step.blocks


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_rounds_cover_all_heads_within_the_workspace(config):
    options = {"is_causal": is_causal_of(config), "seqlen": 20_000}
    whole, memory = launches(config, **options)
    assert [x.stage for x in whole].count("choose") == 1
    small = type(config)(**{**config.__dict__, "workspace_bytes": 1 << 20})
    few, memory = launches(small, **options)
    rows, of_all = ([rows_of(x) for x in found if x.stage == "choose"] for found in (few, whole))
    assert len(rows) > 1 and sum(rows) == sum(of_all)
    assert all(place.nbytes <= 1 << 20 for name, place in memory.places.items() if name in ("scores", "norms", "sums"))
    firsts = [int(x.params["first_head"]) for x in few if x.stage == "choose"]
    assert firsts == [sum(rows[:i]) // 157 for i in range(len(rows))]


def test_a_pointer_of_every_launch_leads_somewhere():
    """Those that lead nowhere are what a method does without."""
    for config in CONFIGS:
        found, _ = launches(config, is_causal=is_causal_of(config))
        for step in found:
            named = {offset for offset, _, _ in step.pointers}
            absent = {name for name, offset in step.kernel.family.params.pointers if offset not in named}
            of_means = {f"{of}.{name}" for of in "qk" for name in ("order", "similarity")}
            optional = of_means | {"importance", "order", "q_similarity", "k_similarity", "first_column"}
            assert absent <= optional, (config, step.stage, absent)
            if isinstance(config, SpargeConfig):
                assert not {"q.similarity", "k.similarity", "q_similarity", "k_similarity"} & absent


@pytest.mark.parametrize("capability", [80, 90])
def test_what_is_launched_is_compiled_ahead(capability):
    """But for shared memory that is only sized, which is in no kernel's text."""
    known = {replace(x, shared_bytes=0, open_bytes=0) for x in kernels_for(capability)}
    for config in CONFIGS:
        for seqlen in (1000, 20_000):
            found, _ = launches(config, seqlen=seqlen, capability=capability, is_causal=is_causal_of(config))
            assert {replace(x.kernel, shared_bytes=0, open_bytes=0) for x in found} <= known, config


def test_what_no_kernel_takes():
    with pytest.raises(ValueError, match="a row of q or k does not start on 16 bytes"):
        launches(PBSConfig(), aligned=False)
    with pytest.raises(ValueError, match=r"k has 46875 blocks of 64; accepted on this GPU: 16384"):
        launches(SpargeConfig(tau=0.9, theta=0), seqlen=3_000_000, capability=86)
    with pytest.raises(ValueError, match="tau has 300 numbers; accepted on the GPU: up to 256"):
        launches(SpargeConfig(tau=(0.9,) * 300, theta=0), heads=300)


def test_every_method_is_known():
    assert {type(x) for x in CONFIGS} | {AShapeConfig} == set(METHODS)  # of which nothing is launched
    for method in METHODS:
        importlib.import_module(f"s2o_cupy.reference.methods.{method.reference}")


def norms_of(config, **options):
    return [x for x in launches(config, **options)[0] if x.stage == "norms"]


def test_cells_come_by_tensor_maps_to_pairs_of_heads():
    """In turns of a few heads, too; not where a cell is short, keys are permuted or nothing is shared."""
    config = XAttentionConfig(workspace_bytes=6 << 20)
    found = norms_of(config, seqlen=20_000)
    assert {x.kernel.function for x in found} == {"antidiagonal_norms_mapped"}
    firsts, heads = ([int(x.params["attention"][name]) for x in found] for name in ("first_head", "round_heads"))
    assert len(found) > 2 and not any(n % 2 for n in (*firsts, *heads)) and max(heads) - min(heads) <= 2
    assert sum(heads) == 16 and not any(x.blocks % 2 for x in found)
    for other, options in (
        (config, {"seqlen": 20_004}), (PBSConfig(scores="antidiagonal"), {"seqlen": 20_000}),
        (XAttentionConfig(workspace_bytes=1 << 20), {"seqlen": 20_000}),
    ):  # fmt: skip
        assert {x.kernel.function for x in norms_of(other, **options)} == {"antidiagonal_norms_sm90"}


def test_a_tensor_map_of_cells(monkeypatch):
    from s2o_cupy.cuda import tensor_maps

    asked = []

    def encode(*arguments):
        asked.append((arguments[2], *(list(x) for x in arguments[4:7])))
        return 0

    monkeypatch.setattr(tensor_maps, "_encode", lambda: encode)
    tensor_maps.tensor_map(4096, (2, 3, 40, 64), (7680, 2560, 64), 96, 8)
    tensor_maps.tensor_map(4096, (2, 3, 40, 64), (7680, 2560, 64), 96)
    # Pages of 48 rows: with keys and values in each and tokens before heads, heads before tokens; one page, one head.
    tensor_maps.page_map(4096, (9, 3, 48, 128), (2 * 48 * 384, 128, 384), 16)
    tensor_maps.page_map(4096, (9, 3, 48, 256), (3 * 48 * 256, 48 * 256, 256), 32)
    tensor_maps.page_map(4096, (1, 1, 16, 128), (0, 0, 128), 16)
    clear_cache()  # nothing of this driver stays
    assert asked == [
        (5, [64, 8, 5, 3, 2], [128, 1024, 5120, 15360], [64, 1, 96, 1, 1]),
        (4, [64, 40, 3, 2], [128, 5120, 15360], [64, 96, 1, 1]),
        (5, [64, 8, 2, 6, 8 * 288 + 2 + 1], [768, 128, 6144, 256], [64, 8, 2, 2, 1]),
        (5, [64, 8, 4, 6, 8 * 9 + 6 + 1], [512, 128, 4096, 8192], [64, 8, 4, 4, 1]),
        (5, [64, 8, 2, 2, 1], [256, 128, 2048, 16], [64, 8, 2, 2, 1]),
    ]
