"""The description of which keys queries attend to."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ..arrays.frameworks import framework_of, to_host
from ..arrays.narrowed import as_int32
from ..errors import ArgumentValueError, arguments_of
from ..plan.schedule_form import ScheduleForm
from ..problem import GPU_BLOCK_M, check_flag
from ..spec import checked_int
from .check import check_lists
from .lists import Lists, csr_lists, in_c_order, mask_lists, padded_lists, sinks_of
from .rules import INTEGERS, UNITS, Rules, check_blocks, check_number, form_of, shape_of

__all__ = ["Schedule"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Which keys queries attend to, for `gather_attention`. Make one by a ``from_`` method.

    Every query attends to the *dense part*, if there is one, and to the keys of its *list*. A list belongs to a q tile
    (``block_m`` neighbouring queries) or to a segment, and to one query head or to several; all its queries see all its
    keys, as nothing of it is masked. The dense part of a query is what it sees of its own segment and of the ``window``
    keys before that, and the first ``sinks`` keys.

    A key counts once only if it is once there: lists must not hold keys of the dense part, nor a key twice. `check`
    says whether they do; `from_block_mask` takes them out itself.

    Arrays are of one framework on one device. Making a schedule and using it waits for no GPU and looks into no array;
    what a wrong entry reads on a GPU is undefined. Later changes of the arrays that it was made of may change it.

    Attributes
    ----------
    entries : int32 array, (any,)
        Units of all lists: unit e holds the keys from ``e * unit`` on, or those at these places of ``k_order``.
    begins, keys : int64 and int32 arrays, (batch or 1, list heads, lists)
        Each list's first entry, and how many keys it has.
    k_order : int32 array, (batch or 1, heads, kv_heads or 1, seqlen_k), or None
    q_order : int32 array, (batch, heads, seqlen_q), or None
        Queries in the order in which q tiles take them; only `select` makes one. Outputs are in place all the same.
    form : ScheduleForm
        Sizes and rules: ``unit``, ``block_m``, ``segment``, ``window``, ``sinks``, ``is_causal``, ``tau`` and others.
    is_sorted : bool
        Whether lists are promised to ascend, which only `check` looks at.
    """

    entries: Any
    begins: Any
    keys: Any
    k_order: Any
    form: ScheduleForm
    is_sorted: bool
    sink_lists: Lists | None
    q_order: Any = None

    @classmethod
    @arguments_of("Schedule.from_block_mask")
    def from_block_mask(
        cls, mask: Any, block: int = 128, *, seqlen_q: int | None = None, seqlen_k: int | None = None, **rules: Any
    ) -> Schedule:
        """From a mask of key blocks.

        It costs a few passes over the mask, and keeps 4 bytes for each of its elements.

        Parameters
        ----------
        mask : bool array, (batch or 1, heads, kv_heads or 1, lists, key blocks)
            Which blocks the queries of a list attend to. Blocks of the dense part and in the future are passed over,
            whatever it says of them.
        block : 64 or 128
            Keys of a block; the last may be short.
        seqlen_q, seqlen_k : int, optional
            By default as many as the mask's lists and blocks hold.
        rules : the other keywords of `from_csr`
            A causal schedule needs a ``segment``, as blocks that only some rows see are not listed. Blocks must not be
            cut by the dense part: ``segment``, ``seqlen_k - seqlen_q - window`` and ``sinks`` are multiples of a block.
        """
        where = "Schedule.from_block_mask"
        shape = shape_of(where, "mask", mask, ("bool",), 4, "(batch or 1, heads, lists, key blocks)")
        check_number("block", block, UNITS[1:], where)
        given = Rules.parse(where, seqlen_q, seqlen_k, block, rules)
        check_number("block_m", given.block_m, GPU_BLOCK_M, where)
        list_rows = (given.segment if given.per_segment else None) or given.block_m
        if seqlen_q is seqlen_k is None and given.is_causal and shape[2] * list_rows > shape[3] * block:
            raise ArgumentValueError(
                f"mask has {shape[2]} lists of {list_rows} queries and {shape[3]} blocks of {block} keys; "
                "accepted with is_causal=True: no more queries than keys (seqlen_q= and seqlen_k= say their numbers)",
                where,
            )
        seqlen_q = shape[2] * list_rows if seqlen_q is None else seqlen_q
        seqlen_k = shape[3] * block if seqlen_k is None else seqlen_k
        form = form_of(where, shape[:3], given._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k))
        if shape[3] != form.units:
            raise ArgumentValueError(
                f"mask has {shape[3]} key blocks; accepted: {form.units}, those of {block} in seqlen_k",
                where,
            )
        check_blocks(where, form)
        return cls._make(form, mask, lambda: mask_lists(mask, form), given.k_order, is_sorted=True)

    @classmethod
    @arguments_of("Schedule.from_csr")
    def from_csr(
        cls,
        indptr: Any,
        indices: Any,
        *,
        seqlen_q: int,
        seqlen_k: int,
        unit: int = 1,
        batch: int = 1,
        list_heads: int = 1,
        block_m: int = 128,
        per_segment: bool = False,
        segment: int | None = None,
        window: int = 0,
        sinks: int = 0,
        is_causal: bool = True,
        k_order: Any = None,
        tau: float = 0.0,
        value_skip: Any = None,
        is_sorted: bool = False,
    ) -> Schedule:
        """From compressed rows, which are used as they lie.

        Parameters
        ----------
        indptr : int32 or int64 array, (batch or 1, list heads, lists + 1)
            List r has the entries from ``indptr[..., r]`` to ``indptr[..., r + 1]`` of ``indices``. Or one row,
            (batch * list_heads * lists + 1,), of all lists in turn, with ``batch`` and ``list_heads``.
        indices : int32 array, (any,); int64 is copied
            Units of keys, in the order in which they are visited. Unit ``e`` holds keys ``e * unit`` to
            ``(e + 1) * unit``; where that ends past seqlen_k it is short, and stands last in its list.
        seqlen_q, seqlen_k : int
        unit : 1, 64 or 128
            Keys of an entry.
        batch, list_heads : int, default 1
            With one row of all lists: how many there are of each. Of list heads heads, kv_heads or 1.
        block_m : 64 or 128
            Queries of a q tile.
        per_segment : bool, default False
            A list for each segment, (seqlen_q + segment - 1) // segment of them, instead of one for each q tile.
        segment : int, optional
            Queries of a segment, 1 to 8192: the dense part. A multiple of block_m, unless per_segment. None: there is
            no dense part, and a query whose list is empty has an output of 0.
        window : int, default 0
            Keys just before a segment that its queries attend to as well.
        sinks : int, default 0
            First keys that all queries attend to; causal, and with a segment.
        is_causal : bool, default True
            Queries see keys up to their own; query i stands at key i + seqlen_k - seqlen_q. Of lists it is a promise.
        k_order : int32 array, (batch or 1, heads, kv_heads or 1, seqlen_k), optional
            A permutation of key positions: key number i of the lists is key ``k_order[..., i]``. Nothing is moved; the
            dense part goes by position as ever.
        tau : float, default 0
            A q tile stops after the 128 keys of its list that add less than this share of the softmax mass found so
            far to every row, as S2O's do. What it has left counts for nothing. 0: it never stops.
        value_skip : float below 0, or one for each query head, optional
            Values of 64 neighbours of a list are left out by a group of queries (64 on Hopper, 32 else) where no score
            comes closer than this, a natural logarithm, to its row's maximum so far. Their weights count in the softmax
            all the same, so that outputs become a little smaller: SpargeAttn's second filter. None: nothing is.
        is_sorted : bool, default False
            A promise that lists ascend.

        Raises
        ------
        TypeError, ValueError
            An argument is not accepted; the message names it, what came and what is accepted.
        """
        where = "Schedule.from_csr"
        shape_of(where, "indices", indices, INTEGERS, 1, "(any,)")
        ndim = 1 if len(getattr(indptr, "shape", ())) == 1 else 3
        shape = shape_of(where, "indptr", indptr, INTEGERS, ndim, "(batch or 1, list heads, lists + 1), or one row")
        counts = {"batch": batch, "list_heads": list_heads}
        of_one_row = tuple([checked_int(name, x, 0, owner=where) for name, x in counts.items()])
        lists = shape[:2] if ndim == 3 else of_one_row
        rules = Rules(
            seqlen_q, seqlen_k, unit, block_m, per_segment, segment, window, sinks, is_causal, k_order, tau, value_skip
        )
        form = form_of(where, (*lists, None), rules)
        expected = (*lists, form.rows + 1) if ndim == 3 else (batch * list_heads * form.rows + 1,)
        if shape != expected:
            raise ArgumentValueError(
                f"indptr has shape {shape}; accepted: {expected}, {form.rows} lists of a list head",
                where,
            )
        return cls._make(form, indices, lambda: csr_lists(indptr, indices, form), k_order, is_sorted)

    @classmethod
    @arguments_of("Schedule.from_lists")
    def from_lists(
        cls, entries: Any, begins: Any, keys: Any, *, seqlen_q: int, seqlen_k: int, unit: int = 1,
        is_sorted: bool = False, **rules: Any,
    ) -> Schedule:  # fmt: skip
        """From lists that lie anywhere in one array, which is what the others come to: nothing is computed.

        Parameters
        ----------
        entries : int32 array, (any,); int64 is copied
        begins : int64 array, (batch or 1, list heads, lists)
            Where each list begins in ``entries``.
        keys : int32 array, likewise
            How many keys, not units, each list has.
        seqlen_q, seqlen_k, unit, is_sorted, rules : as in `from_csr`
        """
        where = "Schedule.from_lists"
        given = Rules.parse(where, seqlen_q, seqlen_k, unit, rules)
        shape_of(where, "entries", entries, INTEGERS, 1, "(any,)")
        shape = shape_of(where, "begins", begins, ("int64",), 3, "(batch or 1, list heads, lists)")
        of_keys = shape_of(where, "keys", keys, ("int32",), 3, "(batch or 1, list heads, lists)")
        if of_keys != shape:
            raise ArgumentValueError(f"keys has shape {of_keys}; accepted: {shape}, as begins", where)
        form = form_of(where, shape, given)
        lists = lambda: Lists(in_c_order(as_int32(entries)), in_c_order(begins, shape), in_c_order(keys, shape))  # noqa: E731
        return cls._make(form, entries, lists, given.k_order, is_sorted)

    @classmethod
    @arguments_of("Schedule.from_padded")
    def from_padded(
        cls, rows: Any, counts: Any, *, seqlen_q: int, seqlen_k: int, unit: int = 1, is_sorted: bool = False,
        **rules: Any,
    ) -> Schedule:  # fmt: skip
        """From rows of one width.

        Parameters
        ----------
        rows : int32 array, (batch or 1, list heads, lists, width); int64 is copied
            Units of keys, as ``indices`` of `from_csr`.
        counts : int32 or int64 array, (batch or 1, list heads, lists)
            How many entries of each row belong to its list; the others are not read.
        seqlen_q, seqlen_k, unit, is_sorted, rules : as in `from_csr`
        """
        given = Rules.parse("Schedule.from_padded", seqlen_q, seqlen_k, unit, rules)
        return cls._padded("Schedule.from_padded", "rows", rows, counts, given, is_sorted)

    @classmethod
    @arguments_of("Schedule.from_tokens")
    def from_tokens(
        cls, positions: Any, counts: Any, *, seqlen_q: int, seqlen_k: int, is_sorted: bool = False, **rules: Any
    ) -> Schedule:
        """From key positions: `from_padded` with unit 1."""
        given = Rules.parse("Schedule.from_tokens", seqlen_q, seqlen_k, 1, rules)
        return cls._padded("Schedule.from_tokens", "positions", positions, counts, given, is_sorted)

    @classmethod
    def _padded(cls, where: str, name: str, rows: Any, counts: Any, rules: Rules, is_sorted: bool) -> Schedule:
        shape = shape_of(where, name, rows, INTEGERS, 4, "(batch or 1, list heads, lists, width)")
        of_counts = shape_of(where, "counts", counts, INTEGERS, 3, "(batch or 1, list heads, lists)")
        if of_counts != shape[:3]:
            raise ArgumentValueError(f"counts has shape {of_counts}; accepted: {shape[:3]}, as {name}", where)
        form = form_of(where, shape[:3], rules)
        return cls._make(form, rows, lambda: padded_lists(rows, counts, form), rules.k_order, is_sorted)

    @classmethod
    def _make(cls, form: ScheduleForm, like: Any, lists: Any, k_order: Any, is_sorted: bool) -> Schedule:
        is_sorted = check_flag("is_sorted", is_sorted)
        with framework_of("array", like).wide_integers():
            made = lists()
            sinks = sinks_of(like, form) if form.sinks else None
            order = None if k_order is None else in_c_order(as_int32(k_order), tuple(k_order.shape))
        return cls(made.entries, made.begins, made.keys, order, form, is_sorted, sinks)

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """By form.array_names."""
        found = {"entries": self.entries, "begins": self.begins, "keys": self.keys, "k_order": self.k_order,
                 "q_order": self.q_order}  # fmt: skip
        if self.sink_lists is not None:
            found |= {f"sink_{name}": x for name, x in self.sink_lists._asdict().items()}
        return {name: found[name] for name in self.form.array_names}

    @arguments_of("Schedule.check")
    def check(self) -> None:
        """Look into the lists and wait for the GPU that they are on.

        Raises
        ------
        ValueError
            An entry is out of range or twice in a list, a list lies outside of the entries, does not ascend although
            that was promised, has a short unit that is not its last, holds a key of the dense part or one that is in
            the future of a query of its, or k_order is no permutation. The message names the list.
        """
        host = {name: to_host(x) for name, x in self.arrays.items() if not name.startswith("sink_")}
        check_lists(self.form, host, is_sorted=self.is_sorted)

    def __repr__(self) -> str:
        return f"Schedule({self.form})"
