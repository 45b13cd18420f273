"""An option of the command line for each field of S2OConfig."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from .. import spec
from ..plan.launch_plan import dense_by_default
from ..spec import S2OConfig

__all__ = ["add_config", "config_of", "options_given"]

CHOICES = {"rank": spec.RANKS, "path": spec.PATHS, "tail": spec.TAILS}
CONFIG_HELP = {
    "segment": "queries per segment, whose own keys are attended densely",
    "tau": "stop where a key tile adds less than this share of the mass; 0 is dense; one, or one for each query head, "
    "separated by commas",
    "error": "in place of tau: the largest tau of each head whose rel_l2 against dense attention, estimated on some "
    "segments, is at most this; one, or one for each query head",
    "block_m": "queries that stop together",
    "block_n": "keys between two stop checks",
    "rank": "score of a key: largest weight that a query, or a pooled one, gives it; their largest product; the mean's",
    "unit": "neighbouring keys that are scored and visited together, of --rank query or weight",
    "pooled_queries": "means of runs of a segment's queries, of --rank weight or max",
    "window": "keys before the segment that are attended densely too",
    "workspace_bytes": "bound on the GPU memory of scores and key orders",
    "path": "GPU kernels",
    "tail": "what unvisited keys count for: nothing, or what a sample of them says, to first order",
    "dense_up_to": "keys up to which the GPU computes plain dense attention, 0 for never",
    "dense_last": "queries at the end that attend to all their keys",
    "clusters": "groups of a unit's keys that are scored apart, of --rank query",
}


# Defaults that depend on the rank, or on what is asked of it.
BY_RANK = {
    "rank": "query, with --pooled-queries weight",
    "segment": "128, with --rank max or mean 1024",
    "unit": f"{spec.DEFAULT_UNIT['query']}, with --rank weight {spec.DEFAULT_UNIT['weight']}, with max or mean 1",
    "pooled_queries": "all of a segment, with --rank weight one for 8 queries, with max 16, with mean 1",
    "clusters": f"{spec.CLUSTERS[-1]}",
    "tail": "first_order with --rank query, else none",
}


def _by_head(text: str) -> float | list[float]:
    """A number for all heads, or one for each, separated by commas."""
    try:
        found = [float(x) for x in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; accepted: a number, or numbers separated by commas") from None
    return found[0] if len(found) == 1 else found


class _Stored(argparse.Action):
    """Stores a value, and that its option was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.given = [*options_given(namespace), self.option_strings[0]]


def options_given(args: argparse.Namespace) -> list[str]:
    """Those of S2OConfig's fields that stand on the command line."""
    found: list[str] = getattr(args, "given", [])
    return found


def add_config(parser: argparse.ArgumentParser, defaults: S2OConfig, found: Sequence[str] = ()) -> None:
    """An option for each field, but for those that the command finds."""
    group = parser.add_argument_group("S2O")
    parser.set_defaults(asked=[field.name for field in fields(S2OConfig) if field.name not in found])
    for field in fields(S2OConfig):
        default = getattr(defaults, field.name)
        if field.name in found:
            continue
        said: Any = default
        kind: Callable[[str], Any] = type(default)
        if field.name in BY_RANK:
            default, said = None, BY_RANK[field.name]
        if default is None:
            kind = str if field.name in CHOICES else int
        if field.name in ("tau", "error"):
            kind = _by_head
        if field.name == "tau":
            said = f"{spec.DEFAULT_TAU_WITH_TAIL} with --rank query and its tail, else {spec.DEFAULT_TAU}; over "
            said += f"{spec.LONG_FROM:,} keys less by the square root of their number"
        if field.name == "dense_up_to" and default is None:
            few, many = dense_by_default(6, 128), dense_by_default(32, 128)
            said = f"{many} with 32 heads of 128, {few} with 6, and any at tau 0"
        if field.name == "dense_last" and default is None:
            said = f"{spec.DENSE_LAST} of {spec.DENSE_LAST * spec.DENSE_LAST_PART} or more, with --rank query or weight"
        if field.name == "error":
            said = "none"
        said = f"{CONFIG_HELP[field.name]} (default: {said})"
        options: dict[str, Any] = {"type": kind, "action": _Stored, "help": said}
        if field.name in CHOICES:
            options["choices"] = CHOICES[field.name]
        group.add_argument(f"--{field.name.replace('_', '-')}", default=default, **options)


def config_of(args: argparse.Namespace) -> S2OConfig:
    return S2OConfig(**{name: getattr(args, name) for name in args.asked})
