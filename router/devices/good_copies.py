"""Copies of lists: where else their bytes are when those that are served turn out to be damaged, and whether the copies
themselves are what was written.

Devices and page-locked memory hold rows; ids are on the host alone. Other generations may hold the same bytes. Where
searches scan RaBitQ codes, page-locked memory holds those, which say nothing of the bytes of rows, and devices hold
rows only where they lie beside the codes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from hybridindex.errors import RouterClosedError
from hybridindex.index.other_generations import OtherGenerations
from hybridindex.router.batch.parts import RouterParts
from hybridindex.tiers.contract.bounded_join import LOOK_S
from hybridindex.tiers.paged.pinned import PinnedMemory
from hybridindex.types import U8

__all__ = ["GoodCopies"]

_CODES = 0


class GoodCopies:
    """Of one router's lists. One thread asks; :meth:`stop` from any."""

    def __init__(self, parts: RouterParts, pinned: PinnedMemory | None, stuck_s: float) -> None:
        """
        Args:
            pinned: copies in page-locked memory.
            stuck_s: how long a device is waited for.
        """
        self._integrity = parts.index.integrity
        self._residency = parts.residency
        self._index = parts.index.rows
        #: The piece that is the rows of list 0.
        self._first_rows = parts.index.n_pieces - parts.index.nlist
        #: Else devices hold codes alone, which say nothing of the bytes of rows.
        self._rows_there = parts.index.rows is parts.index or self._first_rows > 0
        self._paged = {tier.ordinal: tier for tier in parts.paged if self._rows_there}
        self._labels = [tier.label for tier in parts.tiers]
        self._pinned = pinned if parts.index.rows is parts.index else None
        self._others = OtherGenerations(self._integrity)
        self._looks = max(1, round(stuck_s / LOOK_S))
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Nothing waits for a device any more."""
        self._stopped.set()

    def find(self, list_id: int, part: int) -> tuple[str, bytes] | None:
        """The codes (0) or ids (1) of a list as they were written, and where they were found."""
        content = self._integrity.read_file(list_id, part)
        if content is not None:
            return "the disk", content
        if part == _CODES:
            for where, codes in self._codes(list_id):
                if codes is not None and self._integrity.is_good(list_id, _CODES, codes):
                    return where, codes.tobytes()
        return self._others.find(list_id, part)

    def held(self, first: int, last: int) -> list[int]:
        """Lists ``first`` .. ``last - 1`` of which searches or loads read a copy."""
        devices = self._residency.current.list_device[self._first_rows + first : self._first_rows + last]
        held = set((np.flatnonzero(np.isin(devices, list(self._paged))) + first).tolist()) if self._paged else set()
        if self._pinned is not None:
            held |= {list_id for list_id in range(first, last) if self._pinned.find(list_id) is not None}
        return sorted(held)

    def drop_damaged(self, list_id: int, *, suspect: bool = False) -> list[str]:
        """Drops copies of a list that are not what was written; says where they were.

        ``suspect``: the bytes that copies are made from were damaged. A copy that cannot be compared goes, too.
        """
        dropped = []
        codes = self._pinned_codes(list_id)
        if codes is not None and not self._integrity.is_good(list_id, _CODES, codes):
            assert self._pinned is not None
            self._pinned.discard(list_id)
            dropped.append("page-locked memory")
        device = int(self._residency.current.list_device[self._first_rows + list_id])
        if device < 0 or not self._rows_there:
            return dropped
        where, codes = self._device_codes(list_id)
        if suspect if codes is None else not self._integrity.is_good(list_id, _CODES, codes):
            self._residency.publish({}, drops=[self._first_rows + list_id])
            dropped.append(where or f"the memory of {self._labels[device]}")
        return dropped

    def _codes(self, list_id: int) -> Iterator[tuple[str, U8 | None]]:
        """Copies of a list's codes and where they lie; each is read when it is asked for."""
        yield "page-locked memory", self._pinned_codes(list_id)
        yield self._device_codes(list_id)

    def _pinned_codes(self, list_id: int) -> U8 | None:
        content = None if self._pinned is None else self._pinned.read(list_id)
        return None if content is None else self._index.codes_of_pages(list_id, content)

    def _device_codes(self, list_id: int) -> tuple[str, U8 | None]:
        """What a device holds, and which; None where none does, or it does not say."""
        with self._residency.lease() as snapshot:
            piece = self._first_rows + list_id
            device, pages = int(snapshot.list_device[piece]), snapshot.list_pages[piece]
            tier = self._paged.get(device)
            if tier is None or pages is None or tier.failure is not None:
                return "", None
            try:
                reading = tier.read_back(pages)
            except RouterClosedError:
                return "", None
            for _ in range(self._looks):
                with suppress(TimeoutError):
                    reading.exception(LOOK_S)
                if reading.done() or self._stopped.is_set():
                    break
            if not reading.done() or reading.exception() is not None:
                return "", None
            return f"the memory of {tier.label}", self._index.codes_of_pages(list_id, reading.result())
