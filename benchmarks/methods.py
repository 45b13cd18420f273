"""Published methods and S2O in language models: loss against time, in one run with dense attention, on one GPU.

    python benchmarks/methods.py --models A=llama.py:llama.npz:ids.npy --lengths 131072 --json methods.json
    python benchmarks/methods.py --models A=llama.py:llama.npz:ids.npy --method xattention:threshold=0.95 --plot a.png

It is model.py, whose options it takes, with other defaults: the parts loss and time, cuDNN as the baseline, S2O at
several taus, and every method at several thresholds unless --method names some. Each takes turns with cuDNN. --plot
writes a picture of each model and length: the loss beyond dense attention's by the time of attention.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import _common
import model

from s2o_cupy.tools.plot import check_picture, draw_methods
from s2o_cupy.tools.progress import progress

TAUS = ("0.02", "0.05", "0.1", "0.2")  # of S2O, beside its default
METHODS = (
    "meanpooling", "meanpooling:threshold=0.97",
    "pbs", "pbs:threshold=0.97", "pbs:scores=antidiagonal", "pbs:scores=antidiagonal,threshold=0.97",
    "sparge:tau=0.9,theta=-0.1", "sparge:tau=0.97,theta=-0.1",
    "xattention", "xattention:threshold=0.97", "xattention:stride=16",
    "flexprefill", "flexprefill:gamma=0.97",
    "verticalslash", "verticalslash:slashes=1000", "ashape",
)  # fmt: skip
LINEAR_TO = 1e-3  # nats, about a standard error: above, a picture's axis is logarithmic


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """model.py's arguments and --plot."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--plot", metavar="PICTURE", help="a picture for each model and length, whose names it gets")
    mine, rest = own.parse_known_args(given)
    if "-h" in rest or "--help" in rest:
        print(__doc__)
        own.print_help()
    defaults = {
        "--parts": ["loss,time"], "--baselines": ["cudnn"], "--set": [f"tau={tau}" for tau in TAUS],
        "--method": METHODS,
    }  # fmt: skip
    for name, values in defaults.items():
        if not any(x.partition("=")[0] == name for x in rest):
            rest += [x for value in values for x in (name, value)]
    args = model.parse(rest)
    args.plot = mine.plot
    if mine.plot and (missing := check_picture(mine.plot, "methods")):
        raise SystemExit(f"methods.py: no picture: {missing}")
    return args


def draw(path: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """A picture of each model and length; returns their paths."""
    written = []
    for name, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        groups: dict[str, list[tuple[float, float, str]]] = {}
        for row in rows:
            if (row["model"], row["length"]) == (name, length) and "config" in row:
                of_row = row["x_attention"], row["loss_difference"], row["config"]
                groups.setdefault(row["attention"].replace("s2o", "S2O"), []).append(of_row)
        target = pathlib.Path(path)
        into = str(target.with_stem(f"{target.stem}_{name}_{length}"))
        labels = "time of attention / cuDNN's", "nats per token more than dense attention"
        draw_methods(into, groups, labels, f"Model {name}, {length:,} tokens", LINEAR_TO)
        written.append(into)
    return written


def main() -> None:
    args = parse()
    with progress("methods") as report:
        rows = model.run(args, report)
    print(_common.table(rows, model.COLUMNS))
    if args.plot:
        print("\n".join(draw(args.plot, rows)))


if __name__ == "__main__":
    main()
