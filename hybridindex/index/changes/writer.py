"""Writing through one open index, whichever of its generations is current: retries what a compaction overtook, keeps
the writer's claim where it shall, and compacts by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from weakref import WeakSet

from hybridindex.errors import BuildError, BusyWritingError, HybridIndexError, InvalidInputError, SupersededError
from hybridindex.index.changes.claim import claim_of
from hybridindex.index.changes.compact import Compaction, compact, needs_compaction
from hybridindex.index.changes.write import WAIT_S, add, delete, upsert
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index
from hybridindex.index.storage.commit import Progress
from hybridindex.processes import short_switch_interval
from hybridindex.types import I64

__all__ = ["Durability", "IndexWriter"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: "synced": a change is on disk when the call returns, and survives a power cut. "written": it is with the operating
#: system, and survives the end of the process alone.
Durability = Literal["synced", "written"]

#: Compactions that may overtake one change.
_ATTEMPTS = 5
#: Part of the time in which maintenance works, and between looks whether it should.
_MAINTENANCE_SHARE, _LOOK_S = 0.25, 0.5
#: A failed compaction is tried again after so long.
_RETRY_S = 60.0
#: Rows that came since the lists were written may take so much memory while these are being written anew: so many times
#: the generation's bytes, or so many bytes, whichever is more.
_MOST_TIMES, _MOST_BYTES = 1.0, 1 << 30


class IndexWriter:
    """Of one :class:`hybridindex.api.Index`. From any thread."""

    def __init__(
        self,
        index: IVFIndex,
        *,
        durability: Durability = "synced",
        on_compaction: Callable[[IVFIndex], None] | None = None,
    ) -> None:
        """
        Args:
            on_compaction: told the new generation of each compaction, before the call returns that made it.

        Raises:
            InvalidInputError: no such durability.
        """
        if durability not in get_args(Durability):
            raise InvalidInputError(f"durability is {durability!r}; expected one of {', '.join(get_args(Durability))}")
        self._newest = index
        self._sync = durability == "synced"
        self._opening = threading.Lock()
        self._compacting = threading.Lock()
        #: What was the newest before, while anybody searches it.
        self._older: WeakSet[IVFIndex] = WeakSet()
        self._on_compaction = on_compaction
        self._claim = claim_of(index.path)
        self._keeps = False
        self._closed = threading.Event()
        #: Maintenance has something to do now.
        self._looks = threading.Event()
        self._maintainer: threading.Thread | None = None
        #: Whether maintenance compacts a generation, and what is said where that has to be done otherwise.
        self.compacts: Callable[[IVFIndex], bool] = lambda _index: True
        self.cure = "compact it (hybridindex compact)"
        #: Bytes of such rows that are enough, where the lists have more; None: as many as they have.
        self.most_bytes: int | None = None
        self.compactions = 0
        #: Why the last one failed; empty: it did not.
        self.problem = ""

    # The index

    @property
    def path(self) -> Path:
        """Of the index, whichever generation is current."""
        return self._newest.path

    @property
    def newest(self) -> IVFIndex:
        """The generation that takes changes, open."""
        live = self._newest.live
        if not self._keeps:
            # Others may have compacted it, while nothing here looked.
            live.current()
        if live.is_superseded:
            self._reopen()
        return self._newest

    def _reopen(self) -> None:
        with self._opening:
            if not self._newest.live.is_superseded or self._newest.is_closed:
                return
            self._adopt(open_index(self._newest.path, verify="quick"))

    def _adopt(self, index: IVFIndex) -> None:
        self._older.add(self._newest)
        self._newest = index
        index.live.is_sole_writer = self._keeps

    def keep(self, wait_s: float = WAIT_S) -> None:
        """Has the writer's claim until :meth:`close`.

        Raises:
            ClaimedError: another process has it for ``wait_s``. BuildError: somebody in this one has. Each names it.
        """
        self._claim.keep(wait_s)
        try:
            self.newest.live.read_now()
        except BaseException:
            self._claim.give_up()
            raise
        self._keeps = self._newest.live.is_sole_writer = True
        self._maintainer = threading.Thread(target=self._maintain, name="hybridindex-maintenance", daemon=True)
        self._maintainer.start()

    @property
    def keeps(self) -> bool:
        """Whether it has the claim until it is closed."""
        return self._keeps

    def close(self) -> None:
        """Ends maintenance, gives up the claim and closes all generations. Twice is harmless."""
        self._closed.set()
        self._looks.set()
        if self._maintainer is not None and self._maintainer is not threading.current_thread():
            self._maintainer.join()
        if self._keeps:
            self._keeps = False
            for index in [*self._older, self._newest]:
                index.live.is_sole_writer = False
            self._claim.give_up()
        for index in [*self._older, self._newest]:
            index.close()

    # Changes

    def add(self, vectors: Any, ids: Any = None, attributes: Any = None) -> I64:
        """See :func:`hybridindex.index.changes.write.add`; BusyWritingError: too much came lately."""
        self._refuse_while_full()
        return self._on_newest(lambda index: add(index, vectors, ids, attributes, sync=self._sync))

    def upsert(self, vectors: Any, ids: Any, attributes: Any = None) -> int:
        """See :func:`hybridindex.index.changes.write.upsert`; BusyWritingError: too much came lately."""
        self._refuse_while_full()
        return self._on_newest(lambda index: upsert(index, vectors, ids, attributes, sync=self._sync))

    def delete(self, ids: Any = None, where: str | None = None) -> int:
        """See :func:`hybridindex.index.changes.write.delete`."""
        return self._on_newest(lambda index: delete(index, ids, where, sync=self._sync))

    def compact(self, progress: Progress | None = None, *, share: float = 1.0) -> Compaction | None:
        """See :func:`hybridindex.index.changes.compact.compact`; one at a time. BuildError: not now."""
        with self._compacting, self._claim.held(WAIT_S), short_switch_interval():
            if not self.compacts(self.newest):
                raise BuildError(f"generation {self.newest.generation} does not serve yet; {self.cure}")
            options: dict[str, Any] = {"progress": progress, "share": share, "apart": share < 1}
            done = self._on_newest(lambda index: compact(index, stopping=self._closed.is_set, **options))
            if done is not None:
                with self._opening:
                    self._adopt(done.index)
                self.compactions += 1
                if self._on_compaction is not None:
                    self._on_compaction(done.index)
            return done

    def _on_newest(self, change: Callable[[IVFIndex], _T]) -> _T:
        for attempt in range(_ATTEMPTS):
            try:
                done = change(self.newest)
                if self._newest.live.added.is_short:
                    self._looks.set()
                return done
            except SupersededError:
                if attempt + 1 == _ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _refuse_while_full(self) -> None:
        index = self._newest
        most = _MOST_TIMES * index.count * index.code_size
        most = max(_MOST_BYTES, most if self.most_bytes is None else min(most, self.most_bytes))
        if index.live.added.nbytes > most:
            wait_s = 5.0
            raise BusyWritingError(
                f"{index.live.added.nbytes} bytes of rows were added to {index.path} since its lists were written, "
                f"more than the {most:.0f} allowed before the next compaction; "
                + (f"try again in {wait_s:.0f} s" if self._keeps and self.compacts(index) else self.cure)
                + (f"; the last attempt failed: {self.problem}" if self.problem else ""),
                retry_after_s=wait_s,
            )

    def _maintain(self) -> None:
        again_s = look_s = 0.0
        while not self._closed.is_set():
            self._looks.wait(_LOOK_S)
            self._looks.clear()
            try:
                self._newest.live.added.touch_ahead()
                if self._closed.is_set() or time.monotonic() < max(again_s, look_s):
                    continue
                look_s = time.monotonic() + _LOOK_S
                if self.compacts(self.newest) and needs_compaction(self.newest):
                    self.compact(share=_MAINTENANCE_SHARE)
                else:
                    self.newest.live.rewrite()
                self.problem = ""
            except HybridIndexError as error:
                if self._closed.is_set():
                    return
                self.problem = str(error)
                _log.error(
                    "maintenance of %s failed; it is tried again in %d s: %s", self._newest.path, _RETRY_S, error
                )
                again_s = time.monotonic() + _RETRY_S
            except Exception:  # noqa: BLE001 - the thread goes on
                _log.exception("maintenance of %s failed; it is tried again in %d s", self._newest.path, _RETRY_S)
                again_s = time.monotonic() + _RETRY_S
