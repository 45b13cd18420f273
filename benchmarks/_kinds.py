"""Kinds of attention that a model or a layer runs with: dense by one of PyTorch's kernels, S2O as configured or as
tuned to the model, or another method."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import _baselines
import _common

from s2o_cupy import S2OConfig
from s2o_cupy.methods.own import AnyMethod, method_name
from s2o_cupy.tools.comparing import parse_method, settings_of
from s2o_cupy.tools.tune_layers import TunedLayers

Kind = str | AnyMethod | TunedLayers  # a baseline by its name

# Why some layers of a model attend densely whatever the configuration.
NOT_FOR_S2O = {"sliding window"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base", type=_common.fields, default={}, metavar="FIELD=VALUE,...",
        help="S2OConfig's fields for every configuration, such as dense_up_to=0; alone they are the first one",
    )  # fmt: skip
    parser.add_argument(
        "--set", type=_common.fields, action="append", default=[], metavar="FIELD=VALUE,...",
        help="a further configuration, such as tau=0.02,segment=512; as often as wanted",
    )  # fmt: skip
    parser.add_argument(
        "--method", type=_method, action="append", default=[], metavar="NAME[:FIELD=VALUE,...]",
        help="another method, such as xattention:stride=16, or one of your own, FILE.py:NAME; as often as wanted",
    )  # fmt: skip
    parser.add_argument("--baselines", type=_common.names, default=["cudnn", "flash2"], help="ratios: to the first")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with what is wrong with the arguments of `add_arguments`."""
    if not args.baselines or set(args.baselines) - {"cudnn", "flash2"}:
        parser.error("--baselines: accepted: one or both of cudnn and flash2")
    try:
        configs(args)
    except (TypeError, ValueError) as error:  # fields that are right alone and wrong together
        parser.error(f"--base and --set: {error}")


def _method(text: str) -> str:
    """As it came, once it is known to be a method's."""
    try:
        found = parse_method(text, "--method")
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if isinstance(found, S2OConfig):
        raise argparse.ArgumentTypeError(f"{text}: accepted: another method than S2O, which --set configures")
    return text


def configs(args: argparse.Namespace) -> list[S2OConfig]:
    """--base first, then every --set on top of it, each once."""
    return list(dict.fromkeys(S2OConfig(**args.base | fields) for fields in ({}, *args.set)))


def kinds(args: argparse.Namespace) -> list[Kind]:
    return [*args.baselines, *configs(args), *(parse_method(x, "--method") for x in args.method)]


@contextlib.contextmanager
def attention(kind: Kind) -> Iterator[str]:
    """transformers' name for a kind, which is what runs inside."""
    if isinstance(kind, str):
        from torch.nn.attention import sdpa_kernel

        if kind == "sdpa":  # whichever kernel PyTorch takes, where there is no GPU
            yield kind
            return
        with sdpa_kernel(_baselines.sdpa_backends()[kind]):
            yield "sdpa"
        return
    from s2o_cupy.integrations.fallbacks import BY_S2O
    from s2o_cupy.integrations.transformers import register

    config, per_layer = (kind.config, kind.per_layer) if isinstance(kind, TunedLayers) else (kind, None)
    s2o = register("s2o", config, per_layer, min_seqlen=0)
    yield "s2o"
    is_s2o = isinstance(kind, (S2OConfig, TunedLayers))
    ran, who = ({*BY_S2O}, "S2O") if is_s2o else ({"method"}, told(kind))
    if s2o.calls.keys() - ran - NOT_FOR_S2O or not s2o.calls.keys() & ran:
        raise RuntimeError(f"{who} did not run throughout, so these are not its figures: {dict(s2o.calls)}")


def turns(first: Kind, kind: Kind) -> list[Kind]:
    """Both, or one if they are the same."""
    return [first] if kind is first else [first, kind]


def described(kind: Kind, length: int) -> dict[str, Any]:
    """A row's part on its kind, with so many tokens."""
    if isinstance(kind, str):
        return {"attention": kind}
    if isinstance(kind, TunedLayers):
        found = {"config": told(kind), "default": False, "taus": [x.tolist() for x in kind.taus]}
        return {"attention": "s2o", **found, **_common.describe(kind.config, length)}
    if isinstance(kind, S2OConfig):
        fields = {"config": _common.text_of_fields(kind), "default": kind == S2OConfig()}
        return {"attention": "s2o", **fields, **_common.describe(kind, length)}
    return {"attention": method_name(kind), "config": settings_of(kind) or "default"}


def told(kind: Kind) -> str:
    if isinstance(kind, TunedLayers):
        return f"tuned, {kind.target.name}={kind.target.value:g},by={kind.by}"
    if isinstance(kind, S2OConfig):
        return f"S2O, {_common.text_of_fields(kind)}"
    return kind if isinstance(kind, str) else f"{method_name(kind)}, {settings_of(kind) or 'default'}"
