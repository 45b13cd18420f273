"""Which columns a table of measured figures has: docs/figures.py makes it, of the rows of a result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], Any], str]  # heading, value, format


def value_of(name: str) -> Callable[[Row], Any]:
    return lambda row: row.get(name)


def kind_of(row: Row) -> Any:
    """Of rows with whole configurations: S2O's, which names its order, another method's, or the name of a dense one."""
    if "config" not in row:
        return row.get("attention")
    settings = [part for part in (row["config"],) if part != "default" or row["attention"] != "s2o"]
    settings = [", ".join(re.split(r", *", part)) for part in settings]  # a narrow table breaks there
    if row["attention"] == "s2o" and row.get("rank") and "rank=" not in row["config"]:
        settings.insert(0, f"rank={row['rank']}")
    return ", ".join([row["attention"].replace("s2o", "S2O"), *settings])


def ratio(above: str, below: str) -> Callable[[Row], Any]:
    return lambda row: row[above] / row[below] if row.get(above) is not None and row.get(below) else None


# What a row was measured with. Shown where rows differ in it, else said once below the table.
WHERE: list[Column] = [
    ("task", value_of("task"), "s"),
    ("model", value_of("model"), "s"),
    ("input", value_of("input"), "s"),
    ("from token", value_of("offset"), ",d"),
    ("layers", value_of("layers"), "s"),
    ("query heads", value_of("heads"), "d"),
    ("KV heads", value_of("kv_heads"), "d"),
    ("head_dim", value_of("head_dim"), "d"),
    ("GPUs", value_of("ranks"), "d"),
    ("fixed", value_of("goal"), "s"),
    ("tokens", value_of("length"), ",d"),
]
RANK: Column = ("rank", value_of("rank"), "s")
TAU: Column = ("tau", value_of("tau"), ".3g")
DENSITY: Column = ("density", value_of("density"), ".3f")
ORDER = [RANK, TAU, DENSITY]
ATTENTION: Column = ("attention", kind_of, "s")
# VIEW: what else a row was measured with, treated as WHERE is, and its figures.
VIEWS: dict[str, tuple[list[Column], list[Column]]] = {
    # The whole call beside dense attention.
    "time": (
        ORDER,
        [
            ("S2O ms", value_of("s2o_ms"), "ms"),
            ("cuDNN ms", value_of("cudnn_ms"), "ms"),
            ("FlashAttention-2 ms", value_of("flash2_ms"), "ms"),
            ("FlashAttention-3 ms", value_of("flash3_ms"), "ms"),
            ("S2O / cuDNN", ratio("s2o_ms", "cudnn_ms"), ".3f"),
            ("rel_l2", value_of("rel_l2"), "error"),
        ],
    ),
    # Beside FlashAttention-3.
    "flash3": (
        [],
        [
            ("S2O ms", value_of("s2o_ms"), "ms"),
            ("cuDNN ms", value_of("cudnn_ms"), "ms"),
            ("FlashAttention-3 ms", value_of("flash3_ms"), "ms"),
            ("S2O / cuDNN", ratio("s2o_ms", "cudnn_ms"), ".3f"),
            ("S2O / FlashAttention-3", ratio("s2o_ms", "flash3_ms"), ".3f"),
            ("rel_l2", value_of("rel_l2"), "error"),
        ],
    ),
    "memory": ([RANK, TAU], [("GiB beside inputs and output", value_of("extra_gib"), ".2f")]),
    # Its parts,
    "parts": (
        [RANK, TAU],
        [
            ("ordering ms", value_of("ordering_ms"), "ms"),
            ("pass 1 ms", value_of("pass1_ms"), "ms"),
            ("pass 2 ms", value_of("pass2_ms"), "ms"),
            ("pass 2 TFLOP/s", value_of("pass2_tflops"), ".0f"),
            ("pass 2 / cuDNN", ratio("pass2_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    # the rate of pass 2 on the pairs it computes,
    "rates": (
        ORDER,
        [
            ("pass 2 ms", value_of("pass2_ms"), "ms"),
            ("pass 2 TFLOP/s", value_of("pass2_tflops"), ".0f"),
            ("cuDNN TFLOP/s", value_of("cudnn_tflops"), ".0f"),
            ("pass 2 / cuDNN", ratio("pass2_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    # and that of pass 1 where it does all.
    "dense": (
        [TAU],
        [
            ("pass 1 ms", value_of("pass1_ms"), "ms"),
            ("cuDNN TFLOP/s", value_of("cudnn_tflops"), ".0f"),
            ("pass 1 / cuDNN", ratio("pass1_tflops", "cudnn_tflops"), ".2f"),
        ],
    ),
    # Calls of the portable path; pass 2 of it beside FlashAttention-2,
    "portable": (
        [RANK, DENSITY],
        [
            ("S2O ms", value_of("s2o_ms"), "ms"),
            ("cuDNN ms", value_of("cudnn_ms"), "ms"),
            ("S2O / cuDNN", ratio("s2o_ms", "cudnn_ms"), ".3f"),
            ("rel_l2", value_of("rel_l2"), "error"),
        ],
    ),
    "rates_portable": (
        [RANK, DENSITY],
        [
            ("pass 2 ms", value_of("pass2_ms"), "ms"),
            ("pass 2 TFLOP/s", value_of("pass2_tflops"), ".0f"),
            ("FlashAttention-2 TFLOP/s", value_of("flash2_tflops"), ".0f"),
            ("pass 2 / FlashAttention-2", ratio("pass2_tflops", "flash2_tflops"), ".2f"),
        ],
    ),
    # and pass 1 where it does all.
    "dense_portable": (
        [TAU],
        [
            ("pass 1 ms", value_of("pass1_ms"), "ms"),
            ("pass 1 TFLOP/s", value_of("pass1_tflops"), ".0f"),
            ("FlashAttention-2 TFLOP/s", value_of("flash2_tflops"), ".0f"),
            ("pass 1 / FlashAttention-2", ratio("pass1_tflops", "flash2_tflops"), ".2f"),
            ("rel_l2", value_of("rel_l2"), "error"),
        ],
    ),
    "ordering": (
        [RANK, TAU],
        [
            ("ordering ms", value_of("ordering_ms"), "ms"),
            ("of the call", ratio("ordering_ms", "s2o_ms"), ".0%"),
            ("of cuDNN's time", ratio("ordering_ms", "cudnn_ms"), ".2%"),
        ],
    ),
    # Kinds of order, in files whose rows name them.
    "error": (
        [("segment", value_of("segment"), "d"), *ORDER],
        [
            ("rel_l2", value_of("rel_l2"), "error"),
            ("S2O ms", value_of("s2o_ms"), "ms"),
            ("ordering ms", value_of("ordering_ms"), "ms"),
        ],
    ),
    # Models from end to end, any configuration, from benchmarks/model.py: what is lost and saved,
    "loss": (
        [ATTENTION, DENSITY],
        [
            ("nats more than dense", value_of("loss_difference"), "+.4f"),
            ("±", value_of("loss_difference_sem"), ".4f"),
            ("of dense attention's time", value_of("x_attention"), ".3f"),
        ],
    ),
    # of what,
    "whole": (
        [ATTENTION],
        [
            ("nats a token", value_of("loss"), ".4f"),
            ("likeliest token came", value_of("accuracy"), ".2%"),
            ("prefill ms", value_of("prefill_ms"), "ms"),
            ("of it attention", value_of("attention_ms"), "ms"),
        ],
    ),
    # models side by side (`_side_by_side`),
    "models": (
        [ATTENTION],
        [
            (heading.format(model), value_of(f"{key}_of_{model}"), form)
            for model in (*"ABC", "small_1", "small_2")
            for heading, key, form in (
                ("{}: nats more than dense", "loss_difference", "+.4f"),
                ("{}: where text is copied", "copies_loss_difference", "+.4f"),
                ("{}: of dense attention's time", "x_attention", ".3f"),
            )
        ],
    ),
    # where in the text,
    "positions": (
        [ATTENTION],
        [("nats more than dense, by eighths of the text", value_of("loss_difference_by_position"), "+.4f")],
    ),
    # at tokens that the text copies from far away,
    "copies": (
        [ATTENTION],
        [
            ("copied tokens", value_of("copies"), ".2%"),
            ("their nats", value_of("copies_loss"), ".4f"),
            ("more than dense", value_of("copies_loss_difference"), "+.4f"),
            ("likeliest token came", value_of("copies_accuracy"), ".2%"),
        ],
    ),
    # and in which layers and rows.
    "layers": (
        [ATTENTION],
        [
            ("rel_l2 by layer", value_of("rel_l2_by_layer"), "error"),
            ("99 % of rows below", value_of("row_p99_by_layer"), "error"),
            ("rows above 0.5", value_of("rows_above_half_by_layer"), ".2%"),
        ],
    ),
    # Where an error was asked for.
    "asked": (
        [ATTENTION],
        [
            ("rel_l2 by layer", value_of("rel_l2_by_layer"), "error"),
            ("density by layer", value_of("density_by_layer"), "error"),
        ],
    ),
    # Questions to a pretrained model about a long text, from benchmarks/tasks.py.
    "tasks": (
        [ATTENTION, DENSITY],
        [
            ("right answers", value_of("right"), ".1%"),
            ("right tokens", value_of("right_tokens"), ".1%"),
            ("answered as by dense", value_of("as_dense"), ".1%"),
        ],
    ),
    # Answers of the retrieval model, from benchmarks/tasks.py --retrieval.
    "answers": (
        [ATTENTION, DENSITY],
        [
            ("right answers", value_of("right"), ".1%"),
            ("right tokens", value_of("right_tokens"), ".1%"),
            ("over 32,768 tokens away", value_of("right_beyond"), ".1%"),
            ("of dense attention's time", value_of("x_attention"), ".3f"),
        ],
    ),
    # Calls that wait for each other on the GPU, and how long a call keeps the host busy.
    "queued": (
        [RANK, TAU],
        [
            ("S2O ms, queued", value_of("s2o_queued_ms"), "ms"),
            ("cuDNN ms, queued", value_of("cudnn_queued_ms"), "ms"),
            ("S2O / cuDNN", value_of("x_cudnn_queued"), ".3f"),
            ("host µs, PyTorch", value_of("host_us"), ".0f"),
            ("host µs, CuPy", value_of("host_us_cupy"), ".0f"),
        ],
    ),
    # Cost against length, from benchmarks/scaling.py.
    "scaling": (
        ORDER,
        [
            ("rel_l2", value_of("rel_l2"), "error"),
            ("S2O ms", value_of("s2o_ms"), "ms"),
            ("S2O / cuDNN", ratio("s2o_ms", "cudnn_ms"), ".3f"),
        ],
    ),
    # A paged cache against the same keys in one array, from benchmarks/serving.py.
    "pages": (
        [
            ("call", value_of("call"), "s"),
            TAU,
            ("page size", value_of("page_size"), "d"),
        ],
        [
            ("paged ms", value_of("s2o_ms"), "ms"),
            ("one array ms", value_of("plain_ms"), "ms"),
            ("ratio", value_of("x_plain"), ".2f"),
            ("gathered first ms", value_of("gather_ms"), "ms"),
            ("e4m3 / 16 bits", value_of("x_fp8"), ".2f"),
        ],
    ),
    # A prompt in chunks, sequences packed one behind the other, and these over a paged cache.
    "chunks": (
        ORDER,
        [
            ("rel_l2", value_of("rel_l2"), "error"),
            ("one call's", value_of("plain_rel_l2"), "error"),
            ("chunks ms", value_of("s2o_ms"), "ms"),
            ("one call ms", value_of("plain_ms"), "ms"),
            ("cuDNN, one call, ms", value_of("cudnn_ms"), "ms"),
        ],
    ),
    "packed": (
        ORDER,
        [
            ("rel_l2", value_of("rel_l2"), "error"),
            ("packed ms", value_of("s2o_ms"), "ms"),
            ("one by one ms", value_of("plain_ms"), "ms"),
            ("cuDNN, one by one, ms", value_of("cudnn_ms"), "ms"),
            ("PyTorch's varlen_attn ms", value_of("varlen_ms"), "ms"),
        ],
    ),
    # Servers, from benchmarks/server.py: of each length by the server's own attention and by S2O (`_servers`).
    "servers": (
        [],
        [
            ("seconds of", value_of("said"), "s"),
            ("its own, s", value_of("own"), ".3f"),
            ("S2O, s", value_of("s2o"), ".3f"),
            ("its own / S2O", ratio("own", "s2o"), ".2f"),
            ("S2O's density", value_of("density"), ".3f"),
        ],
    ),
    "served": (
        [ATTENTION],
        [
            ("questions", value_of("answers"), ",d"),
            ("right answers", value_of("right"), ".1%"),
            ("right tokens", value_of("right_tokens"), ".2%"),
        ],
    ),
    # A video's size, from benchmarks/video.py.
    "video": (
        [("method", value_of("method"), "s")],
        [
            ("error asked", value_of("asked"), "g"),
            ("rel_l2", value_of("rel_l2"), "error"),
            ("density", value_of("density"), ".4f"),
            ("ms", value_of("ms"), "ms"),
            ("of cuDNN's time", value_of("x_cudnn"), ".3f"),
        ],
    ),
    "ragged": (
        [
            ("batch", value_of("batch"), "s"),
            ("tokens in all", value_of("tokens"), ",d"),
            ("page size", value_of("page_size"), "d"),
        ],
        [
            ("packed ms", value_of("packed_ms"), "ms"),
            ("paged ms", value_of("paged_ms"), "ms"),
            ("paged / packed", value_of("x_packed"), ".2f"),
        ],
    ),
    # Attention by lists of keys, from benchmarks/lists.py.
    "lists": (
        [("lists", value_of("kind"), "s"), DENSITY],
        [
            ("by lists ms", value_of("lists_ms"), "ms"),
            ("S2O's own pass 2 ms", value_of("pass2_ms"), "ms"),
            ("rate / cuDNN's", value_of("efficiency"), ".2f"),
        ],
    ),
    # How long a call keeps the host, from benchmarks/host.py.
    "host": (
        [("call", value_of("call"), "s")],
        [("host µs", value_of("host_us"), ".0f"), ("more than on CuPy arrays", value_of("more_us"), "+.0f")],
    ),
    # Several GPUs against one, from benchmarks/many_gpus.py.
    "gpus": (
        [*ORDER, ("rel_l2 to one GPU", value_of("rel_l2"), "error")],
        [
            ("one GPU ms", value_of("one_ms"), "ms"),
            ("ms", value_of("many_ms"), "ms"),
            ("times as fast", value_of("speedup"), ".2f"),
            ("keys exchanged ms", value_of("gather_ms"), "ms"),
        ],
    ),
    # NSA's forward, from benchmarks/nsa.py: single calls, and calls that wait for each other on the GPU.
    "nsa": (
        [("query heads of a KV head", value_of("group"), "d")],
        [
            ("NSA ms", value_of("ms"), "ms"),
            ("cuDNN ms", value_of("cudnn_ms"), "ms"),
            ("times as fast", value_of("speedup"), ".2f"),
        ],
    ),
    # Beside others' kernels: of the selected blocks alone and of all branches.
    "nsa_beside": (
        [("query heads of a KV head", value_of("group"), "d")],
        [
            ("of", value_of("part"), "s"),
            ("pass", value_of("pass"), "s"),
            ("NSA ms", value_of("s2o_ms"), "ms"),
            ("FSA / NSA", value_of("x_fsa"), ".2f"),
            ("fla / NSA", value_of("x_fla"), ".2f"),
        ],
    ),
    "nsa_errors": (
        [("query heads of a KV head", value_of("group"), "d")],
        [
            ("NSA, error", value_of("s2o_error"), "error"),
            ("FSA, error", value_of("fsa_error"), "error"),
            ("fla, error", value_of("fla_error"), "error"),
        ],
    ),
    "nsa_queued": (
        [("query heads of a KV head", value_of("group"), "d")],
        [
            ("NSA ms, queued", value_of("queued_ms"), "ms"),
            ("cuDNN ms, queued", value_of("cudnn_queued_ms"), "ms"),
            ("times as fast", value_of("queued_speedup"), ".2f"),
        ],
    ),
}
