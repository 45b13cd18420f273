"""Faults for the kernels of the tail, as test_faults.py has them: kernels, a case, and rows of name, stage, old and new
text."""

from __future__ import annotations

from dataclasses import replace

from gpu_cases import NAN, UNKNOWN, Case
from query_faults import Rows

OPTIONS = {"rank": "mean", "window": 30, "tail": "first_order"}
# Pass 2 stops at once, and the mean stands for nearly all keys.
TAIL = Case(heads=4, kv_heads=2, seqlen_q=700, segment=256, block_m=64, block_n=64, tau=1000.0, options=OPTIONS)
HOPPER_TAIL = Case(heads=4, kv_heads=2, seqlen_q=1400, segment=512, head_dim=128, tau=1000.0, options=OPTIONS)
# Values that no regression on scores knows, of keys that hold a good part of the mass.
SQUARES = Case(seqlen_q=300, seqlen_k=9000, segment=64, scale=0.075, block_m=64, block_n=64, tau=1000.0, squares=True,
               options={"rank": "mean", "tail": "first_order"})  # fmt: skip
HOPPER_SQUARES = replace(SQUARES, head_dim=128, scale=0.053, block_m=128, block_n=128)
# The same by the copy engine.
BOXES_TAIL = replace(HOPPER_TAIL, segment=128, options={**OPTIONS, "unit": 8, "rank": "weight"})
BOXES_SQUARES = replace(HOPPER_SQUARES, segment=128, options={"rank": "weight", "tail": "first_order", "unit": 8})
LATE = replace(HOPPER_SQUARES, segment=128, arrange="50 bits heavier")
FEW = replace(HOPPER_SQUARES, segment=128, arrange="32 keys 20 bits heavier")
ONE_KEY = Case(dtype="float16", seqlen_q=128, seqlen_k=4000, head_dim=128, tau=1000.0, scale=1.0,
               arrange="one key far above all", options={"rank": "mean", "tail": "first_order"})  # fmt: skip
NAN_SAMPLES = replace(HOPPER_SQUARES, segment=128, poison=("v", UNKNOWN, NAN))

TAIL_FAULTS: list[tuple[str, Case, Rows]] = [
    (
        "add_tail", TAIL,
        (
            ("unvisited keys are counted once", "tail output", "exp2_approx(above) * left", "exp2_approx(above)"),
            ("one sample is as good as many", "tail output", "carrying + spec::kTailDoubt", "carrying"),
            ("scores are spread like a normal distribution", "tail output",
             "fminf(fmaxf(__fdividef(moved, scale * spread), 0.f), 1.f)", "1.f"),
            ("visited keys are sampled", "tail output", "work.visited + sample_place(", "sample_place("),
            ("lse is without the tail", "tail lse", "+= log1pf(mass[h])", "+= 0.f"),
            ("each segment has the first one's moments", "tail output",
             "moment_group(p.geometry, tile.segment) - p.first_group", "0"),
            ("odd rows of samples stand as even ones", "tail output", "const uint32 odd = lane / 4 % 2 * 64",
             "const uint32 odd = 0"),
            ("values stand as they are copied", "tail output", "return (d & ~30) | (d & 6) << 2 | (d >> 2 & 6)",
             "return d"),
        ),
    ),
    (
        "part_moments", TAIL,
        (
            ("all parts are the first one", "tail output", "first = moment_samples(part_end(part, p.grain_shift));",
             "first = 0;"),
            ("a part has its neighbour's samples too", "tail output",
             "const bool present = sample < samples && dims > 0;", "const bool present = dims > 0;"),
            ("values are summed in each other's place", "tail output", "of_values[(1 - column_part) * (kRows / 2)",
             "of_values[column_part * (kRows / 2)"),
        ),
    ),
    (
        "part_moments", replace(TAIL, seqlen_q=9000, heads=1, kv_heads=1),
        (
            ("a sample of many keys counts as one", "tail output", "static_cast<float>(1 << share_shift(first))",
             "1.f"),
        ),
    ),
    (
        "pass2_tail_sm90", HOPPER_TAIL,
        (
            ("unvisited keys are counted once", "tail output", "exp2_approx(above) * left", "exp2_approx(above)"),
            ("visited keys are sampled", "tail output", "const int i = visited + sample_place(",
             "const int i = sample_place("),
            ("the first moments are everybody's", "tail output", "const int64 moments = moments_of(params, rows)",
             "const int64 moments = 0"),
            ("queries of 16 rows stand in another's place", "tail output",
             "my.first_row - my.lane / 4 + my.lane % 16;\n  const uint32 tile",
             "my.first_row - my.lane / 4 + my.lane % 8;\n  const uint32 tile"),
            ("a column is read twice", "tail output",
             "my.acc, q[c], descriptor_at(covariance, c / 4 * Traits::kColumnsStride + c % 4 * 32)",
             "my.acc, q[c], descriptor_at(covariance, c / 4 * Traits::kColumnsStride)"),
            ("means are not counted", "tail output", "of_mean * (e == 0 ? mean.x : mean.y)", "0.f"),
            ("lse is without the tail", "tail lse", "log1pf(mass) * kLog2E", "0.f"),
        ),
    ),
    (
        "pass2_tail_sm90", HOPPER_SQUARES,
        (
            ("samples are not believed", "tail output", "fmaxf(all_say.believed[h] * believed, ", "fmaxf(0.f, "),
            ("rows count alike", "tail output", "fmaf(may * may, of_row, agreed)", "fmaf(1.f, of_row, agreed)"),
            ("every other part has the values of the one before", "tail output",
             "Traits::kColumnsStride),\n                                 part % 2 *",
             "Traits::kColumnsStride),\n                                 0 *"),
            ("sums of even samples are lost", "tail output", "even_sum(my, i) = sampled(my, sample)[i];",
             "even_sum(my, i) = 0.f;"),
            ("the mean counts whole beside samples", "tail output", "of_mean = added - of_samples", "of_mean = added"),
        ),
    ),
    (
        "pass2_tail_sm90", replace(HOPPER_SQUARES, seqlen_k=4000),
        (
            ("a tile of few samples has them in their order", "tail output",
             "row % (kBlockN / 2) * 2 + row / (kBlockN / 2)", "row"),
            ("shares are half of what they are", "tail output",
             "sample.sums.one = 1.f / static_cast<float>(sample.samples",
             "sample.sums.one = 0.5f / static_cast<float>(sample.samples"),
        ),
    ),
    (
        "add_tail", replace(SQUARES, seqlen_k=4000),
        (
            ("samples that come again count twice", "tail output", "i * kTailSlice < samples / 2 ? ", "true ? "),
        ),
    ),
    (
        "add_tail", SQUARES,
        (
            ("samples are not believed", "tail output", "fmaxf(found.believed[h] * believed, ", "fmaxf(0.f, "),
            ("a row goes by its own samples alone", "tail output", "lane < 32; lane *= 2", "lane < 4; lane *= 2"),
            ("rows count alike", "tail output", "fmaf(may * may, both_of_row, both)", "fmaf(1.f, both_of_row, both)"),
            ("both halves have the first one's values", "tail output", "multiply_values(sampled, 1)",
             "multiply_values(sampled, 0)"),
            ("pairs of values stand as they are copied", "tail output", "value_place(row, j), Rows",
             "value_place(row, threadIdx.x % 4) + (j - static_cast<int>(threadIdx.x % 4)) * 4, Rows"),
        ),
    ),
    (
        "pass2_boxes_tail_sm90", BOXES_TAIL,
        (
            ("visited keys are sampled", "tail output", "const int i = visited + sample_place(",
             "const int i = sample_place("),
            ("the first moments are everybody's", "tail output", "const int64 moments = moments_of(params, rows)",
             "const int64 moments = 0"),
            ("a row of covariances is its neighbour's", "tail output", "(moments) * Traits::kHeadDim + r :",
             "(moments) * Traits::kHeadDim + (r ^ 8) :"),
        ),
    ),
    (
        "pass2_boxes_tail_sm90", BOXES_SQUARES,
        (
            ("both tiles have the first one's values", "tail output", "value_units(slots[half])",
             "value_units(slots[0])"),
        ),
    ),
    (
        "pass2_tail_sm90", LATE,
        (
            ("a row goes by its own samples alone", "tail output", "lane < 32; lane *= 2", "lane < 4; lane *= 2"),
            ("sums stay in a unit of before", "tail output", "sample.lower[h] = lowered;", "sample.lower[h] = 1.f;"),
        ),
    ),
    (
        "pass2_tail_sm90", replace(LATE, dtype="float16"),
        (
            ("packed weights change their unit", "tail output", "__fdividef(sample.lift[h], lowered)",
             "sample.lift[h] + 0.f * lowered"),
        ),
    ),
    (
        "pass2_tail_sm90", ONE_KEY,
        (
            ("packed weights are larger than float16 holds", "tail output",
             "if (sample.lift[h] > kMostOver * own * lowered)", "if (false)"),
            ("sums of before keep their unit", "tail output",
             "sample.lower[h] = __fdividef(own * lowered, sample.lift[h]);", ";"),
        ),
    ),
    *(
        (function, case, (
            ("one that is alone speaks for others", stage, "fmaf(y.alone[h], largest, (1.f - y.alone[h]) * mass)",
             "mass"),
            ("one that is alone has not its own value", "tail output",
             f"fmaxf({name}.believed[h] * believed, {name}.alone[h])", f"{name}.believed[h] * believed"),
        ))
        for function, case, name, stage in (
            ("pass2_tail_sm90", FEW, "all_say", "tail output"), ("add_tail", FEW, "found", "tail output"))
    ),
    (
        "pass2_tail_sm90", NAN_SAMPLES,
        (
            ("what is no number is believed", "tail output", "SampleSums::of_quad(zero) != 0.f", "false"),
        ),
    ),
    (
        "add_tail", replace(NAN_SAMPLES, head_dim=64, scale=0.075),
        (
            ("what is no number is believed", "tail output", "if (samples_count) samples_count =",
             "if (false) samples_count ="),
        ),
    ),
    (
        "pass2_tail_sm90", replace(HOPPER_TAIL, dtype="float16"),
        (
            ("queries stay float16", "tail output", "Bfloat16::pack(Element::low(q[c][i]), Element::high(q[c][i]))",
             "q[c][i]"),
        ),
    ),
    (
        "key_moments", TAIL,
        (
            ("means are not taken off", "tail output", " - mean * (of_keys[c] * share)", ""),
            ("parts are not added up", "tail output", "product[c] += products_of[i][c];",
             "product[c] = products_of[i][c];"),
            ("sums are of more keys", "tail output", "1.f / static_cast<float>(keys)",
             "1.f / static_cast<float>(keys + 64)"),
        ),
    ),
]  # fmt: skip
