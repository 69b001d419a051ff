"""One load request, from the first page taken to its report: a state machine that sends one buffer per step.

It decides what goes into which buffer and publishes lists whose bytes have landed. It starts no thread and reads no
clock. Where an index is scanned by its codes, what it moves of a list is a *piece*: its codes or its rows
(:attr:`hybridindex.index.ivf.IVFIndex.n_pieces`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.index.ivf import IVFIndex
from hybridindex.tiers.contract.futures import fail, settle
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.contract.tier import LoadReport
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier, Ticket, Write
from hybridindex.tiers.paged.pinned import PinnedList, PinnedMemory
from hybridindex.types import I32, I64, U8

__all__ = ["ListLoad", "LoadPath", "ReadBack"]

_NOTHING = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPath:
    """How lists get to one device; the same for all its loads."""

    index: IVFIndex
    arena: PageArena
    copier: Copier
    pinned: PinnedMemory | None
    #: The device's number in its router.
    ordinal: int
    #: Whether the device takes lists; asked before each send.
    usable: Callable[[], bool]


@dataclass(slots=True)
class _Sending:
    """A list of which not all pages are sent."""

    list_id: int
    pages: I32
    source: U8 | PinnedList
    n_sent: int = 0


@dataclass(slots=True)
class _Sent:
    """One send, and the lists that are complete when it has landed."""

    ticket: Ticket
    complete: dict[int, tuple[int, I32]]


class ListLoad:
    """Owner of the pages that it took and has not published. One thread steps (the mover)."""

    def __init__(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        path: LoadPath,
        *,
        cancelled: Callable[[], bool],
        depth: int,
    ) -> None:
        """Takes no page yet.

        Args:
            lists: list ids in the order in which they are wanted; one that is named twice is present the second time.
            store: where they are published.
            cancelled: whether the lists are wanted no more; asked before each send.
            depth: most buffers in progress; 0: each is waited for, so that a step's time is its copy's.
        """
        self._store = store
        self._index = path.index
        self._arena = path.arena
        self._copier = path.copier
        self._pinned = path.pinned
        self._ordinal = path.ordinal
        self._usable = path.usable
        self._cancelled = cancelled
        self._depth = depth
        #: Lists in order, the pages of each, and how many of them were looked at.
        self._lists = np.fromiter(lists, dtype=np.int64)
        self._counts = path.arena.geometry.pages_of_bytes(path.index.piece_bytes[self._lists]).astype(np.int64)
        self._looked_at = 0
        #: Pages that it is about to take, by place in ``_lists`` and in all; the sum is read by any thread.
        self._claims = np.zeros_like(self._counts)
        once = np.unique(self._lists, return_index=True)[1]
        self._claims[once] = np.where(store.current.list_device[self._lists[once]] < 0, self._counts[once], 0)
        self.unclaimed_pages = int(self._claims.sum())
        #: Lists that have pages, of which none is sent.
        self._ready: deque[_Sending] = deque()
        self._sending: _Sending | None = None
        #: Lists that the buffer being filled completes.
        self._complete: dict[int, tuple[int, I32]] = {}
        self._on_their_way: deque[_Sent] = deque()
        #: On the device, not yet published.
        self._landed: dict[int, tuple[int, I32]] = {}
        #: Pages of a list that was cancelled half way.
        self._dropped: list[I32] = []
        #: Lists that were taken, and the damage that was known then (:attr:`Integrity.seen`).
        self._seen: dict[int, int] = {}
        self._loaded: list[int] = []
        self._skipped: list[int] = []
        self._present: list[int] = []
        self._too_large: list[int] = []
        self._nbytes = 0
        self.future: Future[LoadReport] = Future()
        # A copy in progress cannot be stopped: cancelling the future only ends the wait.
        self.future.set_running_or_notify_cancel()

    def step(self) -> bool:
        """Sends the next buffer and publishes what has landed; False when all is done and reported.

        Raises:
            whatever stopped a copy; :meth:`abort` must follow.
        """
        sent = self._send()
        self._land(self._depth if sent else 0)
        if sent:
            return True
        report = LoadReport(
            loaded=tuple(self._loaded),
            skipped=tuple(self._skipped),
            present=tuple(self._present),
            nbytes=self._nbytes,
            too_large=tuple(self._too_large),
        )
        settle(self.future, report)
        return False

    def abort(self, error: BaseException) -> None:
        """Gives back every page that is not published, at once or when no copy can write it any more; reports."""
        self._copier.give_back(self.held_pages(), [sent.ticket for sent in self._on_their_way])
        self._sending, self._complete, self._landed, self._dropped = None, {}, {}, []
        self._on_their_way.clear()
        self._ready.clear()
        self.unclaimed_pages = 0
        fail(self.future, error)

    def held_pages(self) -> list[I32]:
        """Pages that this load took and neither published nor gave back."""
        placed = [self._complete, self._landed, *(sent.complete for sent in self._on_their_way)]
        held = [pages for lists in placed for _, pages in lists.values()] + self._dropped
        held += [ready.pages for ready in self._ready]
        return held if self._sending is None else [*held, self._sending.pages]

    # Sending

    def _send(self) -> bool:
        writes: list[Write] = []
        staged = room = self._copier.send_pages
        if self._depth:  # a paced move rests after each send: short ones
            room = self._copier.most_pages
        self._stop_half_way()
        while room:
            sending = self._sending or self._take_next(room)
            if sending is None:
                break
            left = len(sending.pages) - sending.n_sent
            taken = left if left < room else room
            if not isinstance(sending.source, PinnedList):
                taken = min(taken, staged)
                staged -= taken
            if not taken:  # the buffer is full: first in the next one
                break
            writes += self._writes(sending, taken)
            room -= taken
            sending.n_sent += taken
            if taken == left:
                self._sending = None
                self._complete[sending.list_id] = (self._ordinal, sending.pages)
        if not writes:
            return False
        ticket = self._copier.send(writes)
        self._on_their_way.append(_Sent(ticket, self._complete))
        self._complete = {}
        if ticket.error is not None:
            raise ticket.error
        return True

    def _stop_half_way(self) -> None:
        if (self._sending is not None or self._ready) and (not self._usable() or self._cancelled()):
            stopped = [*self._ready] if self._sending is None else [self._sending, *self._ready]
            for sending in stopped:
                self._skipped.append(sending.list_id)
                self._dropped.append(sending.pages)
                del self._seen[sending.list_id]
            self._sending = None
            self._ready.clear()

    def _take_next(self, room: int) -> _Sending | None:
        """The next list that has pages; where none has, the next ones get them, as many as fill ``room`` pages."""
        while not self._ready and self._looked_at < len(self._lists):
            first = self._looked_at
            after = int(np.searchsorted(np.cumsum(self._counts[first : first + room]), room)) + 1
            self._looked_at = min(first + after, len(self._lists))
            self._take(slice(first, self._looked_at))
        if not self._ready:
            return None
        # Held by the load from here on: reading its codes may fail.
        sending = self._sending = self._ready.popleft()
        pinned = None if self._pinned is None else self._pinned.find(sending.list_id)
        sending.source = pinned or self._index.piece_codes(sending.list_id).reshape(-1)
        return sending

    def _take(self, places: slice) -> None:
        """Gives lists their pages; those that get none are noted."""
        lists, counts = self._lists[places], self._counts[places]
        self.unclaimed_pages -= int(self._claims[places].sum())
        # Before it is asked whether a list is in quarantine: what turns out to be damaged later is then seen.
        seen = self._index.integrity.seen
        stopped = not self._usable() or self._cancelled()
        present = self._store.current.list_device[lists] >= 0
        refused, most = self._damaged(lists) | stopped, self._arena.pages.n_pages
        chosen: list[int] = []
        every = zip(lists.tolist(), counts.tolist(), present.tolist(), refused.tolist(), strict=True)
        for at, (list_id, count, is_present, is_refused) in enumerate(every):
            if count == 0:  # nothing to move, nothing to scan
                continue
            if is_present or list_id in self._seen:
                self._present.append(list_id)
            elif is_refused:
                self._skipped.append(list_id)
            elif count > most:
                self._too_large.append(list_id)
            else:
                chosen.append(at)
                self._seen[list_id] = seen
        if not chosen:
            return
        counts = counts[chosen]
        pages, found = self._arena.pages.allocate_each(counts)
        end = 0
        for list_id, count, got in zip(lists[chosen].tolist(), counts.tolist(), found, strict=True):
            if got:
                self._ready.append(_Sending(list_id, pages[end : end + count], _NOTHING))
                end += count
            else:
                self._skipped.append(list_id)
                del self._seen[list_id]

    def _writes(self, sending: _Sending, n_pages: int) -> list[Write]:
        """The next ``n_pages`` of a list: one write, or one for each run of pinned pages."""
        first, source, pages = sending.n_sent, sending.source, sending.pages
        if n_pages < len(pages):
            pages = pages[first : first + n_pages]
        if not isinstance(source, PinnedList):
            page_bytes = self._arena.geometry.page_bytes
            return [Write(pages, source[first * page_bytes : (first + n_pages) * page_bytes])]
        parts = source.cut(first, n_pages)
        if len(parts) == 1:
            return [Write(pages, parts[0][1])]
        writes = []
        for count, part in parts:
            writes.append(Write(pages[:count], part))
            pages = pages[count:]
        return writes

    # Landing

    def _land(self, limit: int) -> None:
        """Publishes what has landed, after waiting until at most ``limit`` buffers are in progress."""
        while self._on_their_way and (len(self._on_their_way) > limit or self._on_their_way[0].ticket.done):
            self._copier.finish(self._on_their_way[0].ticket)
            self._landed.update(self._on_their_way.popleft().complete)
        if not self._on_their_way:
            for pages in self._dropped:
                self._arena.pages.free(pages)
            self._dropped = []
        # From here on the pages are the snapshot's, or free.
        landed, self._landed = self._landed, {}
        if not self._usable():
            for list_id, (_, pages) in landed.items():
                self._arena.pages.free(pages)
                self._skipped.append(list_id)
        elif landed:
            self._publish(landed)

    def _damaged(self, pieces: I64) -> npt.NDArray[np.bool_]:
        index = self._index
        if index.integrity.quarantined is None:
            return np.zeros(len(pieces), dtype=np.bool_)
        quarantined = index.integrity.pieces_in_quarantine(index.n_pieces, of_codes=index.rows is not index)
        return np.zeros(len(pieces), dtype=np.bool_) if quarantined is None else quarantined[pieces]

    def _publish(self, landed: dict[int, tuple[int, I32]]) -> None:
        # What was read may be what was damaged.
        marks = self._index.integrity.marks[0]
        for list_id in [list_id for list_id in landed if self._seen[list_id] != marks]:
            self._arena.pages.free(landed.pop(list_id)[1])
            self._skipped.append(list_id)
        snapshot = self._store.publish(landed)
        lists = np.fromiter(landed, dtype=np.int64)
        first = np.array([pages[0] for _, pages in landed.values()], dtype=np.int32)
        taken = snapshot.begin_at(lists, self._ordinal, first)
        # Another load may have brought a list first; the store has given these pages back then.
        self._loaded += lists[taken].tolist()
        self._present += lists[~taken].tolist()
        self._nbytes += int(snapshot.page_counts[lists[taken]].sum()) * self._arena.geometry.page_bytes


class ReadBack:
    """One move: reads pages of the device back, to be compared. The pages stay the caller's."""

    def __init__(self, pages: I32, copier: Copier) -> None:
        self._pages = pages
        self._copier = copier
        self.future: Future[U8] = Future()
        self.future.set_running_or_notify_cancel()

    def step(self) -> bool:
        try:
            settle(self.future, self._copier.read_back(self._pages))
        except MemoryError as error:  # the host's: the device is well
            fail(self.future, error)
        return False

    def abort(self, error: BaseException) -> None:
        fail(self.future, error)
