"""Which configuration each layer and head runs with, and which heads can share a call."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..methods.own import AnyMethod, as_method, method_name
from ..plan.launch_plan import dense_limit
from ..spec import S2OConfig

__all__ = ["HeadGroup", "LayerConfigs", "head_groups"]

Index = slice | list[int]


@dataclass(frozen=True)
class HeadGroup:
    """Query heads that one call takes, in the order that grouped-query attention needs, and their KV heads.

    Indices are slices where heads are evenly spaced, so that arrays are viewed and not copied. ``config`` has a tau, or
    an error, for each of these heads where they differ; of all heads of a layer it may be that of another method.
    """

    config: AnyMethod
    heads: Index
    kv_heads: Index

    def dense_heads(self, heads: int, head_dim: int, seqlen_k: int) -> list[tuple[int, bool]]:
        """Its query heads of a layer's so many, each with whether it is dense on a GPU: the call has no more keys than
        make it plain dense attention, or this head's tau is 0. If ``dense_up_to`` is given, it alone decides."""
        members = range(heads)[self.heads] if isinstance(self.heads, slice) else self.heads
        config: Any = self.config
        if seqlen_k <= dense_limit(config, len(members), head_dim):
            return [(head, True) for head in members]
        if config.dense_up_to is not None or not isinstance(config.tau, tuple):
            return [(head, False) for head in members]
        return [(head, tau == 0) for head, tau in zip(members, config.tau, strict=False)]


@functools.lru_cache(maxsize=1024)
def head_groups(configs: tuple[S2OConfig, ...], kv_heads: int) -> tuple[HeadGroup, ...]:
    """The fewest calls that give query head ``h`` the config ``configs[h]``, of which tau and error are numbers.

    Heads whose configs differ in nothing but tau, or the error, share a call, but for those with the default tau, which
    is not one number. A call needs as many query heads of one
    KV head as of another, so heads of other configs may take several.
    """
    shared = len(configs) // kv_heads
    bases = [_base(config) for config in configs]
    members: dict[tuple[S2OConfig, int], dict[int, list[int]]] = {}
    for base in dict.fromkeys(bases):
        for kv in range(kv_heads):
            heads = [h for h in range(kv * shared, (kv + 1) * shared) if bases[h] == base]
            if heads:
                members.setdefault((base, len(heads)), {})[kv] = heads
    groups = []
    for group in members.values():
        heads = [h for of_kv in group.values() for h in of_kv]
        groups.append(HeadGroup(_together([configs[h] for h in heads]), _index(heads), _index(list(group))))
    return tuple(groups)


def _base(config: S2OConfig) -> S2OConfig:
    """What heads that share a call agree on."""
    if config.error is not None:
        return config.with_error(0.5)
    return config if config.tau is None else config.with_tau(0.0)  # the default is not one number


def _together(configs: list[S2OConfig]) -> S2OConfig:
    """One config for heads that agree on all but tau, or the error."""
    if all(config == configs[0] for config in configs):
        return configs[0]
    numbers = tuple(_number(config) for config in configs)
    return configs[0].with_tau(numbers) if configs[0].error is None else configs[0].with_error(numbers)


def _of_head(config: S2OConfig, head: int) -> S2OConfig:
    """What one head has of a config with a number for each."""
    if not isinstance(_number(config), tuple):
        return config
    return config.with_tau(_number(config)[head]) if config.error is None else config.with_error(_number(config)[head])


def _number(config: S2OConfig) -> Any:
    """tau or error, a tuple of one for each head perhaps."""
    return config.tau if config.error is None else config.error


def _index(numbers: list[int]) -> Index:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    even = range(numbers[0], numbers[-1] + 1, step)
    return slice(even.start, even.stop, even.step) if list(even) == numbers else numbers


@dataclass(frozen=True)
class LayerConfigs:
    """A config for every layer and head: ``(layer, head)`` if it is named, else ``layer``, else the default. That of a
    layer may be of another method, or a method of the caller's own; that of a head may not."""

    default: AnyMethod
    layers: Mapping[int, AnyMethod | None]  # None: the model's ordinary attention
    heads: Mapping[int, Mapping[int, S2OConfig]]  # layer -> head -> config

    @classmethod
    def parse(cls, config: Any, per_layer: Any) -> LayerConfigs:
        """Raises TypeError or ValueError that names the entry, what came and what is accepted."""
        config = S2OConfig() if config is None else config
        as_method(config, owner="register", also="None")
        if per_layer is not None and not isinstance(per_layer, Mapping):
            raise TypeError(
                f"register: per_layer is a {type(per_layer).__name__}; accepted: a mapping of layer or (layer, head) "
                "to S2OConfig"
            )
        layers: dict[int, AnyMethod | None] = {}
        heads: dict[int, dict[int, S2OConfig]] = {}
        for key, value in (per_layer or {}).items():
            pair = key if isinstance(key, tuple) else (key,)
            whole = all(isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 0 for n in pair)
            if len(pair) not in (1, 2) or not whole:
                raise ValueError(
                    f"register: per_layer has the key {key!r}; accepted: a layer or a (layer, head), counted from 0"
                )
            pair = tuple(map(int, pair))
            if len(pair) == 1:
                if value is not None:
                    as_method(value, f"per_layer[{key!r}]", "register", also="None (the model's ordinary attention)")
                layers[pair[0]] = value
            elif len(pair) == 2 and isinstance(value, S2OConfig):
                heads.setdefault(pair[0], {})[pair[1]] = value
            else:
                raise TypeError(f"register: per_layer[{key!r}] is a {type(value).__name__}; accepted: S2OConfig")
        for layer in heads:
            of_layer = layers.get(layer, config)
            if of_layer is None:
                raise ValueError(
                    f"register: per_layer[{layer}] is None, and there are entries for heads of layer {layer}; "
                    "accepted: None for the layer alone (S2OConfig(tau=0) is dense attention for a head)"
                )
            if not isinstance(of_layer, S2OConfig):
                raise ValueError(
                    f"register: layer {layer} has {method_name(of_layer)}, and there are entries for heads of it; "
                    "accepted: another method for the whole layer, or an S2OConfig for each head"
                )
        return cls(config, layers, heads)

    @property
    def last_layer(self) -> int:
        """The last layer that is named, -1 without any."""
        return max((*self.layers, *self.heads), default=-1)

    def groups(self, layer: int, heads: int, kv_heads: int) -> tuple[HeadGroup, ...] | None:
        """The calls of a layer; None if it is not to run S2O."""
        config = self.layers.get(layer, self.default)
        if config is None:
            return None
        named = self.heads.get(layer)
        if not named:
            return (HeadGroup(config, slice(0, heads, 1), slice(0, kv_heads, 1)),)
        assert isinstance(config, S2OConfig)  # as parse() has seen to
        if max(named) >= heads:
            raise ValueError(
                f"register: per_layer names head {max(named)} of layer {layer}; accepted: 0 to {heads - 1}"
            )
        numbers = _number(config)
        if isinstance(numbers, tuple) and len(numbers) != heads:
            raise ValueError(
                f"register: {'tau' if config.error is None else 'error'} of layer {layer} has {len(numbers)} numbers; "
                f"accepted: one, or {heads}, one for each query head"
            )
        return head_groups(tuple(_of_head(named.get(h, config), h) for h in range(heads)), kv_heads)
