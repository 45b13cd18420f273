"""A fault planted in a kernel of a selection is found at its own stage and at none before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from conftest import has_gpu, has_hopper
from method_stages import selected, wrong_stages
from test_gpu_methods import draw

from s2o_cupy.caches import clear_cache
from s2o_cupy.cuda import compiler
from s2o_cupy.methods import (
    FlexPrefillConfig,
    MeanPoolingConfig,
    PBSConfig,
    SpargeConfig,
    VerticalSlashConfig,
    XAttentionConfig,
    kernels,
    last_rows,
)
from s2o_cupy.tools.catalogue import kernels_for

XATTENTION, PORTABLE = XAttentionConfig(), XAttentionConfig(stride=16, path="portable")
FLEX, LINES = FlexPrefillConfig(gamma=0.6, tau=0.9, min_blocks=2), VerticalSlashConfig(verticals=100, slashes=60)
TOPK = SpargeConfig(topk=0.4, theta=-1)
MEAN, PBS, SPARGE = MeanPoolingConfig(threshold=0.7), PBSConfig(share="kv_head"), SpargeConfig(tau=0.8, theta=0.39)


@dataclass(frozen=True)
class Fault:
    function: str
    name: str
    stage: str  # that must be wrong first
    old: str
    new: str
    config: object = MEAN
    is_causal: bool = True
    head_dim: int = 128
    seqlen: int = 1500
    heads: int = 4  # of 2 KV heads
    long_rows: bool = False  # as if rows had more blocks than a warp holds
    waves: int | None = None  # 0: all keys in one split

    def plant(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.name}: its place in the source is gone or no longer the only one"
        return text.replace(self.old, self.new)


FAULTS = [
    Fault("block_means", "a last row is left out", "q means", "inside && r < count", "inside && r + 1 < count"),
    Fault("block_means", "the low part is lost", "q means", "? rest[i] : 0.f", "? 0.f : 0.f"),
    Fault("block_means", "heads have the first one's rows", "q means", "source % of_sequence)", "0)"),
    Fault("block_means", "keys are as they lie", "k means", "order ? order[r] : begin + r", "begin + r", PBS),
    Fault("alike_block_means", "rows keep their lengths", "similarity", "fmaf(y[e], inverse[i], units[e])",
          "fmaf(y[e], 0.1f, units[e])", SPARGE),
    Fault("block_scores", "low parts do not count", "scores", "Element::mma(d[j], low[0], b_high.x, b_high.y);", "",
          head_dim=256),
    Fault("block_scores", "heads have the others' keys", "scores", "(flat / p.shared_heads)", "(flat % 2)",
          head_dim=256),
    Fault("block_scores", "columns go to their neighbours", "scores", "8 * j + 2 * t;", "8 * j + 2 * (t ^ 1);",
          head_dim=256),
    Fault("block_scores_sm90", "low parts do not count", "scores", "multiply(1, 0, true);", ""),
    Fault("block_scores_sm90", "heads have the others' keys", "scores", "(flat / p.shared_heads)", "(flat % 2)"),
    Fault("block_scores_sm90", "rows go to their neighbours", "scores", "make_float2(d[j * 4 + 2 * h] *",
          "make_float2(d[j * 4 + 2 - 2 * h] *"),
    Fault("choose_blocks", "what crosses is left out", "choice", "ties = max(1, min(", "ties = 0 * max(1, min("),
    Fault("choose_blocks", "what crosses is taken", "choice", "x > limit : x >= limit; };",
          "x >= limit * 1.2f : x >= limit; };", SPARGE),
    Fault("choose_blocks", "half as many are taken", "choice", "p.counted ? 1.f : total), rest",
          "p.counted ? 0.5f : total), rest", TOPK),
    Fault("choose_blocks", "weights are of another base", "choice", "exp2_approx(w[i] - base)",
          "exp2_approx(0.7f * (w[i] - base))"),
    Fault("choose_blocks", "own blocks do not compete", "choice", "visible = g.visible(row)",
          "visible = g.listed(row)"),
    Fault("choose_blocks", "the block of key 0 is not kept", "choice", "p.first_column[shared_head] : 0",
          "p.first_column[shared_head] : -1"),
    Fault("choose_blocks", "unlike blocks of keys are judged", "choice",
          "sure |= fixed ? 1ull << i : 0;", "", SPARGE),
    Fault("choose_blocks", "unlike blocks of queries are judged", "choice", "rows + row] < theta;",
          "rows + row] < -9.f;", SPARGE),
    Fault("choose_blocks", "the short block counts as a whole one", "lists", "g.columns() * g.block_k - g.seqlen_k : 0",
          "0 : 0", is_causal=False),
    Fault("choose_long", "half as many are taken", "choice", "row.threshold * (p.counted ? 1.f : total) - block",
          "0.5f * row.threshold * (p.counted ? 1.f : total) - block", long_rows=True),
    Fault("choose_long", "what is forced does not count", "choice", " - block.sum(forced);", ";", XATTENTION,
          long_rows=True),
    Fault("last_row_sums", "a sum is not rescaled", "importance", "found[i][h].y * exp2_approx(found[i][h].x - base)",
          "found[i][h].y", PBS, head_dim=256, waves=0),
    Fault("last_row_sums_of_two_sm90", "a sum is not rescaled", "importance",
          "found[h].y * exp2_approx(found[h].x - base)", "found[h].y", PBS, waves=0),
    Fault("last_row_sums_sm90", "a sum is not rescaled", "importance",
          "found[h].y * exp2_approx(found[h].x - base)", "found[h].y", PBS, waves=0, heads=2),
    Fault("column_means_sm90", "half of the queries count", "importance",
          "j < 16; ++j) {\n      const float2 norm", "j < 8; ++j) {\n      const float2 norm", PBS, heads=2),
    Fault("column_means_of_two_sm90", "half of the queries count", "importance",
          "j < 16; ++j) {\n      const float2 norm", "j < 8; ++j) {\n      const float2 norm", PBS),
    Fault("column_means_of_two_sm90", "a split is left out", "importance", "i < p.splits; ++i) x = joined",
          "i + 1 < p.splits; ++i) x = joined", PBS),
    Fault("column_means", "half of the queries count twice", "importance",
          "(shared.columns[0][threadIdx.x] + shared.columns[1][threadIdx.x])", "(2.f * shared.columns[0][threadIdx.x])",
          PBS, head_dim=256),
    Fault("order_short_segments", "importance ascends", "k_order", "~sortable(sum / p.group)",
          "sortable(sum / p.group)", PBS),
    Fault("order_segments", "only the first head counts", "k_order", "h < p.group; ++h", "h < 1; ++h",
          PBSConfig(share="kv_head", segment=512)),
    Fault("token_order", "keys stand as they lie", "k_order", "p.k_order[i] = token;", "p.k_order[i] = i;",
          SpargeConfig(tau=0.8, theta=0.39, permutation=(3, 10, 50)), is_causal=False),
    Fault("antidiagonal_norms", "queries of a cell are not turned round", "scores",
          "* kStride + kStride - 1 - r;", "* kStride + r;", PORTABLE),
    Fault("antidiagonal_norms", "cells of the future are seen", "scores", "e < left - lane % 4 * 2",
          "e < left + 8 - lane % 4 * 2", PORTABLE),
    Fault("antidiagonal_norms_sm90", "queries of a cell are not turned round", "scores", "back = kStride - 1 - r;",
          "back = r;", XATTENTION),
    Fault("antidiagonal_norms_sm90", "the second half of the rows is the first", "scores",
          "descriptor_at(a, 64 * 128 + c * 32)", "descriptor_at(a, c * 32)", XATTENTION),
    Fault("antidiagonal_norms_mapped", "queries of a cell are not turned round", "scores", "column, kStride - 1 - r,",
          "column, r,", XATTENTION, seqlen=1504),
    Fault("antidiagonal_norms_mapped", "both blocks bring the same keys", "scores",
          "walk.first_key + static_cast<int>(rank) * (kTile / 2)", "walk.first_key", XATTENTION, seqlen=1504),
    Fault("antidiagonal_norms_mapped", "the second half of the rows is the first", "scores",
          "descriptor_at(a, 64 * 128 + c * 32)", "descriptor_at(a, c * 32)", XATTENTION, seqlen=1504),
    Fault("block_mass", "cells have the first one's norm", "scores", " - shared.norms[i] :", " - shared.norms[0] :",
          XATTENTION),
    Fault("choose_blocks", "what is forced does not count", "choice", "limit -= forced;",
          "", XATTENTION),
    Fault("last_row_sums_of_two_sm90", "the last queries see their future", "last sums", "present - after ?",
          "present ?", LINES),
    Fault("last_row_sums", "the last queries see their future", "last sums", "present - after)", "present)",
          LINES, head_dim=256),
    Fault("line_sums", "diagonals run the other way", "last sums", "const int key = row - d;",
          "const int key = row + d;", LINES),
    Fault("line_sums", "queries see their future", "last sums", "key < seen ?", "key < seen + 1 ?", LINES),
    Fault("line_totals", "a distance is of one tile alone", "last sums", "if (d >= kPart) break;",
          "if (d >= 0) break;", LINES),
    Fault("choose_lines", "as many distances as columns", "choice", "is_slash ? p.slashes : p.verticals",
          "p.verticals", LINES),
    Fault("crossed_keys", "a diagonal crosses for the first query alone", "choice", "min(first + rows - j,",
          "min(first + 1 - j,", LINES),
    Fault("flex_lines", "too many lines", "lines", "(held + 1) / kBlock) + 1,", "(held + 1) / kBlock) + 4,",
          FlexPrefillConfig(gamma=0.6, tau=0, min_blocks=1)),
    Fault("flex_lines", "means are never trusted", "lines", "(kLn2 / 2)", "(kLn2 * 4000)", FLEX),
    Fault("row_weights", "rows are not normalised", "choice", "exp2_approx(of[c] - most) / sum :",
          "exp2_approx(of[c] - most) :", FLEX),
    Fault("flex_bound", "gamma is of a single row", "choice", "p.gamma * rows, block", "p.gamma, block", FLEX),
    Fault("flex_lists", "diagonals are columns", "choice", "lines[columns + own - c]", "lines[columns + c]", FLEX),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.function}: {f.name}")
def test_every_fault_has_its_place(fault):
    """Without a GPU: the sources still hold what each fault changes."""
    kernel = next(kernel for kernel in kernels_for(90) if kernel.function == fault.function)
    text = compiler.render(kernel)
    assert fault.plant(text) != text


@pytest.mark.gpu
@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda f: f"{f.function}: {f.name}" if f else "none")
def test_a_planted_fault_is_found(fault, monkeypatch):
    if not has_gpu():
        pytest.skip("no GPU: cupy.is_available() is False")
    if fault is not None and fault.function.endswith("sm90") and not has_hopper():
        pytest.skip("needs compute capability 9.0")
    good = compiler.render
    if fault is not None:
        monkeypatch.setattr(
            compiler, "render", lambda kernel: fault.plant(good(kernel)) if kernel.function == fault.function
            else good(kernel),
        )  # fmt: skip
    monkeypatch.setattr(compiler, "_loaded", {})
    if fault is not None and fault.long_rows:
        monkeypatch.setattr(kernels, "MOST_OF_ROW", 0)
    if fault is not None and fault.waves is not None:
        monkeypatch.setattr(last_rows, "WAVES", dict.fromkeys(last_rows.WAVES, fault.waves))
    clear_cache()
    head_dim = fault.head_dim if fault else 128
    seqlen = fault.seqlen if fault else 1500
    heads = fault.heads if fault else 4
    q, k, _ = draw(np.random.default_rng(0), "float16", seqlen, seqlen, heads=heads, head_dim=head_dim)
    try:
        for config in [fault.config] if fault else [MEAN, PBS, SPARGE, XATTENTION, PORTABLE, FLEX, LINES]:
            found = selected(q, k, config, is_causal=fault.is_causal if fault else True)
            wrong = wrong_stages(found, q, k, config)
            assert wrong[:1] == ([fault.stage] if fault else [])
    finally:
        clear_cache()
