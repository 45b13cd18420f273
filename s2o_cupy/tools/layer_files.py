"""Files and folders with q, k and v of several layers of a model, as `s2o_cupy.integrations.transformers.capture`
writes them, and what their heads are called."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from .inputs import QKV, Paths, load
from .layer_settings import head_name
from .readers import LAYER_FILE, read_layers

__all__ = ["head_names", "layer_file", "layers_of", "load_layers", "named_layers"]


def layer_file(layer: int) -> str:
    """The name of a layer's file in a folder."""
    return f"layer_{layer:03}.safetensors"


def _paths(source: Paths) -> list[Path]:
    return [Path(source)] if isinstance(source, str | os.PathLike) else [Path(path) for path in source]


def layers_of(source: Paths) -> tuple[int, ...] | None:
    """The layers whose heads stand side by side in a file, in their order; None if it does not say."""
    paths = _paths(source)
    if len(paths) != 1 or not paths[0].is_file():
        return None
    return read_layers(paths[0])


def named_layers(source: Paths) -> tuple[int, ...] | None:
    """`layers_of`, and None too where what stands there are no layers: what only names heads does without."""
    try:
        return layers_of(source)
    except ValueError:
        return None


def head_names(source: Paths, heads: int) -> list[str]:
    """Each of an input's query heads: layer.head where a file says of which layers they are, else 0, 1, ..."""
    layers = named_layers(source)
    if not layers or heads % len(layers):
        return [str(h) for h in range(heads)]
    return [head_name(layer, h) for layer in layers for h in range(heads // len(layers))]


def load_layers(source: Paths) -> Mapping[int, QKV]:
    """q, k and v by layer, from a folder of layer_<number>.safetensors or .npz, or from one file with several layers.

    A folder's files are read when they are asked for, as all together may be more than memory holds.
    """
    paths = _paths(source)
    if len(paths) == 1 and paths[0].is_dir():
        found = {int(m[1]): path for path in sorted(paths[0].iterdir()) if (m := LAYER_FILE.fullmatch(path.name))}
        if found:
            return _Files(found)
    layers, named = layers_of(source), ", ".join(map(str, _paths(source)))
    if not layers:
        raise ValueError(
            f"{named}: does not say of which layers its heads are; accepted: a folder or a file that "
            "s2o_cupy.integrations.transformers.capture wrote"
        )
    qkv = load(source)
    for name, x in qkv._asdict().items():
        if x.shape[-3] % len(layers):
            raise ValueError(f"{named}: {name} has {x.shape[-3]} heads of {len(layers)} layers; accepted: as many each")
    q, k, v = (np.split(x, len(layers), axis=-3) for x in qkv)
    return {layer: QKV(*arrays) for layer, *arrays in zip(layers, q, k, v, strict=True)}


class _Files(Mapping[int, QKV]):
    def __init__(self, paths: dict[int, Path]) -> None:
        self.paths = paths

    def __getitem__(self, layer: int) -> QKV:
        return load(self.paths[layer])

    def __iter__(self) -> Iterator[int]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)
