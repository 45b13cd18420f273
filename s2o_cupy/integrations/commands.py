"""``s2o tune-model`` and ``s2o report``, of Hugging Face models. Importing this imports no framework."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..extras import with_extra
from ..spec import S2OConfig, checked_int
from ..tools import cli
from ..tools.config_options import options_given
from ..tools.layer_settings import BY, MIN_SEQLEN
from ..tools.readers import read_npy
from ..tools.sampled import check_segments
from ..tools.tuning import parse_target, parse_taus

__all__ = ["add"]

MODEL_HELP = """\
input:
  MODEL is a folder or a name that transformers' from_pretrained reads, in the dtype that it is stored in; on the GPU
  where there is one. TEXT is a text file for the model's tokenizer, or a .npy file of token ids. tune-model
  takes several, best of different kinds.
"""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The two commands."""
    does = "a tau for each layer or head of a model, for a loss, an error or a density"
    tune = command("tune-model", _tune_model, does, MODEL_HELP, allow_abbrev=False)
    _add_model(tune, "+")
    target = tune.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--loss", type=float, help="at most so many nats a token more than dense attention; twice as many where it is "
        "hardest, and four times as many where text is copied from far away and in answers",
    )  # fmt: skip
    target.add_argument("--error", type=float, help="at most this rel_l2 of each layer or head")
    target.add_argument("--density", type=float, help="at most this share of pairs computed, mean over the heads")
    tune.add_argument("--by", choices=BY, default="layer", help="what has a tau of its own (default: %(default)s)")
    tune.add_argument("--taus", help="the taus to choose from, separated by commas")
    tune.add_argument(
        "--held-back", type=float, default=0.25, metavar="SHARE",
        help="of --loss: the share of each text, up to 0.5, that taus are not chosen on and then must hold on "
        "(default: %(default)s)",
    )  # fmt: skip
    tune.add_argument(
        "--answers", action="append", metavar="FILE",
        help="of --loss: which tokens answer something that a text asks, a .npy file of as many booleans as the text "
        "has tokens; once for each TEXT, in their order",
    )  # fmt: skip
    tune.add_argument("--out", help=cli.OUT_HELP)
    tune.add_argument("--plot", help="a picture to write: tau, density and error by layer and head")
    cli.add_config(tune, S2OConfig(), found=("tau", "error"))

    does = "density, error and time of a model's layers, and what S2O left and why"
    report = command("report", _report, does, MODEL_HELP)
    _add_model(report, None)
    report.add_argument("--settings", help="a JSON file of `s2o tune-model --out`, instead of the options of S2O")
    report.add_argument("--no-loss", action="store_true", help="leave the model's loss out")
    report.add_argument("--plot", help="a picture to write: density and error by layer and head")
    cli.add_config(report, S2OConfig(), found=("error",))  # a report is of given taus


def _add_model(parser: argparse.ArgumentParser, texts: str | None) -> None:
    """``texts``: how many, as argparse says it."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT", nargs=texts)
    parser.add_argument("--length", type=int, help="tokens to take of a text (default: all, at most 32768)")
    default = "(default: that of --settings, or 8192)" if texts is None else "(default: 8192)"
    parser.add_argument("--min-seqlen", type=int, help=f"fewer keys are not S2O's {default}")
    parser.add_argument("--segments", type=int, default=16, help="segments of each layer to take (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of their draw (default: 0)")


def _texts(args: argparse.Namespace, texts: list[str]) -> list[Any]:
    """Ids of each text, (length,), before a model is loaded, which may take minutes."""
    if not os.path.isdir(args.model) and (args.model.count("/") > 1 or args.model.startswith((".", "/", "~"))):
        raise FileNotFoundError(
            f"MODEL is {args.model!r}: no such folder; accepted: a folder or a name that transformers' from_pretrained "
            "reads"
        )
    if not os.path.isdir(args.model):
        print(
            f"s2o {args.command}: MODEL is {args.model!r}, which is no folder here; the Hugging Face Hub, or its "
            "cache, is asked for a model of that name", file=sys.stderr,
        )  # fmt: skip
    for text in texts:
        if not os.path.isfile(text):
            raise FileNotFoundError(f"TEXT is {text!r}: no such file; accepted: a text, or a .npy file of token ids")
    return [_ids(args, text) for text in texts]


def _load(args: argparse.Namespace, texts: list[str], found: list[Any]) -> tuple[Any, list[Any]]:
    """The model, and the ids (1, length) of each text, on the GPU where there is one."""
    with with_extra(f"s2o {args.command}", "transformers"):
        import torch
        from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    except Exception as error:  # of many kinds, by what is missing or does not fit
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(
            f"MODEL is {args.model!r}, of which transformers makes no model ({why}); accepted: what its "
            "AutoModelForCausalLM.from_pretrained reads"
        ) from error
    model, config = model.to(device).eval(), model.config.get_text_config()
    known, positions = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    weights = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    if getattr(config, "rope_parameters", None) or not any("wpe" in x or "position" in x for x in weights):
        positions = None  # not from a table: there are more than the model was trained for
    for text, ids in zip(texts, found, strict=True):
        if known is not None and (wrong := [x for x in (int(ids.min()), int(ids.max())) if not 0 <= x < known]):
            raise ValueError(f"{text} has the token id {wrong[0]}; accepted: 0 to {known - 1}, the model's vocabulary")
        if positions is not None and len(ids) > positions:
            raise ValueError(
                f"{text} is {len(ids)} tokens, the model has {positions} positions; accepted: --length {positions}, or "
                "less"
            )
    return model, [torch.from_numpy(ids[None]).to(device) for ids in found]


def _ids(args: argparse.Namespace, text: str) -> Any:
    import numpy as np

    if text.endswith(".npy"):
        stored = read_npy(Path(text))
        if stored.dtype.kind not in "iu":
            raise ValueError(f"{text}: {stored.dtype}; accepted: token ids, integers")
        ids = _row(text, stored).astype(np.int64)
    else:
        from .text_ids import text_ids

        ids = text_ids(args.model, text)
    if len(ids) < 2:
        raise ValueError(f"{text} is {len(ids)} tokens; accepted: 2 or more")
    length = min(len(ids), 32768) if args.length is None else args.length
    if not 1 < length <= len(ids):
        raise ValueError(f"--length is {length}; accepted: 2 to {len(ids)}, the tokens of {text}")
    return ids[:length].astype(np.int64)


def _row(path: str, stored: Any) -> Any:
    """Of one text: several would be joined where none of them ends."""
    if stored.ndim != 1 and stored.shape[:-1] != (1,):
        raise ValueError(f"{path}: shape {stored.shape}; accepted: (tokens,) or (1, tokens), one text")
    return stored.reshape(-1)


def _answers(args: argparse.Namespace, ids: list[Any]) -> list[Any] | None:
    """Booleans (1, length) of each text."""
    if args.answers is None:
        return None
    if len(args.answers) != len(ids):
        raise ValueError(f"--answers came {len(args.answers)} times with {len(ids)} texts; accepted: once for each")
    found = []
    for path, text in zip(args.answers, ids, strict=True):
        marked = _row(path, read_npy(Path(path)))
        if marked.dtype != bool or len(marked) < len(text):
            raise ValueError(f"{path}: {len(marked)} of {marked.dtype}; accepted: bool, {len(text)} or more")
        found.append(marked[None, : len(text)])
    return found


def _tune_model(args: argparse.Namespace) -> int:
    from ..tools.progress import progress
    from ..tools.tune_layers import LAYER_TAUS

    cli.check_out(args)
    cli.check_plot(args)
    taus, config = cli.taus_of(args, LAYER_TAUS), cli.config_of(args)
    # Before a model is loaded, which may take minutes.
    parse_target("tune_model", loss=args.loss, error=args.error, density=args.density)
    parse_taus("tune_model", taus)
    check_segments("tune_model", args.segments)
    checked_int("seed", args.seed, 0, owner="tune_model")
    with with_extra(f"s2o {args.command}", "transformers"):
        import torch

        from .model_texts import check_held_back
        from .model_tools import tune_model

    check_held_back("tune_model", args.held_back)
    texts = _texts(args, args.text)
    marked = _answers(args, texts)
    model, ids = _load(args, args.text, texts)
    answers = None if marked is None else [torch.from_numpy(x).to(model.device) for x in marked]
    with progress("tune-model") as told, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "tune_model: ", UserWarning)  # they are among the result's notes
        found = tune_model(
            model, ids, loss=args.loss, error=args.error, density=args.density, by=args.by, taus=taus, config=config,
            min_seqlen=MIN_SEQLEN if args.min_seqlen is None else args.min_seqlen, answers=answers,
            held_back=args.held_back, segments=args.segments, seed=args.seed, progress=told,
        )  # fmt: skip
    for note in found.notes if args.json else ():  # the table has them
        print(f"s2o {args.command}: note: {note}", file=sys.stderr)
    tokens = [text.shape[1] for text in ids]
    about = {"model": args.model, "texts": args.text, "tokens": tokens, "picture": args.plot}
    try:
        if args.out is not None:
            found.save(args.out)
    finally:  # printed, too, where it cannot be written
        cli.print_result(args, found.to_dict() | about, lambda _: found.table())
    if args.plot is not None:
        found.draw(args.plot)
    return cli.OK


def _report(args: argparse.Namespace) -> int:
    from ..tools.progress import progress

    if args.settings is not None and (given := options_given(args)):
        raise ValueError(f"--settings and {', '.join(given)} came together; accepted: --settings, or options of S2O")
    cli.check_plot(args)
    check_segments("report", args.segments)
    checked_int("seed", args.seed, 0, owner="report")
    from .model_tools import report
    from .transformers import register

    s2o = register("s2o", args.settings or cli.config_of(args), min_seqlen=args.min_seqlen)
    model, (ids,) = _load(args, [args.text], _texts(args, [args.text]))
    with progress("report") as told:
        found = report(
            model, ids, s2o, loss=not args.no_loss, segments=args.segments, seed=args.seed, progress=told
        )  # fmt: skip
    about = {"model": args.model, "text": args.text, "picture": args.plot}
    cli.print_result(args, found.to_dict() | about, lambda _: found.table())
    if args.plot is not None:  # last, so that the result is not lost where it cannot be written
        found.draw(args.plot)
    return cli.OK
