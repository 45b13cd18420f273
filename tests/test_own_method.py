"""Methods of one's own: what a callable is given and must give, and that it stands wherever a configuration does."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path

import numpy as np
import own_methods
import pytest
from conftest import has_gpu
from own_methods import LargestKeys, everything, some
from pages import paged, random_table
from schedules import FRAMEWORKS, masked_attention, meant

from s2o_cupy import S2OConfig, Schedule, gather_attention
from s2o_cupy.methods import (
    MeanPoolingConfig,
    PBSConfig,
    select,
    sparse_attention,
    sparse_attention_paged,
    sparse_attention_varlen,
)
from s2o_cupy.methods.own import method_name
from s2o_cupy.tools import cli, compare
from s2o_cupy.tools.comparing import parse_method, settings_of

FILE = own_methods.__file__


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((500, 500), {}),
        ((300, 700), {"layout": "BSHD"}),
        ((300, 700), {"is_causal": False}),
        ((256, 600), {"scale": 0.4, "softcap": 3.0}),
        ((1, 200), {}),
    ],
)
def test_attention_is_dense_attention_to_what_the_method_chose(qkv, lengths, options):
    q, k, v = qkv(*lengths, batch=2, heads=4, kv_heads=2, head_dim=16)
    by_layout = (lambda x: x.swapaxes(1, 2)) if options.get("layout") == "BSHD" else lambda x: x
    arrays = [by_layout(x) for x in (q, k, v)]
    o, lse, stats = sparse_attention(
        *arrays, config=LargestKeys(0.4), return_lse=True, return_stats=True, **options
    )  # fmt: skip
    is_causal = options.get("is_causal", True)
    mask = meant(LargestKeys(0.4)(q, k, is_causal=is_causal, scale=0.0), 2, 4)
    numbers = {name: options[name] for name in ("scale", "softcap") if name in options}
    exact, of_rows = masked_attention(q, k, v, mask, **numbers)
    np.testing.assert_allclose(by_layout(o), exact, atol=1e-5)  # float32, of outputs of about 1
    np.testing.assert_allclose(lse, of_rows, atol=1e-5)
    visible = np.tri(*lengths, lengths[1] - lengths[0]).sum() if is_causal else np.prod(lengths)
    assert stats.density == pytest.approx(mask.sum() / visible / 8)
    assert stats.density < 1 or lengths[0] == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks(name, qkv):
    framework, host = FRAMEWORKS[name](), qkv(128, 512, heads=4, kv_heads=2, head_dim=16)
    q, k, v = map(framework.array, host)
    o = sparse_attention(q, k, v, config=LargestKeys())
    assert isinstance(o, framework.kind) and isinstance(select(q, k, LargestKeys()).entries, framework.kind)
    exact = sparse_attention(*host, config=LargestKeys())
    np.testing.assert_allclose(np.asarray(o), exact, atol=1e-6)  # its sums of squares may round otherwise, no more


def test_what_a_method_is_given(qkv):
    """Views of the caller's arrays, four axes whatever the call's, and the factor that the call uses."""
    q, k, v = qkv(200, 260, heads=4, kv_heads=2, head_dim=16)
    seen: list = []

    def noted(q, k, **options):
        seen.append((q, k, options))
        return everything(q, k, **options)

    for arrays, options in (
        ((q, k, v), {}),
        ((q[0], k[0], v[0]), {"scale": 0.5}),
        ([x.swapaxes(1, 2).copy() for x in (q, k, v)], {"layout": "BSHD"}),
    ):
        sparse_attention(*arrays, config=noted, **options)
        given_q, given_k, of_call = seen.pop()
        np.testing.assert_array_equal(given_q, q)
        np.testing.assert_array_equal(given_k, k)
        assert np.shares_memory(given_q, arrays[0]) and np.shares_memory(given_k, arrays[1])
        assert of_call == {"is_causal": True, "scale": options.get("scale", 0.25)}
    o, lse = sparse_attention(q[:, :, :0], k, v, config=noted, return_lse=True)
    assert o.shape[2] == lse.shape[2] == 0
    assert not sparse_attention(q, k[:, :, :0], v[:, :, :0], config=noted, is_causal=False).any()
    assert not seen  # without queries or keys there is nothing to choose


def test_packed_and_paged(rng):
    """Each sequence's bits are those of a call of its own."""
    starts = [0, 300, 300, 420]
    q, k, v = (rng.standard_normal((420, heads, 16), dtype=np.float32) for heads in (4, 2, 2))
    o = sparse_attention_varlen(q, k, v, starts, config=LargestKeys(0.4))
    for begin, end in ((0, 300), (300, 420)):
        rows = slice(begin, end)
        own = sparse_attention(q[rows], k[rows], v[rows], config=LargestKeys(0.4), layout="BSHD")
        np.testing.assert_array_equal(o[rows], own)

    q, k, v = (rng.standard_normal((2, heads, n, 16), dtype=np.float32) for heads, n in ((4, 200), (2, 420), (2, 420)))
    table, pages = random_table(rng, [420, 420], 16)
    caches = (paged(x, table, pages, 16, "NHD", [420, 420]) for x in (k, v))
    found = sparse_attention_paged(q, *caches, table, seqlen_k=420, config=LargestKeys(0.4))
    np.testing.assert_array_equal(found, sparse_attention(q, k, v, config=LargestKeys(0.4)))


# ---------------------------------------------------------------- the page's own method

PAGE = Path(__file__).resolve().parents[1] / "docs" / "methods.md"


@pytest.fixture
def of_page(tmp_path, capsys):
    """The file that a reader of docs/methods.md would make, and the method in it."""
    if not PAGE.exists():
        pytest.skip("needs a source checkout")
    section = PAGE.read_text(encoding="utf-8").split("## A method of your own")[1]
    file = tmp_path / "largest.py"
    file.write_text(section.split("```python\n")[1].split("```")[0], encoding="utf-8")
    found = parse_method(f"{file}:LargestKeys:share=0.5", "--method")
    capsys.readouterr()
    return file, found


def on_frameworks(*of_lengths):
    """JAX compiles anew for each: all but its first are slow."""
    for name, lengths in itertools.product(FRAMEWORKS, of_lengths):
        slow = name == "jax" and lengths != of_lengths[0]
        yield pytest.param(name, lengths, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "lengths"), [*on_frameworks((300, 600), (600, 600), (1024, 1024), (1, 100))])
def test_the_page_s_method_takes_any_framework_and_length(of_page, qkv, name, lengths):
    framework, (q, k, v) = FRAMEWORKS[name](), qkv(*lengths, heads=4, kv_heads=2, head_dim=16)
    for is_causal in (True, False):
        o, stats = sparse_attention(
            *map(framework.array, (q, k, v)), config=of_page[1], is_causal=is_causal, return_stats=True
        )
        mask = meant(of_page[1](q, k, is_causal=is_causal, scale=0.0), 1, 4)
        np.testing.assert_allclose(np.asarray(o), masked_attention(q, k, v, mask)[0], atol=1e-5)
        assert stats.density < 1 or lengths[1] < 600


def test_the_page_s_command(of_page, capsys):
    file, _ = of_page
    arguments = ["compare", "trace", "--length", "600", "--method", f"{file}:LargestKeys:share=0.5"]
    assert cli.main(arguments) == cli.OK
    assert "\nlargestkeys (share=0.5) " in capsys.readouterr().out


def test_the_page_s_method_in_a_model(of_page):
    """At a length that no 128 divides, the prompt whole and behind a cache."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", "5.16")
    from tiny_llama import llama, logits_of, prompt

    from s2o_cupy.integrations.transformers import register

    model, ids = llama(), prompt(600)
    with torch.no_grad():
        dense = logits_of(model, "sdpa", ids)
        for share, tolerance in ((0.5, None), (1.0, 1e-4)):
            s2o = register("s2o", type(of_page[1])(share), min_seqlen=100)
            found = logits_of(model, "s2o", ids)
            assert s2o.calls == {"method": 3} and found.isfinite().all()
            assert torch.equal(found, dense) is False
            if tolerance:  # all blocks
                torch.testing.assert_close(found, dense, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- errors


def scheduled(seqlen_q=300, seqlen_k=300, is_causal=True, batch=1, heads=1, array=np.asarray, **rules):
    """A method that gives empty lists for these sizes, whatever the call's."""
    lists = array(np.zeros((batch, heads, -(-seqlen_q // 128), -(-seqlen_k // 128)), bool))
    rules = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "is_causal": is_causal, **rules}
    rules |= {"segment": 128, "window": (seqlen_k - seqlen_q) % 128} if is_causal else {}
    return lambda q, k, **_: Schedule.from_block_mask(lists, **rules)


def of_the_future(q, k, *, is_causal, scale):
    """Query 0 sees key 200."""
    indptr, indices = np.array([[[0, 1, 1, 1]]]), np.array([200], np.int32)
    return Schedule.from_csr(indptr, indices, seqlen_q=q.shape[2], seqlen_k=k.shape[2], segment=128)


def torch_array(x):
    return pytest.importorskip("torch").from_numpy(x)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda q, k, **_: {"a": 1}, r"the method <lambda> returned a dict; accepted: a Schedule$"),
        (scheduled(seqlen_q=200), "returned a Schedule with seqlen_q 200; accepted: 300, as in the call"),
        (scheduled(seqlen_k=301), "returned a Schedule with seqlen_k 301; accepted: 300, as in the call"),
        (scheduled(is_causal=False), "returned a Schedule with is_causal False; accepted: True, as in the call"),
        (scheduled(batch=3), "returned a Schedule with lists for a batch of 3; accepted: 1 or q's, 2"),
        (scheduled(heads=3), "returned a Schedule with lists for 3 heads; accepted: 1 or 2 or 4"),
        (
            scheduled(k_order=np.tile(np.arange(300, dtype=np.int32), (1, 3, 1))),
            "returned a Schedule with a k_order for 3 heads; accepted: 1 or 2 or 4",
        ),
        (
            of_the_future,
            r"the method of_the_future returned a Schedule with a mistake: list \[0, 0, 0\] .* has key 200, which is",
        ),
        (LargestKeys, r"config is the class LargestKeys; accepted: an instance, LargestKeys\(\.\.\.\)"),
        (PBSConfig, r"config is the class PBSConfig; accepted: an instance"),
        ("pbs", r"config is a str; accepted: .*PBSConfig, .*, or a method of your own, called as method\(q, k,"),
    ],
)
def test_what_is_refused(method, message, qkv):
    q, k, v = qkv(300, batch=2, heads=4, kv_heads=2, head_dim=16)
    for function, arguments in ((sparse_attention, (q, k, v)), (select, (q, k))):
        with pytest.raises((TypeError, ValueError), match=f"^{function.__name__}: .*{message}"):
            function(*arguments, config=method)


def test_what_was_probably_meant(qkv):
    for config, instead in (({"tau": 0.1}, r"S2OConfig\(\*\*config\)"), (0.1, r"S2OConfig\(tau=0.1\)")):
        with pytest.raises(TypeError, match=f"config is a .* returning a Schedule; such as {instead}$"):
            sparse_attention(*qkv(100), config=config)


def test_arrays_of_another_framework_are_refused(qkv):
    q, k, v = qkv(300, heads=4, kv_heads=2, head_dim=16)
    of_torch = scheduled(array=torch_array)
    with pytest.raises(TypeError, match="returned a Schedule of PyTorch arrays; accepted: of NumPy arrays, as q is"):
        sparse_attention(q, k, v, config=of_torch)

    class Exported:
        """Of a framework that nobody knows."""

        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    with pytest.raises(TypeError, match="q is a Exported, which the method everything gets as it is; accepted: an arr"):
        sparse_attention(*map(Exported, (q, k, v)), config=everything)


def test_errors_of_the_method_are_its_own(qkv):
    def failing(q, k, *, is_causal, scale):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="^'mine'$"):
        sparse_attention(*qkv(200), config=failing)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        sparse_attention(*qkv(200), config=lambda q, k: None)


def test_a_method_cannot_write_what_the_caller_has(qkv):
    def writing(q, k, *, is_causal, scale):
        k[:] = 0
        return everything(q, k, is_causal=is_causal, scale=scale)

    q, k, v = qkv(200)
    before = k.copy()
    for layout, arrays in (("BHSD", (q, k, v)), ("BSHD", [x.swapaxes(1, 2) for x in (q, k, v)])):
        with pytest.raises(ValueError, match="read-only"):
            sparse_attention(*arrays, config=writing, layout=layout)
    np.testing.assert_array_equal(k, before)
    k[:] = 1  # still the caller's to write


# ---------------------------------------------------------------- names, tables, files


def test_names():
    class Odd:
        def __call__(self, q, k, *, is_causal, scale):
            raise AssertionError

    for method, expected in (
        (LargestKeys(), ("largestkeys", "")),
        (LargestKeys(0.25), ("largestkeys", "share=0.25")),
        (everything, ("everything", "")),
        (functools.partial(some, share=0.3), ("some", "share=0.3")),
        (Odd(), ("odd", "")),
        (PBSConfig(threshold=0.5), ("pbs", "threshold=0.5")),
    ):
        assert (method_name(method), settings_of(method)) == expected
    assert settings_of(LargestKeys(np.array([0.1, 0.2]))) == "share=[0.1 0.2]"  # which no default can be told from


def test_side_by_side(qkv):
    """In compare a method has the figures of its own calls, beside others; and nothing that JSON cannot say."""
    q, k, v = qkv(400, heads=4, kv_heads=2, head_dim=16)
    of_partial = functools.partial(some, share=0.3)
    steps: list = []
    found = compare(
        q, k, v, [S2OConfig(tau=0), LargestKeys(0.3), of_partial, everything], repeats=1,
        progress=lambda *x: steps.append(x[2]),
    )  # fmt: skip
    assert steps[:5] == ["dense", "s2o", "largestkeys", "some", "everything"]
    _, mine, same, dense = found.rows
    _, stats = sparse_attention(q, k, v, config=LargestKeys(0.3), return_stats=True)
    assert mine.pooled_density == same.pooled_density == stats.density < 1
    assert mine.pooled_error == same.pooled_error > 0.01
    assert dense.pooled_density == 1 and dense.pooled_error < 1e-6
    assert all(f"\n{name} " in found.table() for name in ("largestkeys (share=0.3)", "some (share=0.3)", "everything"))
    rows = json.loads(json.dumps(found.to_dict()))["rows"]
    assert [row["config"] for row in rows[1:]] == [{"share": 0.3}, {"share": 0.3}, {}]
    with pytest.raises(TypeError, match="compare: configs is a function; accepted: some of S2OConfig, .*, as a list"):
        compare(q, k, v, everything)
    with pytest.raises(TypeError, match=r"compare: configs\[1\] is the class LargestKeys; accepted: an instance"):
        compare(q, k, v, [everything, LargestKeys])


def test_a_method_by_its_file():
    assert parse_method(f"{FILE}:LargestKeys", "--method") == parse_method(f"{FILE}:LargestKeys:share=0.5", "--method")
    found = parse_method(f"{FILE}:some:share=0.25", "--method")
    assert (method_name(found), settings_of(found)) == ("some", "share=0.25")
    assert parse_method(f"{FILE}:everything", "--method") is parse_method(f"{FILE}:everything", "--method")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.py:f", "--method has nowhere.py; accepted: a file that is there"),
        (f"{FILE}:other", "--method has other, which .*does not define; accepted: LargestKeys, everything, some"),
        (f"{FILE}:LargestKey", "does not define; did you mean LargestKeys. accepted: "),
        ("S2O", "--method has 'S2O'; did you mean s2o. accepted: s2o, "),
        ("XAttentionConfig", "--method has 'XAttentionConfig'; did you mean xattention. accepted: "),
        ("xattention stride=8", "did you mean xattention. .*; fields are NAME:FIELD=VALUE,..., another method another"),
        (f"{FILE}:NOT_A_METHOD", "--method: NOT_A_METHOD is a int; accepted: S2OConfig, "),
        (f"{FILE}:LargestKeys:part=1", "--method has LargestKeys: .*unexpected keyword argument 'part'"),
        (f"{FILE}:some:share=1,part=1", "--method has some: .*unexpected keyword argument 'part'"),
        (f"{FILE}:some", "--method has some: missing a required argument: 'share'"),
        (f"{FILE}:BLOCK:part=1", "--method has BLOCK: it is made already, and takes no fields"),
        (f"{FILE}:some:share", "has .*:some:share'; accepted: .*own_methods.py:some:FIELD=VALUE"),
        ("largestkeys", "--method has 'largestkeys'; accepted: s2o, .*, blasst, or FILE.py:NAME, a method of your own"),
    ],
)
def test_files_that_are_refused(text, message):
    with pytest.raises((TypeError, ValueError), match=message):
        parse_method(text, "--method")


def test_the_command(capsys):
    arguments = ["compare", "slash", "--length", "600", "--head-dim", "32", "--repeats", "1", "--method"]
    assert cli.main([*arguments, f"{FILE}:LargestKeys:share=0.4", "--method", "blasst"]) == cli.OK
    told = capsys.readouterr().out
    assert "\nlargestkeys (share=0.4) " in told and "\nblasst (scale_factor=1000) " in told
    assert cli.main([*arguments, f"{FILE}:NOT_A_METHOD"]) == cli.UNABLE
    assert "NOT_A_METHOD is a int" in capsys.readouterr().err


def test_a_method_that_raises(tmp_path, capsys):
    """The command says which did, and what."""
    file = tmp_path / "mine.py"
    file.write_text("def fails(q, k, *, is_causal, scale):\n    raise KeyError('mine')\n")
    arguments = ["compare", "slash", "--length", "300", "--head-dim", "16", "--method", f"{FILE}:everything"]
    assert cli.main([*arguments, "--method", f"{file}:fails"]) == cli.UNABLE
    assert capsys.readouterr().err.endswith(f"s2o compare: --method {file}:fails raised KeyError: 'mine'\n")
    broken = tmp_path / "broken.py"
    broken.write_text("nothing()\n")
    assert cli.main([*arguments, "--method", f"{broken}:f"]) == cli.UNABLE
    assert f"--method has {broken}, which raised NameError: name 'nothing'" in capsys.readouterr().err


def test_numbers_by_head():
    assert parse_method("s2o:tau=0.1/0.2,segment=256", "--method") == S2OConfig(
        tau=(0.1, 0.2), segment=256, dense_up_to=0
    )
    with pytest.raises(ValueError, match=r"accepted: s2o:FIELD=VALUE, .* each query head as FIELD=0.1/0.2$"):
        parse_method("s2o:tau=0.1,0.2", "--method")


class Scaled:
    def __call__(self, q, k, scale):
        pytest.fail("it was called")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda q, k: None, "the method <lambda>(q, k) is called as <lambda>(q, k, is_causal=, scale=), which it does "
         "not take (got an unexpected keyword argument 'is_causal')"),
        (lambda q, *, is_causal, scale: None, "(too many positional arguments)"),
        (lambda q, k, v, *, is_causal, scale: None, "(missing a required argument: 'v')"),
        (Scaled(), "the method scaled(q, k, scale) is called as scaled(q, k, is_causal=, scale=), which it"),
        (functools.partial(everything, nothing=1), "the method everything(q: "),  # type: ignore[call-arg]
    ],
)  # fmt: skip
def test_a_signature_that_a_call_does_not_fit(method, said, qkv, monkeypatch):
    """Said before it is called, and of compare before anything is measured."""
    q, k, v = qkv(200)
    accepted = "accepted: two arguments by position, q and k, and the keywords is_causal and scale"
    for name, call in (
        ("sparse_attention", lambda: sparse_attention(q, k, v, config=method)),
        ("select", lambda: select(q, k, method)),
        ("compare", lambda: compare(q, k, v, [S2OConfig(), method])),
    ):  # fmt: skip
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value).startswith(f"{name}: the method ") and str(error.value).endswith(accepted)
        assert said in str(error.value)


def test_signatures_that_nobody_knows_or_that_take_more(qkv):
    """An error from inside stays what it is."""
    q, k, v = qkv(200)
    sparse_attention(q, k, v, config=lambda *of, **options: everything(*of, **options))

    def wrong(q, k, *, is_causal, scale, more=1):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="^of its own$"):
        sparse_attention(q, k, v, config=wrong)
    with pytest.raises(TypeError, match="returned a|argument"):
        sparse_attention(q, k, v, config=print)


# ---------------------------------------------------------------- PyTorch's compiler and autocast, and a GPU


def test_torch_compile_breaks_its_graph_at_the_call(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv(300, heads=2, kv_heads=1, head_dim=16))
    call = lambda q: sparse_attention(q * 2, k, v, config=LargestKeys()) + 1  # noqa: E731
    graphs: list = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    assert torch.equal(torch.compile(call, backend=backend)(q), call(q))
    assert len(graphs) == 2 and not any("sort" in str(target) for graph in graphs for target in graph)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph cannot hold sparse_attention"):
        torch.compile(call, backend="eager", fullgraph=True)(q)


def test_autocast_does_not_reach_a_method(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in qkv(200))
    seen = []

    def noted(q, k, **options):
        seen.append((q[0] @ k[0].mT).dtype)
        return everything(q, k, **options)

    with torch.autocast("cpu", torch.bfloat16):
        sparse_attention(q, k, v, config=noted)
    assert seen == [torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="no GPU: cupy.is_available() is False")
def test_on_a_gpu(qkv):
    """The call's own bits, on a stream of its own, and replayed by a CUDA graph of PyTorch."""
    import cupy

    host = [x.astype(np.float16) for x in qkv(700, heads=4, kv_heads=2)]
    q, k, v = map(cupy.asarray, host)
    expected = gather_attention(q, k, v, LargestKeys()(q, k, is_causal=True, scale=0.0)).get()
    for stream in (None, cupy.cuda.Stream()):
        np.testing.assert_array_equal(sparse_attention(q, k, v, config=LargestKeys(), stream=stream).get(), expected)
    with pytest.raises(TypeError, match="returned a Schedule of NumPy arrays; accepted: of CuPy arrays, as q is"):
        sparse_attention(q, k, v, config=scheduled(700, 700))
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    q, k, v = (torch.from_numpy(x).cuda() for x in host)
    for config in (LargestKeys(), MeanPoolingConfig(threshold=0.5)):
        warm = sparse_attention(q, k, v, config=config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = sparse_attention(q, k, v, config=config)
        graph.replay()
        torch.testing.assert_close(o, warm, rtol=0, atol=0)
