"""Which ids of an open index were deleted: read from the log when it is opened, and again while it serves.

Deletions of this process are seen at once, those of other processes within :data:`LOOK_AGAIN_S`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from hybridindex.errors import CorruptIndexError, HybridIndexError
from hybridindex.index.log.delete_log import DELETE_LOG, append_record, log_state, read_records
from hybridindex.types import F32, I64

__all__ = ["LOOK_AGAIN_S", "Deleted", "DeletedIds"]

_log = logging.getLogger(__name__)

#: Between looks at the log for what other processes deleted.
LOOK_AGAIN_S = 1.0
#: Places of an answer that are spare at least, while rows are deleted.
_FEWEST_SPARE = 8
#: As :func:`hybridindex.index.log.delete_log.log_state` says it.
_NO_LOG = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deleted:
    """Deleted ids at one moment. Immutable."""

    #: (m,) int64, ascending.
    ids: I64
    #: Records of the log so far.
    n_records: int
    #: Whether larger distances are nearer.
    keep_max: bool

    def contains(self, ids: I64) -> npt.NDArray[np.bool_]:
        """Of which ids, of any shape, it holds."""
        at = np.searchsorted(self.ids, ids)
        found: npt.NDArray[np.bool_] = self.ids[np.minimum(at, len(self.ids) - 1)] == ids
        return found

    def spare(self, k: int, count: int) -> int:
        """How many more places an answer needs, so that ``k`` nearly always stay; of an index of ``count`` rows."""
        return _FEWEST_SPARE + math.ceil(2 * k * self.share(count))

    def share(self, count: int) -> float:
        """Of the rows of an index of ``count``; of one with repeated ids, about."""
        return min(1.0, len(self.ids) / max(count, 1))

    def leave_out(self, distances: F32, ids: I64, k: int) -> tuple[F32, I64] | None:
        """The first ``k`` of each row of an answer (n, k + spare) that were not deleted; None where a row has fewer of
        them and might have had more."""
        gone = self.contains(ids)
        if not gone[:, :k].any():
            return distances[:, :k].copy(), ids[:, :k].copy()
        left = ids.shape[1] - gone.sum(axis=1)
        if ((left < k) & (ids[:, -1] >= 0)).any():
            return None
        # What was deleted comes behind all others, and leaves empty places.
        order = np.argsort(gone, axis=1, kind="stable")[:, :k]
        nearest: F32 = np.take_along_axis(distances, order, axis=1)
        their_ids: I64 = np.take_along_axis(ids, order, axis=1)
        beyond = np.arange(k) >= left[:, None]
        nearest[beyond], their_ids[beyond] = -np.inf if self.keep_max else np.inf, -1
        return nearest, their_ids


class DeletedIds:
    """Those of one open generation. Thread-safe."""

    def __init__(self, folder: Path, rows_xxh3_128: str, *, keep_max: bool) -> None:
        """Reads the log.

        Args:
            folder: of the generation.
            rows_xxh3_128: digest of its rows.
            keep_max: whether larger distances are nearer.

        Raises:
            CorruptIndexError, UnsupportedIndexError, UnreadableIndexError: as
            :func:`hybridindex.index.log.delete_log.read_records`.
        """
        # Wherever the process goes.
        self.path = folder.absolute() / DELETE_LOG
        self._rows, self._keep_max = rows_xxh3_128, keep_max
        self.renew_locks()
        #: Of the log when it was read, and where its last record ends.
        self._state, self._end = _NO_LOG, 0
        self._deleted: Deleted | None = None
        self._look_again_s = 0.0
        self._problem = ""
        self._read()
        _open.add(self)

    def renew_locks(self) -> None:
        """In a child process, which has the lock as it was, and not the thread that held it."""
        self._lock = threading.Lock()

    def current(self) -> Deleted | None:
        """What was deleted until now; None: nothing."""
        if time.monotonic() >= self._look_again_s and self._lock.acquire(blocking=False):
            try:
                self._look_again_s = time.monotonic() + LOOK_AGAIN_S
                self._read()
                self._problem = ""
            except HybridIndexError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.error("deletions of other processes are not seen: %s", error)
            finally:
                self._lock.release()
        return self._deleted

    def read_now(self) -> Deleted | None:
        """What was deleted until now, by other processes too.

        Raises:
            CorruptIndexError, UnreadableIndexError: the log is gone, damaged, or cannot be read.
        """
        with self._lock:
            self._read()
            return self._deleted

    @contextmanager
    def appending(self) -> Iterator[tuple[Deleted | None, Callable[[I64], None]]]:
        """With the writers' lock held: what was deleted until now, and a function that deletes more, durably when it
        returns: (m,) int64, all different, none of them deleted.

        Raises:
            FileError: the log cannot be read, or written; then nothing was deleted.
        """
        with self._lock:
            self._read()
            yield self._deleted, self._append

    def _append(self, ids: I64) -> None:
        before = self._deleted
        number = 1 + (0 if before is None else before.n_records)
        every = np.sort(ids)
        if before is not None:
            every = np.insert(before.ids, np.searchsorted(before.ids, every), every)
        end = append_record(self.path, self._rows, ids, end=self._end, number=number)
        self._publish(every, number, end)
        # Last: whatever interrupts this has the log read again.
        self._state = log_state(self.path)

    def _read(self) -> None:
        """Anew where it was changed: what others wrote and could not sync, they take back."""
        state = log_state(self.path)
        if state == self._state:
            return
        if state == _NO_LOG:
            raise CorruptIndexError(
                f"{self.path}, which says what was deleted, is gone; was its generation removed? open the index again"
            )
        found = read_records(self.path, self._rows)
        if found.torn:
            _log.warning(
                "%s: the last %d bytes are no whole deletion, and are left out: its writer was interrupted before it "
                "told anybody, or they are damaged",
                self.path,
                found.torn,
            )
        ids = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found.ids]))
        self._publish(ids, len(found.ids), found.end)
        self._state = state

    def _publish(self, ids: I64, n_records: int, end: int) -> None:
        ids.setflags(write=False)
        self._end = end
        # One reference: searches have the old ids or the new ones.
        self._deleted = Deleted(ids=ids, n_records=n_records, keep_max=self._keep_max) if len(ids) else None


_open: WeakSet[DeletedIds] = WeakSet()


def _renew_locks() -> None:
    for each in _open:
        each.renew_locks()


os.register_at_fork(after_in_child=_renew_locks)
