"""``s2o tune-model`` and ``s2o report``, of Hugging Face models. Importing this imports no framework."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..spec import S2OConfig
from ..tools import cli
from ..tools.layer_settings import BY

__all__ = ["add"]

MODEL_HELP = """\
input:
  MODEL is a folder or a name that transformers' from_pretrained reads, in the dtype that it is stored in; on the GPU
  where there is one. TEXT is a text file for the model's tokenizer, or a .npy file of token ids.
"""


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """The two commands."""
    does = "a tau for each layer or head of a model, for a loss, an error or a density"
    tune = command("tune-model", _tune_model, does, MODEL_HELP, allow_abbrev=False)
    _add_model(tune)
    target = tune.add_mutually_exclusive_group(required=True)
    loss = "at most so many nats a token more than dense attention, two standard errors included"
    target.add_argument("--loss", type=float, help=loss)
    target.add_argument("--error", type=float, help="at most this rel_l2 of each layer or head")
    target.add_argument("--density", type=float, help="at most this share of pairs computed, mean over the heads")
    tune.add_argument("--by", choices=BY, default="layer", help="what has a tau of its own (default: %(default)s)")
    tune.add_argument("--taus", help="the taus to choose from, separated by commas")
    tune.add_argument("--out", help="write what register() and `s2o report --settings` take to this JSON file")
    tune.add_argument("--plot", help="a picture to write: tau, density and error by layer and head")
    cli.add_config(tune, S2OConfig(), found=("tau",))

    does = "density, error and time of a model's layers, and what S2O left and why"
    report = command("report", _report, does, MODEL_HELP)
    _add_model(report)
    report.add_argument("--settings", help="a JSON file of `s2o tune-model --out`, instead of the options of S2O")
    report.add_argument("--no-loss", action="store_true", help="leave the model's loss out")
    report.add_argument("--plot", help="a picture to write: density and error by layer and head")
    cli.add_config(report, S2OConfig())


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("text", metavar="TEXT")
    parser.add_argument("--length", type=int, help="tokens to take (default: the text's, at most 32768)")
    parser.add_argument("--min-seqlen", type=int, default=8192, help="fewer keys are not S2O's (default: %(default)s)")
    parser.add_argument("--segments", type=int, default=16, help="segments of each layer to take (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of their draw (default: 0)")


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and ids (1, length), on the GPU where there is one."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.text.endswith(".npy"):
        ids = np.load(args.text, allow_pickle=False).astype(np.int64).reshape(-1)
    else:
        text = Path(args.text).read_text(encoding="utf-8")
        ids = np.array(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"], np.int64)
    length = min(len(ids), 32768) if args.length is None else args.length
    if not 1 < length <= len(ids):
        raise ValueError(f"--length is {length}; accepted: 2 to {len(ids)}, the tokens of {args.text}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
    return model, torch.from_numpy(ids[None, :length]).to(device)


def _tune_model(args: argparse.Namespace) -> int:
    from ..tools.progress import progress
    from ..tools.tune_layers import LAYER_TAUS

    cli.check_plot(args)
    taus, config = cli.taus_of(args, LAYER_TAUS), cli.config_of(args)
    from .model_tools import tune_model

    model, ids = _load(args)
    with progress("tune-model") as told:
        found = tune_model(
            model, ids, loss=args.loss, error=args.error, density=args.density, by=args.by, taus=taus, config=config,
            min_seqlen=args.min_seqlen, segments=args.segments, seed=args.seed, progress=told,
        )  # fmt: skip
    if args.out is not None:
        found.save(args.out)
    if args.plot is not None:
        found.draw(args.plot)
    about = {"model": args.model, "text": args.text, "tokens": ids.shape[1], "picture": args.plot}
    cli.print_result(args, found.to_dict() | about, lambda _: found.table())
    return cli.OK


def _report(args: argparse.Namespace) -> int:
    from ..tools.progress import progress

    cli.check_plot(args)
    from .model_tools import report
    from .transformers import register

    s2o = register("s2o", args.settings or cli.config_of(args), min_seqlen=args.min_seqlen)
    model, ids = _load(args)
    with progress("report") as told:
        found = report(
            model, ids, s2o, loss=not args.no_loss, segments=args.segments, seed=args.seed, progress=told
        )  # fmt: skip
    if args.plot is not None:
        found.draw(args.plot)
    about = {"model": args.model, "text": args.text, "picture": args.plot}
    cli.print_result(args, found.to_dict() | about, lambda _: found.table())
    return cli.OK
