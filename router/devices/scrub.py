"""The scrub: reads lists again while they are served, a bounded number of bytes a second, and mends what is damaged.

It reads what scans read: the mapped file, whatever lies in memory for it, copies in page-locked memory, and pages of
devices. A list that differs from its digests is quarantined at once. Then its bytes are looked for elsewhere
(:mod:`hybridindex.router.devices.good_copies`). Found, they take the place of the damaged ones in memory, and the list
is scanned again; the file stays damaged. Where the file is whole again, it is mapped again. A share's lists that are
damaged are not mended: who fills it gives them anew. Lists that it does not hold are not read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hybridindex import filesystem
from hybridindex.index.integrity import name_lists
from hybridindex.index.share.ranges import ranges_of
from hybridindex.index.warm import available_bytes
from hybridindex.processes import OfOneProcess
from hybridindex.router.devices.good_copies import GoodCopies

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["Scrub", "ScrubReport"]

_log = logging.getLogger(__name__)

#: Neighbouring lists of about so many bytes are compared at once; and what is read between two rests.
_PIECE_BYTES = 256 << 10
#: Passes begin so far apart at least: a small index need not be read all the time. And when the first one begins.
_LEAST_PASS_S = 10.0
_FIRST_S = 1.0
#: Lists that are served from good bytes in memory at most: each takes several mappings, of which a process has so many.
#: And of the memory that is available, at most this part.
_MOST_MENDED, _MOST_MENDED_PART = 1024, 0.25
#: Lists of a restored file are served again in groups of about so many bytes: searches that are under way are repeated.
_LIFTED_BYTES = 16 << 20
#: Between two looks at the file, which may have been cut or restored.
_LOOK_S = 1.0

#: Rests after so many bytes; raises _StoppedError when no more is to be read.
_Rest = Callable[[int], None]


class _StoppedError(Exception):
    """The scrub ends; never leaves this module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """What was read since the start, and what is damaged now."""

    passes: int = 0
    nbytes: int = 0
    #: How often a list, or a copy of one, was found damaged.
    found: int = 0
    #: Lists that no search may probe.
    quarantined: tuple[int, ...] = ()
    #: Lists that are damaged in the file and served from good bytes in memory.
    mended: tuple[int, ...] = ()
    #: Some bytes of the file differ from its checksum, and it is not known whose.
    unknown: bool = False

    @property
    def ok(self) -> bool:
        return not (self.quarantined or self.mended)

    def describe(self) -> str:
        """In words."""
        if self.unknown:
            return "lists.bin differs from its checksum: all searches fail until it is restored from a copy"
        if self.ok:
            return f"none is damaged; all were compared with their digests {self.passes} time(s) since the start"
        found = []
        if self.quarantined:
            found.append(f"{name_lists(self.quarantined)}: searches that probe them fail")
        if self.mended:
            found.append(f"{name_lists(self.mended)}: served from good bytes in memory")
        cure = "restore the file from a copy, in place, or build the index again"
        return f"damaged in lists.bin: {'; '.join(found)}; {cure}"


class Scrub(OfOneProcess):
    """Owner of its thread. :meth:`check` and :attr:`report` from any thread."""

    def __init__(self, index: IVFIndex, copies: GoodCopies, bytes_per_s: int) -> None:
        """
        Args:
            copies: where good bytes may be.
            bytes_per_s: most bytes that are read; 0: no thread is started, and :meth:`check` alone reads.
        """
        self._integrity = index.integrity
        self._sizes = index.list_sizes
        self._copies = copies
        self._rate = bytes_per_s
        spans = self._integrity.spans
        #: First list of each piece, and the end.
        window = np.unique(spans[:, 0, 0] // _PIECE_BYTES, return_index=True)[1]
        self._pieces = [*window.tolist(), len(spans)]
        #: Digest of each piece when all its lists were whole.
        self._known: dict[int, int] = {}
        #: The file, and what was known of its damage, when it was last looked at for lists that are damaged.
        self._looked_at: object = None
        self._passes = self._nbytes = self._found = 0
        self._unknown = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hybridindex-scrub", daemon=True)
        if bytes_per_s:
            self._thread.start()

    @property
    def report(self) -> ScrubReport:
        return ScrubReport(
            passes=self._passes,
            nbytes=self._nbytes,
            found=self._found,
            quarantined=tuple(self._integrity.damaged_lists()),
            mended=tuple(sorted(self._integrity.mended)),
            unknown=self._unknown,
        )

    def check(self) -> ScrubReport:
        """Reads every list now, as fast as it goes, on the calling thread."""

        def rest(nbytes: int) -> None:
            if self._stop.is_set():
                raise _StoppedError

        with suppress(_StoppedError):
            self._pass(rest)
        return self.report

    def close(self) -> None:
        """Ends the thread, after what it is reading. Twice is harmless."""
        self._stop.set()
        self._copies.stop()
        if self._rate and threading.current_thread() is not self._thread:
            self._thread.join()

    def owns_current_thread(self) -> bool:
        return threading.current_thread() is self._thread

    # The thread

    def _run(self) -> None:
        slept, wait_s = 0.0, _FIRST_S

        def rest(nbytes: int) -> None:
            nonlocal slept
            seconds = nbytes / self._rate
            slept += seconds
            if self._stop.wait(seconds):
                raise _StoppedError

        with suppress(_StoppedError):
            while self._wait(wait_s, rest):
                slept = 0.0
                try:
                    self._pass(rest)
                except _StoppedError:
                    raise
                except Exception:  # noqa: BLE001 - what one pass could not read, the next may
                    _log.exception("%s: a pass of the scrub ended early", self._integrity.file)
                wait_s = max(0.0, _LEAST_PASS_S - slept)

    def _wait(self, seconds: float, rest: _Rest) -> bool:
        """Until the next pass, with a look at the file every second; False where there is none."""
        while not self._stop.wait(min(seconds, _LOOK_S)):
            seconds -= _LOOK_S
            if seconds <= 0:
                return True
            try:
                self._look_at_file(rest)
            except _StoppedError:
                raise
            except Exception:  # noqa: BLE001 - the next look may
                _log.exception("%s cannot be looked at", self._integrity.file)
        return False

    def _pass(self, rest: _Rest) -> None:
        integrity = self._integrity
        self._looked_at = None  # whatever it says of itself, it may be another one
        if integrity.digests is None and not self._learn(rest):
            return
        for number in range(len(self._pieces) - 1):
            self._look_at_file(rest)
            self._look_at_piece(number, rest)
        self._passes += 1

    def _learn(self, rest: _Rest) -> bool:
        """Digests of all lists, where the whole file has its own; False where it has not."""
        integrity = self._integrity
        if self._unknown and integrity.mapped.is_mapped_file():
            integrity.map_again()
        whole, part = xxhash.xxh3_128(), xxhash.xxh3_64()

        def take(content: memoryview) -> None:
            whole.update(content)
            part.update(content)

        found: list[int] = []
        at = 0
        for start, stop in integrity.spans.reshape(-1, 2).tolist():
            self._read(whole.update, at, start, rest)
            part.reset()
            self._read(take, start, stop, rest)
            found.append(part.intdigest())
            at = stop
        self._read(whole.update, at, len(integrity.data), rest)
        with integrity.looking:
            if whole.hexdigest() == integrity.file_digest:
                integrity.digests = np.array(found, dtype=np.uint64).reshape(-1, 2)
                if self._unknown:
                    self._unknown = False
                    self._lift(integrity.lists_in_quarantine())
                return True
            self._found += 1
            self._unknown = True
            integrity.quarantine(np.flatnonzero(self._sizes).tolist())
        _log.error(
            "%s differs from its checksum in the manifest; it has no digests of single lists, so all searches fail "
            "until it is restored",
            integrity.file,
        )
        return False

    def _read(self, take: Callable[[memoryview], None], start: int, stop: int, rest: _Rest) -> bool:
        """Gives bytes [start, stop) of the mapping to ``take``, a piece at a time; False where they cannot be read."""
        integrity = self._integrity
        for first in range(start, stop, _PIECE_BYTES):
            last = min(stop, first + _PIECE_BYTES)
            if not integrity.mapped.readable(first, last):
                return False
            take(integrity.data[first:last].data)
            self._nbytes += last - first
            rest(last - first)
        return True

    # What is read alone needs no lock. What is done about it does, and nobody rests with it.

    def _look_at_piece(self, number: int, rest: _Rest) -> None:
        first, last = self._pieces[number], self._pieces[number + 1]
        state = xxhash.xxh3_64()
        parts = self._parts_of(first, last)
        readable = all(self._read(state.update, start, stop, rest) for start, stop in parts)
        digest = state.intdigest()
        if not readable or digest != self._known.get(number):
            with self._integrity.looking:
                self._look_at_lists(number, digest if readable else None)
            rest(sum(stop - start for start, stop in parts))  # which was read twice
        for list_id in self._copies.held(first, last):
            with self._integrity.looking:
                self._look_at_copies(list_id)
            rest(self._nbytes_of(list_id))

    def _parts_of(self, first: int, last: int) -> list[tuple[int, int]]:
        """Where the bytes of lists ``first`` .. ``last - 1`` lie, of a share those of the lists that it holds."""
        spans, absent = self._integrity.spans, self._integrity.absent
        runs = [[0, last - first]] if absent is None else ranges_of(~absent[first:last])
        return [(int(spans[first + start, 0, 0]), int(spans[first + stop - 1, 1, 1])) for start, stop in runs]

    # With the lock held

    def _look_at_lists(self, number: int, digest: int | None) -> None:
        """Finds the damaged lists of a piece."""
        first, last = self._pieces[number], self._pieces[number + 1]
        quarantined, absent = self._integrity.quarantined, self._integrity.absent
        lists = range(first, last) if quarantined is None else np.flatnonzero(~quarantined[first:last]) + first
        n_held = last - first - (0 if absent is None else int(np.count_nonzero(absent[first:last])))
        # Whole after the piece was read: what comes to be damaged meanwhile differs next time.
        damaged = [int(list_id) for list_id in lists if not all(self._integrity.whole(int(list_id)))]
        for list_id in damaged:
            self._save(list_id)
        if damaged:
            self._looked_at = self._state_of_file()
        if digest is not None and not damaged and len(lists) == n_held:
            self._known[number] = digest
        else:
            self._known.pop(number, None)

    def _look_at_copies(self, list_id: int, *, suspect: bool = False) -> None:
        for where in self._copies.drop_damaged(list_id, suspect=suspect):
            self._found += 1
            _log.error("%s: the copy of list %d in %s was damaged and is dropped", self._integrity.file, list_id, where)

    def _save(self, list_id: int) -> None:
        """A list is damaged: no answer comes from it, until good bytes are in its place."""
        integrity = self._integrity
        self._found += 1
        integrity.quarantine([list_id])
        if not integrity.mended:  # private pages would go
            integrity.mapped.read_again(int(integrity.spans[list_id, 0, 0]), int(integrity.spans[list_id, 1, 1]))
        if all(integrity.whole(list_id)):
            _log.warning("%s: list %d was damaged in memory and is whole on the disk", integrity.file, list_id)
            self._lift([list_id])
        elif integrity.absent is not None:
            _log.error("%s: list %d is damaged, and is not held until it is given anew", integrity.file, list_id)
        elif (lack := self._mend(list_id)) is not None:
            _log.error("%s: list %d is damaged, and searches that probe it fail: %s", integrity.file, list_id, lack)

    def _mend(self, list_id: int) -> str | None:
        """Good bytes in the place of a list in quarantine, from wherever they are; what is lacking, where it stays."""
        integrity = self._integrity
        parts: list[bytes] = []
        origins: list[str] = []
        for part, is_good in enumerate(integrity.whole(list_id)):
            start, stop = integrity.spans[list_id, part].tolist()
            found = ("", integrity.data[start:stop].tobytes()) if is_good else self._copies.find(list_id, part)
            if found is None:
                return "there is no good copy of it; restore the file"
            origins += [found[0]] if found[0] else []
            parts.append(found[1])
        codes, ids = parts
        if len(integrity.mended) >= _MOST_MENDED or len(codes) + len(ids) > _MOST_MENDED_PART * available_bytes():
            return "there is no room to mend it in memory"
        try:
            integrity.mend(list_id, codes, ids)
        except OSError as error:
            return f"it cannot be mended: {error}"
        if not all(integrity.whole(list_id)):
            return "what took its place was lost at once"
        _log.error(
            "%s: list %d is damaged; it is served from memory, with bytes from %s: restore the file",
            integrity.file,
            list_id,
            " and ".join(dict.fromkeys(origins)),
        )
        self._lift([list_id])
        return None

    def _lift(self, lists: list[int]) -> None:
        """Lists that are whole again are scanned again."""
        for list_id in lists:
            self._look_at_copies(list_id, suspect=True)
        self._integrity.lift(lists)

    # The file

    def _look_at_file(self, rest: _Rest) -> None:
        """Sees a file that was cut, and good bytes in the place of damaged ones, or elsewhere."""
        integrity = self._integrity
        if integrity.marks[0] != integrity.seen or integrity.mapped.length() < len(integrity.data):
            integrity.catch_up()
        state = self._state_of_file()
        if state != self._looked_at:
            self._restore(rest)
            self._looked_at = self._state_of_file()

    def _state_of_file(self) -> object:
        """Changes when the file, or what is known of its damage, does; None while it is not damaged."""
        integrity = self._integrity
        if not integrity.mended and (integrity.quarantined is None or not integrity.damaged_lists()):
            return None
        try:
            found = filesystem.stat(integrity.file)
        except OSError:
            return integrity.seen
        return integrity.seen, found.st_ino, found.st_size, found.st_mtime_ns

    def _nbytes_of(self, list_id: int) -> int:
        start, stop = self._integrity.spans[list_id, 0].tolist()
        return int(stop - start)

    def _restore(self, rest: _Rest) -> None:
        integrity = self._integrity
        if integrity.digests is None:
            return
        state = self._state_of_file()
        damaged = sorted({*integrity.damaged_lists(), *integrity.mended})
        n_whole = 0
        for list_id in damaged:
            n_whole += integrity.whole_in_file(list_id)
            rest(self._nbytes_of(list_id))
        if n_whole == len(damaged) and integrity.mapped.is_mapped_file():
            self._map_again(damaged, state, rest)
            return
        for list_id in damaged:
            with integrity.looking:
                quarantined = integrity.quarantined
                if quarantined is None or not quarantined[list_id]:
                    continue
                if all(integrity.whole(list_id)):
                    _log.warning("%s: list %d is whole again", integrity.file, list_id)
                    self._lift([list_id])
                elif integrity.absent is None:
                    self._mend(list_id)
            rest(self._nbytes_of(list_id))

    def _map_again(self, damaged: list[int], state: object, rest: _Rest) -> None:
        """Where nothing has changed since ``state``, when the file held all that is damaged as it was written."""
        integrity = self._integrity
        with integrity.looking:
            if self._state_of_file() != state or integrity.mapped.length() < len(integrity.data):
                return  # the next look starts anew
            try:
                integrity.map_again()
            except OSError as error:
                _log.error("%s cannot be mapped again: %s", integrity.file, error)
                return
            self._known.clear()
        again: list[int] = []
        group: list[int] = []
        for list_id in damaged:
            group.append(list_id)
            nbytes = sum(map(self._nbytes_of, group))
            if nbytes < _LIFTED_BYTES and list_id != damaged[-1]:
                continue
            with integrity.looking:
                whole = [i for i in group if all(integrity.whole(i))]
                self._lift(whole)
                for i in set(group).difference(whole):
                    self._save(i)
            again += whole
            group = []
            rest(nbytes)
        if again:
            verb = "is" if len(again) == 1 else "are"
            _log.warning("%s: %s %s whole again", integrity.file, name_lists(again), verb)
