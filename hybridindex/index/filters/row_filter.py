"""Filters: a bit for each row of an index, and how many rows of each list it leaves."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from hybridindex.errors import CorruptIndexError, InvalidInputError, UnreadableIndexError, without_path
from hybridindex.index.attributes.columns import schema_of
from hybridindex.index.attributes.stored import StoredAttributes
from hybridindex.index.attributes.where import matching
from hybridindex.index.filters.row_numbers import RowNumbers, row_numbers
from hybridindex.index.live.added import AddedLists
from hybridindex.index.live.deleted import Deleted
from hybridindex.types import I64, U8

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["AddedFilter", "RowFilter", "RowFilters", "ids_of"]

#: Bytes of filters that are kept for searches to come.
_KEPT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class RowFilter:
    """Which rows of one index may be answered. Immutable. Made by :meth:`hybridindex.router.Router.filter`."""

    #: (m,) int64 ids that it leaves, None: all; and ids that it does not.
    allowed: I64 | None
    denied: I64 | None
    #: The condition on attributes; None: none. And the digest of the attributes.
    where: str | None
    attributes: str
    #: Of the index.
    fingerprint: str
    #: (m,) uint8, a multiple of 8: bit r & 7 of byte r >> 3 is that of row number r; the rest is 0.
    mask: U8
    #: (nlist + 1,) int64: number of the first row of each list; :mod:`hybridindex.index.filters.row_numbers`.
    first: I64
    #: (nlist,) int64: rows of each list that it leaves; of a list in quarantine, all.
    counts: I64
    #: Rows that it leaves.
    total: int
    #: Changes of the quarantine (:attr:`hybridindex.index.integrity.Integrity.seen`) when its ids were looked up.
    seen: int

    @property
    def nbytes(self) -> int:
        """Memory of its own."""
        ids = sum(each.nbytes for each in (self.allowed, self.denied) if each is not None)
        return self.mask.nbytes + self.counts.nbytes + ids


class AddedFilter(NamedTuple):
    """Which rows may be answered of those that came since the lists were written."""

    rows: AddedLists
    #: (m,) int64, ascending.
    ids: I64
    #: (nlist,) int64, of each list.
    counts: I64


def _spelt(part: bytes | None) -> bytes:
    return b"\0" if part is None else b"\1" + len(part).to_bytes(8, "little") + part


def ids_of(index: IVFIndex, wanted: RowFilter) -> I64:
    """(total,) int64: ids of the rows that a filter leaves, in the order of the lists."""
    rows = np.flatnonzero(np.unpackbits(wanted.mask, bitorder="little"))
    lists = np.searchsorted(wanted.first, rows, "right") - 1
    return index.rows.ids_at(lists, rows - wanted.first[lists])


class RowFilters:
    """Makes the filters of one index, and keeps those of late, so that the next searches with the same ids pay for a
    digest of these alone. Thread-safe."""

    def __init__(self, index: IVFIndex, earlier: Collection[str] = ()) -> None:
        """``earlier``: fingerprints of other generations, whose filters are made anew for this one."""
        self._index, self._earlier = index, earlier
        self._lock = threading.Lock()
        #: Changes of the quarantine that kept filters know of.
        self._seen = 0
        #: Answers of :meth:`without`, and what had been deleted; the last one is the last.
        self._without: OrderedDict[RowFilter, tuple[Deleted, RowFilter]] = OrderedDict()
        #: Answers of :meth:`of_added`.
        self._of_added: WeakKeyDictionary[RowFilter, AddedFilter] = WeakKeyDictionary()
        #: By a digest of what each was made of that nobody can forge: one client's filter must never serve another's
        #: ids. The one that was asked for last is the last.
        self._kept: OrderedDict[bytes, RowFilter] = OrderedDict()
        self._kept_bytes = 0

    def make(self, allowed: I64 | None, denied: I64 | None, where: str | None = None) -> RowFilter:
        """The filter that leaves the rows of ``allowed`` ids, all where that is None, without those of ``denied``, as
        far as the condition ``where`` is true of them; see :mod:`hybridindex.index.attributes.where`.

        Args:
            allowed, denied: (m,) int64, contiguous, in any order; ids that no row has change nothing. Kept: nobody may
                write to them any more.

        Raises:
            InvalidInputError: the condition is none, or the index has no attributes.
            MissingDependencyError: what reads or computes them is not installed.
        """
        stored = None if where is None else self._attributes()
        digest = hashlib.sha256()
        # Each part says whether it is there, and how long: no two filters are spelt alike.
        condition = None if stored is None else f"{stored.spec.file_xxh3_128} {where}".encode(errors="surrogatepass")
        for part in (None if each is None else each.tobytes() for each in (allowed, denied)):
            digest.update(_spelt(part))
        digest.update(_spelt(condition))
        key = digest.digest()
        numbers, seen = row_numbers(self._index)
        with self._lock:
            if seen != self._seen:
                self._seen = seen
                self._kept.clear()
                self._without.clear()
                self._kept_bytes = 0
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        made = self._make(numbers, allowed, denied, seen, where, stored)
        with self._lock:
            if seen == self._seen and key not in self._kept:
                self._kept[key] = made
                self._kept_bytes += made.nbytes
            while self._kept_bytes > _KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def renewed(self, wanted: RowFilter) -> RowFilter:
        """The same filter; or another, where the ids of rows may have turned out to be damaged, or good again, or where
        attributes were given since."""
        index = self._index
        stored = index.rows.attributes
        same = wanted.where is None or (stored is not None and stored.spec.file_xxh3_128 == wanted.attributes)
        if wanted.seen == index.integrity.marks[0] and same:
            return wanted
        return self.make(wanted.allowed, wanted.denied, wanted.where)

    def _attributes(self) -> StoredAttributes:
        index = self._index.rows
        stored, why = index.attributes, index.attributes_problem
        if stored is not None:
            try:
                stored.columns  # noqa: B018 - reads them
                return stored
            except (CorruptIndexError, UnreadableIndexError) as error:
                why = str(error)
        # Clients are told it, too, and no paths.
        why = without_path(why, index.path) or "hybridindex attributes INDEX TABLE gives them"
        raise InvalidInputError(f"where is given, and the index has no attributes: {why}")

    def check(self, wanted: Any) -> RowFilter:
        """A filter of this index; raises InvalidInputError: ``wanted`` is none."""
        if not isinstance(wanted, RowFilter):
            raise InvalidInputError(
                f"row_filter is a {type(wanted).__name__}; expected what Router.filter returned, or None"
            )
        mine = self._index.rows.fingerprint
        if wanted.fingerprint != mine and wanted.fingerprint in self._earlier:
            return self.make(wanted.allowed, wanted.denied, wanted.where)
        if wanted.fingerprint != mine:
            raise InvalidInputError(
                f"the filter was made for index {wanted.fingerprint}, this is index {mine}; make it with this router"
            )
        return wanted

    def without(self, wanted: RowFilter, deleted: Deleted | None) -> RowFilter:
        """The filter that leaves the same rows but the deleted ones; kept for the next calls."""
        if deleted is None:
            return wanted
        with self._lock:
            known = self._without.get(wanted)
            if known is not None and known[0] is deleted:
                self._without.move_to_end(wanted)
                return known[1]
        numbers, seen = row_numbers(self._index)
        left = np.unpackbits(wanted.mask, bitorder="little").view(np.bool_)
        left[numbers.of_ids(deleted.ids)] = False
        made = replace(wanted, seen=seen, **_counted(left, numbers.first))
        with self._lock:
            self._without[wanted] = deleted, made
            self._without.move_to_end(wanted)
            # What was asked for is held, too.
            while sum(each.nbytes + made.nbytes for each, (_, made) in self._without.items()) > _KEPT_BYTES:
                self._without.popitem(last=False)
        return made

    def of_added(self, wanted: RowFilter, added: AddedLists) -> AddedFilter:
        """What a filter leaves of the rows that came since."""
        with self._lock:
            known = self._of_added.get(wanted)
            if known is not None and known.rows is added:
                return known
        left = np.ones(added.count, dtype=np.bool_)
        if wanted.allowed is not None:
            left &= np.isin(added.ids, wanted.allowed)
        if wanted.denied is not None:
            left &= ~np.isin(added.ids, wanted.denied)
        if wanted.where is not None:
            kinds = schema_of(self._attributes().spec.columns)
            table = added.attributes.table(kinds)
            # Part by part: an array counts its bytes by 32 bits.
            matches = [
                matching(wanted.where, dict(zip(part.schema.names, part.columns, strict=True)))
                for part in table.to_batches()
            ]
            left &= np.concatenate([np.empty(0, dtype=np.bool_), *matches])[added.numbers]
        counts = np.bincount(added.lists[left], minlength=len(added.table))
        made = AddedFilter(added, np.sort(added.ids[left]), counts)
        with self._lock:
            self._of_added[wanted] = made
        return made

    def _make(
        self,
        numbers: RowNumbers,
        allowed: I64 | None,
        denied: I64 | None,
        seen: int,
        where: str | None,
        stored: StoredAttributes | None,
    ) -> RowFilter:
        left = np.zeros(-(-numbers.count // 64) * 64, dtype=np.bool_)
        left[: numbers.count] = allowed is None
        if allowed is not None:
            left[numbers.of_ids(allowed)] = True
        if denied is not None:
            left[numbers.of_ids(denied)] = False
        if stored is not None and where is not None:
            left[: numbers.count] &= matching(where, stored.columns)
        for list_id in numbers.unknown.tolist():
            left[numbers.first[list_id] : numbers.first[list_id + 1]] = True
        return RowFilter(
            allowed=allowed,
            denied=denied,
            where=where,
            attributes="" if stored is None else stored.spec.file_xxh3_128,
            fingerprint=self._index.rows.fingerprint,
            first=numbers.first,
            seen=seen,
            **_counted(left, numbers.first),
        )


def _counted(left: npt.NDArray[np.bool_], first: I64) -> dict[str, Any]:
    """Mask, counts and total of the rows that are left."""
    before = np.concatenate([[0], np.cumsum(left, dtype=np.int64)])
    return {
        "mask": np.packbits(left, bitorder="little"),
        "counts": np.diff(before[first]),
        "total": int(before[-1]),
    }
