"""Configurations by layer and head as a JSON file.

    {"config": {"tau": 0.02, ...}, "min_seqlen": 8192, "per_layer": {"0": {"tau": 0.1}, "3": null, "7.2": {"tau": 1}}}

``config`` has the fields of S2OConfig, all or some. ``per_layer`` says what differs from it: of a layer, or of a head
as layer.head, both counted from 0; null leaves a layer to the model's own attention. With fewer keys than
``min_seqlen`` that runs in all layers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import plain_kind
from ..nearest import nearest
from ..spec import S2OConfig

__all__ = [
    "BY", "MIN_SEQLEN", "PerLayer", "Settings", "config_of", "head_name", "plain_config", "plain_per_layer",
    "read_settings",
]  # fmt: skip

MIN_SEQLEN = 8192  # keys of a call, if nobody says; with more, `dense_up_to` still has a say
BY = ("model", "layer", "head")  # what may have a tau of its own
PerLayer = Mapping[int | tuple[int, int], S2OConfig | None]

_READ = ("config", "per_layer", "min_seqlen")  # entries of a file


class Settings(NamedTuple):
    """What a file says, as `s2o_cupy.integrations.transformers.register` takes it."""

    config: S2OConfig
    per_layer: dict[int | tuple[int, int], S2OConfig | None]
    min_seqlen: int | None = None  # None: it does not say


def head_name(layer: int, head: int) -> str:
    """A head of a model, both counted from 0."""
    return f"{layer}.{head}"


def plain_config(config: S2OConfig) -> dict[str, Any]:
    """All fields, for JSON: null where there is no choice, so that another segment or rank written beside it holds."""
    values = dict(zip((field.name for field in fields(S2OConfig)), config.values, strict=True))
    return values | dict.fromkeys(config.without_choice)


def plain_per_layer(config: S2OConfig, per_layer: PerLayer) -> dict[str, dict[str, Any] | None]:
    """What of each differs from ``config``, for JSON, in the order of layers and heads."""
    base, found = plain_config(config), {}
    for key in sorted(per_layer, key=lambda key: key if isinstance(key, tuple) else (key, -1)):
        value = per_layer[key]
        name = head_name(*key) if isinstance(key, tuple) else str(key)
        found[name] = None if value is None else {k: x for k, x in plain_config(value).items() if x != base[k]}
    return found


def config_of(settings: Mapping[str, Any], where: str) -> S2OConfig:
    """S2OConfig of some of its fields. Its TypeError or ValueError begins with ``where`` they come from."""
    try:
        return S2OConfig(**settings)
    except (TypeError, ValueError) as error:
        raise plain_kind(error)(f"{where}: {error}") from error


def read_settings(path: str | os.PathLike[str]) -> Settings:
    """``config``, ``per_layer`` and ``min_seqlen`` of a file.

    Raises
    ------
    FileNotFoundError, TypeError, ValueError
        The message names the file, the entry and what is accepted.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file; accepted: a file that tune_model or s2o tune wrote") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{path}: a folder; accepted: a file that tune_model or s2o tune wrote") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); accepted: a file that tune_model or s2o tune wrote") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("config"), Mapping):
        raise ValueError(f'{path}: no object with "config"; accepted: a file that tune_model or s2o tune wrote')
    for name in found:  # tools write more than is read here, but nothing that looks like what is
        if name not in _READ and (near := nearest(name, _READ, 0.8)):
            raise ValueError(f"{path}: {name} is no entry; did you mean {near}?")
    base, entries, min_seqlen = found["config"], found.get("per_layer") or {}, found.get("min_seqlen")
    if min_seqlen is not None and (isinstance(min_seqlen, bool) or not isinstance(min_seqlen, int) or min_seqlen < 0):
        raise ValueError(f"{path}: min_seqlen is {min_seqlen!r}; accepted: an integer >= 0, or null")
    config = config_of(base, f"{path}: config")
    if not isinstance(entries, Mapping):
        raise ValueError(f"{path}: per_layer is a {type(entries).__name__}; accepted: an object")
    per_layer: dict[int | tuple[int, int], S2OConfig | None] = {}
    for name, changes in entries.items():
        if not re.fullmatch(r"\d+(\.\d+)?", name):
            raise ValueError(f'{path}: per_layer has {name!r}; accepted: a layer such as "3" or a head such as "3.7"')
        layer, _, head = name.partition(".")
        key = (int(layer), int(head)) if head else int(layer)
        if changes is not None and not isinstance(changes, Mapping):
            raise ValueError(f"{path}: per_layer has {changes!r} for {name}; accepted: fields of S2OConfig, or null")
        where = f"{path}: per_layer[{name}]"
        per_layer[key] = None if changes is None else config_of({**base, **changes}, where)
    return Settings(config, per_layer, min_seqlen)
