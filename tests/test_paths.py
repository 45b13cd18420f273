"""What paths can do, and that everybody else asks them. No GPU is needed."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import s2o_cupy
from s2o_cupy.arrays.operand import Operand
from s2o_cupy.plan.device import DeviceLimits
from s2o_cupy.plan.kernels import Inputs, padded_head_dim
from s2o_cupy.plan.launches import launches, workspace
from s2o_cupy.plan.paths import HOPPER, PATHS, PORTABLE, choose_path, path_of
from s2o_cupy.plan.schedule import ScheduleShape, listed_plan
from s2o_cupy.problem import GPU_BLOCK_M, Problem
from s2o_cupy.selection.methods import make_plan
from s2o_cupy.spec import PATHS as NAMES
from s2o_cupy.spec import STOP_LAG, Geometry, S2OConfig
from s2o_cupy.tools.catalogue import kernels_for

PACKAGE = Path(s2o_cupy.__file__).parent
PROBLEM = Problem(1, 8, 2, 1000, 1000, 128, "bfloat16", True, 0.1)
LIMITS = DeviceLimits.of_architecture(90)


def test_a_path_has_a_name_that_a_configuration_accepts_and_a_lag():
    assert {path.name for path in PATHS} == set(NAMES) - {"auto"} == set(STOP_LAG)
    assert {path.name: path.stop_lag for path in PATHS} == STOP_LAG


@pytest.mark.parametrize(
    ("compute_capability", "path"),
    [(75, None), (80, PORTABLE), (89, PORTABLE), (90, HOPPER), (100, PORTABLE), (121, PORTABLE)],
)
def test_the_fastest_path_of_a_device(compute_capability, path):
    assert path_of(compute_capability) is path


@pytest.mark.parametrize("compute_capability", [80, 90, 120])
def test_kernels_of_a_path_are_compiled_where_it_runs(compute_capability):
    for kernel in kernels_for(compute_capability):
        path = kernel.family.path
        assert path is None or path.runs_on(compute_capability), kernel.name
        assert kernel.family.arch == (None if path is None else path.arch)


@pytest.mark.parametrize("block_m", GPU_BLOCK_M)
@pytest.mark.parametrize("head_dim", [64, 128, 136, 256])
def test_a_path_that_is_named_and_cannot_is_an_error(block_m, head_dim):
    config, problem = S2OConfig(path="hopper", block_m=block_m), replace(PROBLEM, head_dim=head_dim)
    if block_m == 128 or head_dim <= 128:
        assert choose_path(problem, config.of_pass, LIMITS, True, True) == (HOPPER, None)
        return
    refusal = f"path is 'hopper', but block_m is 64, not 128 with head_dim {head_dim}; accepted: 'auto' or 'portable'"
    with pytest.raises(ValueError, match=refusal):
        choose_path(problem, config.of_pass, LIMITS, True, True)


@pytest.mark.parametrize(("head_dim", "wants_tail", "threads"), [(64, False, 320), (64, True, 384), (128, False, 384)])
def test_pass2_with_two_blocks(head_dim, wants_tail, threads):
    """Of head_dim 64 where nothing has a tail, nor would have one but for its tau."""
    assert HOPPER.pass2(Inputs("bfloat16", head_dim, wants_tail=wants_tail), LIMITS, 128).family.threads == threads


def test_as_many_blocks_fit_as_are_launched():
    of = [Inputs(dtype, head_dim) for dtype in ("bfloat16", "float16") for head_dim in (64, 128, 256)]
    kernels = [x for inputs in of for x in HOPPER.catalogue(inputs, LIMITS, packed=True, skips_values=True)]
    assert any(x.family.threads == 320 for x in kernels)
    for kernel in kernels:
        of_block = kernel.shared_bytes + 1024  # which the driver keeps
        assert kernel.family.blocks_per_multiprocessor * of_block <= LIMITS.shared_per_multiprocessor, kernel.name


@pytest.mark.parametrize(
    ("head_dim", "unit", "page_size", "by_boxes"),
    [
        (128, 1, 0, False), (128, 4, 0, False), (128, 8, 0, True), (128, 128, 0, True), (64, 8, 0, False),
        (64, 16, 0, True), (256, 8, 0, True), (96, 64, 0, False), (40, 64, 0, False), (128, 8, 1, False),
        (128, 8, 4, False), (128, 8, 8, True), (128, 64, 16, True), (64, 16, 8, False), (64, 16, 16, True),
    ],
)  # fmt: skip
def test_units_that_the_copy_engine_brings(head_dim, unit, page_size, by_boxes):
    """Boxes of 2 KiB or more, of rows that are not padded, each in one page: each kernel of pass 2 that has a twin."""
    inputs = Inputs("bfloat16", padded_head_dim(head_dim), paged=page_size > 0)
    pass2, tiles = HOPPER.pass2(inputs, LIMITS, 128), HOPPER.block_ms_of(head_dim)
    tailed = HOPPER.pass2(replace(inputs, wants_tail=True), LIMITS, 128)
    kernels = [pass2, tailed, HOPPER.with_tail(tailed)]
    assert (kernels[-1] is None) == (head_dim > 128)
    for of_lists in (HOPPER.pass2(inputs, LIMITS, block_m) for block_m in tiles):
        kernels += [HOPPER.listed(of_lists), HOPPER.listed(of_lists, skips_values=True)]
        kernels.append(HOPPER.paired(kernels[-2]))
    for kernel in filter(None, kernels):
        twin = kernel.function.replace("pass2_", "pass2_boxes_")
        found = HOPPER.by_boxes(kernel, unit, head_dim, page_size)
        spills = page_size > 0 and kernel.role == "pass2_skipping" and kernel.block_m == 128
        assert found.function == (twin if by_boxes and not spills else kernel.function)
        assert replace(found, family=kernel.family) == kernel
    assert HOPPER.by_boxes(HOPPER.laddered(pass2), unit, head_dim, page_size) == HOPPER.laddered(pass2)
    portable = PORTABLE.pass2(inputs, LIMITS, 128)
    assert PORTABLE.by_boxes(portable, unit, head_dim, page_size) is portable


@pytest.mark.parametrize(
    ("options", "function"),
    [
        ({}, "pass2_boxes_tail_sm90"), ({"tail": "none"}, "pass2_boxes_sm90"), ({"segment": 256}, "pass2_tail_sm90"),
        ({"unit": 4}, "pass2_tail_sm90"), ({"rank": "mean"}, "pass2_sm90"),
    ],
)  # fmt: skip
def test_calls_that_the_copy_engine_brings_keys_to(options, function):
    """Where a segment is one q tile, whose queries stand as they lie."""
    config, problem = S2OConfig(dense_up_to=0, **options), replace(PROBLEM, seqlen_q=2000, seqlen_k=2000)
    plan = make_plan(problem, config, LIMITS, True, True)
    q, k = (Operand(0, (1, n, 2000, 128), (n * 256000, 256000, 128)) for n in (8, 2))
    steps = launches(plan, problem, config, {"q": q, "k": k, "v": k, "out": q}, workspace(plan, problem, config))
    assert {x.kernel.function for x in steps if x.stage == "pass2"} == {function}


@pytest.mark.parametrize(("q_ordered", "function"), [(False, "pass2_boxes_listed_sm90"), (True, "pass2_listed_sm90")])
def test_lists_that_the_copy_engine_brings_keys_to(q_ordered, function):
    plan = make_plan(PROBLEM, S2OConfig().of_pass, LIMITS, True, True)
    assert listed_plan(plan, ScheduleShape(2, unit=64), PROBLEM, True, q_ordered)[1].function == function


def test_blocks_of_a_launch():
    """One for each q tile, or as many as run at once: on Hopper a multiprocessor holds one of 128 queries or two of
    64."""
    inputs, tiles = Inputs("bfloat16", 128), (0, 5, 1000)
    for path, block_m, blocks in (
        (PORTABLE, 128, [0, 5, 1000]), (PORTABLE, 64, [0, 5, 1000]),
        (HOPPER, 128, [0, 5, 132]), (HOPPER, 64, [0, 5, 264]),
    ):  # fmt: skip
        kernel = path.pass2(inputs, LIMITS, block_m)
        assert [path.blocks(kernel, n, LIMITS) for n in tiles] == blocks
        assert [path.blocks(path.listed(kernel), n, LIMITS) for n in tiles] == blocks


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_kernels_of_other_work_are_the_path_s_own(path):
    """Packed sequences and lists of keys: the same instantiation of another function."""
    inputs = Inputs("bfloat16", 128)
    pass1, pass2 = path.pass1(inputs, LIMITS, maps=True), path.pass2(inputs, LIMITS, 128)
    packed, listed = path.packed(pass1), path.listed(pass2)
    assert len({kernel.function for kernel in (pass1, pass2, packed, listed)}) == 4
    for one, other in ((pass1, packed), (pass2, listed)):
        assert other.family.path is one.family.path
        assert other.name.split("-")[1:] == one.name.split("-")[1:]
        assert other.shared_bytes == one.shared_bytes


def test_maps_that_pass_1_reads_by():
    """The portable kernels take none; Hopper's those of arrays and of pages that are large enough."""
    geometry = Geometry(4096, 4096, 1024)
    assert PORTABLE.map_boxes(geometry, 128, 0) == ()
    assert HOPPER.map_boxes(geometry, 128, 0) == (128, 128, 128)
    assert HOPPER.map_boxes(geometry, 256, 64) == (128, 64, 64)
    assert HOPPER.map_boxes(geometry, 128, 16) == (128, 16, 16)
    assert HOPPER.map_boxes(geometry, 128, 8) == ()


# ---------------------------------------------------------------- nobody compares what a path could answer


def asks(text: str) -> list[int]:
    """Lines that compare an architecture or a function's name with one that they spell, look something up by it, or ask
    of a path by its name: a named path may only stand where a kernel says to which it belongs."""
    paths, asked = {"HOPPER", "PORTABLE"}, ("removesuffix", "removeprefix", "startswith", "endswith", "replace")
    names = {"arch", "function", "compute_capability", "architecture_path"}

    def named(node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            return named(node.func)
        return getattr(node, "attr", getattr(node, "id", None)) in names

    def spelled(node: ast.AST) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(spelled, node.elts))
        return isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id.isupper())

    def arch(node: ast.AST) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("sm_")

    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.expr):
            continue
        sides: Sequence[ast.expr] = []
        if isinstance(node, ast.Compare) and not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            compared = [node.left, *node.comparators]
            sides = compared if any(map(spelled, compared)) else []
        elif isinstance(node, ast.Subscript):
            sides = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("get", "index"):
                sides = list(node.args)
            elif node.func.attr in asked and any(map(spelled, node.args)):
                sides = [node.func.value]
        of_path = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in paths
        is_path = isinstance(node, ast.Compare) and any(
            isinstance(side, ast.Name) and side.id in paths for side in (node.left, *node.comparators)
        )
        if of_path or is_path or any(named(side) or arch(side) for side in sides):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "line", ['row["arch"] == arch', "known <= compute_capability", "family is PASS1", "Family('x', path=HOPPER)"]
)
def test_what_does_not(line):
    assert asks(line) == []


@pytest.mark.parametrize(
    "line",
    [
        'x.family.arch == "sm_90a"', 'plan.pass1.function == "pass1"', '{"pass1": 1}[plan.pass1.function]',
        "limits.compute_capability == 90", "compute_capability >= 80", 'names.get(kernel.function, "")',
        'x.function.endswith("sm90")', "function != PASS1", 'architecture_path(90) == "hopper"',
        'kernel.function in ("pass1", "pass2")', '"sm_90a" in options', "HOPPER.runs_on(90)", "HOPPER in paths",
        "path is HOPPER", 'x.function.removesuffix("_sm90")',
    ],
)  # fmt: skip
def test_what_counts_as_asking(line):
    assert asks(line) == [1]


def test_only_paths_compare_architectures_and_functions():
    """A capability of a Path is what to ask instead."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name not in ("plan/paths.py", "plan/device.py") and (lines := asks(path.read_text(encoding="utf-8"))):
            found[name] = lines
    assert not found
