"""A fault planted in a kernel that `diff` does not run is found by what a call gives: NSA, its gradients, packed
sequences, pages, lists of keys, the taus of an error.

Each fault changes the text of one kernel, as a slip of the hand would. None makes a kernel read what nobody has written
or what is not there: that would end the process. test_faults.py and test_method_faults.py have the other kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import packs
import pages
import pytest
import sanitize
import test_faults
import test_gpu_nsa
import test_method_faults
from conftest import has_gpu, has_hopper
from gpu_cases import DTYPES, Case
from listed_calls import moved_by_unlisted, wrong_by_random_lists
from nsa_cases import SMALL, branch_problems, choice_problems, draw, whole_problems, wide

from s2o_cupy import S2OConfig, s2o_attention
from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import compiler
from s2o_cupy.nsa import selected_attention, selected_attention_backward
from s2o_cupy.plan import collecting, launch_plan
from s2o_cupy.plan.error_search import sampled
from s2o_cupy.reference.error_taus import error_taus
from s2o_cupy.reference.nsa import backward as nsa_backward
from s2o_cupy.reference.nsa import forward as nsa
from s2o_cupy.tools.catalogue import kernels_for

# ---------------------------------------------------------------- what a call gives otherwise than it must

TOKENS = 700  # of NSA: two chunks of its counting sort


def of_nsa(path: str, heads: int = 4) -> list[str]:
    """Of 2 KV heads; with 2 heads Hopper has another kernel for compressed attention. Several chunks of tokens. What is
    left in memory is another call's."""
    config, rng = replace(SMALL, path=path), np.random.default_rng(0)
    x, other = (draw(rng, DTYPES["float16"], TOKENS, heads=heads, head_dim=128, config=config) for _ in range(2))
    test_gpu_nsa.attend(other, config)
    o, blocks = test_gpu_nsa.attend(x, config)
    wrong = {"choice": choice_problems(blocks, x, config), "output": whole_problems(o, x, blocks, config)}
    return [name for name, problems in wrong.items() if problems]


def selected_case(block: int) -> tuple[Any, np.ndarray]:
    """All blocks but one, in any order, some of them none and some in the future: each has more tokens than an item."""
    rng = np.random.default_rng(0)
    x = draw(rng, DTYPES["float16"], TOKENS, heads=16, head_dim=128)  # 8 of a KV head: 512 tokens are an item
    count = -(-TOKENS // block)
    blocks = np.stack([rng.permutation(count)[1:] for _ in range(2 * TOKENS)]).reshape(1, 2, TOKENS, count - 1)
    blocks[rng.random(blocks.shape) < 0.1] = -1
    return x, blocks


def of_selected(block: int) -> list[str]:
    """On Hopper blocks of 64 keys have a kernel of their own."""
    import cupy

    x, blocks = selected_case(block)
    q, k, v, chosen = map(test_gpu_nsa.to_gpu, (*x[:3], blocks))
    o, lse = selected_attention(q, k, v, chosen, block, return_lse=True)
    q, k, v = wide(*x[:3])
    exact = nsa.selected(q, k, v, blocks, block=block)
    weight = nsa.selected(q, k, np.abs(v), blocks, block=block)[0]
    return branch_problems(cupy.asnumpy(o), cupy.asnumpy(lse), exact, weight, x, 2)


def of_gradients(block: int) -> list[str]:
    """Each sums products of two numbers that were rounded to float16, whose errors are 2^-11 of them, some twice."""
    import cupy

    x, blocks = selected_case(block)
    do = np.random.default_rng(1).standard_normal(x.q.shape).astype(x.q.dtype)
    q, k, v, do64 = wide(*x[:3], do)
    attended = nsa.selected(q, k, v, blocks, block=block)
    expected = nsa_backward.selected_backward(q, k, v, blocks, *attended, do64, block=block)
    q, k, v, blocks, do = map(test_gpu_nsa.to_gpu, (*x[:3], blocks, do))
    o, lse = selected_attention(q, k, v, blocks, block, return_lse=True)
    found = selected_attention_backward(q, k, v, blocks, o, lse, do, block)
    return [
        name for name, mine, right in zip(("dq", "dk", "dv"), map(cupy.asnumpy, found), expected, strict=True)
        if not np.linalg.norm(mine - right) <= 2.0**-8 * np.linalg.norm(right)
    ]  # fmt: skip


def of_taus(path: str) -> list[str]:
    """Taus from 0.05 on, of errors that suit the path's key tiles; as test_asked_error.py compares them. In an order
    that the path has as the reference has it: 8-bit products put keys elsewhere."""
    import cupy

    tile, errors, length = {
        "portable": (64, (0.03, 0.02, 0.05, 0.012), 900), "hopper": (128, (0.006, 0.004, 0.003, 0.0025), 1400),
    }[path]  # fmt: skip
    case = Case(dtype="float16", heads=4, kv_heads=2, seqlen_q=length, block_m=tile, block_n=tile)
    q, k, v = case.arrays()
    config = replace(case.config(path), tau=None, error=errors, dense_up_to=0, rank="weight")
    _, stats = s2o_attention(*map(cupy.asarray, (q, k, v)), config=config, return_stats=True)
    lag = 1 if stats.path == "hopper" else 0
    sample = sampled(stats.problem, config)
    q, k, v = wide(q, k, v)
    segments, weights = sample
    expected = error_taus(q, k, v, config, segments, weights, scale=stats.problem.scale, stop_lag=lag)
    return [] if np.allclose(cupy.asnumpy(stats.tau_per_head), expected, rtol=0.02) else ["taus"]


def of_visited() -> list[str]:
    """A dense call visits every key tile: 64 of the keys before each 100 queries, the last tile may be short."""
    import cupy

    q, k, v = (cupy.zeros((1, 1, 500, 64), np.float16) for _ in range(3))
    config = S2OConfig(segment=100, block_m=64, block_n=64, rank="mean", path="portable", dense_up_to=1000)
    visited = cupy.asnumpy(s2o_attention(q, k, v, config=config, return_stats=True)[1].visited)
    return [] if visited.tolist() == [[[[0, 0], [2, 2], [4, 4], [5, 5], [7, 7]]]] else ["visited"]


COLLECTED = Case(seqlen_q=200, seqlen_k=333, head_dim=72, batch=2, heads=4, kv_heads=2, options={"dense_up_to": 1000})
PAGED = Case(seqlen_q=300, seqlen_k=333, head_dim=128, batch=2, heads=4, kv_heads=2, segment=128)
LISTED = Case(seqlen_q=150, seqlen_k=333, head_dim=128, heads=4, kv_heads=2, is_causal=False)


def of_pages(case: Case, path: str, page_size: int) -> list[str]:
    return pages.differing(case, path, page_size=page_size)


def of_packed_pages(path: str, page_size: int, dense_up_to: int = 1000) -> list[str]:
    return sanitize.ragged_differing(sanitize.ragged_on(path, dense_up_to), 128, page_size, "NHD")


def collecting_few(check: Callable[[], list[str]]) -> list[str]:
    """With pages that are copied to arrays though queries are few."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch_plan, collecting):
            patch.setattr(module, "COLLECT_ROWS", 100)
        patch.setattr(collecting, "COLLECT_PAIRS", 0)
        clear_cache()
        return check()


# ---------------------------------------------------------------- the faults

NSA, NSA_OF_ONE, NSA_PORTABLE = partial(of_nsa, "auto"), partial(of_nsa, "auto", 2), partial(of_nsa, "portable")
SELECTED, SELECTED_128 = partial(of_selected, 64), partial(of_selected, 128)
GRADIENTS = partial(of_gradients, 64)
PACKED, PACKED_HOPPER = (partial(packs.differing_on, path, True, 64) for path in ("portable", "hopper"))
GATHERED, WHOLE_ROWS = partial(of_pages, PAGED, "hopper", 1), partial(of_pages, PAGED, "hopper", 16)
BOX_PAGES, CUT_PAGE = (  # units of 8 keys come by the copy engine
    partial(of_pages, replace(PAGED, options={"dense_up_to": 0}, is_causal=is_causal), "hopper", 16)
    for is_causal in (True, False)
)
PACKED_GATHERED, PACKED_WHOLE_ROWS = partial(of_packed_pages, "hopper", 1), partial(of_packed_pages, "hopper", 16)
COLLECT = partial(collecting_few, partial(of_pages, COLLECTED, "hopper", 8))
COLLECT_PACKED = partial(collecting_few, partial(of_packed_pages, "hopper", 8))
FP8 = partial(sanitize.fp8_differing, sanitize.ragged_on("portable", 100))  # a sequence takes a turn, others do not
# Units of 64 keys come by the copy engine on Hopper, others are gathered.
PAIRS, BOX_PAIRS = (
    partial(wrong_by_random_lists, replace(LISTED, block_m=64, heads=8, kv_heads=2), "hopper", unit) for unit in (4, 64)
)
LISTS, LISTS_HOPPER, BOX_LISTS = (
    partial(wrong_by_random_lists, LISTED, path, unit)
    for path, unit in (("portable", 64), ("hopper", 4), ("hopper", 64))
)
CUT = partial(moved_by_unlisted, "hopper", 128, 64, 100)  # a list that ends within a box
CUT_SHORT = replace(LISTED, seqlen_k=339)
SKIPS, SKIPS_HOPPER, BOX_SKIPS = (
    partial(wrong_by_random_lists, LISTED, path, unit, value_skip=-1.0)
    for path, unit in (("portable", 1), ("hopper", 1), ("hopper", 64))
)
TAUS, TAUS_HOPPER = partial(of_taus, "portable"), partial(of_taus, "hopper")


@dataclass(frozen=True)
class Fault:
    function: str
    name: str
    old: str
    new: str
    check: Callable[[], list[str]]
    hopper: bool = False  # the check's kernels run there alone

    def plant(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.name}: its place in the source is gone or no longer the only one"
        return text.replace(self.old, self.new)


FAULTS = [
    Fault("nsa_window", "rows are one position further", "shared.first = rows.first;", "shared.first = rows.first + 1;",
          NSA_PORTABLE),
    Fault("nsa_window", "the window is a step shorter", "count = band + sink_end;", "count = band + sink_end - 1;",
          NSA_PORTABLE),
    Fault("nsa_window_sm90", "a row's latest key is not seen", "(key <= last) & ((key >= first)",
          "(key < last) & ((key >= first)", NSA),
    Fault("nsa_window_sm90", "the output is not rescaled", "acc[i] *= rescale_by[i / 2 % 2];", "acc[i] *= 1.f;", NSA),
    Fault("nsa_window_sm90", "all warpgroups have the first one's rows", "q_tile = shared_address(shared.q[group]);",
          "q_tile = shared_address(shared.q[0]);", NSA),
    Fault("nsa_compressed_sm90", "a compressed key is seen too early", "visible[h] = p.visible_compressed(token);",
          "visible[h] = p.visible_compressed(token) + 1;", NSA_OF_ONE),
    Fault("nsa_compressed_sm90", "half of the weights count in the sum", "rows.l[h] += sum[0] + sum[1];",
          "rows.l[h] += sum[0];", NSA_OF_ONE),
    Fault("nsa_block_weights", "keys stand in other slots", "return slot % 8 / 2 * 16 + slot / 8 * 2 + slot % 2;",
          "return slot;", NSA_PORTABLE),
    Fault("nsa_block_weights", "rows have their neighbours' norms", "shared.lse[turn][of.warp_row + x * 8 + lane / 4]",
          "shared.lse[turn][of.warp_row + x * 8 + (lane / 4 ^ 1)]", NSA_PORTABLE),
    Fault("nsa_block_weights_sm90", "one head counts", "h == 0 ? weight : sum[i] + weight;",
          "h == 0 ? weight : sum[i];", NSA),
    Fault("nsa_block_weights_sm90", "all warpgroups have the first one's queries",
          "tile_descriptor(shared_address(shared.q[warpgroup][turn]), 0)",
          "tile_descriptor(shared_address(shared.q[0][turn]), 0)", NSA),
    Fault("nsa_top_blocks", "one block before a token's own is left out", "end = own - p.local + 1, wanted",
          "end = own - p.local, wanted", NSA),
    Fault("nsa_top_blocks", "the lightest are taken", "greater_than(mine.numbers, number, found) < wanted &&",
          "greater_than(mine.numbers, number, found) >= found - wanted &&", NSA),
    Fault("nsa_count", "a chunk's last token does not count", "i < tokens.count * p.slots; i +=",
          "i < (tokens.count - 1) * p.slots; i +=", NSA),
    Fault("nsa_totals", "a block's last token is left out",
          "p.begins[static_cast<int64>(kv_row) * p.blocks + c] = total;",
          "p.begins[static_cast<int64>(kv_row) * p.blocks + c] = max(total - 1, 0);", NSA),
    Fault("nsa_places", "items are a token short", "min(each, total - i * each), kv_row}",
          "min(each, total - i * each) - 1, kv_row}", NSA),
    Fault("nsa_scatter", "every entry is of the first slot", "<< kSlotBits | (i - token * p.slots);", "<< kSlotBits;",
          NSA),
    Fault("nsa_selected", "a key of the future is seen", "first_key + key <= shared.position[attention.row(i, h)]",
          "first_key + key <= shared.position[attention.row(i, h)] + 1", SELECTED_128),
    Fault("nsa_selected_sm90", "a key of the future is seen", "first_key + key <= positions[lane / 4 + 8 * h]",
          "first_key + key <= positions[lane / 4 + 8 * h] + 1", SELECTED),
    Fault("nsa_selected_sm90", "the second buffer's rows go to the first one's",
          "targets = shared.target[group][buffer];", "targets = shared.target[group][0];", SELECTED),
    Fault("nsa_merge_parts", "the window's blocks are left out", "add_row<Traits>(o, weights.own_weight, of_near);",
          ";", NSA),
    Fault("nsa_merge_parts", "two gates are exchanged", "add_row<Traits>(o, gate[2], of_window);",
          "add_row<Traits>(o, gate[0], of_window);", NSA),
    Fault("nsa_selected_backward", "delta is not taken off", "weight * (ds[j][e] - shared.delta[r])",
          "weight * ds[j][e]", GRADIENTS),
    Fault("nsa_selected_backward", "a key of the future has a gradient", "key <= p.position(shared.token[r])",
          "key <= p.position(shared.token[r]) + 1", GRADIENTS),
    Fault("nsa_deltas", "half of the columns count", " + Element::high(x) * Element::high(y);", ";", GRADIENTS),
    Fault("nsa_query_gradients", "the last slot's part is all", "sum[i].y += x.y;", "sum[i].y = x.y;", GRADIENTS),
    Fault("nsa_key_gradients", "the first item's part is all", "item = index; item < end; ++item",
          "item = index; item < index + 1; ++item", GRADIENTS),
    Fault("pass1_packed", "keys are those of the first sequence", "return kPaged ? 0 : begin_k;",
          "return kPaged ? 0 : 0 * begin_k;", PACKED),
    Fault("pass1_packed", "a sequence's causal limit is a key short", "sequence.seqlen_k - sequence.seqlen_q + 1) {}",
          "sequence.seqlen_k - sequence.seqlen_q) {}", PACKED),
    Fault("pass1_packed_sm90", "keys are those of the first sequence", "return kPaged ? 0 : begin_k;",
          "return kPaged ? 0 : 0 * begin_k;", PACKED_HOPPER, hopper=True),
    Fault("pass1_gathered_sm90", "every KV head has the first one's keys",
          "k = head_rows<true>(params.k, described.batch, described.kv_head);",
          "k = head_rows<true>(params.k, described.batch, 0);", GATHERED, hopper=True),
    Fault("pass1_packed_gathered_sm90", "a sequence's causal limit is a key short",
          "sequence.seqlen_k - sequence.seqlen_q + 1) {}", "sequence.seqlen_k - sequence.seqlen_q) {}", PACKED_GATHERED,
          hopper=True),
    Fault("pass1_whole_rows_sm90", "every KV head has the first one's rows",
          "of * page + kv_head * head}", "of * page}", WHOLE_ROWS, hopper=True),
    Fault("pass2_boxes_tail_sm90", "every KV head has the first one's rows",
          "of * page + kv_head * head}", "of * page}", BOX_PAGES, hopper=True),
    Fault("pass2_boxes_tail_sm90", "boxes are the first of their page", "{0, row / 8,", "{0, row / 16,", BOX_PAGES,
          hopper=True),
    Fault("pass2_boxes_tail_sm90", "what stands behind the last key of a page counts", "is_cut = there > 0 &&",
          "is_cut = false && there > 0 &&", CUT_PAGE, hopper=True),
    Fault("pass1_packed_whole_rows_sm90", "a sequence's causal limit is a key short",
          "sequence.seqlen_k - sequence.seqlen_q + 1) {}", "sequence.seqlen_k - sequence.seqlen_q) {}",
          PACKED_WHOLE_ROWS, hopper=True),
    Fault("collect_pages", "columns are a chunk further", "chunk % p.row_chunks * 8;",
          "(chunk + 1) % p.row_chunks * 8;", COLLECT, hopper=True),
    Fault("collect_pages", "every KV head has the first one's keys", "kv_head = head % kv_heads;",
          "kv_head = 0 * head;", COLLECT, hopper=True),
    Fault("collect_packed_pages", "keys are those before them", "key - first_key[n]);",
          "max(key - first_key[n] - 1, 0));", COLLECT_PACKED, hopper=True),
    Fault("fp8_pages", "a byte of two has its neighbour's place", "from_e4m3(four >> 8 * (i + 1)));",
          "from_e4m3(four >> 8 * i));", FP8),
    Fault("fp8_pages", "every KV head has the first one's scale", "of_heads[kv_head * stride]",
          "of_heads[0 * kv_head * stride]", FP8),
    Fault("fp8_pages", "what is no number is one", "return magnitude == 0x7fu ? __int_as_float(0x7fffffff) : x;",
          "return x;", FP8),
    Fault("packed_fp8_pages", "keys are those before them", "key - first_key[n]);",
          "max(key - first_key[n] - 1, 0));", FP8),
    Fault("packed_fp8_pages", "values have the scale of keys", "scaled<Element>(value[i], p.v_scale.of(kv_head[i]));",
          "scaled<Element>(value[i], p.k_scale.of(kv_head[i]));", FP8),
    Fault("pass2_listed", "all tiles have the first one's list", "of_segment * p.tiles + tile : of_segment;",
          "of_segment * p.tiles : of_segment;", LISTS),
    Fault("pass2_listed", "a list's last key is not read", "listed = p.lists.keys[list(p)];",
          "listed = max(p.lists.keys[list(p)] - 1, 0);", LISTS),
    Fault("pass2_listed_sm90", "a unit's keys are its first one", "return (entry << unit_shift) + (i & unit_mask);",
          "return (entry << unit_shift) + 0 * (i & unit_mask);", LISTS_HOPPER, hopper=True),
    Fault("pass2_listed_sm90", "a list's last key is not read", "listed = p.lists.keys[list(p)];",
          "listed = max(p.lists.keys[list(p)] - 1, 0);", LISTS_HOPPER, hopper=True),
    Fault("pass2_listed_pairs_sm90", "the second head has the queries of the first",
          "units + kept / kRows * static_cast<uint32>(q.head / 8);", "units;", PAIRS, hopper=True),
    Fault("pass2_listed_pairs_sm90", "the second head's output is the first one's", "tile.head_in_batch += my.group;",
          "", PAIRS, hopper=True),
    Fault("pass2_listed_pairs_sm90", "the second head's lse is the first one's", "tile.head += my.group;", "", PAIRS,
          hopper=True),
    Fault("pass2_listed_pairs_sm90", "every other pair is left out", "t.head += (t.head - of_pairs.first_head)",
          "t.head += 0 * (t.head - of_pairs.first_head)", PAIRS, hopper=True),
    Fault("pass2_listed_pairs_sm90", "nobody says what the second head visits",
          "tile.visited += my.group * my.params", "tile.visited += 0 * my.params", PAIRS, hopper=True),
    Fault("pass2_boxes_listed_sm90", "a unit's keys are its first one",
          "return (entry << unit_shift) + (i & unit_mask);", "return (entry << unit_shift) + 0 * (i & unit_mask);",
          BOX_LISTS, hopper=True),
    Fault("pass2_boxes_listed_sm90", "values past a list's end come too", "is_cut = there > 0 &&",
          "is_cut = false && there > 0 &&", CUT, hopper=True),
    Fault("pass2_boxes_listed_sm90", "a list's last values are one short", "source, row < count);",
          "source, row < count - 1);", partial(wrong_by_random_lists, CUT_SHORT, "hopper", 64), hopper=True),
    Fault("pass2_boxes_listed_pairs_sm90", "the second head has the queries of the first", "head + nth_head, batch);",
          "head, batch);", BOX_PAIRS, hopper=True),
    Fault("pass2_boxes_listed_pairs_sm90", "the second head's queries stand in the place of the first's",
          "nth_head * kRows * 128", "0 * nth_head", BOX_PAIRS, hopper=True),
    Fault("pass2_boxes_skipping_sm90", "half as much is slight", "return largest - m <= limit;",
          "return largest - m <= 2.f * limit;", BOX_SKIPS, hopper=True),
    Fault("pass2_skipping", "half as much is slight", "return largest - m <= limit;",
          "return largest - m <= 2.f * limit;", SKIPS),
    Fault("pass2_skipping_sm90", "half as much is slight", "return largest - m <= limit;",
          "return largest - m <= 2.f * limit;", SKIPS_HOPPER, hopper=True),
    Fault("pass2_skipping_sm90", "pairs are counted by the tile",
          "rows = min(max(tile_rows - group * kRows, 0), kRows);", "rows = kRows;", SKIPS_HOPPER, hopper=True),
    Fault("pass2_ladder", "a gain is half of it", "share = sum / l;", "share = sum / (2.f * l);", TAUS),
    Fault("pass2_ladder", "a tau has the next one's sums", "sums + kLadder - 1 - b, thread, sum);",
          "sums + kLadder - 1 - (b ^ 1), thread, sum);", TAUS),
    Fault("pass2_ladder_sm90", "a gain is half of it", "share = sum / l;", "share = sum / (2.f * l);", TAUS_HOPPER,
          hopper=True),
    Fault("choose_taus", "an error is its square", "sqrtf(difference / size)", "(difference / size)", TAUS),
    Fault("choose_taus", "every head is asked for the first one's error", "p.errors[head % p.heads]",
          "p.errors[0 * head]", TAUS),
    Fault("choose_taus", "every head has the first one's differences", "p.sums[((first + at) / kLadderWarps",
          "p.sums[(at / kLadderWarps", TAUS),
    Fault("segment_sizes", "a size is squared again", "p.sizes[place] = size;", "p.sizes[place] = size * size;", TAUS),
    Fault("every_tile", "a short key tile does not count", "(p.geometry.candidates(n) + p.block_n - 1) / p.block_n",
          "p.geometry.candidates(n) / p.block_n", of_visited),
]  # fmt: skip
CHECKED = {fault.check: fault for fault in FAULTS}  # a fault of each check


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.function}: {f.name}")
def test_every_fault_has_its_place(fault):
    """Without a GPU: the sources still hold what each fault changes."""
    kernel = next(kernel for kernel in kernels_for(90) if kernel.function == fault.function)
    text = compiler.render(kernel)
    assert fault.plant(text) != text


def test_every_kernel_has_a_planted_fault():
    planted = {x.function for x in (*FAULTS, *test_method_faults.FAULTS)}
    planted |= {function for x in test_faults.FAULTS for function in x.functions}
    assert planted == {kernel.function for architecture in (80, 90, 120) for kernel in kernels_for(architecture)}


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.function}: {f.name}")
def test_a_planted_fault_is_found(fault, monkeypatch):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if (fault.hopper or fault.function.endswith("sm90")) and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    good = compiler.render
    monkeypatch.setattr(
        compiler, "render", lambda kernel: fault.plant(good(kernel)) if kernel.function == fault.function
        else good(kernel),
    )  # fmt: skip
    monkeypatch.setattr(compiler, "_loaded", {})
    clear_cache()
    try:
        assert fault.check()
    finally:
        clear_cache()


@pytest.mark.slow
def test_an_emulated_gpu_finds_one_too():
    """The first of all, and without it none: where there is no GPU no other test runs the kernel of NSA's window."""
    if has_gpu():
        pytest.skip("there is a GPU")
    if shutil.which("gcc") is None:
        pytest.skip("the emulator is compiled by gcc")
    pytest.importorskip("cupy")
    folder = Path(__file__).parent
    environment = os.environ | {"S2O_EMULATED_CAPABILITY": "90", "PYTHONPATH": f"{folder}{os.pathsep}{folder.parent}"}
    which = [
        f"{__file__}::test_a_planted_fault_is_found[{FAULTS[0].function}: {FAULTS[0].name}]",
        f"{__file__}::test_without_a_fault_none_is_found[{CHECKED[FAULTS[0].check].function}]",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulator.plugin", "-p", "no:cacheprovider", *which]
    done = subprocess.run(command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKED.values(), ids=lambda f: f.function)
def test_without_a_fault_none_is_found(check):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if check.hopper and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    clear_cache()
    assert check.check() == []
    clear_cache()
