"""Padded batches and packed sequences of Hugging Face models: each sequence as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import SMALL

from s2o_cupy import s2o_attention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import llama, logits_of, prompt  # noqa: E402

from s2o_cupy.integrations.causal_mask import CausalMask  # noqa: E402
from s2o_cupy.integrations.packed_rows import pack, unpack  # noqa: E402
from s2o_cupy.integrations.transformers import register  # noqa: E402

DENSE = replace(SMALL, segment=64, tau=0.0)
LENGTH = 400


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def ids():
    ids = prompt(LENGTH)
    return torch.cat([ids, ids.flip(1), ids.roll(50)])


def padding(side):
    """(3, LENGTH): row 0 is full, rows 1 and 2 lack 40 and 150 tokens."""
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row, tokens in ((1, 40), (2, 150)):
        mask[row, slice(0, tokens) if side == "left" else slice(-tokens, None)] = 0
    return mask


def assert_same_tokens(x, y, mask):
    """Where there are tokens; what padding gets nobody reads."""
    assert not x.isnan().any()
    torch.testing.assert_close(x[mask.bool()], y[mask.bool()], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(model, ids, side):
    s2o = register(config=DENSE, min_seqlen=100)
    options = {"attention_mask": padding(side)}
    found = logits_of(model, "s2o", ids, **options)
    assert s2o.calls == {"s2o": 3}
    assert_same_tokens(found, logits_of(model, "sdpa", ids, **options), options["attention_mask"])


def test_a_padded_row_is_what_it_is_alone(qkv):
    """Bit for bit, at a tau that leaves keys out, with heads of two configs; 0 where padding is."""
    config, other = replace(SMALL, tau=0.5), replace(SMALL, segment=64, tau=0.1)
    s2o = register(config=config, per_layer={(0, 2): other}, min_seqlen=100)
    q, k, v = (torch.from_numpy(x) for x in qkv(300, heads=4, kv_heads=2, batch=2))
    module = torch.nn.Module().eval()
    module.layer_idx = 0
    mask = CausalMask(2, 300, 300, 300, "cpu", sequences=((0, 0, 300), (1, 120, 300)))
    o, _ = s2o(module, q, k, v, mask)
    assert s2o.calls == {"s2o": 1} and o.is_contiguous()
    assert not o[1, :120].any()
    for row, begin in ((0, 0), (1, 120)):
        for h, used in enumerate((config, config, other, config)):
            part = (q[row, h : h + 1, begin:], k[row, h // 2 :][:1, begin:], v[row, h // 2 :][:1, begin:])
            assert torch.equal(o[row, begin:, h], s2o_attention(*part, config=used)[0])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_padding_beside_a_cache(model, ids, kind):
    """Chunks, of which one has tokens of two rows alone."""
    s2o = register(config=DENSE, min_seqlen=100)
    mask = padding("left")
    found = []
    for implementation in ("s2o", "sdpa"):
        cache = (
            transformers.DynamicCache(config=model.config)
            if kind == "dynamic"
            else transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 20)
        )
        parts = [
            logits_of(model, implementation, ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache)
            for a, b in ((0, 120), (120, 250), (250, LENGTH - 1), (LENGTH - 1, LENGTH))
        ]
        found.append(torch.cat(parts, 1))
    assert_same_tokens(*found, mask)
    assert s2o.calls == {"s2o": 9, "decoding": 3}


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(model, ids, cache):
    s2o = register(config=DENSE, min_seqlen=100)
    options = {
        "max_new_tokens": 4, "do_sample": False, "cache_implementation": cache, "disable_compile": True,
        "attention_mask": padding("left"), "pad_token_id": 0,
    }  # fmt: skip
    model.set_attn_implementation("sdpa")
    expected = model.generate(ids, **options)
    model.set_attn_implementation("s2o")
    assert torch.equal(model.generate(ids, **options), expected)
    assert s2o.calls == {"s2o": 3, "decoding": 9}


def test_packed_by_position_ids(model, ids):
    s2o = register(config=DENSE, min_seqlen=100)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((LENGTH,), (150, 250), (1, 99, 100, 200))]
    )
    options = {"position_ids": positions, "use_cache": False}
    found = logits_of(model, "s2o", ids, **options)
    assert s2o.calls == {"s2o": 3}
    assert_same_tokens(found, logits_of(model, "sdpa", ids, **options), torch.ones_like(positions))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("side", ["left", "right"])
def test_what_s2o_leaves_to_sdpa_is_what_sdpa_does(model, ids, side):
    """Bit for bit: the mask that was not made is, and is transformers' own."""
    s2o = register(config=DENSE, min_seqlen=LENGTH + 1)
    options = {"attention_mask": padding(side)}
    assert torch.equal(logits_of(model, "s2o", ids, **options), logits_of(model, "sdpa", ids, **options))
    options = {"position_ids": torch.arange(LENGTH).remainder(130)[None], "use_cache": False}
    assert torch.equal(logits_of(model, "s2o", ids[:1], **options), logits_of(model, "sdpa", ids[:1], **options))
    assert s2o.calls == {"short": 6}
    s2o = register(config=DENSE, min_seqlen=100)
    mask = padding(side)
    mask[0, 10] = 0
    options = {"attention_mask": mask}
    assert torch.equal(logits_of(model, "s2o", ids, **options), logits_of(model, "sdpa", ids, **options))
    assert s2o.calls == {"scattered padding": 3}


def test_the_longest_sequence_decides(model, ids):
    s2o = register(config=DENSE, min_seqlen=351)
    mask = padding("left")
    mask[0, :50] = 0
    logits_of(model, "s2o", ids, attention_mask=mask)  # 350, 360 and 250 tokens
    assert s2o.calls == {"s2o": 3}
    logits_of(model, "s2o", ids[::2], attention_mask=mask[::2])
    assert s2o.calls == {"s2o": 3, "short": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_a_gpu(ids, side, path_config):
    """A model in bfloat16, dense: the logits of sdpa, up to the rounding of its layers."""
    model = llama(head_dim=64).to("cuda", torch.bfloat16)
    s2o = register(config=replace(path_config, tau=0.0), min_seqlen=100)
    mask, ids = padding(side).cuda(), ids.cuda()
    found = logits_of(model, "s2o", ids, attention_mask=mask)[mask.bool()].float()
    expected = logits_of(model, "sdpa", ids, attention_mask=mask)[mask.bool()].float()
    assert s2o.calls == {"s2o": 3}
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_rows_packed_and_back():
    x = torch.randn(3, 7, 2, 4)
    spans = ((0, 2, 7), (2, 0, 3))
    packed = pack(x, spans)
    assert torch.equal(packed, torch.cat([x[0, 2:], x[2, :3]]))
    back = unpack(packed, spans, 3, 7)
    assert torch.equal(back[0, 2:], x[0, 2:]) and torch.equal(back[2, :3], x[2, :3])
    assert back.count_nonzero() == packed.count_nonzero()
    everything = ((0, 0, 4), (0, 4, 7), (1, 0, 7), (2, 0, 7))
    assert pack(x, everything).data_ptr() == x.data_ptr()
    assert torch.equal(unpack(pack(x, everything), everything, 3, 7), x)
    transposed = x.transpose(0, 1)
    assert torch.equal(pack(transposed, ((0, 0, 3), *((i, 0, 3) for i in range(1, 7)))), transposed.reshape(21, 2, 4))
