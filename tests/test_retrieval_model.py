"""The retrieval model's texts, weights and training: answers are in the text where they are said to be, weights come
back from bytes, and a few steps run."""

from __future__ import annotations

import argparse
import types

import numpy as np
import pytest
from benchmarks_on_cpu import BENCHMARKS

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", "5.16")

import _small_llama  # noqa: E402
import _sources  # noqa: E402

from s2o_cupy.tools import inputs  # noqa: E402

FOLDER = BENCHMARKS / "retrieval_model"


@pytest.fixture(scope="module")
def texts():
    return _sources.module_of(str(FOLDER / "texts.py"))


def test_the_recorded_prompt_is_this_models(texts, monkeypatch):
    """Its first keys and values, which depend on no later token, made again by the script that made them all."""
    monkeypatch.syspath_prepend(str(FOLDER))
    record = _sources.module_of(str(FOLDER / "record.py"))
    _, *kv = record.attention_inputs(texts.prompt(record.LENGTH, seed=0).ids[:, :300])
    for x, stored in zip(kv, inputs.builtin("retrieval", dtype="float32")[1:], strict=True):
        found = x[:, : stored.shape[1]]
        # 7 significant bits round by at most 2^-7 of a value; float32's own errors, which grow through layers, are some
        # 1e-5 of the largest values at most.
        np.testing.assert_allclose(stored[:, :, :300], found, rtol=2**-7, atol=1e-4 * float(np.abs(found).max()))
    x = np.array([0, 1, -1.015, 3.99, 1e-30], np.float32)
    np.testing.assert_allclose(record.rounded(x).astype(np.float32), x, rtol=2**-7)
    assert record.rounded(np.float32(1 + 2**-6)) == 1 + 2**-6 and record.rounded(np.float32(1 + 2**-7)) == 1


@pytest.fixture
def train(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return _sources.module_of(str(FOLDER / "train.py"))


def test_texts_repeat_and_have_their_length(texts):
    for length in (512, 1000, 4096):
        one, same, other = (texts.made(np.random.default_rng(seed), 3, length, 0.6) for seed in (0, 0, 1))
        for x, y in zip(one, same, strict=True):
            assert (x == y).all()
        assert one.ids.shape == one.question.shape == one.distance.shape == (3, length)
        assert (one.ids != other.ids).any()
        assert (one.ids[:, 0] == texts.BEGIN).all() and (one.ids[:, 1:] != texts.BEGIN).all()
        assert one.ids.min() >= 0 and one.ids.max() < texts.VOCABULARY
        assert {*one.kinds} == {*range(len(texts.KINDS))}  # every kind
    assert len(texts.prompt(1024, 0).ids[0]) == 1024
    with pytest.raises(ValueError, match="groups of .* tokens, 0 at the end, in 512; accepted: fewer"):
        texts.made(np.random.default_rng(0), 3, 512, 1.5)


def said_in(ids, markers, end):
    """Of statements or questions: where each begins, its marker, and what stands between that and its end."""
    for at in np.flatnonzero(np.isin(ids, markers)):
        yield int(at), int(ids[at]), ids[at + 1 : at + int(np.argmax(ids[at:] == end))].tolist()


def lookups(texts, marker, words):
    """What a question asks for, read as a person would: (marker, key, what is said of it, where the answer begins)."""
    key, value = texts.KEY, texts.VALUE
    if marker == texts.MOST:
        return [(texts.MARKED, words[:key], words[key:], key)]
    if marker == texts.TRACE:  # names, one after the other, and a value
        names = range(0, len(words) - value, key)
        return [(texts.VARIABLE, words[i : i + key], words[i + key :][: key if i < names[-1] else value], i + key)
                for i in names]  # fmt: skip
    found, at = [], 0
    while at < len(words):
        at += words[at] == texts.AND
        behind = at + key
        first = behind + (words[behind] in texts.ORDINALS)
        found.append((texts.NEEDLE, words[at:behind], words[behind : first + value], first))
        at = first + value
    return found


LOOKUPS = {"single": 1, "multi_key": 1, "multi_value": 3, "multi_query": 4, "variables": 4, "frequent_words": 1}


@pytest.mark.parametrize("kind", LOOKUPS)
@pytest.mark.parametrize("length", [700, 6000])
def test_answers_are_in_the_text(texts, kind, length):
    """As far away as they are said to be, and each once."""
    made = texts.made(np.random.default_rng(0), 2, length, 0.5, [kind], at_end=2)
    expected, distances = np.zeros_like(made.question), np.zeros_like(made.distance)
    number = 0
    for row, ids in enumerate(made.ids):
        facts: dict = {}
        for at, marker, words in said_in(ids, (texts.NEEDLE, texts.VARIABLE, texts.MARKED), texts.END):
            facts.setdefault((marker, *words[: texts.KEY]), []).append((at, words[texts.KEY :]))
        asked = list(said_in(ids, (texts.ASK, texts.TRACE, texts.MOST), texts.END))
        assert len(facts) >= len(asked) > 2
        assert asked[-1][0] + len(asked[-1][2]) == length - 2 and asked[-2][0] > length - 80  # at the end
        for begin, marker, words in asked:
            number += 1
            looked_up = lookups(texts, marker, words)
            assert len(looked_up) == LOOKUPS[kind]
            for of, key, value, offset in looked_up:
                known = (of, *key)
                places = facts[known]
                right = [at for at, said in places if said == value]
                assert len(right) == (6 if kind == "frequent_words" else 1)
                assert len(places) == {"frequent_words": 12, "multi_value": 3}.get(kind, 1)
                assert max(at for at, _ in places) < begin
                first = begin + 1 + offset
                first_place = places[0][0] if kind == "frequent_words" else right[0]
                last = first + len(value) - (kind == "multi_value")  # without its ordinal
                expected[row, first:last] = number
                distances[row, first:last] = np.arange(first, last) - first_place
    assert ((expected > 0) == (made.question > 0)).all()
    assert (distances == made.distance).all()
    # Numbered in some order, each answer one number, and all of this kind.
    assert len(np.unique(np.stack([expected, made.question], -1).reshape(-1, 2), axis=0)) == number + 1
    assert made.kinds.tolist() == [texts.KINDS.index(kind)] * number


def test_kinds_differ_in_what_they_share(texts):
    """Keys of multi_key share two tokens with one of them, values of multi_value come in order, chains as they grow."""
    made = texts.made(np.random.default_rng(0), 1, 4000, 0.5, ["multi_key"])
    keys = [words[:3] for _, _, words in said_in(made.ids[0], texts.NEEDLE, texts.END)]
    shared = [
        max(sum(a == b for a, b in zip(one, other, strict=True)) for other in keys if other != one) for one in keys
    ]
    assert min(shared) == 2
    made = texts.made(np.random.default_rng(0), 1, 4000, 0.5, ["multi_value"])
    order: dict = {}
    for _, _, words in said_in(made.ids[0], texts.NEEDLE, texts.END):
        order.setdefault(tuple(words[:3]), []).append(words[3])
    assert {tuple(x) for x in order.values()} == {tuple(texts.ORDINALS)}


def test_distances_reach_from_near_to_far(texts):
    made = texts.made(np.random.default_rng(0), 1, 131072, 0.12, at_end=8)
    distance = made.distance[made.question > 0]
    counts = np.histogram(distance, [0, 1024, 8192, 32768, 131072])[0]
    assert counts.min() > 0.1 * counts.sum()
    assert len(made.kinds) > 200
    at = np.flatnonzero(made.question[0])
    assert len(np.unique(made.question[0, at[at >= 131072 - 256]])) >= 4  # at the end
    assert np.diff(at).max() < 8192  # and everywhere


def test_prose_is_a_language(texts):
    """Each word has few successors, and some words are common."""
    words = texts.prose(np.random.default_rng(0), 200_000)
    assert words.min() >= texts.WORDS and words.max() < texts.VOCABULARY
    common = int(np.bincount(words).argmax())
    at = np.flatnonzero(words[:-1] == common)
    assert len(np.unique(words[at + 1])) > 10 and len(at) > 0.02 * len(words)
    one, other = texts.prose(np.random.default_rng(0), 100), texts.prose(np.random.default_rng(1), 100)
    assert (one == texts.prose(np.random.default_rng(0), 100)).all() and (one != other).any()


def test_positions_jump_between_words(texts):
    made = texts.made(np.random.default_rng(0), 40, 512, 0.6)
    positions = texts.jumps(np.random.default_rng(0), made.ids)
    assert positions.min() >= 0 and positions.max() < texts.POSITIONS
    row, at = np.nonzero(np.diff(positions) != 1)
    assert (np.diff(positions) >= 1).all() and 40 < len(at) < 240
    assert (made.ids[row, at + 1] >= texts.WORDS).all()  # before a word, never inside a statement
    assert (positions[:, -1] - positions[:, 0]).max() > 60_000
    assert np.median(np.diff(positions)[row, at]) < 20_000


# ---------------------------------------------------------------- weights and training


def arguments(tmp_path, **others):
    given = {
        "seed": 0, "device": "cpu", "minutes": 0.02, "start": None, "shares": None, "rate": 1e-3, "workers": 0,
        "compile": False, "tell": 0.05, "out": str(tmp_path / "weights.npz"), "hidden": 32, "layers": 2,
        "intermediate": 48, "head_dim": 64,
    }  # fmt: skip
    return argparse.Namespace(**given | others)


@pytest.fixture
def clock(train, monkeypatch):
    """A tenth of a second goes by with each step, however long it takes."""
    now, step = [0.0], train.Training.step

    def ticking(self, *arrays):
        now[0] += 0.1
        return step(self, *arrays)

    monkeypatch.setattr(train.Training, "step", ticking)
    monkeypatch.setattr(train, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.slow
def test_a_few_steps(train, tmp_path, capsys, clock):
    """Every stage runs and leaves weights, which are scored, and gone on from."""
    stages = [x._replace(rows=1, length=min(x.length, 512)) for x in train.STAGES]
    train.train(arguments(tmp_path), stages)
    told = capsys.readouterr().out
    assert "128 tokens" in told and "512 tokens" in told and "single" in told and "frequent_words" in told
    assert clock[0] == pytest.approx(1.2)  # 0.02 minutes
    stored = train.loader.load(tmp_path / "weights.npz")
    assert stored["model.layers.1.mlp.up_proj.weight"].shape == (48, 32)
    (share,) = train.evaluate(str(tmp_path / "weights.npz"), "cpu", (1024,), prompts=1)
    assert 0 <= share < 0.2
    assert "1,024 tokens, 1 texts: right tokens" in capsys.readouterr().out
    again = train.train(arguments(tmp_path, start=str(tmp_path / "weights.npz"), minutes=0.005), stages[:1])
    close = [torch.allclose(x.detach().cpu(), stored[name].cpu(), atol=0.1) for name, x in again.items()]
    assert all(close)


def test_loss_falls(train, tmp_path):
    """What it learns is the next token."""
    torch.manual_seed(0)
    args = arguments(tmp_path, minutes=1, rate=3e-3)
    weights = train.network.initial(train.texts.VOCABULARY, 32, 2, 48, 0)
    training = train.Training(args, weights, torch.float32, train.network.layer)
    stage = train.STAGES[0]._replace(rows=2)
    ids, positions, kinds = (torch.from_numpy(x).long() for x in train.batch(np.random.default_rng(0), stage))
    losses = [training.step(ids, positions, kinds)[0].mean().item() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.3
    assert training.steps == 30


def test_weights_come_back_from_bytes(train, tmp_path):
    """As they were, but for half a 127th of each row's largest; and small."""
    weights = train.network.initial(1024, 256, 4, 640, 0)
    weights["model.norm.weight"] = torch.linspace(0.1, 3, 256)
    weights["model.layers.0.self_attn.q_proj.weight"][0] = 0
    train.loader.store(str(tmp_path / "w.npz"), weights)
    assert (tmp_path / "w.npz").stat().st_size < 4e6
    found = train.loader.load(str(tmp_path / "w.npz"))
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        back = found[name].float().cpu()
        if weight.ndim == 1:
            assert torch.allclose(back, weight, rtol=0.005)
        else:
            assert ((back - weight).abs() <= weight.abs().amax(1, keepdim=True) * (0.501 / 127 + 0.004)).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_is_a_llama(train, head_dim):
    """transformers' gives the same logits; so does a Llama compiled, or where that fails."""
    weights = train.network.initial(train.texts.VOCABULARY, 64, 3, 96, 0, head_dim)
    made = train.texts.made(np.random.default_rng(0), 1, 400, 0.5)
    ids = torch.from_numpy(made.ids).long()
    positions = torch.arange(400)[None] + 100_000
    ours = train.network.logits(weights, train.network.hidden_states(weights, ids, positions, torch.float32))
    llama = _small_llama.load(train.loader, weights)
    with torch.inference_mode():
        theirs = llama(ids, position_ids=positions, use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_first_heads_look_back(train, head_dim):
    """Those of the first layer at the token 1, 2, 3 or 4 before, wherever they are."""
    network = train.network
    weights = network.initial(train.texts.VOCABULARY, 256, 1, 64, 0, head_dim)
    ids = torch.from_numpy(train.texts.prose(np.random.default_rng(0), 300)).long()
    q, k, _ = network.qkv_by_layer(weights, ids[None], torch.float32)[0]
    group = network.HEADS // network.KV_HEADS
    scores = (q[0] @ k[0].repeat_interleave(group, 0).transpose(1, 2)) / head_dim**0.5
    likeliest = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -np.inf).argmax(-1)  # [heads, 300]
    back = torch.arange(300) - likeliest
    assert [back[head, 10:].mode().values.item() for head in range(network.HEADS)] == [1, 2, 3, 4, 1, 2, 3, 4]


def test_weights_with_norms_of_heads_are_qwen3s(train):
    weights = train.network.initial(200, 64, 2, 96, 0)
    for layer in range(2):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.full((train.network.HEAD_DIM,), 1.5)
    model = _small_llama.load(train.loader, weights)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.rms_norm_eps == 1e-5 and model.config.head_dim == train.network.HEAD_DIM
    del weights["model.layers.0.self_attn.k_norm.weight"]
    with pytest.raises(ValueError, match="not those of a Llama or Qwen3; missing .*k_norm"):
        _small_llama.load(train.loader, weights)


def test_q_k_and_v_to_time_calls_on(train, tmp_path, monkeypatch):
    """32 query heads over 8 KV heads of head_dim 128, of a model by the same script."""
    program = _sources.module_of(str(FOLDER / "retrieval_2.py"))
    monkeypatch.setattr(program, "WEIGHTS", tmp_path / "retrieval_2.npz")
    with pytest.raises(ValueError, match="retrieval_2.npz: there is none in build/figures; `make figures` trains it"):
        program.qkv_32_8(1024)
    weights = train.network.initial(train.texts.VOCABULARY, 64, 5, 96, 0, 128)
    train.loader.store(str(program.WEIGHTS), weights)
    q, k, v = (x.float().cpu() for x in program.qkv_32_8(1024))
    assert q.shape == (1, 32, 1024, 128) and k.shape == v.shape == (1, 8, 1024, 128)
    ids = torch.from_numpy(train.texts.prompt(1024, program.SEED).ids.astype(np.int64))
    stored = train.loader.on_cpu(str(program.WEIGHTS))
    last = train.network.qkv_by_layer(stored, ids, torch.float32)[4]
    for x, part, heads in zip((q, k, v), last, (8, 2, 2), strict=True):
        # On a GPU the model is bfloat16, which rounds by up to 2^-9; residuals pass five layers with two sums each.
        rounding = 10 * 2.0**-9 * float(part.abs().max()) if torch.cuda.is_available() else 0.0
        torch.testing.assert_close(x[:, -heads:], part, rtol=0, atol=rounding)


# ---------------------------------------------------------------- the weights that come with it


def test_its_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 4e6


@pytest.mark.parametrize("far", [False, True])
def test_it_answers(train, far):
    """What texts ask, also where positions jump by up to 131,072 in between."""
    weights = {name: x.float().cpu() for name, x in train.loader.load(str(FOLDER / "weights.npz")).items()}
    made = train.texts.made(np.random.default_rng(5), 1, 2048, 0.5)
    ids = torch.from_numpy(made.ids).long()
    jumps = train.texts.jumps(np.random.default_rng(5), made.ids) if far else np.arange(2048)[None]
    with torch.inference_mode():
        hidden = train.network.hidden_states(weights, ids, torch.from_numpy(jumps), torch.float32)[0]
        at = np.flatnonzero(made.question[0])
        found = train.network.logits(weights, hidden[at - 1]).argmax(-1)
    right = found.numpy() == made.ids[0, at]
    assert len(right) > 100 and right.mean() > 0.97
    for kind in range(len(train.texts.KINDS)):
        assert right[made.kinds[made.question[0, at] - 1] == kind].mean() > 0.8
