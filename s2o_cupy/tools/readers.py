"""Arrays named q, k and v from a file, by its ending. What a file says of its size is checked before data is read."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from ..extras import remedy
from . import byte_planes

__all__ = ["ACCEPTED", "DTYPES", "LAYER_FILE", "SAFETENSORS", "read_file", "read_folder", "read_layers", "read_npy"]

ACCEPTED = (
    ".npz, .safetensors or .pt with arrays q, k and v; a folder with q.npy, k.npy and v.npy; "
    "or three .npy files in the order q, k, v"
)
DTYPES = ("float16", "bfloat16", "float32", "float64")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SAFETENSORS = {"BF16": BFLOAT16, "F16": np.float16, "F32": np.float32, "F64": np.float64}  # its names
LAYER_FILE = re.compile(r"layer_(\d+)\.(npz|safetensors)")  # of a folder that `capture` writes
ALIASES = {"q": ("q", "query"), "k": ("k", "key"), "v": ("v", "value")}

# A file may unpack to so many bytes, or to so many times its own. Attention inputs compress to a half or a third; a
# file of zeros, to a thousandth: a small download could else fill a machine's memory.
UNPACKED_BYTES = 1 << 30
UNPACKED_TIMES = 16


def read_file(path: Path) -> Mapping[str, Any]:
    """What a .npz, .safetensors, .pt or .pth file holds as q, k and v."""
    _require_file(path)
    reader = {".npz": _npz, ".safetensors": _safetensors, ".pt": _torch, ".pth": _torch}.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: a file that ends in {path.suffix or 'nothing'!r}; accepted: {ACCEPTED}")
    return reader(path)


def read_folder(path: Path) -> Mapping[str, Any]:
    """q, k and v of a folder of .npy files."""
    found = {file.stem: file for file in path.glob("*.npy")}
    layers = sorted(int(m[1]) for file in path.iterdir() if (m := LAYER_FILE.fullmatch(file.name)))
    if layers and not found:
        listed = ", ".join(map(str, layers))
        raise ValueError(f"{path}: holds layers {listed}; accepted: one of its files, or give tune --by")
    return {key: read_npy(found[stored]) for key, stored in _pick(path, found).items()}


def read_layers(path: Path) -> tuple[int, ...] | None:
    """The array ``layers`` of a .npz or .safetensors file: of which layers of a model its heads are."""
    stored: np.ndarray | None = None
    if path.suffix == ".npz":
        with _reading(path, ".npz archive"), zipfile.ZipFile(path) as archive:
            if "layers.npy" in archive.namelist():
                with archive.open("layers.npy") as file:
                    _check_npy(file, archive.getinfo("layers.npy").file_size)
                with archive.open("layers.npy") as file:
                    stored = np.lib.format.read_array(file, allow_pickle=False)
    elif path.suffix == ".safetensors":
        with path.open("rb") as file, _reading(path, ".safetensors file"):
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError(f"a header of {size} bytes")
            header = file.read(size)
            metadata = json.loads(header).get("__metadata__", {})
            stored = np.array(metadata["layers"].split(","), np.int64) if "layers" in metadata else None
    if stored is None:
        return None
    if stored.ndim != 1 or stored.dtype.kind not in "iu":
        raise ValueError(f"{path}: layers is {stored.shape} {stored.dtype.name}; accepted: integers (layers,)")
    layers = tuple(stored.tolist())
    if len({*layers}) < len(layers) or min(layers, default=0) < 0:
        raise ValueError(f"{path}: layers is {list(layers)}; accepted: different numbers from 0 on")
    return layers


def read_npy(path: Path) -> np.ndarray:
    """The array of a .npy file."""
    _require_file(path, "a .npy file")
    if zipfile.is_zipfile(path):
        raise ValueError(f"{path}: an archive of arrays; accepted here: one .npy array")
    with _reading(path, ".npy array"):
        with path.open("rb") as file:
            _check_npy(file, path.stat().st_size)
        array: np.ndarray = np.load(path, allow_pickle=False)
    return array


# ---------------------------------------------------------------- what all readers share


def _require_file(path: Path, accepted: str = ACCEPTED) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; accepted: {accepted}")


def _pick(path: Path, found: Iterable[Any]) -> dict[str, str]:
    """The names under which q, k and v are stored."""
    found = list(found)
    picked = {key: next((a for a in aliases if a in found), "") for key, aliases in ALIASES.items()}
    if not all(picked.values()):
        listing = ", ".join(sorted(map(str, found))[:12]) or "nothing"
        raise ValueError(f"{path}: holds {listing}; accepted: arrays named q, k and v (or query, key and value)")
    return picked


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Name the file in whatever error a broken one causes, in one line; the libraries raise many types."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        why = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"{path}: not a readable {what} ({why})") from error


def _check_unpacked(path: Path, nbytes: int) -> None:
    """Refuse ``nbytes`` of data from a file that is too small for them."""
    size = path.stat().st_size
    accepted = max(UNPACKED_BYTES, UNPACKED_TIMES * size)
    if nbytes > accepted:
        raise ValueError(
            f"{path}: a file of {size:,} bytes that would unpack to {nbytes:,}; accepted: {accepted:,} "
            f"({UNPACKED_BYTES >> 30} GiB, or {UNPACKED_TIMES} times the file); store so much uncompressed"
        )


# ---------------------------------------------------------------- NumPy


def _check_npy(file: IO[bytes], size: int) -> None:
    """Whether the array that the header of a .npy file of ``size`` bytes declares is in it."""
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the format; accepted: 1.0 and 2.0")
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Python objects; accepted: numbers")
    present, declared = size - file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or declared > present:
        raise ValueError(f"{shape} of {dtype.name} takes {declared:,} bytes, and {present:,} are there")


def _npz(path: Path) -> Mapping[str, Any]:
    with _reading(path, ".npz archive"), zipfile.ZipFile(path) as archive:
        found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    packed = "q.high" in found
    picked = {name: name for name in byte_planes.names() if name in found} if packed else _pick(path, found)
    _check_unpacked(path, sum(found[name].file_size for name in picked.values()))
    arrays = {}
    with _reading(path, ".npz archive"), zipfile.ZipFile(path) as archive:
        for key, name in picked.items():
            with archive.open(found[name]) as file:
                _check_npy(file, found[name].file_size)
            with archive.open(found[name]) as file:
                arrays[key] = np.lib.format.read_array(file, allow_pickle=False)
    if not packed:
        return arrays
    with _reading(path, "packed trace"):
        return byte_planes.join(arrays)


# ---------------------------------------------------------------- safetensors


def _safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors import deserialize
    except ImportError as error:
        raise ImportError(f"{path}: reading it needs safetensors; remedy: {remedy('safetensors')}") from error
    with _reading(path, ".safetensors file"):
        stored = dict(deserialize(path.read_bytes()))

    def view(key: str) -> np.ndarray:
        tensor = stored[key]
        if tensor["dtype"] not in SAFETENSORS:
            raise ValueError(f"{path}: {key} is {tensor['dtype']}; accepted: {', '.join(SAFETENSORS)}")
        return np.frombuffer(tensor["data"], SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])

    return {key: view(name) for key, name in _pick(path, stored).items()}


# ---------------------------------------------------------------- PyTorch


def _torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"{path}: reading it needs PyTorch; remedy: {remedy('PyTorch')}, or q, k and v in a .npz file"
        ) from error
    if zipfile.is_zipfile(path):
        with _reading(path, "file of tensors"), zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        _check_unpacked(path, unpacked)
    with _reading(path, "file of tensors"):
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # torch's own words advise to run what the file holds
            raise ValueError("it holds more than tensors, dicts and tuples, or is no such file") from error
    if isinstance(stored, (tuple, list)) and len(stored) == 3:
        stored = dict(zip("qkv", stored, strict=True))
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: holds a {type(stored).__name__}; accepted: a dict of q, k, v or a tuple of three")
    picked = {key: stored[name] for key, name in _pick(path, stored).items()}
    return {key: _of_tensor(path, key, x) if isinstance(x, torch.Tensor) else x for key, x in picked.items()}


def _of_tensor(path: Path, key: str, tensor: Any) -> np.ndarray:
    """A tensor on the CPU as an array; NumPy has few of its kinds."""
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    for wrong, came, accepted in (
        (tensor.is_nested, "a nested tensor", "one shape for all, such as x.to_padded_tensor(0)"),
        (tensor.layout != torch.strided, f"a {tensor.layout} tensor", "a dense one, x.to_dense()"),
        (tensor.is_quantized, f"{dtype}, quantised", "x.dequantize()"),
        (dtype not in DTYPES, dtype, ", ".join(DTYPES)),
        (tensor.is_meta, "on the meta device, without data", "a tensor with data"),
    ):
        if wrong:
            raise ValueError(f"{path}: {key} is {came}; accepted: {accepted}")
    _check_unpacked(path, tensor.numel() * tensor.element_size())  # a stride of 0 makes much of little
    tensor = tensor.detach().resolve_neg().contiguous()
    if tensor.dtype == torch.bfloat16:  # torch's numpy() refuses bfloat16
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    array: np.ndarray = tensor.numpy()
    return array
