"""The loss of a language model at every token of a long text, whatever its vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

__all__ = ["NextTokens", "next_tokens"]

Tensor = Any  # torch.Tensor

CHUNK = 4096  # tokens whose float32 logits are in memory at a time


class NextTokens(NamedTuple):
    """Of every prediction [batch, seqlen]."""

    loss: np.ndarray  # float64, nats
    hit: np.ndarray  # bool: whether the likeliest token came


def next_tokens(model: Any, ids: Tensor, targets: Tensor, chunk: int = CHUNK, **inputs: Any) -> NextTokens:
    """How well a model predicts ``targets``, the token behind each of ``ids``.

    The model's layers run once, without a cache, and what makes logits of their output, a chunk of tokens at a time:
    logits of 131,072 tokens at once would be 64 GB for a vocabulary of 128,000.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of transformers.
    ids, targets : Tensor, (batch, seqlen)
        Integers on the model's device.
    chunk : int, default 4096
        Tokens of logits at a time.
    **inputs
        Further arguments of the model's forward.
    """
    return of_hidden(model, last_hidden(model, ids, **inputs), ids, targets, chunk)


def last_hidden(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """What the last layer gives, after its norm: [batch, seqlen, hidden]."""
    with torch.no_grad():
        hidden = getattr(_base(model)(ids, use_cache=False, **inputs), "last_hidden_state", None)
    if hidden is None:
        raise ValueError(
            f"model is a {type(model).__name__}, whose layers do not run without what makes logits of them; accepted: "
            "a causal language model of transformers"
        )
    return hidden


def _base(model: Any) -> Any:
    """The part of a model with the layers. Llama4ForCausalLM gives itself as its base model."""
    base = model.base_model
    return getattr(model, "model", model) if base is model else base


def of_hidden(model: Any, hidden: Tensor, ids: Tensor, targets: Tensor, chunk: int = CHUNK) -> NextTokens:
    """Of the output of the layers, which `last_hidden` gives."""
    losses, hits = [], []
    for part, logits in _logits(model, hidden, ids, chunk):
        expected = targets[:, part].to(logits.device)
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), expected, reduction="none")
        losses.append(loss.double().cpu())
        hits.append((logits.argmax(-1) == expected).cpu())
    return NextTokens(torch.cat(losses, 1).numpy(), torch.cat(hits, 1).numpy())


def text_losses(model: Any, hidden: Tensor, ids: Tensor, attention_mask: Tensor | None = None) -> np.ndarray:
    """float64 nats of every token of a text but the first, one row behind the other, from the layers' output on it.
    With a mask (batch, seqlen) neither of padding nor after it."""
    loss = of_hidden(model, hidden[:, :-1], ids[:, :-1], ids[:, 1:]).loss
    if attention_mask is None:
        return loss.ravel()
    return loss[predicted(attention_mask)]


def predicted(attention_mask: Tensor) -> np.ndarray:
    """Which of a text's predictions, bool [batch, seqlen - 1], are neither of padding nor after it."""
    found: np.ndarray = (attention_mask[:, :-1] * attention_mask[:, 1:]).bool().cpu().numpy()
    return found


class Changes(NamedTuple):
    """Of every prediction [batch, seqlen - 1], from one output of the layers to another."""

    before: np.ndarray  # float64, nats: the loss of the first
    loss: np.ndarray  # float64, nats: how much larger that of the other is
    moved: np.ndarray  # float64, nats, at least 0: the Kullback-Leibler divergence
    right: np.ndarray  # int8: 1 where the likeliest token came only of the other, -1 where only of the first, else 0
    entropy: np.ndarray  # float64, nats: how unsure the first is


def changes(model: Any, hidden: Tensor, other: Tensor, ids: Tensor, chunk: int = CHUNK // 4) -> Changes:
    """What becomes of the predictions of a text's tokens but the first, where ``other`` is what the layers give in the
    place of ``hidden``. Where the model's probabilities are right, ``moved`` is what the loss grows by, without the
    noise of a loss."""
    found: list[tuple[Tensor, ...]] = []
    given, expected = ids[:, :-1], ids[:, 1:]
    for (part, first), (_, second) in zip(
        _logits(model, hidden[:, :-1], given, chunk), _logits(model, other[:, :-1], given, chunk), strict=True
    ):
        wanted = expected[:, part].to(first.device)
        both = (first, second)
        before, after = (
            torch.nn.functional.cross_entropy(x.transpose(1, 2), wanted, reduction="none").double() for x in both
        )
        hits = [(x.argmax(-1) == wanted).to(torch.int8) for x in both]
        p, q = (x.log_softmax(-1) for x in both)
        never = p == -torch.inf  # tokens that the model rules out
        moved = (p.exp() * (p - q)).masked_fill(never, 0).sum(-1).clamp(min=0).double()  # [batch, chunk]
        entropy = -(p.exp() * p).masked_fill(never, 0).sum(-1).double()
        found.append(tuple(x.cpu() for x in (before, after - before, moved, hits[1] - hits[0], entropy)))
    return Changes(*(torch.cat(x, 1).numpy() for x in zip(*found, strict=True)))


def _logits(model: Any, hidden: Tensor, ids: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of the sequence, and their logits in float32 [batch, chunk, vocabulary]."""
    base = _base(model)
    if base is model:
        raise ValueError(f"model is a {type(model).__name__}, which gives no logits; accepted: a causal language model")
    for begin in range(0, ids.shape[1], chunk):
        part = slice(begin, begin + chunk)
        with torch.no_grad(), _given(base, hidden[:, part]):
            logits = model(ids[:, part], use_cache=False).logits.float()
        yield part, logits


class _Given(BaseModelOutputWithPast):  # type: ignore[misc]
    """Also has, as None, what layers of some kinds give beside hidden states, such as the logits of a router."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _given(base: Any, hidden: Tensor) -> Iterator[None]:
    """In the place of the layers' work their output: the model then does only what comes after it, caps and scales of
    its logits included."""
    before = vars(base).get("forward")
    base.forward = lambda *_, **__: _Given(last_hidden_state=hidden)
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before
