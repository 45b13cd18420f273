"""What S2O costs a language model, and what it saves: loss, errors and time of whole models, on one GPU.

    python benchmarks/model.py --small
    python benchmarks/model.py --models A=llama.py:llama.npz:ids.npy --set tau=0.02 --set segment=512 --json model.json
    python benchmarks/model.py --models A=llama.py:llama.npz:ids.npy --tune loss=0.005
    python benchmarks/model.py --hugging-face smollm2.gguf --text book.txt --lengths 8192 --base dense_up_to=0

--small: the small model of benchmarks/small_model, which comes with its text. Without a GPU loss and errors alone, of
4,096 tokens, by the NumPy reference.

--models: small trained Llamas and Qwen3s, each NAME=LOADER:WEIGHTS:TOKENS. The loader is a .py with load(path), HEADS,
KV_HEADS and ROPE_THETA, the tokens a .npy of ids. --hugging-face: a pretrained model, which reads --text by its own
tokenizer, or --tokens. Of every length and every kind of attention, by --parts:

- loss: nats per token and its difference to dense attention, over the text and over eight equal parts of it; how often
  the likeliest next token is the one that came; and both at tokens that the text copies from far away
  (`s2o_cupy.tools.far_copies`), which is where attention that misses keys would show first.
- error: in every layer, on the q, k and v that dense layers give it, the error of attention (pooled rel_l2), of its
  rows (median, 99 %, 99.9 %, and the share that is more than half wrong), and the density.
- time: of a prefill (with a KV cache, up to the logits of the last token) and of its attention in all layers, in turns
  with that of the first of --baselines.

Attention is dense (transformers' "sdpa", held to one of PyTorch's kernels), another method by every --method, or S2O,
configured by --base and by every --set, and tuned to the model on top of --base by every --tune: on the tokens that
follow the measured ones, or on these where the text ends before. --measure second has it the other way round: it
measures the tokens that follow the first ones, and tunes on the first. Differences and ratios are to the first of
--baselines. Needs PyTorch with CUDA, CuPy, transformers.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import _common
import _kinds
import _pretrained
import _sources
import numpy as np
from _kinds import Kind, attention, described, kinds, told, turns

from s2o_cupy import S2OConfig
from s2o_cupy.by_head import check_one_error
from s2o_cupy.errors import ArgumentValueError
from s2o_cupy.tools.far_copies import far_copies
from s2o_cupy.tools.progress import Report, progress
from s2o_cupy.tools.tune_layers import TunedLayers

Row = dict[str, Any]
PARTS = ("loss", "error", "time")
POSITIONS = 8  # equal parts of a text
SMALL = pathlib.Path(__file__).parent / "small_model"
COLUMNS: list[_common.Column] = [
    ("model", "model", "s"),
    ("tokens", "length", ",d"),
    ("attention", "attention", "s"),
    ("configuration", "config", "s"),
    ("density", "density", ".4f"),
    ("nats / token", "loss", ".5f"),
    ("to dense", "loss_difference", "+.5f"),
    ("±", "loss_difference_sem", ".5f"),
    ("loader's own", "loader_loss", ".5f"),
    ("of text tuned on", "tuned_loss_difference", "+.5f"),
    ("held back worse by", "tuned_held_back_worse", "+.5f"),
    ("copies: nats to dense", "copies_loss_difference", "+.5f"),
    ("copies: hits", "copies_accuracy", ".4f"),
    ("worst layer's rel_l2", "worst_rel_l2", ".4f"),
    ("worst layer's rows > 0.5", "worst_rows_above_half", ".5f"),
    ("prefill ms", "prefill_ms", ".2f"),
    ("attention ms", "attention_ms", ".2f"),
    ("rest ms", "rest_ms", ".2f"),
    ("prefill ratio", "x_prefill", ".3f"),
    ("attention ratio", "x_attention", ".3f"),
    ("peak GiB", "peak_gib", ".2f"),
]


@dataclass(frozen=True)
class Subject:
    """A model, a text for it, and where there is one the loss of (ids, targets) by code of the loader's own."""

    name: str
    model: Any
    text: np.ndarray  # ids
    nll: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True)
class Case:
    """A subject at one length."""

    args: argparse.Namespace
    subject: Subject
    ids: Any
    targets: Any
    kinds: Sequence[Kind]


def subjects(args: argparse.Namespace, device: str) -> Iterator[Subject]:
    """One at a time."""
    import _small_llama

    if args.hugging_face:
        path = pathlib.Path(args.hugging_face)
        text = np.load(args.tokens) if args.tokens else _pretrained.ids_of(args.hugging_face, args.text)
        yield Subject(path.stem, _pretrained.model(args.hugging_face, device), text)
    for name, (loader, weights_path, tokens) in args.models.items():
        module = _sources.module_of(loader)
        weights = module.load(weights_path)
        nll = partial(module.nll, weights) if hasattr(module, "nll") else None
        text = np.load(tokens)
        yield Subject(name, _small_llama.load(module, weights), text["ids"] if tokens.endswith(".npz") else text, nll)


# ---------------------------------------------------------------- the parts


def add_loss(case: Case, rows: list[Row], step: Any) -> None:
    from s2o_cupy.integrations.next_tokens import next_tokens

    args, subject, ids, targets = case.args, case.subject, case.ids, case.targets
    copied = far_copies(subject.text[: len(ids) + 1], args.copy_ids, args.copy_distance)
    dense = None
    for kind, row in zip(case.kinds, rows, strict=True):
        step(f"loss, {told(kind)}")
        with attention(kind) as name:
            subject.model.set_attn_implementation(name)
            loss, hit = (x[0] for x in next_tokens(subject.model, ids[None], targets[None]))
        dense = loss if dense is None else dense
        row |= {"loss": loss.mean(), "accuracy": hit.mean(), "loss_difference": (loss - dense).mean()}
        # Its standard error, tokens taken for independent.
        row["loss_difference_sem"] = (loss - dense).std() / len(loss) ** 0.5
        row["loss_by_position"] = by_position(loss)
        row["loss_difference_by_position"] = by_position(loss - dense)
        row["copies"] = copied.mean()
        if copied.any():
            row["copies_loss"], row["copies_accuracy"] = loss[copied].mean(), hit[copied].mean()
            row["copies_loss_difference"] = (loss - dense)[copied].mean()
        if isinstance(kind, TunedLayers) and kind.loss is not None:
            row["tuned_loss_difference"] = kind.loss.loss_difference
            if kind.loss.held_back_worse is not None:
                row["tuned_held_back_worse"] = kind.loss.held_back_worse
        row |= {key: float(value) for key, value in row.items() if isinstance(value, np.floating)}
    if subject.nll is not None:
        rows[0]["loader_loss"] = float(subject.nll(ids, targets).double().mean())


def by_position(losses: np.ndarray) -> list[float]:
    """Means of equal parts."""
    return [float(part.mean()) for part in np.array_split(losses, POSITIONS)]


def add_errors(case: Case, rows: list[Row], step: Any) -> None:
    from _layer_errors import on_dense_trajectory

    step("errors by layer")
    found_of = on_dense_trajectory(case.subject.model, case.ids, case.kinds, case.args.error_rows)
    for row, found in zip(rows, found_of, strict=True):
        row |= found
        for name in ("rel_l2", "rows_above_half"):
            row[f"worst_{name}"] = max(found[f"{name}_by_layer"])


def add_times(case: Case, rows: list[Row], step: Any) -> None:
    from _turns import in_turns, prefill

    first, model, ids = case.kinds[0], case.subject.model, case.ids
    for kind, row in zip(case.kinds, rows, strict=True):
        step(f"time, {told(kind)}")
        times = in_turns(model, ids, turns(first, kind), case.args.repeats)
        for (whole, part), prefix in ((times[-1], ""), (times[0], f"{first}_")):
            row |= {f"{prefix}prefill_ms": whole, f"{prefix}attention_ms": part}
        row["rest_ms"] = row["prefill_ms"] - row["attention_ms"]
        row |= {f"x_{name}": row[f"{name}_ms"] / row[f"{first}_{name}_ms"] for name in ("prefill", "attention")}
        with attention(kind) as name:
            model.set_attn_implementation(name)
            row["peak_gib"] = _common.peak_gib(partial(prefill, model, ids))


MEASURES = {"loss": add_loss, "error": add_errors, "time": add_times}


# ---------------------------------------------------------------- the run


def tuned(args: argparse.Namespace, subject: Subject, step: Callable[[str], None], ids: Any) -> list[Kind]:
    """What each --tune finds on these tokens."""
    from s2o_cupy.integrations.model_tools import tune_model

    config = S2OConfig(**args.base)
    subject.model.set_attn_implementation("sdpa")
    return [
        tune_model(
            subject.model, ids[None], **wanted, config=config, min_seqlen=0,
            progress=lambda done, total, what=None: step(f"tuning, {done} of {total}: {what}"),
        )
        for wanted in args.tune
    ]  # fmt: skip


def halves(text: np.ndarray, length: int, measure: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the measured tokens of a text begin, and where those that are tuned on do."""
    enough = len(text) > 2 * length
    if measure == "second" and not enough:
        raise ValueError(f"--measure second: a text of {len(text):,} tokens; accepted: {2 * length + 1:,} or more")
    if measure == "second":
        return text[length:], text
    return text, text[length:] if enough else text


def run_models(args: argparse.Namespace, step: Callable[[str], None], device: str = "") -> Iterator[list[Row]]:
    """The rows of each model and length."""
    import _small_llama

    device = device or args.device
    for subject in subjects(args, device):
        for length in args.lengths:
            _pretrained.check_length(subject.model, length)
            measured, other = halves(subject.text, length, args.measure)
            ids, targets = _small_llama.tokens(measured, length, device)
            tune_on, _ = _small_llama.tokens(other, length, device)
            report = lambda what: step(f"{subject.name}, {length:,}: {what}")  # noqa: B023, E731
            found = [*kinds(args), *tuned(args, subject, step, tune_on)]
            case = Case(args, replace(subject, text=measured), ids, targets, found)
            rows = [{"model": subject.name, "length": length, **described(kind, length)} for kind in case.kinds]
            for part in args.parts:
                MEASURES[part](case, rows, report)
            yield rows


def run(args: argparse.Namespace, report: Report) -> list[Row]:
    import torch
    import transformers

    done = itertools.count()
    each = len(kinds(args)) + len(args.tune)
    steps = {"loss": each, "error": 1, "time": each}
    total = max(1, len(args.models)) * len(args.lengths) * sum(steps[part] for part in args.parts)
    rows: list[Row] = []
    with torch.inference_mode():
        for found in run_models(args, lambda what: report(next(done), total, what)):
            rows += found
            # After each length, so that an interrupted run leaves what it has measured.
            result = _common.provenance(args.device) | {"transformers": transformers.__version__}
            _common.write_json(args.json, {**result, "settings": _common.settings(args, rows), "rows": rows})
    return rows


def models(text: str) -> dict[str, tuple[str, ...]]:
    """ "A=loader:weights:tokens,B=...": names and their three files."""
    found: dict[str, tuple[str, ...]] = {}
    for part in _common.names(text):
        name, _, files = part.partition("=")
        found[name] = tuple(files.split(":"))
        if len(found[name]) != 3 or not all((name, *found[name])):
            raise argparse.ArgumentTypeError(f"{part}: accepted: NAME=LOADER:WEIGHTS:TOKENS,...")
    return found


def tuning(text: str) -> dict[str, Any]:
    """ "loss=0.005,by=head": arguments of tune_model."""
    found: dict[str, Any] = dict(part.partition("=")[::2] for part in _common.names(text))
    targets = {"loss", "error", "density"} & found.keys()
    try:
        if len(targets) != 1 or found.keys() - targets - {"by"}:
            raise ValueError
        found |= {name: float(found[name]) for name in targets}
        if "error" in found:
            check_one_error("error", found["error"], "tune_model")
        return found
    except ArgumentValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: accepted: loss=, error= or density=NUMBER[,by=layer]") from None


def parts(text: str) -> list[str]:
    found = _common.names(text)
    if not found or set(found) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{text}: accepted: one or more of {', '.join(PARTS)}")
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--models", type=models, default={}, metavar="NAME=LOADER:WEIGHTS:TOKENS,...")
    which.add_argument("--small", action="store_true", help="the model of benchmarks/small_model")
    which.add_argument("--hugging-face", metavar="PATH", help=_pretrained.HELP)
    parser.add_argument("--text", help="of --hugging-face: a text file")
    parser.add_argument("--tokens", help="of --hugging-face: a .npy of ids")
    parser.add_argument("--lengths", type=_common.integers, help="tokens (default: 32768,131072; without a GPU 4096)")
    parser.add_argument("--parts", type=parts, help=f"default: {','.join(PARTS)}; without a GPU loss,error")
    parser.add_argument("--error-rows", type=int, metavar="ROWS", help="of a head, for its errors (default: all)")
    parser.add_argument("--copy-ids", type=int, help="ids that agree before a copy (default: 8; of --small, bytes, 24)")
    parser.add_argument("--copy-distance", type=int, default=4096, help="tokens back to it, more than (default: 4096)")
    _kinds.add_arguments(parser)
    parser.add_argument(
        "--tune", type=tuning, action="append", default=[], metavar="loss=NUMBER[,by=head]",
        help="a configuration tuned to the model, for a loss, an error or a density; as often as wanted",
    )  # fmt: skip
    parser.add_argument(
        "--measure", choices=("first", "second"), default="first",
        help="the first tokens of the text, and tune on those that follow; or the other way round (default: first)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args(argv)
    _kinds.check(parser, args)
    if bool(args.text) + bool(args.tokens) != bool(args.hugging_face):
        parser.error("--text, --tokens: accepted: one of them with --hugging-face, none with --models")
    if args.error_rows is not None and args.error_rows < 1:
        parser.error(f"--error-rows: {args.error_rows}; accepted: 1 or more")
    args.device = "cuda" if _common.has_gpu() else "cpu"
    if args.device == "cpu" and (not args.small or "time" in (args.parts or [])):
        parser.error("needs an NVIDIA GPU, CuPy and PyTorch with CUDA, but for loss and errors of --small")
    if args.small:
        args.models = {"small": tuple(str(SMALL / name) for name in ("loader.py", "weights.npz", "text.npz"))}
    args.copy_ids = args.copy_ids or (24 if args.small else 8)
    gpu = args.device == "cuda"
    args.lengths = args.lengths or ([32768, 131072] if gpu else [4096])
    args.parts = args.parts or ([*PARTS] if gpu else ["loss", "error"])
    if not gpu:
        args.baselines = ["sdpa"]
    return args


def main() -> None:
    args = parse()
    with progress("model") as report:
        rows = run(args, report)
    print(_common.table(rows, COLUMNS))


if __name__ == "__main__":
    main()
