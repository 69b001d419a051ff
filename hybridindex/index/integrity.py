"""Whether the lists of an open index are what was written: which are damaged, and what nobody may scan.

A list whose bytes differ from its digests is *quarantined*: searches that probe it fail, all others are answered. Good
bytes may be put in its place (:meth:`Integrity.mend`): it is then *mended*, and the file is still damaged.

**Searches pay one comparison a batch.** A batch notes :attr:`Integrity.seen` before it looks at
:attr:`Integrity.quarantined`. Before it uses what it has read, it compares that with ``marks[0]``, which counts every
change of the quarantine and every byte that turned out to be gone while somebody read it. Where they differ, what was
read says nothing.

A *share* holds only some of the lists (:mod:`hybridindex.index.share.share`). Those that it does not hold are
quarantined too, and :attr:`Integrity.absent` tells them from damaged ones.

It knows lists and bytes. Who looks, and where good bytes are, is :mod:`hybridindex.router.devices.scrub`'s.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from hybridindex.errors import (
    CorruptIndexError,
    DamagedListsError,
    FileError,
    HybridIndexError,
    NotHeldError,
)
from hybridindex.index.storage.generation import refuse_share
from hybridindex.index.storage.list_digests import U64, digest_part, list_spans
from hybridindex.index.storage.manifest import LISTS_FILE, Manifest
from hybridindex.index.storage.mapped_lists import MappedLists
from hybridindex.types import I64, U8

__all__ = ["Integrity", "Remembers", "name_lists"]

_log = logging.getLogger(__name__)

#: Lists that a message names.
_MOST_NAMED = 8


def name_lists(lists: Sequence[int]) -> str:
    """ "list 17", or "lists 3, 17 and 5 more"."""
    named = ", ".join(map(str, lists[:_MOST_NAMED]))
    more = f" and {len(lists) - _MOST_NAMED} more" if len(lists) > _MOST_NAMED else ""
    return f"list{'s' if len(lists) > 1 else ''} {named}{more}"


class Remembers(Protocol):
    """Keeps what it computed from the bytes of lists."""

    def forget(self, lists: I64) -> None:
        """What was computed from these lists may be wrong, now and while scans are under way that began before."""
        ...


class Integrity:
    """State of one open index. Thread-safe; one thread at a time looks at lists, with :attr:`looking` held."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        table: I64,
        data: U8,
        other_addresses: Sequence[int],
        digests: U64 | None,
        absent: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """
        Args:
            folder: of the generation.
            data: the mapped ``lists.bin``.
            other_addresses: of further mappings of it.
            digests: (nlist, 2) uint64 of codes and ids of each list; None: not known yet.
            absent: (nlist,) bool, of a share: lists that it does not hold.
        """
        self.folder = folder
        self.digests = digests
        #: XXH3-128 of the whole file.
        self.file_digest = manifest.files[LISTS_FILE].xxh3_128
        #: (nlist, 2, 2) int64: [start, stop) of the codes and of the ids of each list.
        self.spans = list_spans(table, manifest.code_size, manifest.layout)
        self.data = data
        counts = np.zeros(1, dtype=np.int64)
        #: One number: changes so far. Plain memory, which takes less to read than an array.
        self.marks = counts.data
        #: Of these changes: those that :attr:`quarantined` tells of.
        self.seen = 0
        #: (nlist,) bool: lists that nobody may scan; None while there are none. Replaced, never changed.
        self.quarantined: npt.NDArray[np.bool_] | None = absent if absent is not None and absent.any() else None
        #: (nlist,) bool: those of them that this share does not hold, which is no damage; None: it is no share.
        #: Replaced, never changed.
        self.absent = absent
        #: Lists that are served from good bytes in the place of damaged ones. Replaced, never changed.
        self.mended: frozenset[int] = frozenset()
        #: (nlist,) bool: lists in whose place a mapping holds zeros.
        self._gone = np.zeros(len(self.spans), dtype=np.bool_)
        self.mapped = MappedLists(folder / LISTS_FILE, data, other_addresses, counts)
        #: Told before a list may be scanned again.
        self.remembering: WeakSet[Remembers] = WeakSet()
        self._renew_locks()
        _alive.add(self)

    def _renew_locks(self) -> None:
        self.looking = threading.Lock()
        self._lock = threading.Lock()

    @property
    def file(self) -> Path:
        return self.folder / LISTS_FILE

    def close(self) -> None:
        """Ends the watch over the mapping."""
        self.mapped.close()

    # For searches

    def lists_in_quarantine(self) -> list[int]:
        """Ascending."""
        mask = self.quarantined
        return [] if mask is None else np.flatnonzero(mask).tolist()

    def pieces_in_quarantine(self, n_pieces: int, *, of_codes: bool) -> npt.NDArray[np.bool_] | None:
        """(n_pieces,) bool: pieces of :attr:`hybridindex.index.ivf.IVFIndex.n_pieces` that nobody may read; None: there
        are none. ``of_codes``: the first are codes of the lists, and rows follow, if they do.

        A share has the codes of all lists, and candidates of lists that it does not hold are compared elsewhere. Where
        all rows should be here, codes of damaged lists find candidates that nobody can compare.
        """
        rows = self.quarantined
        if rows is None or not of_codes:
            return rows
        codes = rows if self.absent is None else np.zeros_like(rows)
        return np.concatenate([codes, rows])[:n_pieces]

    def damaged_lists(self) -> list[int]:
        """Those in quarantine that are held, ascending."""
        with self._lock:
            mask, absent = self.quarantined, self.absent
        if mask is None:
            return []
        return np.flatnonzero(mask if absent is None else mask & ~absent).tolist()

    def error(self, lists: Sequence[int]) -> HybridIndexError:
        """What a search that probes ``lists``, which were in quarantine, fails with: a NotHeldError where it lacks
        nothing but lists that this share does not hold, else a DamagedListsError."""
        damaged = list(lists) if self.absent is None else sorted(set(lists).intersection(self.damaged_lists()))
        missing = sorted(set(lists).difference(damaged))
        if not damaged:
            return NotHeldError(
                f"the search needs {name_lists(missing)} of {LISTS_FILE} in {self.folder.name}, which this share does "
                "not hold; ask who does, or have this share hold it",
                lists=missing,
            )
        beside = f" (and {name_lists(missing)}, which this share does not hold)" if missing else ""
        return DamagedListsError(
            f"the search needs {name_lists(damaged)}{beside} of {LISTS_FILE} in {self.folder.name}, and the bytes "
            "there are not what was written; restore the file from a copy, which is then noticed, or build the index "
            "again",
            lists=lists,
        )

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """For who reads all lists.

        Raises:
            CorruptIndexError: some are damaged, or turned out to be while they were read.
            UnsupportedIndexError: this is a share.
        """
        if self.absent is not None:
            refuse_share(self.folder)
        seen = self.seen  # before what it tells of
        if self.quarantined is None:
            try:
                yield
            except FileError as error:
                if error.errno != errno.EFAULT:  # the system read them for a write
                    raise
            else:
                if self.marks[0] == seen:
                    return
            self.catch_up()
        named = name_lists(self.lists_in_quarantine()) if self.quarantined is not None else "some lists"
        raise CorruptIndexError(f"{self.file} is damaged ({named}): a copy of it would be, too; restore the file")

    def catch_up(self) -> None:
        """Quarantines what turned out to be gone since :attr:`seen`."""
        with self._lock:
            seen = int(self.marks[0])
            lost = self._lost()
            fresh = lost if self.quarantined is None else lost & ~self.quarantined
            if fresh.any():
                self._replace(lost, np.zeros_like(lost))
                self.mapped.count()
                seen += 1
            self.seen = seen
        if fresh.any():
            named = name_lists(np.flatnonzero(fresh).tolist())
            _log.error(
                "%s: the bytes of %s are gone; searches that probe them fail until they are back", self.file, named
            )

    def _lost(self) -> npt.NDArray[np.bool_]:
        """(nlist,) lists of which bytes are gone, and not mended since. With the lock held."""
        for start, stop in self.mapped.take_gone():
            hit = self._within(start, stop)
            self._gone[hit] = True
            self.mended -= set(np.flatnonzero(hit).tolist())
        beyond = self._within(self.mapped.length(), len(self.data))
        beyond[list(self.mended)] = False
        return np.logical_or(self._gone, beyond)

    def _within(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """(nlist,) lists with bytes in [start, stop)."""
        starts, stops = self.spans[:, :, 0], self.spans[:, :, 1]
        return np.any((starts < stops) & (starts < stop) & (stops > start), axis=1)  # type: ignore[no-any-return]

    # For who looks

    def whole(self, list_id: int) -> tuple[bool, bool]:
        """Whether the codes and the ids of a list are what was written, by the bytes that scans read now."""
        if self._gone[list_id]:  # maybe in another mapping than ours
            return False, False
        (a, b), (c, d) = self.spans[list_id].tolist()
        return self._fits(list_id, 0, a, b), self._fits(list_id, 1, c, d)

    def _fits(self, list_id: int, part: int, start: int, stop: int) -> bool:
        if start == stop:
            return True
        return self.mapped.readable(start, stop) and self.is_good(list_id, part, self.data[start:stop])

    def is_good(self, list_id: int, part: int, content: U8 | bytes) -> bool:
        """Whether ``content`` is what was written: of a list's codes (0) or ids (1)."""
        assert self.digests is not None
        return digest_part(content if isinstance(content, bytes) else content.data) == int(self.digests[list_id, part])

    def whole_in_file(self, list_id: int) -> bool:
        """Whether what has the file's name now holds a list as it was written."""
        return all(self.read_file(list_id, part) is not None for part in (0, 1))

    def read_file(self, list_id: int, part: int) -> bytes | None:
        """A list's codes or ids from what has the file's name now; None where they are not what was written."""
        start, stop = self.spans[list_id, part].tolist()
        with suppress(OSError):
            content = self.mapped.read_file(start, stop)
            if len(content) == stop - start and self.is_good(list_id, part, content):
                return content
        return None

    def quarantine(self, lists: Iterable[int]) -> None:
        """From now on no answer comes from these lists."""
        self._change(lists, quarantined=True)

    def lift(self, lists: Iterable[int]) -> None:
        """These lists, which are whole again, may be scanned again."""
        self._forget(lists := list(lists))
        self._change(lists, quarantined=False)

    def _forget(self, lists: list[int]) -> None:
        for scanner in list(self.remembering):
            scanner.forget(np.array(lists, dtype=np.int64))

    def take(self, lists: Iterable[int]) -> None:
        """These lists of a share were written, whole, and may be scanned from now on."""
        self._forget(taken := list(lists))
        self._change(taken, quarantined=False, absent=False)

    def let_go(self, lists: Iterable[int]) -> None:
        """From now on this share does not hold these lists; their bytes may go when this returns."""
        self._change(lists, quarantined=True, absent=True)

    def mend(self, list_id: int, codes: bytes, ids: bytes) -> None:
        """Puts good bytes in the place of a list's, in memory. It stays quarantined.

        Raises:
            OSError: there is no memory.
        """
        assert self.is_good(list_id, 0, codes)
        assert self.is_good(list_id, 1, ids)
        (start, codes_end), (ids_start, _) = self.spans[list_id].tolist()
        with self._lock:
            self._lost()
            self.mapped.replace(start, codes + bytes(ids_start - codes_end) + ids)
            # What turns out to be gone from now on, or did since this was asked, takes it out again.
            self._gone[list_id] = False
            self.mended |= {list_id}

    def map_again(self) -> None:
        """Has scans read the file again. For a file that is whole; raises OSError where it cannot be mapped."""
        with self._lock:
            self.mapped.map_again()
            self._gone[:] = False
            self.mended = frozenset()

    def _change(self, lists: Iterable[int], *, quarantined: bool, absent: bool | None = None) -> None:
        """``absent``: whether a share lacks them from now on; None: as before."""
        changed = np.zeros(len(self.spans), dtype=np.bool_)
        changed[np.fromiter(lists, dtype=np.int64)] = True
        none = np.zeros_like(changed)
        with self._lock:
            if quarantined:
                self._replace(changed, none)
            else:  # but for those that were lost meanwhile
                self._replace(none, changed & ~self._lost())
            if absent is not None:
                assert self.absent is not None
                self.absent = (self.absent | changed) if absent else (self.absent & ~changed)
            self.mapped.count()
            # Only this change: what turned out to be gone meanwhile is caught up with apart.
            self.seen += 1

    def _replace(self, added: npt.NDArray[np.bool_], removed: npt.NDArray[np.bool_]) -> None:
        before = np.zeros(len(self.spans), dtype=np.bool_) if self.quarantined is None else self.quarantined
        mask = (before | added) & ~removed
        self.quarantined = mask if mask.any() else None


_alive: WeakSet[Integrity] = WeakSet()


def _after_fork_in_child() -> None:
    """Whoever held the locks is not there: nearly always a router's scrub does."""
    for integrity in list(_alive):
        integrity._renew_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)
