"""One move: brings added rows to the device that holds the lists that they came to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from hybridindex.index.live.added import AddedLists
from hybridindex.tiers.contract.futures import fail, settle
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.paged.added.added_pages import AddedPages
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.copier import Copier
from hybridindex.types import I32, U8

__all__ = ["ADDED_PAGES", "AddedLoad"]

#: That a device may have for them at least, however small the index is.
ADDED_PAGES = 256
#: Of the pages, those that added rows may take: lists come first.
_MOST_PAGES = 1 / 4


class AddedLoad:
    """The mover steps. Its future says how many rows were copied."""

    def __init__(
        self,
        added: AddedLists,
        residency: Residency,
        pages: AddedPages,
        arena: PageArena,
        copier: Copier,
        ordinal: int,
        *,
        usable: Callable[[], bool],
        make_room: Callable[[int], None],
    ) -> None:
        """
        Args:
            residency: of the lists.
            pages: where it is published.
            usable: whether the device takes rows; asked before each step.
            make_room: tries to have so many pages more, before some are taken.
        """
        self._added, self._pages, self._arena, self._copier = added, pages, arena, copier
        self._ordinal, self._usable, self._make_room, self._residency = ordinal, usable, make_room, residency
        self._waiting: list[int] | None = None
        self._n_rows = 0
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()

    def step(self) -> bool:
        """Copies as many rows as one send takes; False when all is done."""
        if self._pages.away or not self._usable():
            settle(self.future, self._n_rows)
            return False
        if self._waiting is None:
            self._waiting = self._plan()
        # Another device may drop a list while rows are put behind those that are here: its pages stay until then.
        lease = self._pages.lease()
        try:
            self._send(self._waiting)
        finally:
            lease.release()
        if self._waiting:
            return True
        settle(self.future, self._n_rows)
        return False

    def _send(self, waiting: list[int]) -> None:
        fresh: dict[int, I32] = {}
        grown: dict[int, I32] = {}
        places: list[tuple[int, U8]] = []
        room = self._copier.send_pages * self._arena.geometry.page_bytes
        try:
            while waiting and room > 0:
                room -= self._take(waiting, fresh, grown, places, room)
            if places:
                self._copier.put(places)
        except BaseException:
            # A copy that failed may still write them.
            for pages in (*fresh.values(), *grown.values()):
                self._copier.keep(pages)
            raise
        if places:
            for dropped in self._pages.publish(self._added, self._ordinal, fresh, grown):
                self._arena.pages.free(dropped)

    def abort(self, error: BaseException) -> None:
        fail(self.future, error)

    def _plan(self) -> list[int]:
        """Lists that have more rows than are here; what is here for no use is dropped before."""
        added, (residency, held) = self._added, self._pages.now
        mine = residency.list_device == self._ordinal
        here = self._residency.list_device[: len(added.sizes)] == self._ordinal
        current = held.current(added)
        gone = mine & ~(here & current)
        # Of a list that moved here, they lie on the device that it came from.
        left = here & (residency.list_device >= 0) & ~mine
        self._pages.drop(np.flatnonzero(gone | left))
        there = np.where(mine & ~gone, held.rows, 0)
        lists = np.flatnonzero(here & (added.sizes > there))
        # Taken from the end: those that lack most come first, while there is room.
        order = np.argsort(added.sizes[lists] - there[lists], kind="stable")
        waiting: list[int] = lists[order].tolist()
        return waiting

    def _take(
        self,
        waiting: list[int],
        fresh: dict[int, I32],
        grown: dict[int, I32],
        places: list[tuple[int, U8]],
        room: int,
    ) -> int:
        """Gives the next list its pages and says what goes where; how many bytes. One that is larger than a send, or
        finds no page, is the host's."""
        list_id = waiting.pop()
        geometry, (residency, held) = self._arena.geometry, self._pages.now
        before = residency.list_pages[list_id]
        if before is not None and residency.list_device[list_id] != self._ordinal:
            return 0
        first, size = int(held.rows[list_id]), int(self._added.sizes[list_id])
        old = np.empty(0, dtype=np.int32) if before is None else before
        nbytes = (size - first) * geometry.code_size
        if nbytes > self._copier.send_pages * geometry.page_bytes:
            return 0
        if nbytes > room:  # in the next step
            waiting.append(list_id)
            return room
        n_more = -(-size // geometry.rows_per_page) - len(old)
        if n_more > self._arena.pages.n_free:
            self._make_room(n_more)
        # What others of this send take is not published yet.
        mine = residency.list_device == self._ordinal
        n_taken = int(residency.page_counts[mine].sum()) + sum(map(len, (*fresh.values(), *grown.values())))
        if n_more and n_taken + n_more > _MOST_PAGES * self._arena.pages.n_pages:
            return 0
        more = self._arena.pages.allocate(n_more) if n_more else np.empty(0, dtype=np.int32)
        if more is None:
            return 0
        (fresh if before is None else grown)[list_id] = more
        pages = np.concatenate((old, more))
        codes = self._added.reader.rows(list_id, first, size)
        row = first
        while row < size:
            in_page = row % geometry.rows_per_page
            count = min(size - row, geometry.rows_per_page - in_page)
            at = int(pages[row // geometry.rows_per_page]) * geometry.page_bytes + in_page * geometry.code_size
            places.append((at, codes[row - first : row - first + count].reshape(-1)))
            row += count
        self._n_rows += size - first
        return nbytes
