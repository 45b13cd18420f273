# mypy: disable-error-code="call-overload, call-arg, arg-type"
"""Mistakes that newcomers make: each is answered by the function that was called, with the argument, what came and what
is accepted, or what was probably meant."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import s2o_cupy
from s2o_cupy import (
    S2OConfig,
    Schedule,
    errors,
    gather_attention,
    gather_attention_varlen,
    integrations,
    merge_states,
    s2o_attention,
    s2o_attention_paged,
    s2o_attention_varlen,
)
from s2o_cupy.methods import (
    MeanPoolingConfig,
    SpargeConfig,
    XAttentionConfig,
    sparse_attention,
    sparse_attention_paged,
    sparse_attention_varlen,
)
from s2o_cupy.nsa import nsa_attention
from s2o_cupy.tools import attention_within, compare, inputs, tune

Q, K = np.zeros((1, 4, 200, 16), np.float32), np.zeros((1, 2, 200, 16), np.float32)
PACKED = Q[0].swapaxes(0, 1), K[0].swapaxes(0, 1), K[0].swapaxes(0, 1)
PAGES, TABLE = np.zeros((16, 16, 2, 16), np.float32), np.arange(16, dtype=np.int32)[None]
HND = PAGES.swapaxes(1, 2)  # pages, kv_heads, page_size, head_dim
OTHER_LAYOUT = (Q, HND, HND, TABLE)

MISTAKES = {
    "a dict for a config": (
        lambda: s2o_attention(Q, K, K, config={"tau": 0.1}),
        "s2o_attention: config is a dict; accepted: S2OConfig or None, such as S2OConfig(**config)",
    ),
    "a number for a config": (
        lambda: s2o_attention_varlen(*PACKED, [0, 200], config=0.1),
        "config is a float; accepted: S2OConfig or None, such as S2OConfig(tau=0.1)",
    ),
    "a method's config": (
        lambda: s2o_attention(Q, K, K, config=MeanPoolingConfig()),
        "config is a MeanPoolingConfig; accepted: S2OConfig or None; sparse_attention takes the others",
    ),
    "a class for a config": (
        lambda: s2o_attention(Q, K, K, config=S2OConfig),
        "config is a type; accepted: S2OConfig or None, an object: S2OConfig()",
    ),
    "text for tau": (
        lambda: s2o_attention(Q, K, K, tau="0.1"),
        "s2o_attention: tau is '0.1' (str); accepted: a number >= 0 (0 never stops: dense attention; math.inf stops "
        "after one key tile), or one for each head",
    ),
    "taus of other heads": (
        lambda: s2o_attention(Q, K, K, tau=[0.1, 0.2]),
        "s2o_attention: tau has 2 numbers, q has 4 heads; accepted: one number for all heads, or one for each query ",
    ),
    "q and k swapped": (
        lambda: s2o_attention(K, Q, Q),
        "q has 2 heads, k and v have 4; accepted: heads a multiple of kv_heads (grouped-query attention), so that q "
        "has the more of them",
    ),
    "no cu_seqlens": (
        lambda: s2o_attention_varlen(*PACKED),
        "s2o_attention_varlen: cu_seqlens_q is missing, where each sequence begins in q, and the rows of q: "
        "[0, ..., total_q]; accepted: q, k, v, cu_seqlens_q",
    ),
    "transformers' name for cu_seqlens": (
        lambda: s2o_attention_varlen(*PACKED, cu_seq_lens_q=[0, 200]),
        "s2o_attention_varlen: cu_seq_lens_q is not an argument; did you mean cu_seqlens_q?",
    ),
    "no v": (lambda: s2o_attention(Q, K), "s2o_attention: v is missing; accepted: q, k, v"),
    "no seqlen_k": (
        lambda: s2o_attention_paged(Q, PAGES, PAGES, TABLE),
        "s2o_attention_paged: seqlen_k is missing, how many keys each sequence has in its pages: an integer, or one "
        "for each sequence",
    ),
    "pages in the other layout": (
        lambda: s2o_attention_paged(*OTHER_LAYOUT, seqlen_k=200),
        "accepted: seqlen_k <= pages_per_sequence * page_size. Did you mean layout='HND'? These shapes fit it",
    ),
    "a list for a page table": (
        lambda: s2o_attention_paged(Q, PAGES, PAGES, TABLE.tolist(), seqlen_k=200),
        "s2o_attention_paged: page_table is a list; accepted: NumPy, CuPy, PyTorch or JAX arrays",
    ),
    "no schedule": (
        lambda: gather_attention(Q, K, K),
        "gather_attention: schedule is missing, the keys that each tile of queries attends to, such as "
        "Schedule.from_block_mask(mask, block=128)",
    ),
    "a mask for a schedule": (
        lambda: gather_attention(Q, K, K, np.ones((1, 4, 2, 2), bool)),
        "gather_attention: schedule is a ndarray; accepted: Schedule, such as Schedule.from_block_mask(mask, block",
    ),
    "a mask of fewer keys than queries": (
        lambda: Schedule.from_block_mask(np.ones((1, 4, 2, 3), bool), block=64),
        "mask has 2 lists of 128 queries and 3 blocks of 64 keys; accepted with is_causal=True: no more queries",
    ),
    "a tau for a schedule": (
        lambda: gather_attention(Q, K, K, None, tau=0.1),
        "gather_attention: tau is not an argument; accepted: q, k, v, schedule",
    ),
    "no schedules": (
        lambda: gather_attention_varlen(*PACKED, [0, 200]),
        "gather_attention_varlen: schedules is missing; accepted: q, k, v, cu_seqlens_q, schedules",
    ),
    "no method": (
        lambda: sparse_attention(Q, K, K),
        "sparse_attention: config is missing, an S2OConfig, or the configuration of another method",
    ),
    "tensors to save": (
        lambda: inputs.save("nowhere.npz", inputs.QKV([1.0], Q, Q)),
        "nowhere.npz: q is a list; accepted: a NumPy array",
    ),
    "no error": (
        lambda: attention_within(Q, K, K),
        "attention_within: error is missing, the rel_l2 against dense attention to keep to, such as 0.05",
    ),
    "a field of S2OConfig to compare": (
        lambda: compare(Q, K, K, error=0.1),
        "compare: error is not an argument; it is a field of S2OConfig: configs=[S2OConfig(error=...), ...]",
    ),
    "scales of pages": (
        lambda: s2o_attention(Q, K, K, k_scale=1.0),
        "s2o_attention: k_scale is not an argument; scales of 8-bit pages: s2o_attention_paged",
    ),
    "scales of pages to a method": (
        lambda: sparse_attention_paged(Q, PAGES, PAGES, TABLE, seqlen_k=200, config=S2OConfig(), k_scale=1.0),
        "sparse_attention_paged: k_scale is not an argument; scales of 8-bit pages: s2o_attention_paged",
    ),
    "a scale of queries": (
        lambda: s2o_attention_paged(Q, PAGES, PAGES, TABLE, seqlen_k=200, q_scale=1.0),
        "s2o_attention_paged: q_scale is not an argument; 8-bit pages have k_scale and v_scale, and queries no scale",
    ),
    "packed by heads": (
        lambda: s2o_attention_varlen(Q[0], K[0], K[0], [0, 200]),
        "s2o_attention_varlen: cu_seqlens_q ends with 200; accepted: 0, then ascending to 4, the rows of q. Did you "
        "mean q.swapaxes(0, 1)? Axes are (total_q, heads, head_dim)",
    ),
    "no target": (lambda: tune(Q, K, K), "tune: neither error nor density is given; accepted: one of them"),
    "a method to tune": (
        lambda: tune(Q, K, K, error=0.1, config=XAttentionConfig()),
        "tune: config is a XAttentionConfig; accepted: S2OConfig or None",
    ),
    "nothing to compare": (lambda: compare(Q, K, K, []), "compare: configs is empty; accepted: at least one"),
    "a scale to compare": (lambda: compare(Q, K, K, scale=np.inf), "compare: scale is inf; accepted: a finite number"),
    "taus of other heads to compare": (
        lambda: compare(Q, K, K, [S2OConfig(tau=(0.1,))]), "compare: tau has 1 numbers, q has 4 heads; accepted: one",
    ),
    "causal": (lambda: s2o_attention(Q, K, K, causal=1), "s2o_attention: causal is not an argument; did you mean is_"),
    "thresholds of other heads": (
        lambda: sparse_attention(Q, K, K, config=SpargeConfig(tau=[0.9] * 3, theta=0.1)),
        "SpargeConfig: tau has 3 numbers; accepted: one, or 4, one for each head",
    ),
    "no compressed keys": (
        lambda: nsa_attention(Q, K, K), "nsa_attention: k_cmp is missing; accepted: q, k, v, k_cmp, v_cmp, gates",
    ),
    "a list for gates": (
        lambda: nsa_attention(Q, K, K, K, K, [1.0]), "nsa_attention: gates is a list; accepted: NumPy, CuPy, PyTorch",
    ),
    "compressed keys of another length": (
        lambda: nsa_attention(Q, K, K, K, K, Q), "nsa_attention: k_cmp has shape (1, 2, 200, 16); accepted: (1, 2, 11,",
    ),
    "outputs for sums": (lambda: merge_states(Q, Q, Q, Q), "merge_states: lse1 is (1, 4, 200, 16) with o1"),
    "a list for a mask of blocks": (
        lambda: Schedule.from_block_mask([[True]]), "Schedule.from_block_mask: mask is a list; accepted: NumPy, CuPy",
    ),
    "a wrong rule": (
        lambda: Schedule.from_block_mask(np.ones((1, 4, 2, 2), bool), segment=0),
        "Schedule.from_block_mask: segment is 0; accepted: an integer from 1 to 8192",
    ),
    "a chunk the wrong way round": (
        lambda: S2OConfig().of_chunk(512, 256, 16384), "S2OConfig.of_chunk: begin is 512; accepted: an integer from 0 ",
    ),
    "a chunk before the prompt": (
        lambda: S2OConfig().of_chunk(-5, 1000, seqlen=16384), "begin is -5; accepted: an integer from 0 to 999",
    ),
    "a chunk beyond the prompt": (
        lambda: S2OConfig().of_chunk(0, 99999, seqlen=16384), "end is 99999; accepted: an integer from 1 to 16384",
    ),
    "a chunk of half a segment": (
        lambda: S2OConfig(segment=128).of_chunk(64, 256, 512), "begin is 64; accepted: whole segments, of 128",
    ),
    "a chunk that ends within a segment": (
        lambda: S2OConfig(segment=128).of_chunk(128, 200, 512), "end is 200; accepted: whole segments, of 128",
    ),
    "a schedule's path that is a list": (
        lambda: gather_attention(
            Q, K, K, Schedule.from_block_mask(np.ones((1, 1, 2, 2), bool), segment=128), path=["auto"]
        ),
        "gather_attention: path is ['auto']",
    ),
    "taus by head of a schedule": (
        lambda: Schedule.from_block_mask(np.ones((1, 4, 2, 2), bool), segment=128, tau=[0.1] * 4),
        "(list); accepted: a number >= 0 (0 never stops: dense attention; math.inf stops after one key tile)",
    ),
    "text for a chunk": (
        lambda: S2OConfig().of_chunk("0", 100, seqlen=200), "S2OConfig.of_chunk: begin is '0' (str); accepted: an int",
    ),
    "fewer than no keys": (
        lambda: S2OConfig().tau_of(-5), "S2OConfig.tau_of: candidates is -5; accepted: an integer >= 0",
    ),
    "errors where a tau is asked for": (
        lambda: S2OConfig(tau=0.1).errors(4),
        "S2OConfig: error is None; accepted here: an error, whose taus a call finds",
    ),
    "a tile that no path takes": (
        lambda: S2OConfig(block_n=1025), "S2OConfig: block_n is 1025; accepted: an integer from 1 to 1024",
    ),
    "no taus": (
        lambda: S2OConfig().with_found_taus(None),
        "S2OConfig.with_found_taus: taus is None; accepted: a number, or one for each query head",
    ),
    "text for a scale": (
        lambda: s2o_attention_paged(Q, PAGES, PAGES, TABLE, seqlen_k=200, k_scale="auto"),
        "s2o_attention_paged: k_scale is a str; accepted: a number, or an array of float32",
    ),
    "a list for a scale": (
        lambda: s2o_attention_paged(Q, PAGES, PAGES, TABLE, seqlen_k=200, v_scale=[1.0]),
        "s2o_attention_paged: v_scale is a list; accepted: a number, or an array of float32",
    ),
    "bytes without scales": (
        lambda: s2o_attention_paged(Q, PAGES.astype(np.uint8), PAGES.astype(np.uint8), TABLE, seqlen_k=200),
        "s2o_attention_paged: k_pages is uint8, as v_pages is; accepted: float32 as q",
    ),
    "gates of another dtype": (
        lambda: nsa_attention(Q, K, K, K[:, :, :11], K[:, :, :11], np.zeros((1, 200, 3))),
        "nsa_attention: gates is float64; accepted: float32",
    ),
    "text for return_lse": (
        lambda: s2o_attention(Q, K, K, return_lse="no"), "s2o_attention: return_lse is 'no'; accepted: True or False",
    ),
    "text for return_stats": (
        lambda: sparse_attention(Q, K, K, config=XAttentionConfig(), return_stats="no"),
        "sparse_attention: return_stats is 'no'; accepted: True or False",
    ),
    "no theta": (lambda: SpargeConfig(), "SpargeConfig: theta is missing; accepted: path, workspace_bytes,"),
    "text for a seed": (
        lambda: tune(Q, K, K, error=0.1, seed="a"), "tune: seed is 'a' (str); accepted: an integer >= 0",
    ),
    "a seed below 0": (lambda: tune(Q, K, K, error=0.1, seed=-1), "tune: seed is -1; accepted: an integer >= 0"),
    "a fraction for a seed": (
        lambda: attention_within(Q, K, K, 0.1, seed=1.5), "attention_within: seed is 1.5 (float); accepted: an integer",
    ),
    "another library's name": (
        lambda: sparse_attention_varlen(*PACKED, [0, 200], config=S2OConfig(), causal=True),
        "sparse_attention_varlen: causal is not an argument; did you mean is_causal?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_said(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        call()
    assert mistake == "tensors to save" or isinstance(caught.value, errors.ArgumentError)


def test_one_tau_for_four_heads():
    """Of an operator's list of one nobody can tell whether it is for all heads: refused as everywhere else."""
    torch = pytest.importorskip("torch")
    from s2o_cupy.integrations import drop_in
    from s2o_cupy.integrations.torch import attention, attention_varlen

    q, k = map(torch.from_numpy, (Q, K))
    rows = [x[0].transpose(0, 1) for x in (q, k, k)]
    tokens = [x.transpose(1, 2) for x in (q, k, k)]
    calls = {
        "s2o_attention": lambda **x: attention(q, k, k, **x),
        "s2o_attention_varlen": lambda **x: attention_varlen(*rows, [0, 200], **x),
        "flash_attn_func": lambda **x: drop_in.flash_attn_func(*tokens, **x),
        "scaled_dot_product_attention": lambda **x: drop_in.scaled_dot_product_attention(q, q, q, **x),
    }
    for name, call in calls.items():
        for options in ({"tau": [0.1]}, {"config": S2OConfig(tau=(0.1,))}):
            with pytest.raises(ValueError, match=f"^{name}: tau has 1 numbers, q has 4 heads; accepted: one number"):
                call(**options)
        call(tau=0.1, config=S2OConfig(tau=(0.1,)))
    for layout, of_one in (("BHSD", q[:, :1]), ("BSHD", q[:, :1].transpose(1, 2))):
        attention(of_one, of_one, of_one, tau=[0.1], layout=layout)
    with pytest.raises(ValueError, match="^s2o_attention: error has 1 numbers, q has 4 heads"):
        attention(q, k, k, config=S2OConfig(error=(0.1,)))


def test_drop_ins_have_no_layout():
    """So what they take is said in its place."""
    torch = pytest.importorskip("torch")
    from s2o_cupy.integrations.drop_in import flash_attn_func, scaled_dot_product_attention

    q, k = map(torch.from_numpy, (Q, K))
    for options in ({}, {"window_size": (10, 0)}):
        with pytest.raises(ValueError, match=r"^flash_attn_func: .*transpose\(1, 2\)\? Axes are \(batch, seqlen,"):
            flash_attn_func(q, k, k, causal=True, **options)
    q, k = q.transpose(1, 2)[:, :100], k.transpose(1, 2)  # 100 heads, which 200 do not divide
    with pytest.raises(ValueError, match=r"^scaled_dot_product_attention: .*Axes are \(batch, heads, seqlen, head_dim"):
        scaled_dot_product_attention(q, k, k, enable_gqa=True)


@pytest.mark.parametrize(
    ("name", "folder"), [("tune", "tools"), ("compare", "tools"), ("PBSConfig", "methods"), ("nsa_attention", "nsa")]
)
def test_names_that_are_in_a_folder(name, folder):
    with pytest.raises(ImportError, match=f"^s2o_cupy has no {name}; it is in s2o_cupy.{folder}: from s2o_cupy"):
        exec(f"from s2o_cupy import {name}")
    assert not hasattr(s2o_cupy, name)
    with pytest.raises(AttributeError, match=f"it is in s2o_cupy.{folder}"):
        getattr(s2o_cupy, name)
    assert not hasattr(s2o_cupy, "nothing") and not hasattr(s2o_cupy, "_nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from s2o_cupy import nothing")


INTEGRATIONS = [path.stem for path in (Path(s2o_cupy.__file__).parent / "integrations").glob("[a-z]*.py")]


# s2o_cupy.nsa is there.
@pytest.mark.parametrize("name", sorted({*integrations.MODULES} - {"nsa"}))
def test_integrations_are_said_to_be_in_their_folder(name):
    """Also where the framework that one needs is not installed."""
    said = f"^s2o_cupy has no {name}; it is s2o_cupy.integrations.{name}: import s2o_cupy.integrations.{name}$"
    with pytest.raises(AttributeError, match=said):
        getattr(s2o_cupy, name)
    with pytest.raises(ImportError, match=said):
        exec(f"from s2o_cupy import {name}")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("register", ("diffusers", "transformers")), ("capture", ("transformers",)), ("tune_model", ("model_tools",)),
        ("report", ("model_tools", "sglang", "vllm")), ("flash_attn_func", ("drop_in",)),
        ("SequenceParallel", ("distributed",)),
    ],
)  # fmt: skip
def test_names_that_are_in_an_integration(name, modules):
    """Each by the modules that are for users."""
    known = [f"from s2o_cupy.integrations.{module} import {name}" for module in modules]
    said = f"^s2o_cupy has no {name}; it is in s2o_cupy.integrations: {', or '.join(known)}$"
    with pytest.raises(ImportError, match=said):
        exec(f"from s2o_cupy import {name}")
    with pytest.raises(AttributeError, match=said):
        getattr(s2o_cupy, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["torch.nothing", "nothing.more", "serving", "plugins", "nothing-at-all"])
def test_other_names_are_just_not_there(name):
    """Those of modules that are not for users, and what is no name; no framework is imported to find out."""
    code = f"""
import sys
import s2o_cupy
assert not hasattr(s2o_cupy, {name!r}) and getattr(s2o_cupy, {name!r}, 1) == 1
assert not {{"torch", "jax", "cupy"}} & {{*sys.modules}}
assert s2o_cupy.integrations.MODULES
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_of_integrations_without_their_sources(monkeypatch, tmp_path):
    monkeypatch.setattr(integrations, "__file__", str(tmp_path / "__init__.pyc"))
    integrations._public_names.cache_clear()
    assert integrations.modules_with("register") == []
    integrations._public_names.cache_clear()


def test_public_names_of_integrations_can_be_read():
    assert {*integrations.MODULES} <= {*INTEGRATIONS}
    assert all(map(integrations._public_names, integrations.MODULES))


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ("xattention", r"did you mean XAttentionConfig\(\.\.\.\)\?"),
        ("x-atention", r"did you mean XAttentionConfig\(\.\.\.\)\?"),
        ("PBSConfig", r"did you mean PBSConfig\(\.\.\.\)\?"), ("s2o", r"did you mean S2OConfig\(\.\.\.\)\?"),
        ("weight", r"did you mean S2OConfig\(rank='weight'\)\?"), ("nothing of the kind", "of your own, .*Schedule$"),
    ],
)  # fmt: skip
def test_a_method_by_its_name(config, meant):
    """Where its configuration is taken."""
    for call in (lambda: sparse_attention(Q, K, K, config=config), lambda: compare(Q, K, K, [config])):
        with pytest.raises(TypeError, match=rf"is a str; accepted: S2OConfig, MeanPoolingConfig, .*{meant}"):
            call()


def test_a_rank_for_a_config():
    with pytest.raises(TypeError, match=r"config is a str; accepted: S2OConfig or None, such as S2OConfig\(rank='mean"):
        s2o_attention(Q, K, K, config="Mean")
    with pytest.raises(TypeError, match="accepted: S2OConfig or None; sparse_attention takes other methods, by their"):
        s2o_attention(Q, K, K, config="xattention")


def test_text_for_return_lse_to_an_operator():
    torch = pytest.importorskip("torch")
    from s2o_cupy.integrations.torch import attention

    q, k = map(torch.from_numpy, (Q, K))
    with pytest.raises(TypeError, match="^s2o_attention: return_lse is 'no'; accepted: True or False$"):
        attention(q, k, k, return_lse="no")


def test_names_of_other_functions():
    """flash-attn's and PyTorch's, given to each other."""
    torch = pytest.importorskip("torch")
    from s2o_cupy.integrations.drop_in import flash_attn_func, scaled_dot_product_attention

    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(TypeError, match=r"^flash_attn_func: is_causal is not an argument; did you mean causal\?"):
        flash_attn_func(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="^scaled_dot_product_attention: softmax_scale is not an argument; did you"):
        scaled_dot_product_attention(x, x, x, softmax_scale=1)


def test_a_page_table_on_another_device():
    torch = pytest.importorskip("torch")
    q, pages, table = map(torch.from_numpy, (Q, PAGES, TABLE))
    with pytest.raises(ValueError, match=r"^s2o_attention_paged: q, .* page_table on meta; accepted: one device for"):
        s2o_attention_paged(q, pages, pages, table.to("meta"), seqlen_k=200)


@pytest.mark.parametrize(
    ("shape", "suspected"),
    [((1, 40, 8, 16), True), ((1, 9, 8, 16), True), ((1, 8, 8, 16), False), ((1, 8, 1, 16), False)],
)
def test_more_heads_than_tokens_are_suspected(shape, suspected):
    """As (batch, seqlen, heads, head_dim) reads; but for a single token, as in decoding."""
    x = np.ones(shape, np.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        s2o_attention(x, x, x, scale=0.5 + shape[1] / 1000)  # a problem of its own, as each is warned of once
    said = [str(x.message) for x in caught if "pass layout='BSHD'" in str(x.message)]
    assert len(said) == suspected and all(f"q has {shape[1]} heads of {shape[2]} queries each" in x for x in said)


@pytest.mark.parametrize("number", range(5))
def test_warnings_name_the_caller_s_line(number):
    """However many functions lie between it and the warning."""
    x = np.ones((1, 40, 8, 16), np.float32)
    options = {"scale": 0.25 + number / 1000}  # a problem of its own, as each is warned of once
    with pytest.warns(UserWarning, match="pass layout='BSHD'") as caught:
        if number == 0:
            s2o_attention(x, x, x, **options)
        elif number == 1:
            sparse_attention(x, x, x, config=S2OConfig(), **options)
        elif number == 2:
            compare(x, x, x, [S2OConfig()], **options)
        elif number == 3:
            attention_within(x, x, x, 0.5, **options)
        else:
            torch = pytest.importorskip("torch")
            from s2o_cupy.integrations.torch import attention

            attention(*[torch.from_numpy(x)] * 3, **options)
    assert {y.filename for y in caught if "pass layout" in str(y.message)} == {__file__}


def test_a_warning_whose_callers_are_all_of_the_package(monkeypatch):
    """Then it is of the outermost."""
    monkeypatch.setattr(errors, "_BETWEEN", {x.split(".")[0] for x in sys.modules} | {"__main__"})
    with pytest.warns(UserWarning, match="so it is"):
        errors.warn_caller("so it is")


def test_other_calls_have_no_such_layout():
    """Of a cache queries lie in one way, so nobody is asked about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = np.zeros((1, 16, 16, 1), np.float32)  # a page of 16 keys, 16 KV heads
        s2o_attention_paged(np.zeros((1, 16, 2, 1), np.float32), few, few, TABLE[:, :1], seqlen_k=2)


def test_more_query_heads_than_tokens_are_no_surprise():
    """Of grouped queries, whose KV heads are fewer: read the other way these shapes would fit nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        s2o_attention(np.ones((1, 32, 20, 16), np.float32), *np.ones((2, 1, 8, 20, 16), np.float32))
