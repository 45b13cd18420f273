"""What the plug-ins of serving engines share: settings, which requests of a batch are S2O's, and the call for them."""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ..api.paged import s2o_attention_paged
from ..extras import with_extra
from ..nearest import meant
from ..plan.device import DeviceLimits
from ..problem import validate
from ..selection.methods import make_plan
from ..spec import MAX_HEAD_DIM, S2OConfig
from ..tools.layer_settings import MIN_SEQLEN, config_of, read_settings

with with_extra(__name__, "PyTorch"):
    import torch

    from .fallbacks import CallCounts, Kinds

__all__ = [
    "Cache", "Counts", "Run", "ServingSettings", "attend", "cut", "ended", "kind_of_request", "scales_of",
    "why_not_shape",
]  # fmt: skip

Tensor = Any  # torch.Tensor

# Of those first nobody is warned: every server has them, and the engine's own attention is meant to take them.
_EXPECTED = {
    "decoding": "one query",
    "graph": "a CUDA graph is captured, or was not prepared for S2O",
}
_SHAPES = ((1, 1, 16384, 128),) * 3  # of a prompt that any settings should serve
_UNEXPECTED = {
    "short": f"fewer keys than min_seqlen, {MIN_SEQLEN:,} if the settings do not say",
    "few queries": "fewer queries than block_m, such as the rest of a prompt whose beginning is cached",
    "drafted tokens": "queries that are not of a prompt, or of a draft model",
    "layer": "per_layer says null for the layer",
    "not causal": "an encoder, cross-attention, or attention that is not causal",
    "sliding window": "the layer has a sliding window, or attends in chunks",
    "sinks": "the layer has attention sinks",
    "bias": "ALiBi, a bias or a temperature on scores",
    "mask": "tokens that see others than the causal ones, such as those of an image or of several scored items",
    "cache dtype": "the cache has another dtype than the queries and is not e4m3 with a scale for all or for each head",
    "shape": "head_dim above 256 or no multiple of 8, or values of another head_dim",
    "page size": "pages whose size is no power of two",
    "token pool": "a pool of tokens whose numbers are translated, or that is no plain array of keys and values",
    "context parallel": "a sequence's keys are spread over several GPUs",
    "arguments": "the model passes arguments that S2O does not have",
}


def _kinds(engine: str, log: str) -> Kinds:
    return Kinds(log, f"{engine}'s own attention", _EXPECTED, _UNEXPECTED, {"s2o": "S2O"})


class Counts(CallCounts):
    """How often a request met a layer, and what attended. Says so when the process ends."""

    def __init__(self, engine: str, log: str) -> None:
        super().__init__(_kinds(engine, log))
        atexit.register(self._say_at_the_end)

    def add_now(self, what: str, times: int = 1, layer: int = -1) -> None:
        first = what not in self.calls
        super().add_now(what, times, layer)
        if first and what == "s2o":
            logging.getLogger(self.kinds.log).info("s2o: took its first prompt")

    def _say_at_the_end(self) -> None:
        if self.calls:
            logging.getLogger(self.kinds.log).info("s2o: requests times layers\n%s", self.report())


@dataclass(frozen=True)
class ServingSettings:
    """Which prompts are S2O's, and how it attends."""

    config: S2OConfig
    min_seqlen: int = MIN_SEQLEN  # with fewer keys the engine's own attention runs
    per_layer: Mapping[int, S2OConfig | None] = field(default_factory=dict)
    backend: str | None = None  # SGLang's attention that takes the rest

    @classmethod
    def parse(cls, given: Any, owner: str) -> ServingSettings:
        """Of a mapping, the text of a JSON object, or the path of a file that tune_model or `s2o tune` wrote. ``owner``
        says in errors whose it is.

        Raises FileNotFoundError, TypeError or ValueError that names the entry, what came and what is accepted.
        """
        if isinstance(given, str):
            given = _parse_text(given, owner)
        if not isinstance(given, Mapping):
            raise TypeError(f"{owner} is a {type(given).__name__}; accepted: a JSON object, or the path of a file")
        min_seqlen, backend = given.get("min_seqlen", MIN_SEQLEN), given.get("backend")
        if isinstance(min_seqlen, bool) or not isinstance(min_seqlen, int) or min_seqlen < 0:
            raise ValueError(f"{owner}: min_seqlen is {min_seqlen!r}; accepted: an integer >= 0")
        if not isinstance(backend, str | None):
            raise TypeError(f"{owner}: backend is {backend!r}; accepted: a name of SGLang's attention backends")
        named = "min_seqlen" in given
        given = {name: value for name, value in given.items() if name not in ("min_seqlen", "backend")}
        if "settings" in given:
            config, per_layer, of_file = _of_file(given, owner)
            min_seqlen = min_seqlen if named or of_file is None else of_file
        else:
            layers = given.pop("per_layer", None) or {}
            config, per_layer = _config(given, owner), _layers(given, layers, owner)
        for asked in (config, *per_layer.values()):
            if asked is not None and asked.error is not None:
                raise ValueError(
                    f"{owner}: error is {asked.error}; accepted: a tau, for each layer if need be, as s2o tune-model "
                    "--error finds them"
                )
        return cls(config, min_seqlen, per_layer, backend)

    @functools.cached_property
    def block_m(self) -> int:
        """The largest of all layers: a request is S2O's in all of them or in none, before layers are known."""
        return max(config.block_m for config in (self.config, *self.per_layer.values()) if config)

    def within(self, layers: int | None, owner: str) -> ServingSettings:
        """The same of a model with so many layers; ValueError if per_layer names others, or if settings are such that
        no prompt could run by them on this process's GPU. None: nobody knows."""
        beyond = sorted(layer for layer in self.per_layer if layers is not None and layer >= layers)
        if beyond and layers is not None:
            raise ValueError(
                f"{owner}: per_layer names {', '.join(map(str, beyond))}; accepted: 0 to {layers - 1}, as the model "
                f"has {layers} layers"
            )
        if layers is None or any(layer not in self.per_layer for layer in range(layers)):
            _check_runs(self.config, owner, _capability())
        for layer, config in self.per_layer.items():
            if config is not None:
                _check_runs(config, f"{owner}: per_layer[{layer}]", _capability())
        return self

    def of_layer(self, layer: int) -> S2OConfig | None:
        return self.per_layer.get(layer, self.config)


def _capability() -> int:
    """The compute capability of this process's GPU, 90 for 9.0; without one that of Hopper."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@functools.lru_cache
def _check_runs(config: S2OConfig, where: str, capability: int) -> None:
    """Raise what a GPU of this compute capability would refuse of every prompt."""
    if isinstance(config.tau, tuple):
        raise ValueError(
            f"{where}: tau has {len(config.tau)} numbers; accepted: one for all heads, as a server's GPUs may have "
            "some of them each"
        )
    try:
        problem = validate(_SHAPES, ("bfloat16",) * 3, config=config, backend="cupy")
        make_plan(problem, config, DeviceLimits.of_architecture(capability), aligned=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error.args[0]}") from error


def _parse_text(text: str, owner: str) -> Any:
    if os.path.isfile(text) or not text.lstrip().startswith(("{", "[", '"')):
        return {"settings": text}
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{owner} is no JSON ({error}); accepted: a JSON object, or the path of a file") from error
    if not isinstance(found, Mapping):
        raise TypeError(f"{owner} is {text}; accepted: a JSON object, or the path of a file, without quotes")
    return found


def _of_file(given: Mapping[str, Any], owner: str) -> tuple[S2OConfig, dict[int, S2OConfig | None], int | None]:
    if len(given) > 1:
        others = ", ".join(name for name in given if name != "settings")
        raise ValueError(f"{owner}: settings and {others} came together; accepted: settings, min_seqlen and backend")
    path = given["settings"]
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{owner}: settings is {path!r}; accepted: the path of a file that tune_model wrote")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{owner}: no file {str(path)!r}; accepted: a JSON object, or the path of a file")
    config, per_layer, min_seqlen = read_settings(path)
    layers = {key: value for key, value in per_layer.items() if isinstance(key, int)}
    if len(layers) < len(per_layer):
        raise ValueError(f'{owner}: {path} names heads; accepted: layers, as of by="layer"')
    return config, layers, min_seqlen


def _layers(base: Mapping[str, Any], layers: Any, owner: str) -> dict[int, S2OConfig | None]:
    if not isinstance(layers, Mapping):
        raise TypeError(f"{owner}: per_layer is a {type(layers).__name__}; accepted: a JSON object by layer")
    found: dict[int, S2OConfig | None] = {}
    for layer, changes in layers.items():
        if not str(layer).isdecimal():
            raise ValueError(f"{owner}: per_layer has the key {layer!r}; accepted: a layer, counted from 0")
        if not isinstance(changes, Mapping | None):
            raise TypeError(
                f"{owner}: per_layer[{layer}] is {changes!r}; accepted: null, or an object of S2OConfig's fields"
            )
        where = f"{owner}: per_layer[{layer}]"
        found[int(layer)] = None if changes is None else config_of({**base, **changes}, where)
    return found


def _config(settings: Mapping[str, Any], owner: str) -> S2OConfig:
    known = [x.name for x in fields(S2OConfig)]
    for name in settings:
        if name not in known:
            accepted = ["min_seqlen", "per_layer", "settings", "backend", *known]
            like = meant(str(name), accepted)
            raise ValueError(f"{owner}: {name!r} is not a setting; {like}accepted: {', '.join(accepted)}")
    return config_of(settings, owner)


class Run(NamedTuple):
    """Neighbouring requests of a batch that are all S2O's, or all the engine's. Their rows of q are neighbours too."""

    s2o: bool
    requests: slice
    tokens: slice  # rows of q
    lengths: tuple[tuple[int, int], ...]  # queries and keys of each request
    ends: bool = True  # of S2O's: a request's last query is the last of its prompt


def kind_of_request(seqlen_q: int, seqlen_k: int, settings: ServingSettings) -> str:
    """"s2o", or why a request is not S2O's."""
    if seqlen_q == 1:
        return "decoding"
    if seqlen_k < settings.min_seqlen:
        return "short"
    return "few queries" if seqlen_q < settings.block_m else "s2o"


def ended(
    lengths: Sequence[tuple[int, int]], budget: int | None, step: int = 1, of_prompts: Sequence[bool] | None = None
) -> list[bool]:
    """Of each request of a pass, whether its prompt ends with its last query, as far as its lengths tell.

    A scheduler fills a pass with prompts, each counted in whole ``step`` tokens, and cuts one where ``budget`` tokens
    are reached. So a prompt that fills a pass by itself goes on. Of several one may: nobody can tell which, and all are
    taken to end, which costs no more than time. ``of_prompts``: which requests are prompts; by default those of more
    than one query.
    """
    found = [True] * len(lengths)
    prompts = [i for i, (seqlen_q, _) in enumerate(lengths) if seqlen_q > 1 and (of_prompts is None or of_prompts[i])]
    if len(prompts) == 1 and budget is not None and budget > 0:
        queries = lengths[prompts[0]][0]
        others = sum(seqlen_q for seqlen_q, _ in lengths) - queries
        found[prompts[0]] = budget - others - -(-queries // step) * step >= step
    return found


def cut(
    lengths: Sequence[tuple[int, int]], kinds: Sequence[str], ends: Sequence[bool] | None = None
) -> tuple[Run, ...]:
    """A batch, cut where S2O's requests border on others, and those that end their prompts on those that do not (by
    ``ends``, all by default). Requests without queries, as padding of a batch, go with those before them."""
    flags: list[tuple[bool, bool]] = []
    for (seqlen_q, _), kind, ending in zip(lengths, kinds, ends or [True] * len(lengths), strict=True):
        if seqlen_q:
            flags.append((kind == "s2o", ending or kind != "s2o"))
        else:
            flags.append(flags[-1] if flags else (False, True))
    runs = []
    begin, first = 0, 0
    for (s2o, ending), same in itertools.groupby(flags):
        end = first + len(list(same))
        of_run = tuple(lengths[first:end])
        rows = sum(seqlen_q for seqlen_q, _ in of_run)
        if rows:
            runs.append(Run(s2o, slice(first, end), slice(begin, begin + rows), of_run, ending))
        begin, first = begin + rows, end
    return tuple(runs)


def why_not_shape(head_dim: int, head_dim_v: int, page_size: int) -> str | None:
    """Why S2O does not take a layer's keys and values, or None."""
    if head_dim != head_dim_v or head_dim > MAX_HEAD_DIM or head_dim % 8:
        return "shape"
    return "page size" if page_size & (page_size - 1) else None


def scales_of(k_scale: Any, v_scale: Any, kv_heads: int) -> tuple[Any, Any] | None:
    """The scales of a layer's cache of 8 bits as s2o_attention_paged takes them, 1 for None; None: it does not."""
    flat = [1.0 if x is None else x if isinstance(x, float) else x.detach().reshape(-1) for x in (k_scale, v_scale)]
    if any(not isinstance(x, float) and len(x) not in (1, kv_heads) for x in flat):
        return None
    return flat[0], flat[1]


@functools.lru_cache(maxsize=64)  # layers share it
def _with_last(config: S2OConfig, last: int) -> S2OConfig:
    return replace(config, dense_last=last)


class Cache(NamedTuple):
    """The engine's keys and values, read where they lie."""

    k_pages: Tensor  # [pages, page_size, kv_heads, head_dim]
    v_pages: Tensor
    page_table: Tensor  # of the whole batch
    k_scale: Tensor | float | None = None  # of 8 bits
    v_scale: Tensor | float | None = None


def attend(
    run: Run, q: Tensor, cache: Cache, out: Tensor, config: S2OConfig, scale: float, softcap: float
) -> None:
    """S2O for the requests of ``run``: q and out [tokens, heads, head_dim] are those of the whole batch. The last
    queries of prompts attend densely, not those of chunks before: so many of each prompt as if it were alone, by a call
    for neighbours with as many."""
    first, begin = run.requests.start, run.tokens.start
    for last, group in itertools.groupby(run.lengths, lambda x: config.last_of_prompt(x[1]) if run.ends else 0):
        lengths_q, lengths_k = zip(*group, strict=True)
        requests, tokens = slice(first, first + len(lengths_q)), slice(begin, begin + sum(lengths_q))
        first, begin = requests.stop, tokens.stop
        if tokens.start == tokens.stop:
            continue
        s2o_attention_paged(
            q[tokens], cache.k_pages, cache.v_pages, cache.page_table[requests], seqlen_k=list(lengths_k),
            cu_seqlens_q=list(itertools.accumulate(lengths_q, initial=0)), config=_with_last(config, last),
            scale=scale, softcap=softcap, out=out[tokens], k_scale=cache.k_scale, v_scale=cache.v_scale,
        )  # fmt: skip
