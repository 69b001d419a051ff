"""The changes of one open generation: its log, what they have come to, and the snapshots that searches take.

First the log, then one reference: a change is on disk before any search sees it, and a search sees all of it or
nothing. Indexes that one process has open of the same generation share this, so each sees what any of them wrote when
the call returns. Of other processes' changes it learns within :data:`LOOK_AGAIN_S`.

A generation that was compacted into another one takes no more changes: who searches it sees those of the other one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakSet, WeakValueDictionary

from hybridindex import filesystem
from hybridindex.errors import (
    BuildError,
    CorruptIndexError,
    FileError,
    HybridIndexError,
    LeftBehindError,
    SupersededError,
    cannot_write,
)
from hybridindex.index.live.added import AddedRows
from hybridindex.index.live.convert import OpenIndex, converted
from hybridindex.index.live.state import LiveRows, LiveState
from hybridindex.index.live.waiting import Coming, Resolve, Ticket, WaitingCalls
from hybridindex.index.log.change import Change, merged, no_ids, no_rows
from hybridindex.index.log.change_log import LogPart, LogPlace, LogState, has_own, log_file
from hybridindex.index.storage.generation import current_name, log_lock, log_lock_file, other_generations
from hybridindex.index.storage.manifest import MANIFEST_FILE, Manifest, parse_manifest
from hybridindex.processes import short_switch_interval

__all__ = ["LOOK_AGAIN_S", "LiveStore", "open_live"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Between looks at the log for what other processes changed.
LOOK_AGAIN_S = 1.0
#: A log is rewritten when it has so many bytes, and so many times those of what it comes to.
_REWRITE_BYTES, _REWRITE_TIMES = 64 << 20, 2
#: About, beside what it says.
_RECORD_BYTES = 128
_NO_LOG: LogState = (0, 0, 0)


class _ReplacedError(Exception):
    """Another generation is current; never leaves this module."""


class LiveStore:
    """From any thread. Made by :func:`open_live`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Reads the log.

        Args:
            folder: of the generation.

        Raises:
            CorruptIndexError, UnsupportedIndexError, UnreadableIndexError: as :meth:`LogFile.read`.
        """
        # Wherever the process goes.
        self.folder = folder.absolute()
        self._shape = (manifest.nlist, manifest.code_size)
        self._keep_max = manifest.metric == "ip"
        self._lineage = manifest.lineage
        #: Number of the last change that the rows of the generation know of.
        self._first = int(manifest.notes.get("changes", 0))
        self.file = log_file(self.folder, manifest)
        #: Whether nobody but this process may write: who keeps the writer's claim says so.
        self.is_sole_writer = False
        self.is_watched = False  # a thread looks for what others change, so that no search waits for a file
        self._renew_locks()
        self._rows = LiveRows(number=self._first, deleted=None, added=None)
        self._look_again_s = 0.0
        self._problem = ""
        #: Of the file when it was read; None: it has to be read.
        self._log_state: LogState | None = None
        #: The state has changes that may not be on disk.
        self._is_ahead = False
        #: Number of the last change that no power cut takes away, as far as this one knows; and whether a write failed,
        #: after which what was read may be on no disk, whatever a later sync says.
        self._on_disk = -1
        self._is_doubtful = False
        #: How many need the log as it is.
        self._n_keeping = 0
        #: What this one follows; and who follows this one.
        self._successor: LiveStore | None = None
        self._followers: WeakSet[LiveStore] = WeakSet()
        #: What it follows could not tell it all; and whether nobody can any more.
        self._is_behind = False
        self._is_lost = False
        #: Open indexes of the generation.
        self._indexes: WeakSet[OpenIndex] = WeakSet()
        self._place = LogPlace(0, self._first, 0)
        self._state = LiveState(*self._shape, keep_max=self._keep_max)
        with self._writing:
            self._read_all()
        _open.add(self)

    def _renew_locks(self) -> None:
        """In a child process, which has locks as they were, and not the threads that held them."""
        self._writing = threading.Lock()
        self._calls = WaitingCalls()
        self._lock_of_log = log_lock_file(self.folder.parent)
        self.is_sole_writer = False

    def bind(self, index: OpenIndex) -> None:
        """An index of the generation was opened."""
        self._indexes.add(index)

    # For searches

    def current(self) -> LiveRows | None:
        """What has changed until now; None: nothing differs."""
        rows = self.seen()
        return rows if rows is not None and rows.differs else None

    def seen(self) -> LiveRows | None:
        """As :meth:`current`, also where changes have undone each other; None: there was none."""
        now_s, looks = time.monotonic(), not self.is_watched and (self._is_behind or not self.is_sole_writer)
        if looks and now_s >= self._look_again_s:
            self._look_again_s = now_s + LOOK_AGAIN_S
            try:
                self._look(blocking=False)
                self._problem = ""
            except HybridIndexError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _log.error("changes by other processes are not seen: %s", error)
        return self._rows if self._rows.number != self._first else None

    @property
    def lost(self) -> LeftBehindError | None:
        """Why not all changes can be known here any more; None: they can."""
        follows: LiveStore | None = self
        while follows is not None and not follows._is_lost:
            follows = follows._successor
        return None if follows is None else LeftBehindError(self.folder)

    def read_now(self) -> LiveRows | None:
        """What has changed until now, by other processes too.

        Raises:
            CorruptIndexError, UnreadableIndexError: the log is gone, damaged, or cannot be read.
        """
        self._look(asks=True)
        return self.current()

    @property
    def number(self) -> int:
        """Of the last change that searches see."""
        return self._rows.number

    @property
    def log_bytes(self) -> int:
        """Size of the log."""
        return self._place.end

    @property
    def added(self) -> AddedRows:
        """The rows that came, as those see them who look after their memory."""
        return self._state.added

    # For writers

    def coming(self) -> Coming:
        """To be entered before a change is prepared, and given to :meth:`commit`."""
        return self._calls.coming()

    def commit(
        self,
        resolve: Resolve[_T],
        *,
        ids: Collection[int] | None = None,
        sync: bool = True,
        coming: Coming | None = None,
        is_small: bool = False,
    ) -> _T:
        """Makes a change: on disk and seen by every search that begins when it returns. Changes of several threads
        share one write. For who holds the writer's claim.

        Args:
            ids: those that it may speak of, but for new ones; None: any. Calls that speak of different ones share a
                record.
            sync: False: it is in the file when this returns, and may not survive a power cut.
            coming: of this change; from now on nobody waits for it.
            is_small: of few rows.

        Raises:
            SupersededError: the generation was compacted. BuildError: it was replaced. FileError: nothing has changed.
            Whatever ``resolve`` raises.
        """
        ticket = Ticket(resolve, ids, sync=sync)
        try:
            if self._calls.put(ticket, coming):
                # What is small takes the GIL for less than threads do that switch.
                with self._writing, nullcontext() if is_small else short_switch_interval():
                    self._commit_waiting()
        finally:
            self._calls.leave(ticket)
        if isinstance(ticket.error, _ReplacedError):
            # By a compaction of this process, too, which has not told yet.
            with suppress(BuildError):  # as it says itself
                self._look(asks=True)
            raise (SupersededError if self.is_superseded else BuildError)(
                f"{self.folder.name} of {self.folder.parent} was replaced; open the index again, and repeat it"
            )
        if ticket.error is not None:
            raise ticket.error
        return cast("_T", ticket.result)

    def rewrite(self, *, least_bytes: int = _REWRITE_BYTES) -> bool:
        """Writes the log anew where it says in many words what few rows have come to; whether it did. For who holds the
        writer's claim."""
        with self._writing:
            is_current = current_name(self.folder.parent) == self.folder.name  # else another process compacted it
            if self._successor is not None or self._n_keeping or not is_current:
                return False
            self._read_on()
            added, code_size = self._state.added, self._shape[1]
            # Without attributes, and without copying what there is: writers wait meanwhile.
            least = 8 * len(self._state.gone) + len(added) * (16 + code_size)
            if self._place.end < max(least_bytes, _REWRITE_TIMES * least):
                return False
            state = self._changes()
            nbytes = sum(each.nbytes + _RECORD_BYTES for each in state)
            if self._place.end < max(least_bytes, _REWRITE_TIMES * nbytes):
                return False
            self._rewrite(state)
            return True

    @contextmanager
    def keeping_log(self) -> Iterator[None]:
        """Within the block this process does not write the log anew: somebody will ask which changes came after one."""
        with self._writing:
            self._n_keeping += 1
        try:
            yield
        finally:
            with self._writing:
                self._n_keeping -= 1

    def state(self) -> tuple[list[Change], int]:
        """In few changes, what has changed until now; and the number of the last one."""
        self._look()
        with self._writing:
            return self._changes(), self._place.number

    def follow(self, successor: LiveStore, *, is_own: bool = False) -> None:
        """This generation was compacted into another one; ``is_own``: just now, and by this process."""
        self._catch_up(successor)
        with successor._writing:
            newer = successor._successor
            if newer is None:
                with self._writing:
                    if self._successor is not None:
                        return
                    if filesystem.exists(self.file.path):
                        self._read_on()
                    is_apart = not is_own and has_own(self.file, successor.file, successor._first)
                    if self._place.number < successor._first or is_apart:
                        self._is_lost = True
                        raise LeftBehindError(self.folder)
                successor._lead(self)
                # Who followed this one follows the other from now on: nobody may search this one any more.
                for follower in list(self._followers):
                    successor._try_to_tell(follower, ())
        if newer is not None:
            self.follow(newer)

    @property
    def is_superseded(self) -> bool:
        """Whether another generation takes the changes."""
        return self._successor is not None or self._is_lost

    def _commit_waiting(self) -> None:
        tickets = list[Ticket]()
        try:
            self._calls.gather(tickets)
            self._commit(tickets, sync=any(ticket.sync for ticket in tickets))
        except BaseException as error:
            if self._is_ahead:
                # What was resolved and is not on disk is forgotten with the rest, and what is on disk is read again.
                self._log_state = None
            for ticket in tickets:
                ticket.settle(error=error)
            if not isinstance(error, Exception):
                raise

    def _commit(self, tickets: list[Ticket], *, sync: bool) -> None:
        changes = list[Change]()
        made = list[tuple[Ticket, Any]]()
        with log_lock(self.folder.parent, self._lock_of_log):
            if current_name(self.folder.parent) != self.folder.name or self._successor is not None:
                raise _ReplacedError
            self._read_on()
            group, spoken_of = list[Change](), set[int]()
            for ticket in tickets:
                if ticket.ids is None or not spoken_of.isdisjoint(ticket.ids):
                    changes += self._apply(group)
                    group, spoken_of = [], set()
                try:
                    change, result = ticket.resolve(self._state)
                except Exception as error:  # noqa: BLE001 - it is its caller's
                    ticket.settle(error=error)
                    continue
                if change is not None:
                    group.append(change)
                    # Ids that it was given now, too: the next ones do not see it yet.
                    spoken_of.update(ticket.ids or [*change.ids.tolist(), *change.gone.tolist()])
                made.append((ticket, result))
            changes += self._apply(group)
            if changes:
                try:
                    if sync:
                        self._secure()
                    doubted, self._is_doubtful = self._is_doubtful, True
                    self._place = self.file.append(changes, self._place, sync=sync, on_disk=max(0, self._on_disk))
                    self._is_doubtful = doubted
                except FileError as error:
                    raise cannot_write(error, self.folder.parent, "nothing was changed") from error
                if sync:
                    self._on_disk = self._place.number
        if changes:
            self._publish(changes)
            # Last: whatever interrupts this has the log read again.
            self._note_state()
        for ticket, result in made:
            ticket.settle(result)

    def _apply(self, group: list[Change]) -> list[Change]:
        """Applies changes that speak of different ids; they are one where that can be, and returned."""
        if len(group) > 1 and not any(change.attributes for change in group):
            group = [merged(group)]
        for change in group:
            self._is_ahead = True
            self._state.apply(change)
        return group

    def _secure(self) -> None:
        """What is behind the next change must not go before it: its writer may have died before it was synced, or
        before the names of log and generation were."""
        if self._is_doubtful:
            self.file.renew(self._place)
            self._is_doubtful, self._on_disk = False, self._place.number
        if self._on_disk < self._place.number:
            self.file.sync()
            filesystem.sync_folder(self.folder.parent)
            self._on_disk = self._place.number

    def _note_state(self) -> None:
        """The file is as this one wrote it; where it cannot be looked at now, it is read again."""
        self._log_state = None
        with suppress(HybridIndexError):
            self._log_state = self.file.state()
        self._is_ahead = False

    def _rewrite(self, state: list[Change]) -> None:
        number = self._place.number
        with log_lock(self.folder.parent):
            self._log_state = None
            self._place = self.file.rewrite(state, number)
            self._is_doubtful, self._on_disk = False, number
        self._start_with(state, largest_id=self._state.added.largest_id)
        self._note_state()

    def _changes(self) -> list[Change]:
        """That come to what there is now."""
        gone, added = self._state.gone, self._state.added.snapshot()
        state = []
        if len(gone):
            state.append(Change(gone=gone, ids=no_ids(), lists=no_ids(), codes=no_rows(self._shape[1])))
        if added is not None:
            attributes = added.attributes.of_rows(added.numbers)
            rows = (added.ids, added.lists, added.codes())
            state.append(Change(gone=no_ids(), ids=rows[0], lists=rows[1], codes=rows[2], attributes=attributes))
        return state

    def _look(self, *, blocking: bool = True, asks: bool = False) -> None:
        """For changes of other processes, here or in the generation that this one was compacted into. Without the lock:
        that of a newer generation is taken before that of an older one.

        ``blocking``: False: nothing is looked for while somebody writes. ``asks``: which generation is the current one,
        even if nobody else may write.
        """
        # First: who is followed now was current before.
        followed, was_lost = self._successor, self._is_lost
        name = None if self.is_sole_writer and not asks else current_name(self.folder.parent)
        if followed is None and name is not None and name != self.folder.name:
            self._find_successor(self.folder.parent / name)
        elif name == self.folder.name and (followed is not None or was_lost):
            self._return()
        if (successor := self._successor) is not None:
            successor._look(blocking=blocking)
        elif self._writing.acquire(blocking=blocking):
            try:
                if self._successor is None:
                    self._read_on()
            finally:
                self._writing.release()
        successor = self._successor
        if self._is_behind and successor is not None and successor._writing.acquire(blocking=blocking):
            try:
                successor._lead(self)
            finally:
                successor._writing.release()

    def _return(self) -> None:
        """A rollback made this generation the current one again: its own log says what has changed."""
        with self._writing:
            successor, self._successor, self._is_behind, self._is_lost = self._successor, None, False, False
            if successor is not None:
                successor._followers.discard(self)
            self._place = LogPlace(0, self._first, 0)
            self._read_all()

    def _find_successor(self, folder: Path) -> None:
        """What is current now, if this generation was compacted into it."""
        try:
            manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), str(folder))
        except FileError:  # replaced meanwhile
            return
        if manifest.lineage == self._lineage and manifest.generation > int(self.folder.name.removeprefix("gen-")):
            self.follow(open_live(folder, manifest))

    # With the lock held

    def _read_on(self) -> None:
        """Reads what others wrote; all of it again where the file is another one."""
        state = self.file.state()
        if state == self._log_state:
            return
        known = self._log_state
        if state == _NO_LOG and self._place.end:
            raise CorruptIndexError(
                f"{self.file.path}, which says what was changed, is gone; was its generation removed? open the index "
                "again"
            )
        if known is not None and known != _NO_LOG and state[0] == known[0] and state[1] > self._place.end:
            found = self.file.read_on(self._place)
            # What is no change was torn, or is being written; or another file took its place and its number.
            if not found.torn:
                for change in found.changes:
                    self._state.apply(change)
                self._place = found.place
                self._publish(found.changes)
                self._log_state = state
                return
        self._read_all()

    def _read_all(self) -> None:
        state = self.file.state()
        found = self.file.read()
        if found.torn:
            _log.warning(
                "%s: the last %d bytes are ignored, because they are not a whole change: its writer was interrupted "
                "before it acknowledged the change, or they are damaged",
                self.file.path,
                found.torn,
            )
        self._place = found.place
        self._start_with(found.changes)
        self._log_state, self._is_ahead = state, False
        self._on_disk = -1  # the file may be another one
        for follower in list(self._followers):
            self._try_to_tell(follower, found)

    def _start_with(self, changes: Sequence[Change], *, largest_id: int = -1) -> None:
        fresh = LiveState(*self._shape, keep_max=self._keep_max)
        for change in changes:
            fresh.apply(change)
        fresh.added.largest_id = max(fresh.added.largest_id, largest_id)  # of rows that are gone, too
        self._state = fresh
        self._publish()

    def _lead(self, follower: LiveStore) -> None:
        """Tells a follower what it does not know, and what comes from now on."""
        if self._successor is not None:  # that one tells it
            return
        self._read_on()
        while (found := self.file.read()).place.number != self._place.number:
            self._read_on()
        follower._hear(found, self._place.number, first=self._first, leader=self)
        self._followers.add(follower)

    def _try_to_tell(self, follower: LiveStore, what: LogPart | Sequence[Change]) -> None:
        """The whole log, or changes that came now. Where it fails, the next look tries again."""
        try:
            follower._hear(what, self._place.number, first=self._first, leader=self)
        except HybridIndexError as error:
            follower._look_again_s = 0.0
            _log.error("changes are not seen: %s", error)
        self._followers.add(follower)

    def _until(self, number: int) -> list[Change]:
        """What the log says of the changes until then."""
        found = self.file.read()
        if (later := found.after(number)) is None:
            raise LeftBehindError(self.folder)
        return found.changes[: len(found.changes) - len(later)]

    # Without the lock

    def _hear(
        self, what: LogPart | Sequence[Change], number: int, *, first: int, leader: LiveStore | None = None
    ) -> None:
        """What a later generation, which has the changes until ``first`` in its lists, says of those until ``number``:
        its whole log, or the last ones."""
        index = next((each for each in self._indexes if not each.is_closed), None)
        with self._writing:
            if leader is not None:
                self._successor = leader
            self._is_behind = True
            if index is None:  # nobody searches it
                return
            state, known = self._state, self._place.number
            if isinstance(what, LogPart):
                changes = what.after(known)
                if changes is None:  # the log was written anew: from where that generation begins
                    changes, state = what.changes, LiveState(*self._shape, keep_max=self._keep_max)
                    for change in self._until(first):
                        state.apply(change)
            elif known + len(what) == number:
                changes = list(what)
            else:
                return
            for change in [converted(change, index) for change in changes]:
                state.apply(change)
            self._state, self._is_behind = state, False
            self._place = self._place._replace(number=number)
            self._publish()

    def _catch_up(self, successor: LiveStore) -> None:
        """Reads what generations between this one and ``successor`` have logged, where they are still there."""
        if self._successor is not None or self._place.number >= successor._first:
            return
        with self._writing:
            if self._successor is None and filesystem.exists(self.file.path):
                self._read_on()
        between = other_generations(self.folder.parent, {self.folder.name, successor.folder.name})
        for folder in between:
            if self.folder.name < folder.name < successor.folder.name and self._place.number < successor._first:
                with suppress(FileError):  # it is being removed
                    manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), str(folder))
                    first = int(manifest.notes.get("changes", 0))
                    if manifest.lineage == self._lineage and first <= self._place.number:
                        found = log_file(folder, manifest).read()
                        self._hear(found, found.place.number, first=first)

    def _publish(self, changes: Sequence[Change] = ()) -> None:
        # One reference: searches have the old rows or the new ones.
        self._rows = self._state.rows_at(self._place.number)
        for follower in list(self._followers) if changes else ():
            self._try_to_tell(follower, changes)


_open: WeakSet[LiveStore] = WeakSet()
#: By device and number of the generation's folder.
_shared: WeakValueDictionary[tuple[int, int], LiveStore] = WeakValueDictionary()
_sharing = threading.Lock()


def open_live(folder: Path, manifest: Manifest) -> LiveStore:
    """The store of a generation, the same for all that have it open in this process.

    Raises:
        CorruptIndexError, UnsupportedIndexError, UnreadableIndexError: as :meth:`LogFile.read`.
    """
    found = filesystem.stat(folder)
    key = (found.st_dev, found.st_ino)
    with _sharing:
        store = _shared.get(key)
        if store is None or store.folder != folder.absolute():
            store = _shared[key] = LiveStore(folder, manifest)
            return store
    store.read_now()
    return store


def _in_child() -> None:
    global _sharing
    _sharing = threading.Lock()
    for each in _open:
        # It may be held by a thread of the parent, whose frames keep it.
        each._lock_of_log.let_go()
        each._renew_locks()


os.register_at_fork(after_in_child=_in_child)
