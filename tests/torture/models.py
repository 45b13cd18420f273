"""torch.compile, torch.export, autocast and Hugging Face models on the GPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from .arrays import DEVICE, attend, qkv, same, sparse
from .harness import Run, Skip, check

NO_COMPILER = ("triton", "gcc", "compiler", "CppCompile", "ninja")


@check(40)
def compiled(run: Run) -> str:
    """The operator in whole graphs of torch.compile, with CUDA graphs too, for two lengths."""
    from s2o_cupy.integrations.torch import attention, attention_varlen

    config, notes = sparse(segment=128), []

    def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = attention(q * 1.0, k, v, config=config, return_lse=True)
        return o + q, lse

    for backend, mode in (("eager", None), ("aot_eager", None), ("inductor", None), ("inductor", "reduce-overhead")):
        torch._dynamo.reset()
        run_compiled = torch.compile(block, fullgraph=True, backend=backend, **({"mode": mode} if mode else {}))
        try:
            for i in range(6):
                arrays = qkv(run.seed + i, 1, 4, 2, (1200, 1500)[i // 3], None, 64)
                if mode:
                    torch.compiler.cudagraph_mark_step_begin()
                o, lse = (x.clone() for x in run_compiled(*arrays))
                expected_o, expected_lse = block(*arrays)
                assert same(lse, expected_lse), f"{backend}, {mode}: lse of call {i}"
                # o + q is rounded once more, or once less where the addition is fused: two units of its size.
                off, size = (o.float() - expected_o.float()).abs(), 1 + expected_o.float().abs()
                assert bool((off <= 2.0**-7 * size).all()), f"{backend}, {mode}: o of call {i}"
        except AssertionError:
            raise
        except Exception as error:
            if backend != "inductor" or not any(word in str(error) for word in NO_COMPILER):
                raise
            notes.append(f"{backend} has no compiler here")
            continue
        notes.append(f"{backend} {mode or ''}".strip())
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(run.seed, 1, 4, 2, 600, None, 64))
    varlen = torch.compile(
        lambda q, k, v, starts: attention_varlen(q, k, v, starts, config=config), fullgraph=True, backend="eager"
    )
    for starts in ([0, 300, 600], [0, 10, 200, 600]):
        assert same(varlen(q, k, v, starts), attention_varlen(q, k, v, starts, config=config)), starts
    return ", ".join([*notes, "packed"])


@check(15)
def plain_call_compiled(run: Run) -> str:
    """s2o_attention itself, not the operator, inside torch.compile: its bits, by a graph break."""
    q, k, v = qkv(run.seed, 1, 4, 2, 1200, None, 64)
    found = torch.compile(lambda q, k, v: attend(q, k, v, config=sparse()) * 1, backend="eager")(q, k, v)
    assert same(found, attend(q, k, v, config=sparse()))
    return "the bits of a plain call"


@check(15)
def exported(run: Run) -> str:
    """torch.export, saved and loaded."""
    from s2o_cupy.integrations.torch import attention

    class Block(torch.nn.Module):  # type: ignore[misc]
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return attention(q, k, v, config=sparse(segment=128)) * 2

    arrays = qkv(run.seed, 1, 4, 2, 500, None, 64)
    program = torch.export.export(Block(), tuple(arrays))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    others = [x.roll(3, 2) for x in arrays]
    expected = Block()(*others)
    assert same(program.module()(*others), expected)
    assert same(torch.export.load(file).module()(*others), expected)
    return "exported, saved, loaded"


@check(10)
def autocast_and_vmap(run: Run) -> str:
    """The operator under autocast, and in torch.vmap: right, or refused."""
    from s2o_cupy.integrations.torch import attention

    q, k, v = qkv(run.seed, 2, 4, 2, 300, None, 64)
    expected = attention(q, k, v, tau=0)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert same(attention(q, k, v, tau=0), expected), "under autocast"
    try:
        found = torch.vmap(lambda q, k, v: attention(q, k, v, tau=0))(q[:, None], k[:, None], v[:, None])
    except Exception as error:
        return f"autocast; vmap: {type(error).__name__}"
    assert same(found[:, 0], expected), "in vmap"
    return "autocast, vmap"


def small_models() -> tuple[Any, Any, Any]:
    """(what counts calls, a small Llama with sdpa, the same with S2O at tau 0), float16 on the GPU."""
    try:
        import transformers

        from s2o_cupy.integrations.transformers import register
    except Exception as error:
        raise Skip(f"transformers: {error}") from error
    from s2o_cupy import S2OConfig

    transformers.logging.set_verbosity_error()
    s2o = register("s2o", S2OConfig(tau=0, segment=128), min_seqlen=1)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, max_position_embeddings=4096, initializer_range=0.2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    models = [transformers.LlamaForCausalLM(config).eval().to(DEVICE, torch.float16) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, name in zip(models, ("sdpa", "s2o"), strict=True):
        model.set_attn_implementation(name)
    return s2o, models[0], models[1]


def tokens(seed: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, 300, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@check(30)
def generation(run: Run) -> str:
    """Logits and tokens as with sdpa: padded on either side, in chunks, with caches, by beams."""
    import transformers

    s2o, sdpa_model, s2o_model = small_models()
    ids = tokens(run.seed, 3, 700)
    left = torch.ones_like(ids)
    left[1, :200] = 0
    left[2, :13] = 0

    def chunked(make_cache: Callable[[Any], Any]) -> Callable[[Any], torch.Tensor]:
        def forward(model: Any) -> torch.Tensor:
            cache, at, found = make_cache(model.config), 0, []
            for n in (300, 1, 150, 249):
                found.append(model(ids[:, at : at + n], past_key_values=cache, use_cache=True).logits)
                at += n
            return torch.cat(found, 1)

        return forward

    def padded(mask: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        return lambda model: model(ids, attention_mask=mask).logits * mask[..., None]

    forwards: dict[str, Callable[[Any], torch.Tensor]] = {
        "prompt": lambda model: model(ids).logits,
        "padded on the left": padded(left),
        "padded on the right": padded(left.flip(1)),
        "dynamic cache": chunked(lambda config: transformers.DynamicCache(config=config)),
        "static cache": chunked(lambda config: transformers.StaticCache(config=config, max_cache_len=800)),
    }
    for name, forward in forwards.items():
        s2o.calls.clear()
        expected, found = forward(sdpa_model).float(), forward(s2o_model).float()
        # float16 through two layers: some tens of roundings of 2^-11.
        off = float((found - expected).abs().max() / expected.abs().max())
        assert off < 2e-2, f"{name}: logits are off by {off:.3g} of the largest"
        assert s2o.calls, f"{name}: S2O was not called"
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    shares = []
    for more in ({}, {"attention_mask": left}, {"attention_mask": left, "num_beams": 3}):
        expected, found = (model.generate(ids, **options, **more) for model in (sdpa_model, s2o_model))
        assert expected.shape == found.shape
        shares.append(float((expected[:, 700:] == found[:, 700:]).float().mean()))
    # A near tie of a random model may turn by rounding, and with it all tokens after it.
    assert min(shares) >= 0.5, f"shares of equal new tokens: {shares}"
    return f"{len(forwards)} kinds of logits; equal new tokens {[round(x, 2) for x in shares]}"


@check(15)
def under_autocast(run: Run) -> str:
    """A float32 model under autocast, whose q, k and v may come in two dtypes: S2O runs, and gives sdpa's logits."""
    s2o, sdpa_model, s2o_model = small_models()
    ids = tokens(run.seed, 2, 600)
    sdpa_model, s2o_model = sdpa_model.float(), s2o_model.float()
    for dtype in (torch.bfloat16, torch.float16):
        for use_cache in (True, False):
            s2o.calls.clear()
            with torch.autocast(DEVICE, dtype=dtype):
                expected = sdpa_model(ids, use_cache=use_cache).logits.float()
                found = s2o_model(ids, use_cache=use_cache).logits.float()
            off = float((found - expected).abs().max() / expected.abs().max())
            assert off < 0.1, f"{dtype}, use_cache={use_cache}: logits are off by {off:.3g} of the largest"
            assert s2o.calls["s2o"] + s2o.calls["dense"] > 0, f"{dtype}, use_cache={use_cache}: {dict(s2o.calls)}"
    return "4 combinations"
