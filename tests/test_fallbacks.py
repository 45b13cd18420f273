"""Which calls of a model S2O left to its own attention: counted, in compiled graphs too, and said once."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from conftest import SMALL

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5.16")

from tiny_llama import llama, prompt  # noqa: E402

from s2o_cupy.integrations.fallbacks import REASONS, CallCounts  # noqa: E402
from s2o_cupy.integrations.transformers import register  # noqa: E402

DENSE = replace(SMALL, segment=64, tau=0.0)
LENGTH = 300
LOGGER = "s2o_cupy.integrations.transformers"


@pytest.fixture
def model():
    register()  # or there is no such implementation
    with torch.no_grad():
        yield llama(attn_implementation="s2o")


@pytest.fixture
def ids():
    return prompt(LENGTH)


def test_each_reason_is_said_once(model, ids, caplog):
    """A warning where something can be done about it."""
    s2o = register(config=DENSE, per_layer={1: None}, min_seqlen=100)
    with caplog.at_level(logging.INFO, LOGGER), torch.enable_grad():
        model(ids)
        model(ids)
    assert [(x.levelname, x.message) for x in caplog.records] == [
        (
            "WARNING",
            "s2o: the model's own attention takes calls of the kind 'gradients': gradients are enabled, or the model "
            "is in train(); call it after eval(), under torch.no_grad() or torch.inference_mode(). This is said once; "
            "report() has the counts.",
        ),
        (
            "INFO",
            "s2o: the model's own attention takes calls of the kind 'layer': per_layer says None for the layer. "
            "This is said once; report() has the counts.",
        ),
    ]
    assert s2o.calls == {"gradients": 4, "layer": 2}
    caplog.clear()
    model(ids)
    assert not caplog.records and s2o.calls["s2o"] == 2


def test_report(model, ids):
    s2o = register(config=DENSE, per_layer={1: None}, min_seqlen=100)
    assert s2o.report().startswith("no calls: no model has run with this attention yet")
    model(ids)
    model(ids[:, :50])
    assert s2o.report() == (
        "calls  kind   layers  meaning\n"
        "    3  short  0-2     fewer keys than min_seqlen, 100 (register(min_seqlen=))\n"
        "    2  s2o    0, 2    S2O\n"
        "    1  layer  1       per_layer says None for the layer"
    )  # fmt: skip


def test_s2o_that_never_ran_is_one_visible_line(model, ids, caplog):
    """Most often as a prompt is short: a warning that says so, once. Not where S2O has run before."""
    s2o = register(config=DENSE, min_seqlen=1000)
    with caplog.at_level(logging.INFO, LOGGER):
        model.generate(ids, max_new_tokens=3, do_sample=False)
        model(ids)
    (said,) = [x.message for x in caplog.records if x.levelname == "WARNING"]
    assert said == (
        "s2o: the model's own attention takes calls of the kind 'short': fewer keys than min_seqlen, 1,000 "
        "(register(min_seqlen=)). S2O has not run so far. This is said once; report() has the counts."
    )
    assert s2o.report().splitlines()[-1] == "S2O took no call: the model's own attention took them all."
    caplog.clear()
    register(config=DENSE, min_seqlen=100)
    with caplog.at_level(logging.INFO, LOGGER):
        model(ids)
        model(ids[:, :50])
    assert [x.levelname for x in caplog.records] == ["INFO"] and "S2O has not" not in caplog.text


def test_weights_that_are_asked_for(model, ids, caplog):
    """The tuple of a model without weights is empty; it says so once."""
    register(config=DENSE, min_seqlen=100)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert not any(x is not None for x in model(ids, output_attentions=True).attentions)
        model(ids, output_attentions=True)
    assert len(caplog.records) == 1 and "output_attentions=True gives no attention weights" in caplog.text


def test_every_reason_has_words():
    """Those that the package gives; each is said in a log line."""
    import ast
    import inspect

    from s2o_cupy.integrations import fallbacks, mask_functions
    from s2o_cupy.integrations import transformers as integration

    given = {"mask"}  # the default of getattr
    for module in (integration, fallbacks):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef) and node.name in ("_why_not", "why_not_tensors"):
                values = [x.value for x in ast.walk(node) if isinstance(x, ast.Return)]
                given |= {x.value for x in values if isinstance(x, ast.Constant) and x.value}
    for node in ast.walk(ast.parse(inspect.getsource(mask_functions))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "make" and node.args:
            given |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    assert given | {"chunked attention", "mask function"} == REASONS.keys()


@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_counts_of_a_compiled_model(model, ids, backend, caplog):
    """Each run of a graph counts, not its making; what a graph leaves to sdpa too."""
    s2o = register(config=DENSE, per_layer={1: None}, min_seqlen=100)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with caplog.at_level(logging.INFO, LOGGER):
        for i in range(1, 4):
            compiled(ids, past_key_values=transformers.DynamicCache(config=model.config))
            assert s2o.calls == {"s2o": 2 * i, "layer": i}
    assert [x.message for x in caplog.records if "'layer'" in x.message] == [x.message for x in caplog.records]
    assert len(caplog.records) == 1
    torch._dynamo.reset()


def test_a_mask_made_in_the_graph(model, ids, caplog):
    s2o = register(config=DENSE, min_seqlen=100)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    for i in (1, 2):
        compiled(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        assert s2o.calls == {"mask": 3 * i}
    assert "a mask of the caller's own, or one that transformers made within torch.compile" in caplog.text
    torch._dynamo.reset()


def test_an_exported_program_counts_nothing():
    class Model(torch.nn.Module):
        def forward(self, x):
            counts.add("short")
            return x + 1

    counts = CallCounts()
    program = torch.export.export(Model(), (torch.ones(2),), strict=False)
    assert "count_call" not in str(program) and not counts.calls


def test_a_graph_outlives_what_it_counts_for():
    counts = CallCounts()
    number = counts._number
    torch.ops.s2o_cupy.count_call(number, "short")
    assert counts.calls == {"short": 1}
    del counts
    torch.ops.s2o_cupy.count_call(number, "short")
