"""Files that hold other things than plain numbers, or more than they should: one sentence, before any work."""

from __future__ import annotations

import io
import re
import zipfile

import ml_dtypes
import numpy as np
import pytest

from s2o_cupy.tools import cli, inputs, readers

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (1, 2, 3, 4)


def refused(path, message):
    """Reading says one line that starts with the file, and the command's exit status is 2."""
    with pytest.raises(ValueError, match=message) as error:
        inputs.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert cli.main(["demo", str(path), "--no-picture"]) == cli.UNABLE


# ---------------------------------------------------------------- tensors

TENSORS = {
    "sparse": (lambda t: t.ones(SHAPE).to_sparse(), r"q is a torch.sparse_coo tensor; accepted: .*x.to_dense"),
    "compressed": (lambda t: t.ones(3, 4).to_sparse_csr(), r"q is a torch.sparse_csr tensor; accepted: a dense one"),
    "complex": (lambda t: t.ones(SHAPE, dtype=t.complex64), "q is complex64; accepted: float16, bfloat16, float32"),
    "conjugate": (lambda t: t.ones(SHAPE, dtype=t.complex64).conj(), "q is complex64; accepted: float16"),
    "float8": (lambda t: t.ones(SHAPE).to(t.float8_e4m3fn), "q is float8_e4m3fn; accepted: float16, bfloat16"),
    "quantised": (
        lambda t: t.quantize_per_tensor(t.ones(SHAPE), 0.1, 0, t.qint8), r"q is qint8, quantised; accepted: x.dequant",
    ),
    "meta": (lambda t: t.ones(SHAPE, device="meta"), "q is on the meta device, without data; accepted: a tensor with"),
    "integers": (lambda t: t.ones(SHAPE, dtype=t.int32), "q is int32; accepted: float16, bfloat16, float32, float64"),
    "booleans": (lambda t: t.ones(SHAPE, dtype=t.bool), "q is bool; accepted: float16"),
    "nested": (lambda t: t.nested.nested_tensor([t.ones(2, 3)] * 2), "q is a nested tensor; accepted: one shape"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")  # torch's, of kinds that it calls beta or deprecated
def test_tensors_that_are_no_plain_numbers(tmp_path, torch, kind):
    make, message = TENSORS[kind]
    torch.save({"q": make(torch), "k": torch.ones(SHAPE), "v": torch.ones(SHAPE)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", message)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_negative_bit_is_a_sign(tmp_path, torch, dtype):
    """A tensor may say "minus these numbers", as the imaginary part of a conjugate does."""
    x = torch.arange(24.0).reshape(SHAPE).to(getattr(torch, dtype))
    torch.save({"q": torch._neg_view(x), "k": x, "v": x}, tmp_path / "a.pt")
    q, k, _ = inputs.load(tmp_path / "a.pt")
    assert q.dtype.name == dtype
    np.testing.assert_array_equal(q, -k)


def test_a_dict_of_other_things(tmp_path, torch):
    torch.save({0: torch.ones(2), "q": torch.ones(2)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "holds 0, q; accepted: arrays named q, k and v")


def test_what_is_no_file_of_tensors_gets_no_advice_to_run_it(tmp_path, torch):
    for content in (b"not an array", b"PK\x05\x06" + bytes(18)):
        (tmp_path / "a.pt").write_bytes(content)
        refused(tmp_path / "a.pt", r"not a readable file of tensors \(")
        with pytest.raises(ValueError, match="not a readable") as error:
            inputs.load(tmp_path / "a.pt")
        assert "weights_only" not in str(error.value)


# ---------------------------------------------------------------- planes of bytes


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.float32])
def test_planes_are_bytes(tmp_path, rng, dtype):
    """Wider ones would make four elements of one."""
    x = rng.standard_normal(SHAPE).astype(BFLOAT16)
    planes = inputs.pack(inputs.QKV(x, x, x))
    np.savez(tmp_path / "a.npz", **planes | {"q.low": planes["q.low"].astype(dtype)})
    refused(tmp_path / "a.npz", rf"packed trace \(unpack: q.low is {np.dtype(dtype).name}; accepted: uint8, a byte")


def test_planes_go_together(tmp_path, rng):
    x = rng.standard_normal(SHAPE).astype(BFLOAT16)
    planes = inputs.pack(inputs.QKV(x, x, x))
    np.savez(tmp_path / "a.npz", **planes | {"k.low": planes["k.low"][:, :, :1]})
    refused(tmp_path / "a.npz", r"k.high is \(1, 2, 3, 4\), k.low \(1, 2, 1, 4\); accepted: equal shapes")
    del planes["v.low"]
    np.savez(tmp_path / "a.npz", **planes)
    refused(tmp_path / "a.npz", "v.low is missing; accepted: q.high, q.low")


# ---------------------------------------------------------------- small files, large arrays


@pytest.fixture
def one_mib(monkeypatch):
    """As if a file might unpack to 1 MiB at most, or to 16 times its size."""
    monkeypatch.setattr(readers, "UNPACKED_BYTES", 1 << 20)


ZEROS = np.zeros((1, 1, 1 << 15, 16), np.float32)  # 2 MiB


def test_a_zip_bomb_is_refused_before_it_is_read(tmp_path, one_mib, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", q=ZEROS, k=ZEROS, v=ZEROS)
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_, **__: pytest.fail("an array was read"))
    refused(tmp_path / "a.npz", "would unpack to 6,291,840; accepted: 1,048,576 .*; store so much uncompressed")


def test_large_arrays_are_read_where_the_file_is_as_large(tmp_path, one_mib):
    np.savez(tmp_path / "a.npz", q=ZEROS, k=ZEROS, v=ZEROS)
    assert inputs.load(tmp_path / "a.npz").q.shape == ZEROS.shape


def test_only_what_is_asked_for_counts(tmp_path, one_mib):
    small = np.ones(SHAPE, np.float32)
    np.savez_compressed(tmp_path / "a.npz", q=small, k=small, v=small, other=ZEROS)
    assert inputs.load(tmp_path / "a.npz").q.shape == SHAPE


def test_a_compressed_file_of_tensors(tmp_path, torch, one_mib, monkeypatch):
    x = torch.from_numpy(ZEROS)
    torch.save({"q": x, "k": x.clone(), "v": x.clone()}, tmp_path / "a.pt")
    assert inputs.load(tmp_path / "a.pt").q.shape == ZEROS.shape
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as plain,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("tensors were read"))
    refused(tmp_path / "b.pt", "would unpack to .*; accepted: 1,048,576")


def test_a_tensor_that_repeats_one_number(tmp_path, torch, one_mib):
    """A stride of 0 declares any size."""
    x = torch.ones(1)
    torch.save({"q": x.expand(1, 1, 1 << 25, 128), "k": x.expand(SHAPE), "v": x.expand(SHAPE)}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "would unpack to 17,179,869,184; accepted: 1,048,576")


def npy(declared: str, data: bytes) -> bytes:
    """A .npy file whose header says what it likes."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {declared}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


@pytest.mark.parametrize("declared", ["(1, 1, 1099511627776, 64)", "(1, 2, 3, 5)", "(1, -2, 3, 4)"])
def test_a_header_that_declares_more_than_the_file_holds(tmp_path, declared):
    content = npy(declared, bytes(96))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for key in "qkv":
            archive.writestr(f"{key}.npy", content)
            (tmp_path / f"{key}.npy").write_bytes(content)
    refused(tmp_path / "a.npz", rf"{re.escape(declared)} of float32 takes .* bytes, and 96 are there")
    with pytest.raises(ValueError, match=r"q\.npy: .* and 96 are there"):
        inputs.load(tmp_path)


def test_other_versions_and_python_objects(tmp_path):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ones(SHAPE, np.float32), version=(3, 0))
    (tmp_path / "q.npy").write_bytes(stream.getvalue())
    np.save(tmp_path / "k.npy", np.array([None]))
    with pytest.raises(ValueError, match=r"q\.npy: .*version 3\.0 of the format; accepted: 1\.0 and 2\.0"):
        readers.read_npy(tmp_path / "q.npy")
    with pytest.raises(ValueError, match=r"k\.npy: .*Python objects; accepted: numbers"):
        readers.read_npy(tmp_path / "k.npy")


# ---------------------------------------------------------------- the axes in the other order


@pytest.mark.parametrize(
    ("q", "k", "which"),
    [
        ((1, 64, 8, 4), (1, 64, 2, 4), "seqlen_k >= seqlen_q"),
        ((16, 8, 4), (64, 2, 4), "heads a multiple of kv_heads"),
    ],
)
def test_sequence_before_heads_is_asked_about(tmp_path, q, k, which):
    arrays = {"q": np.ones(q), "k": np.ones(k), "v": np.ones(k)}
    np.savez(tmp_path / "a.npz", **arrays)
    refused(tmp_path / "a.npz", rf"accepted: {which}\. Are these \(batch, seqlen, heads, head_dim\)\? Store x.swapaxes")
    np.savez(tmp_path / "b.npz", **{key: x.swapaxes(-3, -2) for key, x in arrays.items()})
    assert inputs.load(tmp_path / "b.npz").q.shape[-3] == 8
