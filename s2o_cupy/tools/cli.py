"""Command line: ``python -m s2o_cupy`` or ``s2o``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from .. import __version__, spec
from ..cuda.compiler import ARCHITECTURES
from ..errors import arguments_of
from ..nearest import nearest
from ..plan.launch_plan import padded_head_dim
from ..spec import S2OConfig, S2OError
from . import inputs
from .config_options import add_config, config_of
from .finite import note_not_finite
from .layer_settings import BY
from .outputs import check_out, check_plot
from .whole_files import write_text

__all__ = [
    "OUT_HELP", "Add", "add_config", "check_out", "check_plot", "config_of", "main", "number", "parser", "print_result",
    "taus_of",
]  # fmt: skip

OK, FOUND, UNABLE = 0, 1, 2
OLDEST = 80  # compute capability 8.0
EXPECTED = (S2OError, ImportError, OSError, TypeError, ValueError, MemoryError)  # errors in words for a reader
EXIT_STATUS = """\
exit status:
  0  done, and nothing wrong was found
  1  done, and something wrong was found: a difference beyond tolerance, NaN or infinities, a spill or a warning
  2  not done: wrong arguments, an unreadable file, or a machine that cannot do it
With S2O_DEBUG=1 in the environment such an error is shown with where it came from.
"""
INPUT_HELP = f"""\
input:
  a built-in name ({", ".join(inputs.names())}),
  a .npz, .safetensors or .pt file with arrays q, k and v,
  a folder with q.npy, k.npy and v.npy, or those three files.
  q is (batch, heads, seqlen_q, head_dim), k and v (batch, kv_heads, seqlen_k, head_dim);
  batch may be left out.
"""
OUT_HELP = "write the settings that were found, as register() and `s2o report --settings` take them, to this JSON file"


class _Parser(argparse.ArgumentParser):
    """Whose errors are one line: all options, as usage lists them, would push it out of sight."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument \S+: invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        near = nearest(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else None
        message += "" if near is None else f"; did you mean {near}?"
        self.exit(UNABLE, f"{self.prog}: error: {message} ({self.prog} --help lists everything)\n")


Add = Callable[[Callable[..., argparse.ArgumentParser]], None]  # of what makes a command's parser


def main(argv: Sequence[str] | None = None, more: Sequence[Add] = ()) -> int:
    """Run one command, of those here or of ``more``; returns the exit status."""
    args, unknown = parser(more).parse_known_args(argv)
    if unknown:
        args.parser.error(_unknown(unknown, sorted(args.parser._option_string_actions)))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "q has .* heads of")  # _input says it
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, head for example, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return _unable(args, "interrupted")
    except Exception as error:
        if os.environ.get("S2O_DEBUG"):
            raise
        said = str(error) or type(error).__name__
        if not isinstance(error, EXPECTED):  # whose words need not say what is wrong
            said = f"{type(error).__name__}: {error} (with S2O_DEBUG=1 it is shown with where it came from)"
        return _unable(args, said)


# ---------------------------------------------------------------- commands


DTYPES_OF_BUILT_IN = "recorded inputs as stored, patterns as float32, on a GPU as bfloat16"
RECORDED = {"trace": "the recorded trace", "retrieval": "a recorded prompt with questions"}


def _demo(args: argparse.Namespace) -> int:
    from . import demo
    from .info import gpu_problem
    from .layer_files import head_names
    from .progress import progress

    qkv = _input(args, on_gpu=not gpu_problem())
    names = head_names(args.input, qkv.q.shape[-3])
    head = _head(args.picture_head, names)
    note_not_finite(args.command, qkv)
    picture = None if args.no_picture else args.plot or "s2o_demo.png"
    source = RECORDED.get(" ".join(args.input), " ".join(args.input))
    with progress("demo") as report:
        found = demo.run(
            qkv, config_of(args), source=source, picture=picture, head=head, names=names, progress=report
        )
    print_result(args, found, demo.table)
    return OK if found["ok"] else FOUND


def _head(asked: str | None, names: Sequence[str]) -> int | None:
    """The place of a head, by its name in the table or counted from 0."""
    if asked is None or asked in names:
        return None if asked is None else names.index(asked)
    try:
        return int(asked)
    except ValueError:
        accepted = f"0 to {len(names) - 1}, or a name from {names[0]} to {names[-1]}"
        raise ValueError(f"--picture-head is {asked!r}; accepted: {accepted}") from None


def _diff(args: argparse.Namespace) -> int:
    from .info import gpu_problem

    qkv, config = _input(args, on_gpu=True), config_of(args)
    if problem := gpu_problem():
        return _unable(args, f"diff compares the GPU with the reference and needs a GPU: {problem}")
    from . import diffing
    from .progress import progress

    note_not_finite(args.command, qkv)
    with progress("diff") as report:
        found = diffing.diff(
            *qkv, config, scale=args.scale, softcap=args.softcap, is_causal=not args.no_causal, fp8=args.fp8,
            progress=report,
        )  # fmt: skip
    print_result(args, {"ok": found.ok, **found.to_dict()}, lambda _: found.table())
    return OK if found.ok else FOUND


def _tune(args: argparse.Namespace) -> int:
    from .info import gpu_problem
    from .layer_files import head_names
    from .plot import SweepPoint, draw_sweep
    from .progress import progress
    from .tuning import TAUS, tune

    if args.by is not None:
        return _tune_layers(args)
    taus = taus_of(args, TAUS)
    check_out(args)
    config, problem = config_of(args), gpu_problem()
    qkv = _input(args, on_gpu=not problem)
    check_plot(args)
    source, names = " ".join(args.input), head_names(args.input, qkv.q.shape[-3])
    with progress("tune") as report:
        found = tune(
            *(qkv if problem else inputs.to_gpu(qkv)), error=args.error, density=args.density, taus=taus, config=config,
            scale=args.scale, softcap=args.softcap, segments=args.segments, seed=args.seed, progress=report,
        )  # fmt: skip
    about = {"source": source, "backend": "numpy" if problem else "cupy", "picture": args.plot, "head_names": names}
    _keep(args, found.to_dict() | about, lambda _: found.table(names))
    if args.plot is not None:
        shown = (*taus, found.config.tau)  # others lie too close together to be told apart
        sweep = [SweepPoint(x.tau, x.pooled_density, x.pooled_error) for x in found.points if x.tau in shown]
        title = f"{source}: {len(found.estimate.segments):,} of {found.estimate.segments_total:,} segments, by tau"
        draw_sweep(args.plot, sweep, found.config.tau, title)
    return OK


def _tune_layers(args: argparse.Namespace) -> int:
    """By layer or head, of a folder or file with several layers."""
    from .info import gpu_problem
    from .layer_files import load_layers
    from .progress import progress
    from .tune_layers import LAYER_TAUS, tune_layers

    taus, config, problem = taus_of(args, LAYER_TAUS), config_of(args), gpu_problem()
    check_out(args)
    check_plot(args)
    layers = load_layers(args.input)
    _refuse_sizes(args)

    def place(qkv: inputs.QKV) -> inputs.QKV:
        qkv = _converted(args, qkv)
        return qkv if problem else inputs.to_gpu(qkv)

    with progress("tune") as report:
        found = tune_layers(
            layers, error=args.error, density=args.density, by=args.by, taus=taus, config=config, scale=args.scale,
            softcap=args.softcap, segments=args.segments, seed=args.seed, place=place, progress=report,
        )  # fmt: skip
    about = {"source": " ".join(args.input), "backend": "numpy" if problem else "cupy", "picture": args.plot}
    _keep(args, found.to_dict() | about, lambda _: found.table())
    if args.plot is not None:
        found.draw(args.plot)
    return OK


def taus_of(args: argparse.Namespace, default: Sequence[float]) -> Sequence[float]:
    return default if args.taus is None else [number("--taus", x) for x in args.taus.split(",")]


def _keep(args: argparse.Namespace, found: dict[str, Any], table: Callable[[Any], str]) -> None:
    """Writes a result to the file that is asked for, and prints it, also where it cannot be written."""
    try:
        if args.out is not None:
            write_text(args.out, json.dumps(_plain(found), indent=1, allow_nan=False) + "\n")
    finally:
        print_result(args, found, table)


def _compare(args: argparse.Namespace) -> int:
    from .comparing import compare, default_configs, draw, parse_method
    from .info import gpu_problem
    from .own_file import says_which
    from .progress import progress

    given = [parse_method(x, "--method") for x in args.method or ()]
    configs = given or default_configs(not args.no_causal)
    problem = gpu_problem()
    qkv = _input(args, on_gpu=not problem)
    check_plot(args)
    with progress("compare") as report, says_which(args.method or (), given, "--method"):
        found = compare(
            *(qkv if problem else inputs.to_gpu(qkv)), configs, is_causal=not args.no_causal, scale=args.scale,
            softcap=args.softcap, repeats=args.repeats, progress=report,
        )  # fmt: skip
    source = " ".join(args.input)
    print_result(args, found.to_dict() | {"source": source, "picture": args.plot}, lambda _: found.table())
    if args.plot is not None:  # last, so that the result is not lost where it cannot be written
        draw(args.plot, found, source)
    return OK


def number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} has {text!r}; accepted: numbers, separated by commas") from None


def _info(args: argparse.Namespace) -> int:
    from . import info

    print_result(args, info.gather(), info.table)
    return OK


def _compile(args: argparse.Namespace) -> int:
    from ..cuda import compiler, cubin_cache
    from . import compile_ahead, compile_report
    from .progress import progress

    architectures = [*filter(None, map(str.strip, (args.arch or "").split(",")))]
    if args.arch is None:
        architectures = [*(compiler.local_architectures() or ARCHITECTURES)]
    for name in architectures:
        if not re.fullmatch(r"sm_\d+[af]?", name) or int(re.sub(r"\D", "", name)) < OLDEST:
            raise ValueError(f"--arch has {name!r}; accepted: names such as sm_90a, of compute capability 8.0 or newer")
    if not architectures:
        raise ValueError(f"--arch is {args.arch!r}; accepted: names such as sm_90a, separated by commas")
    if args.head_dim is not None and not 1 <= args.head_dim <= spec.MAX_HEAD_DIM:
        raise ValueError(f"--head-dim is {args.head_dim}; accepted: 1 to {spec.MAX_HEAD_DIM}")
    dtypes = None if args.dtype is None else [args.dtype]
    head_dims = None if args.head_dim is None else [padded_head_dim(args.head_dim)]
    with progress("compile") as report:
        compiled = compile_ahead.compile_all(
            architectures, report, dtypes=dtypes, head_dims=head_dims, sample=args.sample
        )
    rows = compile_report.rows_of(compiled)
    ok = bool(rows) and not any(map(compile_report.is_faulty, rows))
    problem, folder = cubin_cache.unwritable(), cubin_cache.folder()
    kept = f"kept for calls in {folder}" if problem is None else f"not kept for calls: {problem} ({folder})"
    found = {"ok": ok, "kernels": rows, "cache_folder": folder, "cache_problem": problem}
    print_result(args, found, lambda found: f"{compile_report.table(found['kernels'], args.all)}\n{kept}")
    return OK if ok else FOUND


# ---------------------------------------------------------------- arguments and output


def print_result(args: argparse.Namespace, found: Any, table: Any) -> None:
    """JSON (NaN and infinities as null would hide them, so as strings) or the table."""
    print(json.dumps(_plain(found), indent=1, allow_nan=False) if args.json else table(found))
    args.printed = True


def _plain(value: Any) -> Any:
    """``value`` with NumPy scalars and arrays as Python's own and non-finite numbers as text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _unknown(arguments: Sequence[str], accepted: Sequence[str]) -> str:
    """What to say of the first argument that a command does not know."""
    name = arguments[0].partition("=")[0]
    near = nearest(name, accepted)
    if name == "--out" and "--plot" in accepted:  # a picture, while --out is a file of settings
        near = "--plot"
    field = name.removeprefix("--").replace("-", "_")
    if "--method" in accepted and field in (x.name for x in fields(S2OConfig)):
        near = f"--method s2o:{field}=VALUE"
    meant = "" if near is None else f"did you mean {near}? "
    return f"{name} is not accepted; {meant}accepted: {', '.join(accepted)}"


def _unable(args: argparse.Namespace, message: str) -> int:
    message = " ".join(message.split())
    for name in (args.command, args.command.replace("-", "_")):
        message = message.removeprefix(f"{name}: ")
    if args.json and not hasattr(args, "printed"):  # with a result it would be no JSON
        print(json.dumps({"error": message}))
    print(f"s2o {args.command}: {message}", file=sys.stderr)
    return UNABLE


def _input(args: argparse.Namespace, on_gpu: bool) -> inputs.QKV:
    """The arrays that the arguments name. For a GPU, which takes 16 bits alone, patterns are bfloat16."""
    if len(args.input) == 1 and args.input[0] in inputs.names():
        dtype = args.dtype or ("bfloat16" if on_gpu else None)
        with arguments_of(args.command):
            return inputs.builtin(args.input[0], dtype=dtype, seed=args.seed, **_sizes(args))
    if len(args.input) == 1 and not os.path.exists(args.input[0]) and os.sep not in args.input[0]:
        raise ValueError(f"{args.input[0]}: neither a file nor a built-in input ({', '.join(inputs.names())})")
    _refuse_sizes(args)
    qkv = inputs.load(args.input)
    if inputs.looks_swapped(qkv):
        _, heads, length, _ = (1, *qkv.q.shape)[-4:]
        print(
            f"s2o {args.command}: note: q has {heads:,} heads of {length:,} tokens; "
            "if its axes are (batch, seqlen, heads, head_dim), store x.swapaxes(-3, -2) of all three",
            file=sys.stderr,
        )
    return _converted(args, qkv)


def _sizes(args: argparse.Namespace) -> dict[str, int | None]:
    return {name: getattr(args, name) for name in ("length", "heads", "kv_heads", "head_dim")}


def _refuse_sizes(args: argparse.Namespace) -> None:
    """Of files, which have their own."""
    for name, value in _sizes(args).items():
        if value is not None:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; accepted only with a built-in input")


def _converted(args: argparse.Namespace, qkv: inputs.QKV) -> inputs.QKV:
    return qkv if args.dtype is None else inputs.cast(qkv, args.dtype)


def _add_input(parser: argparse.ArgumentParser, default: str, dtype: str) -> None:
    parser.add_argument("input", nargs="*", default=[default], help=f"see below (default: {default})")
    group = parser.add_argument_group("input")
    group.add_argument("--length", type=int, help="tokens of a built-in input")
    group.add_argument("--heads", type=int, help="query heads of a synthetic input (default: 4)")
    group.add_argument("--kv-heads", type=int, help="key/value heads of a synthetic input (default: 1)")
    group.add_argument("--head-dim", type=int, help="head size of a synthetic input (default: 128)")
    group.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32", "float64"),
        help=f"convert the input (default: {dtype}; files as stored)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of a synthetic input (default: 0)")


def _add_scores(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, help="factor of the scores (default: 1/sqrt(head_dim))")
    parser.add_argument("--softcap", type=float, default=0.0, help="cap of the scores (default: 0, none)")


def parser(more: Sequence[Add] = ()) -> argparse.ArgumentParser:
    from .comparing import methods_by_name
    from .demo import CONFIG

    raw = argparse.RawDescriptionHelpFormatter
    whole = _Parser(
        prog="s2o",
        description="S2O sparse attention: see it at work, find a tau, compare methods, or GPU and reference, report "
        "and compile.",
        epilog=EXIT_STATUS,
        formatter_class=raw,
    )
    whole.add_argument("--version", action="version", version=f"s2o_cupy {__version__}")
    commands = whole.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Any, text: str, epilog: str = "", **options: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text, epilog=f"{epilog}\n{EXIT_STATUS}", formatter_class=raw, **options
        )
        sub.add_argument("--json", action="store_true", help="write the result to stdout as JSON")
        sub.set_defaults(run=run, parser=sub)
        return sub

    demo = command("demo", _demo, "S2O on real attention inputs: density, error, time and a picture", INPUT_HELP)
    _add_input(demo, "trace", DTYPES_OF_BUILT_IN)
    add_config(demo, CONFIG)
    drawn = demo.add_mutually_exclusive_group()
    drawn.add_argument("--plot", help="the picture to write (default: s2o_demo.png)")
    drawn.add_argument("--no-picture", action="store_true", help="write no picture")
    demo.add_argument("--picture-head", help="the head to draw, from 0, or layer.head (default: 1)")

    diff = command("diff", _diff, "compare the GPU with the NumPy reference, stage by stage", INPUT_HELP)
    _add_input(diff, "trace", "bfloat16")
    add_config(diff, S2OConfig())
    _add_scores(diff)
    diff.add_argument("--no-causal", action="store_true", help="let every query see every key")
    diff.add_argument("--fp8", action="store_true", help="keys and values rounded to e4m3, in the pages of a cache")

    # Without abbreviations, as --tau would be one of --taus.
    tune = command("tune", _tune, "the tau of an error or a density, by a sample of segments", INPUT_HELP,
                   allow_abbrev=False)  # fmt: skip
    _add_input(tune, "trace", DTYPES_OF_BUILT_IN)
    target = tune.add_mutually_exclusive_group()
    target.add_argument("--error", type=float, help="find the largest tau with at most this rel_l2, over all heads")
    target.add_argument("--density", type=float, help="find the smallest tau with at most this share of pairs computed")
    tune.add_argument("--taus", help="the taus to look at first, separated by commas")
    tune.add_argument(
        "--by", choices=BY, help="a tau for each layer or head, or one for all layers, of a folder or file of captured "
        "layers (default: one for the input as a whole)",
    )  # fmt: skip
    tune.add_argument("--segments", type=int, default=32, help="how many to take, drawn by --seed (default: 32)")
    tune.add_argument("--out", help=OUT_HELP)
    tune.add_argument("--plot", help="a picture to write: error by density")
    add_config(tune, S2OConfig(), found=("tau", "error"))
    _add_scores(tune)

    versus = command("compare", _compare, "methods side by side: density, error and time", INPUT_HELP)
    _add_input(versus, "trace", DTYPES_OF_BUILT_IN)
    versus.add_argument(
        "--method", action="append", metavar="NAME[:FIELD=VALUE,...]",
        help=f"one to compare, such as xattention:stride=16 or, by head, s2o:tau=0.1/0.2; as often as wanted: "
        f"{', '.join(methods_by_name())}, or FILE.py:NAME, one of your own (default: all with kernels, by defaults)",
    )  # fmt: skip
    versus.add_argument("--repeats", type=int, default=5, help="timed calls of each, on a GPU (default: %(default)s)")
    versus.add_argument("--plot", help="a picture to write: error by time on a GPU, else by density")
    _add_scores(versus)
    versus.add_argument("--no-causal", action="store_true", help="let every query see every key")

    command("info", _info, "versions, GPU and paths: what a bug report needs")

    build = command("compile", _compile, "build kernels into the cache that calls use; needs no GPU")
    build.add_argument("--all", action="store_true", help="list every kernel, not only those at fault")
    build.add_argument(
        "--arch", help=f"separated by commas (default: of the GPUs here; without one, {','.join(ARCHITECTURES)})"
    )
    build.add_argument("--dtype", choices=("float16", "bfloat16"), help="of the arrays (default: both)")
    build.add_argument("--head-dim", type=int, help=f"head size, up to {spec.MAX_HEAD_DIM} (default: any)")
    build.add_argument(
        "--sample", action="store_true", help="only some kernels, which stand for the others; for a quick check"
    )
    for add in more:
        add(command)
    return whole
