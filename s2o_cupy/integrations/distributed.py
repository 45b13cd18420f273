"""Prefill of one long sequence on several GPUs, over a torch.distributed group (NCCL, or gloo on the CPU).

Importing this imports PyTorch. torch.distributed moves the data; what is here is who computes what, and when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from ..extras import with_extra

with with_extra(__name__, "PyTorch"):
    import torch
    import torch.distributed as dist

from ..api.batch import batched
from ..api.call import Call
from ..api.run import run
from ..arrays.arguments import check_out, describe
from ..arrays.torch_transforms import check_derivatives
from ..errors import ArgumentTypeError, ArgumentValueError
from ..plan.launch_plan import is_dense
from ..problem import Problem, cached_validate
from ..spec import S2OConfig, not_a_config
from .agreement import agreement_of
from .exchange import Exchange, as_bytes, exchange, side_stream, wait_for, wide
from .head_exchange import attend_by_heads
from .zigzag import Zigzag, rounds_for

__all__ = ["SequenceParallel"]

Tensor = Any  # torch.Tensor
Span = tuple[tuple[int, int], slice]  # positions [begin, end) in the sequence, and where a rank has these rows
SPLITS = ("sequence", "heads")


class SequenceParallel:
    """Causal S2O attention of a sequence whose rows are spread over the ranks of a group.

    Chunks of whole segments are dealt out to the ranks in rounds, there and back: as much causal work for every rank.
    Results are those of one call on one GPU, bit for bit.

    - ``split="sequence"``: every rank attends its own queries, with all heads. Ranks send each other their keys and
      values round by round, while they attend to those that they have; each rank ends up with all of them in memory.
    - ``split="heads"``: rows are exchanged for heads, each rank attends the whole sequence with its share of the heads,
      and rows come back, a few heads at a time. It needs kv_heads to be a multiple of the ranks.

    Without an initialised process group there is one rank, and nothing is sent.

    All ranks make the same calls in the same order: same config, split and seqlen, same dtype and heads, same options.
    They compare each call that is new before they send anything, and where it differs all raise the same ValueError.

    A rank that makes no call, or repeats one while others make a new one, is waited for until the timeout of the group
    (``timeout=`` of ``torch.distributed.init_process_group`` and ``new_group``; by default 10 minutes with NCCL, 30
    with others). Then gloo raises RuntimeError. With NCCL PyTorch's watchdog ends the process, or with
    TORCH_NCCL_BLOCKING_WAIT=1 in the environment the call raises torch.distributed.DistBackendError. The group is of no
    use afterwards.

    Parameters
    ----------
    seqlen : int
        Tokens of the whole sequence, >= 0.
    group : torch.distributed.ProcessGroup, optional
        Default: all processes.
    config : S2OConfig, optional
        The same on all ranks.
    split : {"sequence", "heads"}, default "sequence"

    Attributes
    ----------
    rank, world_size : int
        In the group.
    length : int
        Rows of this rank.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what came and what is accepted.

    Examples
    --------
    One process; under torchrun the same lines give each process its part:

    >>> import torch
    >>> from s2o_cupy.integrations.distributed import SequenceParallel
    >>> parallel = SequenceParallel(1000)
    >>> q, k, v = (parallel.shard(x, axis=2) for x in torch.randn(3, 1, 2, 1000, 64))
    >>> o = parallel.gather(parallel.attention(q, k, v), axis=2)
    >>> o.shape
    torch.Size([1, 2, 1000, 64])
    """

    def __init__(
        self, seqlen: int, *, group: Any = None, config: S2OConfig | None = None, split: str = "sequence"
    ) -> None:
        if isinstance(seqlen, bool) or not isinstance(seqlen, int) or seqlen < 0:
            raise ValueError(f"SequenceParallel: seqlen is {seqlen!r}; accepted: an integer >= 0")
        config = S2OConfig() if config is None else config
        if not isinstance(config, S2OConfig):
            raise not_a_config(config, "SequenceParallel")
        if split not in SPLITS:
            raise ValueError(f"SequenceParallel: split is {split!r}; accepted: {', '.join(map(repr, SPLITS))}")
        if config.error is not None:
            raise ValueError(
                f"SequenceParallel: config.error is {config.error}, whose taus a call finds on a whole sequence; "
                "accepted: a tau, or one for each query head"
            )
        connected = dist.is_available() and dist.is_initialized()
        self.group = group
        self.config = config
        self.split = split
        self.rank: int = dist.get_rank(group) if connected else 0
        self.world_size: int = dist.get_world_size(group) if connected else 1
        if self.rank < 0:
            raise ValueError("SequenceParallel: group does not hold this process; accepted: a group that does")
        self.zigzag = Zigzag(seqlen, self.world_size, config.segment, rounds_for(seqlen))
        self.length = self.zigzag.length(self.rank)
        self._terms: dict[str, Any] = {"seqlen": seqlen, "split": split, "rounds": self.zigzag.rounds}
        self._terms |= zip((field.name for field in fields(config)), config.values, strict=True)
        self._own_terms = repr(self._terms)
        self._agreement = agreement_of(group) if self.world_size > 1 else None

    # ---------------------------------------------------------------- rows

    def positions(self, device: Any = None) -> Tensor:
        """Positions of this rank's rows in the sequence, int64 (length,): a model's position_ids."""
        return _positions(self.zigzag, self.rank, device)

    def shard(self, x: Tensor, axis: int) -> Tensor:
        """This rank's rows of a tensor that every rank has. Nothing is sent."""
        self._check_length("shard", x, axis, self.zigzag.seqlen)
        return torch.cat([x.narrow(axis, begin, end - begin) for begin, end in self.zigzag.rows(self.rank)], axis)

    def scatter(self, x: Tensor | None, axis: int, src: int = 0) -> Tensor:
        """This rank's rows of a tensor that only rank ``src`` of the group has; others give None.

        The result is on the device of ``x``: on other ranks, if that is a GPU, on their current one.
        """
        if self.rank == src and x is None:
            raise ValueError(f"scatter: x is None on rank {src}, the source; accepted: a tensor")
        if x is not None:
            self._check_length("scatter", x, axis, self.zigzag.seqlen)
        if self.world_size == 1:
            return self.shard(x, axis)
        self._agree("scatter", x, src=src, axis=axis)
        what = [None if x is None else (tuple(x.shape), x.dtype, x.device.type)]
        dist.broadcast_object_list(what, group=self.group, group_src=src)
        assert what[0] is not None
        shape, dtype, kind = what[0]
        axis %= len(shape)
        rest = shape[:axis] + shape[axis + 1 :]
        longest = max(map(self.zigzag.length, range(self.world_size)))
        received = torch.empty((longest, *rest), dtype=dtype, device=x.device if x is not None else kind)
        sent = None
        if self.rank == src:
            assert x is not None
            sent = [torch.zeros_like(received) for _ in range(self.world_size)]
            for rank, rows in enumerate(sent):
                at = _positions(self.zigzag, rank, x.device)
                rows[: len(at)] = x.movedim(axis, 0)[at]
            sent = [as_bytes(rows) for rows in sent]
        dist.scatter(as_bytes(received), sent, group=self.group, group_src=src)
        return received[: self.length].movedim(0, axis).contiguous()

    def gather(self, x: Tensor, axis: int) -> Tensor:
        """The whole tensor, on every rank, of which each has its rows."""
        self._check_length("gather", x, axis, self.length)
        rows = x.movedim(axis, 0)
        self._agree("gather", x, axis=axis, shape_of_a_row=tuple(rows.shape[1:]), dtype=str(x.dtype))
        whole = rows.new_empty((self.zigzag.seqlen, *rows.shape[1:]))
        for (begin, end), here in self._spans:
            whole[begin:end] = rows[here]
        wait_for([self._exchange(whole, index) for index in range(self.zigzag.rounds)])
        return whole.movedim(0, axis).contiguous()

    def _agree(self, call: str, x: Tensor | None, **terms: Any) -> None:
        """Raise ValueError on all ranks unless all make this ``call``, with the same ``terms``."""
        key = (call, self._own_terms, *terms.values())
        if self._agreement is not None and not self._agreement.knows(key):
            self._agreement.reach(key, {"call": call, **self._terms, **terms}, x)

    def _check_length(self, name: str, x: Tensor, axis: int, expected: int) -> None:
        if x.shape[axis] != expected:
            raise ValueError(
                f"{name}: x is {tuple(x.shape)}, {x.shape[axis]} rows on axis {axis}; accepted: {expected} rows "
                f"on rank {self.rank} of {self.world_size}, for a sequence of {self.zigzag.seqlen}"
            )

    # ---------------------------------------------------------------- attention

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        layout: str = "BHSD",
        return_lse: bool = False,
        out: Tensor | None = None,
    ) -> Any:
        """Causal attention of this rank's rows to all rows of the sequence. All ranks call it together.

        Parameters
        ----------
        q : Tensor, (batch, heads, length, head_dim)
            This rank's rows in the order of the sequence, as :meth:`shard` and :meth:`scatter` give them.
        k, v : Tensor, (batch, kv_heads, length, head_dim)
            The same rows, in q's dtype and on its device.
        scale : float, optional
            Default 1 / sqrt(head_dim).
        softcap : float, default 0
            Scores become softcap * tanh(score / softcap); 0 leaves them as they are.
        layout : {"BHSD", "BSHD"}, default "BHSD"
            "BSHD" is (batch, length, heads, head_dim). The batch axis may be left out.
        return_lse : bool, default False
        out : Tensor, optional
            Where to write this rank's output, as in :func:`s2o_cupy.s2o_attention`.

        Returns
        -------
        o : Tensor, of q's shape, dtype and device; without ``out`` it is (batch, length, heads, head_dim) in memory
        lse : float32 Tensor (batch, heads, length), if ``return_lse``

        Raises
        ------
        TypeError, ValueError, S2OError
            As :func:`s2o_cupy.s2o_attention`, before anything is sent. ValueError also where ranks make different
            calls, on all of them; the message says what differs, and on which ranks.
        """
        problem = self._check(q, k, v, out, scale, softcap, layout)
        self._agree(
            "attention", q, batch=problem.batch, heads=problem.heads, kv_heads=problem.kv_heads,
            head_dim=problem.head_dim, dtype=problem.dtype, device=q.device.type, scale=problem.scale,
            softcap=problem.softcap, layout=layout, return_lse=bool(return_lse),
        )  # fmt: skip
        if out is None:  # (batch, length, heads, head_dim) in memory, whatever the layout
            out = q.new_empty((*q.shape[:-3], self.length, problem.heads, problem.head_dim))
            out = out.transpose(-2, -3) if layout == "BHSD" else out
        has_batch = q.ndim == 4
        q, k, v, o = (x.detach() if has_batch else x.detach()[None] for x in (q, k, v, out))
        if layout == "BHSD":
            q, k, v, o = (x.transpose(1, 2) for x in (q, k, v, o))
        if self.world_size == 1:  # nothing to spread, nothing to wait for
            lse = _attend(q, k, v, o, problem, self.config, return_lse)
        elif self.split == "sequence":
            lse = self._by_sequence(q, k, v, o, problem, return_lse)
        else:
            lse = self._by_heads(q, k, v, o, problem, return_lse)
        if lse is not None and not has_batch:
            lse = lse[0]
        return (out, lse) if return_lse else out

    def _chunk_config(self, problem: Problem) -> S2OConfig:
        """What a part of the sequence runs with: a GPU decides on dense attention by the length and the heads of the
        whole."""
        return _chunk_config(problem, self.config, self.zigzag.seqlen)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, scale: Any, softcap: Any, layout: str
    ) -> Problem:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise ArgumentTypeError(f"{name} is a {type(x).__name__}; accepted: a torch.Tensor")
            check_derivatives(name, x)
        if not q.device == k.device == v.device:
            raise ArgumentValueError(
                f"q, k and v are on different devices: q on {q.device}, k on {k.device}, "
                f"v on {v.device}; accepted: one device for all three"
            )
        problem = cached_validate(
            tuple(tuple(x.shape) for x in (q, k, v)),
            tuple(str(x.dtype).removeprefix("torch.") for x in (q, k, v)),
            self.config,
            "cupy" if q.device.type == "cuda" else "numpy",
            layout,
            True,
            scale,
            softcap,
        )
        if not problem.seqlen_q == problem.seqlen_k == self.length:
            raise ArgumentValueError(
                f"q has {problem.seqlen_q} rows, k and v have {problem.seqlen_k}; accepted: "
                f"{self.length} on rank {self.rank} of {self.world_size}, for a sequence of {self.zigzag.seqlen}"
            )
        if out is not None:
            framework, infos = describe({"q": q, "k": k, "v": v})
            check_out(out, framework, dict(zip("qkv", infos, strict=True)), problem.dtype)
        if self.split == "heads" and problem.kv_heads % self.world_size:
            raise ValueError(
                f'SequenceParallel: split is "heads" with {problem.kv_heads} kv_heads on {self.world_size} ranks; '
                'accepted: kv_heads a multiple of the ranks, or split="sequence"'
            )
        return problem

    def _by_sequence(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, return_lse: bool) -> Any:
        """This rank's queries, a call for each run of its chunks, to everyone's keys and values; lse or None."""
        config = self._chunk_config(problem)
        keys_of_all = _Gathering(self, k, v)
        lse = q.new_empty((problem.batch, problem.heads, self.length), dtype=torch.float32) if return_lse else None
        done = 0
        for chunk, begin, end in self._runs:
            needed = self.zigzag.rounds_before(chunk)
            # The first round leaves before pass 1, which fills the GPU: others need it when theirs is done. The rest
            # leave when launches are under way, as sending takes the host longer than launching.
            keys_of_all.send(max(1, needed))
            rows = slice(done, done := done + end - begin)
            keys, values = keys_of_all.kv[:end].permute(1, 2, 0, 3, 4)
            own = _of_chunk(config, begin, end, self.zigzag.seqlen)
            found = _attend(
                q[:, rows], keys, values, out[:, rows], problem, own, return_lse,
                await_keys=functools.partial(keys_of_all.wait, needed) if keys_of_all.awaits(needed) else None,
            )  # fmt: skip
            keys_of_all.send(self.zigzag.rounds)
            if lse is not None:
                lse[:, :, rows] = found
        keys_of_all.send(self.zigzag.rounds)  # also a rank without rows
        keys_of_all.wait(self.zigzag.rounds)  # also for what nothing here needs: the memory goes after this
        return lse

    @functools.cached_property
    def _runs(self) -> list[tuple[int, int, int]]:
        return self.zigzag.runs(self.rank)

    @functools.cached_property
    def _spans(self) -> list[Span]:
        """This rank's chunks."""
        return list(zip(self.zigzag.rows(self.rank), self.zigzag.spans(self.rank), strict=True))

    def _exchange(self, whole: Tensor, index: int) -> Exchange:
        """Start to send this rank's chunk of a round to all ranks, and to receive theirs, in ``whole``."""
        chunks = [whole[slice(*self.zigzag.bounds(chunk))] for chunk in self._chunks[index]]
        sent = [chunks[self.rank]] * self.world_size
        return exchange(sent, chunks, rank=self.rank, group=self.group, tag=index)

    @functools.cached_property
    def _chunks(self) -> list[list[int]]:
        """Each rank's of each round."""
        return [
            [self.zigzag.chunk(rank, index) for rank in range(self.world_size)] for index in range(self.zigzag.rounds)
        ]

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, return_lse: bool) -> Any:
        """The whole sequence with a share of the heads; lse or None."""
        config = self._chunk_config(problem)  # all heads decide on dense attention

        def attend(heads: slice, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Any:
            return _attend(q, k, v, o, problem, config.of_heads(heads.start, heads.stop), return_lse)

        return attend_by_heads(q, k, v, out, attend, zigzag=self.zigzag, rank=self.rank, group=self.group)


@functools.lru_cache(maxsize=64)  # the layers of a model share it
def _chunk_config(problem: Problem, config: S2OConfig, seqlen: int) -> S2OConfig:
    dense = is_dense(replace(problem, seqlen_q=seqlen, seqlen_k=seqlen), config)
    return replace(config, dense_up_to=seqlen if dense else 0)


_of_chunk = functools.lru_cache(maxsize=64)(S2OConfig.of_chunk)  # likewise


def _attend(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, config: S2OConfig, return_lse: bool,
    await_keys: Callable[[], None] | None = None,
) -> Any:  # fmt: skip
    """`s2o_attention` into ``out``, all (batch, rows, heads, head_dim); lse or None. ``problem``: of all heads.
    ``await_keys``: as of `run`."""
    call = Call({"q": q, "k": k, "v": v}, "auto", None, out)
    forms = tuple([x.form for x in call.infos])
    batch = batched(forms, config, call.backend, "BSHD", True, problem.scale, problem.softcap, problem.heads)
    found = run(batch, call, return_lse=return_lse, return_stats=False, await_keys=await_keys)
    return found[1] if return_lse else None


class _Gathering:
    """All ranks' keys and values in the order of the sequence, ``kv`` [seqlen, 2, batch, kv_heads, head_dim].

    This rank's are there, those of others come round by round.
    """

    def __init__(self, parallel: SequenceParallel, k: Tensor, v: Tensor) -> None:
        """k, v: this rank's, (batch, length, kv_heads, head_dim)."""
        batch, _, kv_heads, head_dim = k.shape
        self.parallel = parallel
        # Rows outermost: a chunk is one piece of memory, and all of them together need no rearranging.
        self.kv = k.new_empty((parallel.zigzag.seqlen, 2, batch, kv_heads, head_dim))
        self.exchanges: list[Exchange] = []
        # Rounds are sent on a stream beside the current one, or they would wait for what was launched before them.
        self.beside = side_stream(k.device)
        self.copied = []  # CUDA events: this rank's chunk of each round is in kv
        keys, values = wide(k), wide(v)
        for (begin, end), rows in parallel._spans:
            for i, x in enumerate((keys, values)):
                self.kv[begin:end, i].view(x.dtype).copy_(x[:, rows].transpose(0, 1))
            if self.beside is not None:
                self.copied.append(torch.cuda.current_stream(k.device).record_event())

    def send(self, rounds: int) -> None:
        """Begin to send and to receive the first so many rounds, those that have not begun."""
        for index in range(len(self.exchanges), rounds):
            with torch.cuda.stream(self.beside):  # None: as it is
                if self.beside is not None:
                    self.beside.wait_event(self.copied[index])
                self.exchanges.append(self.parallel._exchange(self.kv, index))

    def awaits(self, rounds: int) -> bool:
        """Whether others' keys of the first so many rounds may still be on their way."""
        return any(exchange.works for exchange in self.exchanges[:rounds])

    def wait(self, rounds: int) -> None:
        """The current stream, or on the CPU the host, waits for the first so many rounds."""
        wait_for(self.exchanges[:rounds])


def _positions(zigzag: Zigzag, rank: int, device: Any) -> Tensor:
    return torch.cat([torch.arange(begin, end, device=device) for begin, end in zigzag.rows(rank)])

