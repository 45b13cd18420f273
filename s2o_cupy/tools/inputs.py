"""Attention inputs: the user's own files, a recorded trace, and synthetic patterns.

>>> from s2o_cupy import inputs
>>> q, k, v = inputs.builtin("slash", length=256)
>>> q.shape, k.shape, q.dtype.name
((1, 4, 256, 128), (1, 1, 256, 128), 'float32')
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import patterns

__all__ = ["QKV", "builtin", "cast", "load", "names", "pack", "save", "unpack"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

ACCEPTED = (
    ".npz, .safetensors or .pt with arrays q, k and v; a folder with q.npy, k.npy and v.npy; "
    "or three .npy files in the order q, k, v"
)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_SAFETENSORS = {"BF16": _BFLOAT16, "F16": np.float16, "F32": np.float32, "F64": np.float64}  # its names
_ALIASES = {"q": ("q", "query"), "k": ("k", "key"), "v": ("v", "value")}


class QKV(NamedTuple):
    """Query, key and value of one attention call."""

    q: np.ndarray  # [B, H, Lq, D] or [H, Lq, D]
    k: np.ndarray  # [B, Hkv, Lk, D] or [Hkv, Lk, D]
    v: np.ndarray  # as k


# ---------------------------------------------------------------- files


def load(path: Paths) -> QKV:
    """Read q, k and v from files.

    Parameters
    ----------
    path : path, or sequence of three paths
        A ``.npz``, ``.safetensors`` or ``.pt`` file with arrays ``q``, ``k`` and ``v`` (or ``query``,
        ``key`` and ``value``), a folder with ``q.npy``, ``k.npy`` and ``v.npy``, or those three files.
        q is (batch, heads, seqlen_q, head_dim) or without batch; k and v (batch, kv_heads, seqlen_k,
        head_dim) alike. float16, bfloat16, float32 or float64.

    Returns
    -------
    QKV
        NumPy arrays as stored; bfloat16 has the dtype of ml_dtypes.

    Raises
    ------
    FileNotFoundError, ValueError
        The message names the file, what was found and what is accepted.
    ImportError
        ``.safetensors`` without safetensors, ``.pt`` without PyTorch.
    """
    if isinstance(path, (str, os.PathLike)):
        source = Path(path)
        arrays = _load_folder(source) if source.is_dir() else _load_file(source)
        name = str(source)
    else:
        paths = [Path(p) for p in path]
        if len(paths) == 1:
            return load(paths[0])
        if len(paths) != 3:
            raise ValueError(f"got {len(paths)} paths; accepted: {ACCEPTED}")
        arrays = dict(zip("qkv", map(_load_npy, paths), strict=True))
        name = ", ".join(map(str, paths))
    return _check(name, QKV(**{key: _as_float(name, key, arrays[key]) for key in "qkv"}))


def save(path: str | os.PathLike[str], qkv: QKV) -> None:
    """Write q, k and v to a file that :func:`load` reads.

    Parameters
    ----------
    path : path
        ``.npz``, in which bfloat16 is packed and compressed, or ``.safetensors``, which is larger and faster.
    qkv : QKV
        Arrays as :func:`load` returns them.

    Raises
    ------
    ValueError
        The file's ending is not accepted, or the arrays do not fit together.
    """
    target = Path(path)
    qkv = _check(str(target), QKV(*qkv))
    if target.suffix == ".npz":
        planes: dict[str, Any] = pack(qkv) if qkv.q.dtype == _BFLOAT16 else qkv._asdict()
        np.savez_compressed(target, **planes)
    elif target.suffix == ".safetensors":
        _save_safetensors(target, qkv)
    else:
        raise ValueError(f"{target}: a file that ends in {target.suffix or 'nothing'!r}; accepted: .npz, .safetensors")


def _save_safetensors(path: Path, qkv: QKV) -> None:
    """Length of a JSON header, the header, bytes: safetensors.numpy knows no bfloat16 of ml_dtypes."""
    header, offset = {}, 0
    for key, array in qkv._asdict().items():
        end = offset + array.nbytes
        dtype = next(name for name, known in _SAFETENSORS.items() if known == array.dtype)
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in qkv:
            np.ascontiguousarray(array).tofile(file)


def _load_file(path: Path) -> Mapping[str, Any]:
    readers: dict[str, Callable[[Path], Mapping[str, Any]]] = {
        ".npz": _load_npz,
        ".safetensors": _load_safetensors,
        ".pt": _load_torch,
        ".pth": _load_torch,
    }
    _require_file(path)
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: a file that ends in {path.suffix or 'nothing'!r}; accepted: {ACCEPTED}")
    return reader(path)


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; accepted: {ACCEPTED}")


def _pick(path: Path, found: Mapping[str, Any] | Sequence[str]) -> dict[str, str]:
    """The names under which q, k and v are stored."""
    picked = {key: next((a for a in aliases if a in found), "") for key, aliases in _ALIASES.items()}
    if not all(picked.values()):
        listing = ", ".join(sorted(found)[:12]) or "nothing"
        raise ValueError(f"{path}: holds {listing}; accepted: arrays named q, k and v (or query, key and value)")
    return picked


def _load_folder(path: Path) -> Mapping[str, Any]:
    found = {file.stem: file for file in path.glob("*.npy")}
    return {key: _load_npy(found[stored]) for key, stored in _pick(path, found).items()}


@contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Name the file in whatever error a broken one causes; the libraries raise many types."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: not a readable {what} ({error})") from error


def _load_npy(path: Path) -> np.ndarray:
    _require_file(path)
    with _reading(path, ".npy array"):
        array = np.load(path, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: an archive of arrays; accepted here: one .npy array each for q, k and v")
    return array


def _load_npz(path: Path) -> Mapping[str, Any]:
    with _reading(path, ".npz archive"):
        archive = np.load(path, allow_pickle=False)
        names = archive.files
    with archive:
        if "q.high" in names:
            with _reading(path, "packed trace"):
                return unpack(archive)
        picked = _pick(path, names)
        with _reading(path, ".npz archive"):
            return {key: archive[name] for key, name in picked.items()}


def _load_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors import deserialize
    except ImportError as error:
        raise ImportError(f"{path}: reading it needs safetensors; remedy: pip install safetensors") from error
    with _reading(path, ".safetensors file"):
        stored = dict(deserialize(path.read_bytes()))

    def view(key: str) -> np.ndarray:
        tensor = stored[key]
        if tensor["dtype"] not in _SAFETENSORS:
            raise ValueError(f"{path}: {key} is {tensor['dtype']}; accepted: {', '.join(_SAFETENSORS)}")
        return np.frombuffer(tensor["data"], _SAFETENSORS[tensor["dtype"]]).reshape(tensor["shape"])

    return {key: view(name) for key, name in _pick(path, stored).items()}


def _load_torch(path: Path) -> Mapping[str, Any]:
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{path}: reading it needs PyTorch; remedy: save q, k and v as .npz") from error
    with _reading(path, "file of tensors"):
        stored = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(stored, (tuple, list)) and len(stored) == 3:
        stored = dict(zip("qkv", stored, strict=True))
    if not isinstance(stored, dict):
        raise ValueError(f"{path}: holds a {type(stored).__name__}; accepted: a dict of q, k, v or a tuple of three")

    def convert(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # torch's numpy() refuses bfloat16
            return tensor.view(torch.uint16).numpy().view(_BFLOAT16)
        return tensor.numpy()

    return {key: convert(stored[name]) for key, name in _pick(path, stored).items()}


def _as_float(path: str, key: str, array: Any) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: {key} is a {type(array).__name__}; accepted: an array")
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        array = array.view(_BFLOAT16)  # NumPy's files keep the bits of bfloat16 but not its name
    if array.dtype.name not in _DTYPES:
        raise ValueError(f"{path}: {key} is {array.dtype.name}; accepted: {', '.join(_DTYPES)}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _check(path: str, qkv: QKV) -> QKV:
    """Shapes and dtypes that fit together; the call itself checks the rest."""
    q, k, v = qkv
    found = f"{path}: q {q.shape} {q.dtype.name}, k {k.shape} {k.dtype.name}, v {v.shape} {v.dtype.name}"
    fits = (
        q.ndim in (3, 4)
        and q.ndim == k.ndim
        and k.shape == v.shape
        and q.shape[:-3] == k.shape[:-3]
        and q.shape[-1] == k.shape[-1]
    )
    if not fits:
        raise ValueError(
            f"{found}; accepted: q (batch, heads, seqlen_q, head_dim), "
            "k and v (batch, kv_heads, seqlen_k, head_dim), or all three without batch"
        )
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(f"{found}; accepted: heads a multiple of kv_heads")
    if q.shape[-2] > k.shape[-2]:
        raise ValueError(f"{found}; accepted: seqlen_k >= seqlen_q")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{found}; accepted: one dtype for all three")
    return qkv


# ---------------------------------------------------------------- packed bfloat16


def pack(qkv: QKV) -> dict[str, np.ndarray]:
    """bfloat16 arrays as planes of high and low bytes, which compress a third smaller; lossless."""
    planes = {}
    for key, array in zip("qkv", qkv, strict=True):
        if array.dtype != _BFLOAT16:
            raise ValueError(f"pack: {key} is {array.dtype.name}; accepted: bfloat16")
        bits = np.ascontiguousarray(array).view(np.uint16)
        planes[f"{key}.high"] = (bits >> 8).astype(np.uint8)
        planes[f"{key}.low"] = (bits & 0xFF).astype(np.uint8)
    return planes


def unpack(planes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v from the planes of :func:`pack`."""
    join = lambda high, low: (high.astype(np.uint16) << 8 | low).view(_BFLOAT16)  # noqa: E731
    return {key: join(planes[f"{key}.high"], planes[f"{key}.low"]) for key in "qkv"}


# ---------------------------------------------------------------- built-in inputs


def names() -> tuple[str, ...]:
    """Names that :func:`builtin` knows."""
    return ("trace", *patterns.PATTERNS)


def builtin(
    name: str,
    length: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: str | None = None,
    seed: int = 0,
) -> QKV:
    """A built-in input with a batch of one.

    Parameters
    ----------
    name : str
        "trace": attention inputs of a small language model (4 heads, 2 KV heads, 2,816 tokens,
        head_dim 128, bfloat16; see data/README.md). Else a synthetic pattern of :mod:`s2o_cupy.tools.patterns`:
        "random", "diffuse", "sinks", "stripes", "slash", "slashes", "local", "blocks", "needle" or "mixture".
    length : int, optional
        Tokens. Of the trace the first ones; default all of it, for a pattern 2,048.
    heads, kv_heads, head_dim : int, optional
        Default 4, 1 and 128. The trace has its own.
    dtype : str, optional
        "float16", "bfloat16", "float32" or "float64". Default: as stored for the trace, else "float32".
    seed : int, default 0
        Of the patterns.

    Returns
    -------
    QKV
        q (1, heads, length, head_dim), k and v (1, kv_heads, length, head_dim).
    """
    if name not in names():
        raise ValueError(f"input is {name!r}; accepted: {', '.join(names())}")
    if length is not None and length < 0:
        raise ValueError(f"length is {length}; accepted: 0 or more")
    if name == "trace":
        qkv = _trace(length, heads, kv_heads, head_dim)
    else:
        heads, kv_heads, head_dim = (
            default if given is None else given for given, default in ((heads, 4), (kv_heads, 1), (head_dim, 128))
        )
        for what, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
            if value < 1:
                raise ValueError(f"{what} is {value}; accepted: 1 or more")
        if heads % kv_heads:
            raise ValueError(f"heads is {heads} with kv_heads {kv_heads}; accepted: a multiple of kv_heads")
        rng = np.random.default_rng(seed)
        length = 2048 if length is None else length
        qkv = QKV(*(x[None] for x in patterns.PATTERNS[name](rng, length, heads, kv_heads, head_dim)))
        dtype = dtype or "float32"
    return qkv if dtype is None else cast(qkv, dtype)


def cast(qkv: QKV, dtype: str) -> QKV:
    """All three as "float16", "bfloat16", "float32" or "float64"."""
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(_DTYPES)}")
    target = _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    return QKV(*(x.astype(target, copy=False) for x in qkv))


def _trace(length: int | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> QKV:
    with resources.as_file(resources.files("s2o_cupy") / "data" / "trace.npz") as path:
        q, k, v = load(path)
    for what, asked, stored in (
        ("heads", heads, q.shape[1]),
        ("kv_heads", kv_heads, k.shape[1]),
        ("head_dim", head_dim, q.shape[3]),
    ):
        if asked not in (None, stored):
            raise ValueError(f"{what} is {asked}; accepted: {stored}, which the trace has")
    if length is not None and length > q.shape[2]:
        raise ValueError(f"length is {length}; accepted: at most {q.shape[2]}, which the trace has")
    return QKV(q[:, :, :length], k[:, :, :length], v[:, :, :length])
