"""Files in every format, the trace, and synthetic patterns that show what they are named after."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from s2o_cupy.tools import inputs, metrics, patterns

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(params=DTYPES, ids=lambda dtype: dtype.name)
def given(request, rng):
    """q, k, v of one dtype with bits that a conversion would change."""
    draw = lambda *shape: rng.standard_normal(shape).astype(request.param)  # noqa: E731
    return inputs.QKV(draw(1, 4, 5, 8), draw(1, 2, 6, 8), draw(1, 2, 6, 8))


def assert_same(found, given):
    assert isinstance(found, inputs.QKV)
    for x, y in zip(found, given, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def save_torch(path, given, form=dict):
    torch = pytest.importorskip("torch")

    def tensor(x):
        if x.dtype == BFLOAT16:
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    tensors = {key: tensor(x) for key, x in zip("qkv", given, strict=True)}
    torch.save(tensors if form is dict else tuple(tensors.values()), path)


# ---------------------------------------------------------------- files


def test_npz(tmp_path, given):
    np.savez(tmp_path / "a.npz", **given._asdict(), other=np.zeros(3))
    assert_same(inputs.load(tmp_path / "a.npz"), given)
    assert_same(inputs.load(str(tmp_path / "a.npz")), given)
    assert_same(inputs.load([tmp_path / "a.npz"]), given)


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
def test_save(tmp_path, given, ending):
    if ending == ".safetensors":
        pytest.importorskip("safetensors")
    inputs.save(tmp_path / f"a{ending}", given)
    assert_same(inputs.load(tmp_path / f"a{ending}"), given)
    turned = inputs.QKV(*(x[0].swapaxes(-1, -2).copy().swapaxes(-1, -2) for x in given))  # no batch, not in C order
    inputs.save(str(tmp_path / f"b{ending}"), turned)
    assert_same(inputs.load(tmp_path / f"b{ending}"), turned)


def test_what_save_refuses(tmp_path, given):
    with pytest.raises(ValueError, match=r"a\.pt: a file that ends in '\.pt'; accepted: \.npz, \.safetensors"):
        inputs.save(tmp_path / "a.pt", given)
    with pytest.raises(ValueError, match="accepted: heads a multiple of kv_heads"):
        inputs.save(tmp_path / "a.npz", given._replace(q=given.q[:, :3]))
    assert not list(tmp_path.iterdir())


def test_npz_with_long_names(tmp_path, given):
    np.savez_compressed(tmp_path / "a.npz", query=given.q, key=given.k, value=given.v)
    assert_same(inputs.load(tmp_path / "a.npz"), given)


def test_npy_folder_and_three_files(tmp_path, given):
    for key, x in given._asdict().items():
        np.save(tmp_path / f"{key}.npy", x)
    assert_same(inputs.load(tmp_path), given)
    assert_same(inputs.load([tmp_path / f"{key}.npy" for key in "qkv"]), given)


def test_safetensors(tmp_path, given):
    """Bytes as the format has them: the header's length, the header in JSON, the data."""
    pytest.importorskip("safetensors")
    codes = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
    header, data = {}, b""
    for key, x in given._asdict().items():
        span = [len(data), len(data) + x.nbytes]
        header[key] = {"dtype": codes[x.dtype.name], "shape": x.shape, "data_offsets": span}
        data += x.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert_same(inputs.load(tmp_path / "a.safetensors"), given)


def test_safetensors_of_integers(tmp_path):
    of = pytest.importorskip("safetensors.numpy")
    of.save_file({name: np.zeros((1, 1, 4, 8), np.int32) for name in "qkv"}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a\.safetensors: q is I32; accepted: .*F32"):
        inputs.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize("form", [dict, tuple])
def test_torch(tmp_path, given, form):
    save_torch(tmp_path / "a.pt", given, form)
    assert_same(inputs.load(tmp_path / "a.pt"), given)


def test_torch_runs_no_code(tmp_path):
    """A pickle that would call something is refused."""
    torch = pytest.importorskip("torch")

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save(Evil(), tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: not a readable file of tensors"):
        inputs.load(tmp_path / "a.pt")
    assert not (tmp_path / "written").exists()


def test_without_batch(tmp_path, rng):
    q, k = rng.standard_normal((4, 5, 8)), rng.standard_normal((2, 5, 8))
    np.savez(tmp_path / "a.npz", q=q, k=k, v=k)
    assert inputs.load(tmp_path / "a.npz").q.shape == (4, 5, 8)


def test_big_endian(tmp_path, rng):
    x = rng.standard_normal((1, 2, 3, 4))
    np.savez(tmp_path / "a.npz", q=x.astype(">f4"), k=x.astype(">f4"), v=x.astype(">f4"))
    found = inputs.load(tmp_path / "a.npz")
    assert found.q.dtype.isnative
    np.testing.assert_array_equal(found.q, x.astype(np.float32))


ONES = np.ones((1, 2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"q": ONES, "k": ONES}, "holds k, q; accepted: arrays named q, k and v"),
        ({"q": ONES, "k": ONES, "v": ONES[:, :1]}, r"v \(1, 1, 3, 4\) float32; accepted: q \(batch, heads"),
        ({"q": ONES[0], "k": ONES, "v": ONES}, "or all three without batch"),
        ({"q": ONES[0, 0], "k": ONES[0, 0], "v": ONES[0, 0]}, "or all three without batch"),
        ({"q": ONES[..., :2], "k": ONES, "v": ONES}, "accepted: q"),
        ({"q": ONES[:, :1], "k": ONES, "v": ONES}, "heads a multiple of kv_heads"),
        ({"q": ONES, "k": ONES[:, :, 1:], "v": ONES[:, :, 1:]}, "accepted: seqlen_k >= seqlen_q"),
        ({"q": ONES, "k": ONES.astype(np.float16), "v": ONES}, "accepted: one dtype"),
        ({"q": ONES.astype(int), "k": ONES, "v": ONES}, "q is int64; accepted: float16, bfloat16"),
        ({"q": ONES.astype(np.uint16), "k": ONES, "v": ONES}, "q is uint16"),
        ({"q": np.array([None]), "k": ONES, "v": ONES}, "not a readable"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=message) as error:
        inputs.load(tmp_path / "a.npz")
    assert "a.npz" in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz: no such file; accepted: \.npz"):
        inputs.load(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError, match=r"q\.npy: no such file"):
        inputs.load([tmp_path / f"{key}.npy" for key in "qkv"])
    with pytest.raises(ValueError, match="got 2 paths"):
        inputs.load([tmp_path, tmp_path])
    with pytest.raises(ValueError, match="holds nothing; accepted: arrays named q, k and v"):
        inputs.load(tmp_path)
    for suffix in (".npz", ".npy", ".pt", ".safetensors"):
        if suffix in (".pt", ".safetensors"):
            pytest.importorskip({".pt": "torch", ".safetensors": "safetensors"}[suffix])
        broken = tmp_path / f"broken{suffix}"
        broken.write_bytes(b"not an array")
        with pytest.raises(ValueError, match=rf"broken\{suffix}"):
            inputs.load([broken] * 3 if suffix == ".npy" else broken)
    other = tmp_path / "a.csv"
    other.write_text("1,2")
    with pytest.raises(ValueError, match="ends in '.csv'; accepted: .npz"):
        inputs.load(other)


def test_missing_library_says_the_remedy(tmp_path, monkeypatch):
    for module, suffix, remedy in (
        ("safetensors", ".safetensors", r'remedy: pip install "\.\[cli\]" in a checkout'),
        ("torch", ".pt", r'remedy: pip install "\.\[torch\]" in a checkout of s2o_cupy, or q, k and v in a \.npz'),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        (tmp_path / f"a{suffix}").write_bytes(b"")
        with pytest.raises(ImportError, match=remedy):
            inputs.load(tmp_path / f"a{suffix}")


# ---------------------------------------------------------------- trace


def test_pack_is_lossless():
    """Every bit pattern, NaNs among them."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(1, 1, -1, 64).view(BFLOAT16)
    qkv = inputs.QKV(bits, bits[:, :, ::2], bits[:, :, 1::2])
    assert_same(inputs.QKV(**inputs.unpack(inputs.pack(qkv))), qkv)
    with pytest.raises(ValueError, match="q is float32; accepted: bfloat16"):
        inputs.pack(inputs.QKV(ONES, ONES, ONES))


def test_trace():
    q, k, v = inputs.builtin("trace")
    assert (q.shape, k.shape, v.shape) == ((1, 4, 2816, 128), (1, 2, 2816, 128), (1, 2, 2816, 128))
    assert q.dtype == k.dtype == v.dtype == BFLOAT16
    assert all(np.isfinite(x.astype(np.float32)).all() for x in (q, k, v))
    path = Path(inputs.__file__).parents[1] / "data" / "trace.npz"
    assert path.stat().st_size <= 4 * 2**20

    short = inputs.builtin("trace", 100, dtype="float32")
    np.testing.assert_array_equal(short.q, q[:, :, :100].astype(np.float32))
    with pytest.raises(ValueError, match="length is 2817; accepted: at most 2816"):
        inputs.builtin("trace", 2817)
    with pytest.raises(ValueError, match="heads is 8; accepted: 4, which the recorded input 'trace' has"):
        inputs.builtin("trace", heads=8)


def test_retrieval():
    """The end of a prompt: fewer queries than keys, of which none can be left out at the end."""
    q, k, v = inputs.builtin("retrieval")
    assert (q.shape, k.shape, v.shape) == ((1, 4, 1024, 64), (1, 1, 16384, 64), (1, 1, 16384, 64))
    assert q.dtype == k.dtype == v.dtype == BFLOAT16
    assert all(np.isfinite(x.astype(np.float32)).all() for x in (q, k, v))
    assert (Path(inputs.__file__).parents[1] / "data" / "retrieval.npz").stat().st_size < 3e6
    assert inputs.builtin("retrieval", 16384, dtype="float32").k.dtype == np.float32
    with pytest.raises(ValueError, match="length is 8192; accepted: 16384, which the recorded input 'retrieval' has"):
        inputs.builtin("retrieval", 8192)


def test_trace_is_as_described():
    """The table in data/README.md."""
    q, k, _ = (x.astype(np.float32) for x in inputs.builtin("trace", 2304))
    figures = []
    for h in range(4):
        mass = softmax(q[0, h, 2048:] @ k[0, h // 2].T, 2048)[:, :2048]
        total = mass.sum(1).mean()
        shared = np.sort(mass.mean(0))[-128:].sum()
        own = np.sort(mass, axis=1)[:, -128:].sum(1).mean()
        figures.append((total, shared / total, own / total))
    described = [(0.48, 0.41, 0.84), (0.05, 0.77, 0.84), (0.50, 0.42, 0.99), (0.42, 0.70, 0.96)]
    np.testing.assert_allclose(figures, described, atol=0.006)


def test_make_trace_example(tmp_path, rng, monkeypatch):
    q, k, v = (rng.standard_normal((h, 40, 16)).astype(np.float32) for h in (6, 2, 2))
    np.savez(tmp_path / "in.npz", q=q, k=k, v=v)
    out = tmp_path / "out.npz"
    arguments = ["make_trace.py", str(tmp_path / "in.npz"), str(out), "--heads", "4,5", "--length", "30"]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(str(EXAMPLES / "make_trace.py"), run_name="__main__")
    expected = (q[None, 4:6, :30], k[None, 1:, :30], v[None, 1:, :30])
    assert_same(inputs.load(out), [x.astype(BFLOAT16) for x in expected])


# ---------------------------------------------------------------- patterns


def softmax(scores: np.ndarray, offset: int = 0) -> np.ndarray:
    """Causal softmax mass of scores [Lq, Lk] of head_dim 128."""
    scores = scores / np.float32(math.sqrt(128))
    scores[np.arange(scores.shape[1]) > np.arange(scores.shape[0])[:, None] + offset] = -np.inf
    mass = np.exp(scores - scores.max(1, keepdims=True))
    return mass / mass.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def maps():
    """Mass [L/2, L] of the later half of the queries, for each pattern's first and last of 4 heads."""
    length = 1024
    found = {}
    for name in patterns.PATTERNS:
        q, k, _ = inputs.builtin(name, length, heads=4, kv_heads=2)
        found[name] = [softmax(q[0, h] @ k[0, h // 2].T)[length // 2 :] for h in (0, 3)]
    return found


def distance(mass):
    s, c = mass.shape
    return np.arange(c - s, c)[:, None] - np.arange(c)


def effective_keys(mass):
    """exp of the entropy: how many keys a query spreads over, mean."""
    return np.exp(-(mass * np.log(np.maximum(mass, 1e-30))).sum(1)).mean()


def test_diffuse_and_random(maps):
    for mass in maps["diffuse"]:
        assert effective_keys(mass) > 0.98 * 768  # of 513 to 1,024 visible keys
        assert mass.max() < 0.01
    for mass in maps["random"]:
        assert 0.4 * 768 < effective_keys(mass) < 0.8 * 768


def test_sinks(maps):
    for mass in maps["sinks"]:
        others = mass[:, 4:].sum(1)
        assert others.min() > 1e-4 and others.max() < 0.05  # nearly all mass, but not all


def test_stripes(maps):
    for mass in maps["stripes"]:
        assert 0.95 < np.sort(mass.mean(0))[-(1024 // 64 + 1) :].sum() < 0.9999
        assert mass[:, :4].sum(1).mean() < 0.5  # not only at the start
    first, last = (set(np.argsort(mass.mean(0))[-17:]) for mass in maps["stripes"])
    assert first != last  # another KV head, other keys


def test_slash(maps):
    for mass in maps["slash"]:
        best = np.take_along_axis(distance(mass), mass.argmax(1)[:, None], 1)
        assert len(np.unique(best)) == 1
        assert best[0, 0] > 64
        assert mass.max(1).mean() > 0.95


def test_slashes(maps):
    for mass in maps["slashes"]:
        share = np.bincount(distance(mass).clip(0).ravel(), mass.ravel())  # of each distance
        assert np.sort(share)[-3:].sum() > 0.95 * share.sum()
        assert np.sort(share)[-3:].min() > 0.1 * share.sum()
    assert len({int(np.bincount(distance(m).clip(0).ravel(), m.ravel()).argmax()) for m in maps["slashes"]}) == 2


def test_blocks(maps):
    for mass in maps["blocks"]:
        of_block = mass.reshape(len(mass), -1, 64).sum(2)  # [query, block]
        own = np.arange(512, 1024) // 64
        at = np.take_along_axis(of_block, own[:, None], 1)[:, 0]
        assert 0.1 < at.mean() < 0.5  # of the own block half the keys, in the mean, are later
        assert np.sort(of_block)[:, -2:].sum(1).min() > 0.9
        other = np.where(np.arange(16) == own[:, None], 0, of_block).argmax(1)
        assert all(len(set(other[own == b])) == 1 for b in set(own))  # its queries agree on the earlier one
        assert len(set(other)) > 2


def test_mixture(maps):
    even, peaked = maps["mixture"]
    for mass in (even, peaked):
        assert 0.05 < mass[:, :4].sum(1).mean() < 0.6
        near = (mass * (distance(mass) < 64)).sum(1).mean()
        assert 0.05 < near < 0.8
        assert (mass[:, 4:] * (distance(mass) >= 64)[:, 4:]).sum(1).mean() > 0.1
    assert effective_keys(even) > 3 * effective_keys(peaked)


def test_local(maps):
    for mass in maps["local"]:
        assert (mass * (distance(mass) < 128)).sum(1).min() > 0.95
        assert effective_keys(mass) > 8


def test_needle(maps):
    for mass in maps["needle"]:
        assert mass[-128:, 1024 // 3].min() > 0.8
        assert mass[:-128, 1024 // 3].max() < 0.01


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_every_pattern(name):
    for length in (0, 1, 3, 65):
        q, k, v = inputs.builtin(name, length, heads=6, kv_heads=3, head_dim=5, dtype="bfloat16")
        assert (q.shape, k.shape, v.shape) == ((1, 6, length, 5), (1, 3, length, 5), (1, 3, length, 5))
        assert q.dtype == k.dtype == v.dtype == BFLOAT16
        assert all(np.isfinite(x.astype(np.float32)).all() for x in (q, k, v))
    same, other = inputs.builtin(name, 65), inputs.builtin(name, 65, seed=1)
    assert_same(inputs.builtin(name, 65), same)
    assert metrics.rel_l2(other.v, same.v) > 1


def test_patterns_of_another_framework():
    """What draws the numbers decides the framework; the rest is the same arithmetic."""
    torch = pytest.importorskip("torch")

    class Random:
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def standard_normal(self, size, dtype):
            return torch.from_numpy(self.rng.standard_normal(size, dtype))

        def permutation(self, x):
            return torch.from_numpy(self.rng.permutation(x))

    for name, pattern in patterns.PATTERNS.items():
        found = pattern(Random(), 300, 4, 2, 64)
        expected = inputs.builtin(name, 300, heads=4, kv_heads=2, head_dim=64)
        for x, y in zip(found, expected, strict=True):
            assert isinstance(x, torch.Tensor)
            assert metrics.rel_l2(x.numpy(), y[0]) < 1e-5, name


def test_builtin_refuses():
    for options, message in (
        ({"name": "nothing"}, "input is 'nothing'; accepted: trace, retrieval, random"),
        ({"name": "random", "length": -1}, "length is -1"),
        ({"name": "random", "heads": 0}, "heads is 0; accepted: 1 or more"),
        ({"name": "random", "heads": 3, "kv_heads": 2}, "a multiple of kv_heads"),
        ({"name": "random", "dtype": "int8"}, "dtype is 'int8'; accepted: float16"),
    ):
        with pytest.raises(ValueError, match=message):
            inputs.builtin(**options)
