"""Attention inputs: the user's own files, two recorded ones, and synthetic patterns.

>>> from s2o_cupy.tools import inputs
>>> q, k, v = inputs.builtin("slash", length=256)
>>> q.shape, k.shape, q.dtype.name
((1, 4, 256, 128), (1, 1, 256, 128), 'float32')
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import arguments_of
from ..spec import checked_int
from . import byte_planes, patterns
from .readers import ACCEPTED, BFLOAT16, DTYPES, SAFETENSORS, read_file, read_folder, read_npy
from .whole_files import whole_file

__all__ = ["RECORDED", "QKV", "builtin", "cast", "load", "looks_swapped", "names", "pack", "save", "to_gpu", "unpack"]

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


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
        head_dim) alike. float16, bfloat16, float32 or float64. What compressed files unpack to is at most 1 GiB,
        or 16 times the file.

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
        arrays = read_folder(source) if source.is_dir() else read_file(source)
        name = str(source)
    else:
        paths = [Path(p) for p in path]
        if len(paths) == 1:
            return load(paths[0])
        if len(paths) != 3:
            raise ValueError(f"got {len(paths)} paths; accepted: {ACCEPTED}")
        arrays = dict(zip("qkv", map(read_npy, paths), strict=True))
        name = ", ".join(map(str, paths))
    return _check(name, QKV(**{key: _as_float(name, key, arrays[key]) for key in "qkv"}))


def save(path: str | os.PathLike[str], qkv: QKV, layers: Sequence[int] | None = None) -> None:
    """Write q, k and v to a file that :func:`load` reads.

    Parameters
    ----------
    path : path
        ``.npz``, in which bfloat16 is packed and compressed, or ``.safetensors``, which is larger and faster.
    qkv : QKV
        Arrays as :func:`load` returns them.
    layers : sequence of int, optional
        Of which layers of a model the heads are, equally many of each, one layer behind the other: the file says it to
        what names heads.

    Raises
    ------
    ValueError
        The file's ending is not accepted, or the arrays do not fit together.
    """
    target = Path(path)
    arrays_of = dict(zip("qkv", qkv, strict=True))
    qkv = _check(str(target), QKV(**{key: _as_float(str(target), key, x) for key, x in arrays_of.items()}))
    if target.suffix not in (".npz", ".safetensors"):
        raise ValueError(f"{target}: a file that ends in {target.suffix or 'nothing'!r}; accepted: .npz, .safetensors")
    with whole_file(target) as file:
        _save(file, qkv, layers)


def _save(target: Path, qkv: QKV, layers: Sequence[int] | None) -> None:
    if target.suffix == ".npz":
        arrays: dict[str, Any] = pack(qkv) if qkv.q.dtype == BFLOAT16 else qkv._asdict()
        np.savez_compressed(target, **arrays | ({} if layers is None else {"layers": np.array(layers, np.int64)}))
    else:
        _save_safetensors(target, qkv, layers)


def _save_safetensors(path: Path, qkv: QKV, layers: Sequence[int] | None) -> None:
    """Length of a JSON header, the header, bytes: safetensors.numpy knows no bfloat16 of ml_dtypes."""
    header: dict[str, Any] = {} if layers is None else {"__metadata__": {"layers": ",".join(map(str, layers))}}
    offset = 0
    for key, array in qkv._asdict().items():
        end = offset + array.nbytes
        dtype = next(name for name, known in SAFETENSORS.items() if known == array.dtype)
        header[key] = {"dtype": dtype, "shape": array.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in qkv:
            np.ascontiguousarray(array).tofile(file)


def _as_float(path: str, key: str, array: Any) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path}: {key} is a {type(array).__name__}; accepted: a NumPy array")
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        array = array.view(BFLOAT16)  # NumPy's files keep the bits of bfloat16 but not its name
    if array.dtype.name not in DTYPES:
        raise ValueError(f"{path}: {key} is {array.dtype.name}; accepted: {', '.join(DTYPES)}")
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
    (heads, seqlen_q), (kv_heads, seqlen_k) = q.shape[-3:-1], k.shape[-3:-1]
    if not _go_together(heads, kv_heads, seqlen_q, seqlen_k):
        swapped = kv_heads > seqlen_k and _go_together(seqlen_q, seqlen_k, heads, kv_heads)
        hint = ". Are these (batch, seqlen, heads, head_dim)? Store x.swapaxes(-3, -2)" if swapped else ""
        which = "seqlen_k >= seqlen_q" if _shared(heads, kv_heads) else "heads a multiple of kv_heads"
        raise ValueError(f"{found}; accepted: {which}{hint}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"{found}; accepted: one dtype for all three")
    return qkv


def looks_swapped(qkv: QKV) -> bool:
    """Whether the axes of heads and sequence are probably in the other order, though the shapes are possible."""
    (heads, seqlen_q), (kv_heads, seqlen_k) = qkv.q.shape[-3:-1], qkv.k.shape[-3:-1]
    return min(heads, kv_heads) > max(seqlen_q, seqlen_k) > 1 and _go_together(seqlen_q, seqlen_k, heads, kv_heads)


def _shared(heads: int, kv_heads: int) -> bool:
    return kv_heads > 0 and heads % kv_heads == 0


def _go_together(heads: int, kv_heads: int, seqlen_q: int, seqlen_k: int) -> bool:
    return _shared(heads, kv_heads) and seqlen_q <= seqlen_k


# ---------------------------------------------------------------- packed bfloat16


def pack(qkv: QKV) -> dict[str, np.ndarray]:
    """bfloat16 arrays as planes of high and low bytes, which compress a third smaller; lossless."""
    return byte_planes.split(qkv)


def unpack(planes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v from the planes of :func:`pack`."""
    return byte_planes.join(planes)


# ---------------------------------------------------------------- built-in inputs


RECORDED = ("trace", "retrieval")  # in data/, which says what they are


def names() -> tuple[str, ...]:
    """Names that :func:`builtin` knows."""
    return (*RECORDED, *patterns.PATTERNS)


@arguments_of("inputs.builtin")
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
        head_dim 128, bfloat16). "retrieval": those of a small model that answers questions, at the end of a long
        prompt (4 heads, 1 KV head, the last 1,024 queries of 16,384 tokens, head_dim 64, bfloat16). Both are
        described in data/README.md. Else a synthetic pattern of :mod:`s2o_cupy.tools.patterns`:
        "random", "diffuse", "sinks", "stripes", "slash", "slashes", "local", "blocks", "needle" or "mixture".
    length : int, optional
        Tokens. Of "trace" the first ones; default all of it, for a pattern 2,048. "retrieval" has all of its own.
    heads, kv_heads, head_dim : int, optional
        Default 4, 1 and 128. Recorded inputs have their own.
    dtype : str, optional
        "float16", "bfloat16", "float32" or "float64". Default: as stored for recorded inputs, else "float32".
    seed : int, default 0
        Of the patterns.

    Returns
    -------
    QKV
        q (1, heads, length, head_dim), k and v (1, kv_heads, length, head_dim); of "retrieval" fewer queries.
    """
    if name not in names():
        raise ValueError(f"input is {name!r}; accepted: {', '.join(names())}")
    for what, value in (("length", length), ("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        if value is not None:
            checked_int(what, value, 0)
    checked_int("seed", seed, 0)
    if name in RECORDED:
        qkv = _recorded(name, length, heads, kv_heads, head_dim)
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
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; accepted: {', '.join(DTYPES)}")
    target = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    return QKV(*(x.astype(target, copy=False) for x in qkv))


def to_gpu(qkv: QKV) -> QKV:
    """Copies on the current GPU, as CuPy arrays."""
    import cupy

    return QKV(*(cupy.asarray(x) for x in qkv))


def _recorded(
    name: str, length: int | None, heads: int | None, kv_heads: int | None, head_dim: int | None
) -> QKV:
    with resources.as_file(resources.files("s2o_cupy") / "data" / f"{name}.npz") as path:
        q, k, v = load(path)
    for what, asked, stored in (
        ("heads", heads, q.shape[1]),
        ("kv_heads", kv_heads, k.shape[1]),
        ("head_dim", head_dim, q.shape[3]),
    ):
        if asked not in (None, stored):
            raise ValueError(f"{what} is {asked}; accepted: {stored}, which the recorded input {name!r} has")
    tokens = k.shape[2]
    if length is None or length == tokens:
        return QKV(q, k, v)
    if q.shape[2] < tokens:  # the last queries: without the last keys there are none
        raise ValueError(f"length is {length}; accepted: {tokens}, which the recorded input {name!r} has")
    if length > tokens:
        raise ValueError(f"length is {length}; accepted: at most {tokens}, which the recorded input {name!r} has")
    return QKV(q[:, :, :length], k[:, :, :length], v[:, :, :length])
