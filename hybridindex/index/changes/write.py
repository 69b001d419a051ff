"""Adding, replacing and deleting rows of an index, durably. Lists stay where they lie: what comes is held beside them,
and searches leave out what goes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex.config import check_ids
from hybridindex.errors import DuplicateIdError, InvalidInputError, UnsupportedIndexError, without_path
from hybridindex.extension import native
from hybridindex.index.attributes.added import as_stream
from hybridindex.index.attributes.columns import as_attributes, fitted
from hybridindex.index.attributes.stored import spec_state
from hybridindex.index.changes.claim import claim_of
from hybridindex.index.codec import max_abs_of
from hybridindex.index.filters.row_filter import RowFilters, ids_of
from hybridindex.index.filters.row_numbers import RowNumbers, row_numbers
from hybridindex.index.filters.write_attributes import look_again
from hybridindex.index.inputs.elements import ELEMENTS, holds_vectors
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.live.added import AddedLists
from hybridindex.index.live.state import LiveState
from hybridindex.index.live.waiting import Coming
from hybridindex.index.log.change import Change, no_ids, no_rows
from hybridindex.index.source import VectorSource, check_ids_argument
from hybridindex.index.storage.generation import refuse_share
from hybridindex.processes import short_switch_interval
from hybridindex.types import I64, U8

__all__ = ["WAIT_S", "add", "delete", "largest_id", "refuse_unwritable", "takes_rows", "upsert"]

_T = TypeVar("_T")

#: How long another process may write before a change is refused.
WAIT_S = 10.0
#: Of one call, in codes and in rows.
_MOST_BYTES, _MOST_ROWS = 1 << 30, 1 << 22
#: So many rows of one call are worth other cores to find their lists; and how many cores at most.
_MANY_ROWS, _MOST_THREADS = 256, 4
#: Numbers of 64 bits with a sign.
_IDS = 1 << 63
#: Ids that a message names.
_MOST_NAMED = 5


class _Rows(NamedTuple):
    """Rows that shall come, encoded."""

    #: None: to be numbered.
    ids: I64 | None
    lists: I64
    codes: U8
    attributes: bytes
    #: As they were given, None where they were not; and which attributes the index had then.
    given: Any
    spec: tuple[int, int, int] | None


def add(index: IVFIndex, vectors: Any, ids: Any = None, attributes: Any = None, *, sync: bool = True) -> I64:
    """Adds rows; durable when it returns, and found by every search of this process that begins then.

    Args:
        vectors: (n, dim), or (dim,) for one row, of elements that a build takes.
        ids: (n,) integers of 0 or more, all different; none may be there. None: numbers above all that are there.
        attributes: a pyarrow Table or RecordBatch, a DataFrame or a mapping of names to columns, a record for each row,
            of columns that the index has. None: missing values.
        sync: False: it is in the file when the call returns, and may not survive a power cut.

    Returns:
        (n,) int64, the ids.

    Raises:
        DuplicateIdError: an id is there, or given twice. InvalidInputError: names what is wrong.
        UnsupportedIndexError: rows of the codec cannot be changed, or this is a share.
        DamagedListsError: ids of some lists cannot be read.
        BuildError: another process writes, or the generation was replaced. FileError, DiskFullError: nothing was added.
    """
    with index.rows.live.coming() as coming:
        return _add(index, _prepared(index.rows, vectors, ids, attributes), coming, sync=sync)


def _add(index: IVFIndex, rows: _Rows, coming: Coming, *, sync: bool) -> I64:
    def resolve(state: LiveState) -> tuple[Change | None, I64]:
        if not len(rows.lists):
            return None, no_ids()
        numbers = _numbers(index.rows)
        if rows.ids is None:
            first = max(largest_id(index.rows, None), state.added.largest_id) + 1
            if first + len(rows.lists) > _IDS:
                raise InvalidInputError(
                    f"ids is None, and {len(rows.lists)} numbers above the largest id so far, {first - 1}, do not fit "
                    "64 bits; expected ids"
                )
            given: I64 = first + np.arange(len(rows.lists), dtype=np.int64)
        else:
            given = rows.ids
            there = given[_is_there(state, numbers, given)]
            if len(there):
                raise DuplicateIdError(
                    f"{len(there)} of the ids exist already: {_named(there)}; expected new ones, or upsert, which "
                    "replaces rows"
                )
        change = _change(index.rows, no_ids(), rows, given)
        state.added.largest_id = max(state.added.largest_id, int(given.max()))
        return change, given

    ids_named = () if rows.ids is None else rows.ids.tolist()
    return _commit(index.rows, resolve, ids_named, sync=sync, n=len(rows.lists), coming=coming)


def upsert(index: IVFIndex, vectors: Any, ids: Any, attributes: Any = None, *, sync: bool = True) -> int:
    """Adds rows, in the place of all rows of these ids, at once; how many ids were there. As :func:`add`.

    Raises:
        As :func:`add`, but for ids that are there.
    """
    if ids is None:
        raise InvalidInputError("ids is None; expected the id of each row")
    with index.rows.live.coming() as coming:
        return _upsert(index, _prepared(index.rows, vectors, ids, attributes), coming, sync=sync)


def _upsert(index: IVFIndex, rows: _Rows, coming: Coming, *, sync: bool) -> int:
    given = rows.ids
    assert given is not None

    def resolve(state: LiveState) -> tuple[Change | None, int]:
        there = given[_is_there(state, _numbers(index.rows), given)]
        change = _change(index.rows, there, rows, given) if len(given) else None
        state.added.largest_id = max(state.added.largest_id, int(given.max(initial=-1)))
        return change, len(there)

    return _commit(index.rows, resolve, given.tolist(), sync=sync, n=len(given), coming=coming)


def delete(index: IVFIndex, ids: Any = None, where: str | None = None, *, sync: bool = True) -> int:
    """Deletes rows; durable when it returns, and left out of every search of this process that begins then.

    Args:
        ids: (m,) integers; those that are not there, or no longer, change nothing. An id of several rows loses all.
        where: or a condition on attributes: the rows of which it is true now.
        sync: as of :func:`add`.

    Returns:
        How many ids were deleted.

    Raises:
        InvalidInputError: neither or both are given, they are no integers, or the condition is none.
        UnsupportedIndexError: the index is a share. DamagedListsError: ids of some lists cannot be read.
        BuildError: another process writes, or the generation was replaced. FileError, DiskFullError, NotWritableError:
            nothing was deleted.
    """
    index = index.rows
    index.mapped_model()  # is it open?
    if index.share is not None:
        refuse_share(index.integrity.folder)
    if (ids is None) == (where is None):
        raise InvalidInputError("ids and where are both given, or missing; expected one of them")
    given = None if ids is None else np.unique(check_ids("ids", ids))

    def resolve(state: LiveState) -> tuple[Change | None, int]:
        there = _ids_where(index, state, where) if given is None else given[_is_there(state, _numbers(index), given)]
        if not len(there):
            return None, 0
        nothing = no_rows(index.code_size)
        return Change(gone=there, ids=no_ids(), lists=no_ids(), codes=nothing), len(there)

    if given is None:
        return _commit(index, resolve, None, sync=sync, n=_MANY_ROWS)
    return _commit(index, resolve, given.tolist(), sync=sync, n=len(given))


def largest_id(index: IVFIndex, added: AddedLists | None) -> int:
    """Of the rows that are there, or were when lists were last written anew; -1: there was none."""
    numbers, _ = row_numbers(index)
    came = -1 if added is None else int(added.ids.max(initial=-1))
    return max(numbers.largest_id, came, int(index.manifest.notes.get("largest_id", -1)))


def takes_rows(index: IVFIndex) -> bool:
    """Whether rows can be added, and lists written anew."""
    return index.manifest.layout == "rows" and index.device_codec() is not None


def refuse_unwritable(index: IVFIndex) -> None:
    """Raises UnsupportedIndexError: the index is a share, or its rows cannot be changed; says which can."""
    index.mapped_model()  # is it open?
    if index.share is not None:
        refuse_share(index.integrity.folder)
    if not takes_rows(index):
        raise UnsupportedIndexError(
            f"{index.path} has codec {index.codec!r}, whose rows cannot be changed one by one; those of flat, fp16, "
            "bf16, sq8 and pq<M> can: rebuild the index with one of them, and with bits= to keep it small"
        )


def _commit(
    index: IVFIndex,
    resolve: Callable[[LiveState], tuple[Change | None, _T]],
    ids: Collection[int] | None,
    *,
    sync: bool,
    n: int,
    coming: Coming | None = None,
) -> _T:
    """``n``: rows that come or go, about."""
    # Who keeps the claim need not take it each time.
    claimed = nullcontext() if index.live.is_sole_writer else claim_of(index.path).held(WAIT_S)
    with claimed:
        return index.live.commit(resolve, ids=ids, sync=sync, coming=coming, is_small=n < _MANY_ROWS)


def _prepared(index: IVFIndex, vectors: Any, ids: Any, attributes: Any) -> _Rows:
    refuse_unwritable(index)
    try:
        given = np.asarray(vectors) if isinstance(vectors, list) else vectors
    except ValueError as error:
        raise InvalidInputError(f"vectors are not an array ({error}); expected (n, {index.dim})") from error
    given = given[None] if isinstance(given, np.ndarray) and given.ndim == 1 else given
    if not isinstance(given, np.ndarray) or given.ndim != 2 or given.shape[1] != index.dim:
        what = f"shape {given.shape}" if isinstance(given, np.ndarray) else f"type {type(given).__name__}"
        raise InvalidInputError(f"vectors have {what}; expected (n, {index.dim}) or ({index.dim},)")
    if not holds_vectors(given.dtype) and given.dtype.kind not in "iu":
        raise InvalidInputError(f"vectors have dtype {given.dtype}; expected {ELEMENTS}")
    n, most = len(given), min(_MOST_ROWS, _MOST_BYTES // index.code_size)
    if n > most:
        raise InvalidInputError(f"vectors hold {n} rows; expected {most} at most in one call")
    # What is small takes the GIL for less than threads do that switch.
    with short_switch_interval() if n >= _MANY_ROWS else nullcontext():
        return _encoded(index, given, ids, attributes)


def _encoded(index: IVFIndex, given: npt.NDArray[Any], ids: Any, attributes: Any) -> _Rows:
    """``given``: (n, dim)."""
    n = len(given)
    numbered = check_ids_argument(ids, n)
    if numbered is not None:
        numbered = np.array(numbered, dtype=np.int64)
        if n > 1:
            distinct, counts = np.unique(numbered, return_counts=True)
            if len(distinct) < n:
                raise DuplicateIdError(f"ids are given twice: {_named(distinct[counts > 1])}; expected every id once")
    spec = None if attributes is None else spec_state(index.integrity.folder)
    stream = _attributes(index, attributes, n)
    source = VectorSource(
        vectors=given, given_ids=None, max_abs=None if index.manifest.normalized else max_abs_of(index.codec)
    )
    if not n:
        return _Rows(numbered, no_ids(), no_rows(index.code_size), b"", attributes, spec)
    transformed = index.transform(source.rows(0, n))
    lists = index.quantize(transformed, 1, _helpers() if n >= _MANY_ROWS else None)[0][:, 0]
    if (lists < 0).any():
        raise InvalidInputError(
            f"vectors[{int(np.argmax(lists < 0))}] is nearest to no list; expected finite distances"
        )
    return _Rows(numbered, lists, index.encode_rows(transformed, lists), stream, attributes, spec)


@cache
def _helpers() -> Any:
    """Threads beside a caller's, of all writers of the process; None: there is no other core, or no extension."""
    n_helpers = min(len(os.sched_getaffinity(0)), _MOST_THREADS) - 1
    return native.ThreadPool(n_helpers) if native is not None and n_helpers > 0 else None


# A child process has none of the threads.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def _attributes(index: IVFIndex, attributes: Any, n: int) -> bytes:
    if attributes is None:
        return b""
    # Others may have given some since.
    problem, stored = look_again(index), index.attributes
    table = as_attributes(attributes, None if stored is None else stored.spec.columns)
    if len(table) != n:
        raise InvalidInputError(f"attributes have {len(table)} rows and vectors {n}; expected as many")
    if stored is None or problem:
        why = problem or "set_attributes (hybridindex attributes) gives it some"
        raise InvalidInputError(f"attributes are given, and the index has none: {why}")
    return as_stream(fitted(table, stored.spec.columns))


def _change(index: IVFIndex, gone: I64, rows: _Rows, ids: I64) -> Change:
    """Raises InvalidInputError: the index was given other attributes since the rows were prepared."""
    attributes = rows.attributes
    if attributes and spec_state(index.integrity.folder) != rows.spec:
        attributes = _attributes(index, rows.given, len(ids))
    return Change(gone=gone, ids=ids, lists=rows.lists, codes=rows.codes, attributes=attributes)


def _numbers(index: IVFIndex) -> RowNumbers:
    numbers, _ = row_numbers(index)
    if len(numbers.unknown):
        raise index.integrity.error(numbers.unknown.tolist())
    return numbers


def _is_there(state: LiveState, numbers: RowNumbers, ids: I64) -> npt.NDArray[np.bool_]:
    """Which ids have rows now."""
    smallest = int(ids.min()) if len(ids) else 0
    if smallest > max(numbers.largest_id, state.added.largest_id):
        return np.zeros(len(ids), dtype=np.bool_)
    added = np.fromiter((each in state.added for each in ids.tolist()), np.bool_, len(ids))
    if smallest > numbers.largest_id:
        return added
    stored = np.diff(numbers.of_each(ids)[1]) > 0
    return added | (stored & ~state.is_gone(ids))


def _ids_where(index: IVFIndex, state: LiveState, where: str | None) -> I64:
    """(m,) int64: ids of the rows of which a condition is true now, by the attributes on disk."""
    while True:
        _numbers(index)
        if problem := look_again(index):
            raise InvalidInputError(
                f"where is given, and the index has no attributes: {without_path(problem, index.path)}"
            )
        filters = RowFilters(index)
        made = filters.make(None, None, where)
        stored: I64 = np.unique(ids_of(index, made))
        stored = stored[~state.is_gone(stored)]
        added = state.added.snapshot()
        came = no_ids() if added is None else filters.of_added(made, added).ids
        # Else ids may have been read from damaged bytes.
        if made.seen == index.integrity.marks[0]:
            return np.union1d(stored, came)


def _named(ids: I64) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(map(str, ids[:_MOST_NAMED].tolist())) + more
