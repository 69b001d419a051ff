"""The copier of one device: a copy stream, a ring of page-locked staging buffers, and a ticket for each send.

It moves bytes into pages that its caller owns. :mod:`hybridindex.tiers.paged.loading` decides which lists move and
publishes them.

**Order between copy and scan.** A list is published only after the mover has seen its copy's event done; it waits on a
blocking event. Publishing at once and letting every scan wait for an event on its own stream would save some tens of
microseconds, but would put an event into every snapshot and a wait into every scanner. Page reuse needs no event
either: a page is reused after the last lease on it, and a lease ends when its scan's answers are on the host.

**Runs.** Lists lie in a staging buffer as they lie in the arena, in whole pages. Pages that follow each other in both
are one copy, across lists too; the padding, at most a page a list, costs less than another copy. Scattered pages are
one copy per run, all of a send in one call where the driver takes them so: one scatter per buffer would need a bounce
buffer on the device, out of the budget.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hybridindex.errors import DeviceError, InvalidInputError
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.pinned import HostPages
from hybridindex.tiers.paged.staging import Placed, StagingBuffer, StagingRing, merge_runs
from hybridindex.tiers.paged.streams import Copies, CopyMark, CopyStream, CudaStream
from hybridindex.types import I32, U8

__all__ = ["DEFAULT_STAGING_BYTES", "Copier", "CopyStats", "Ticket", "Write", "open_copier"]

_log = logging.getLogger(__name__)

#: Host memory of the ring. A third is one buffer: large enough that one wait a buffer costs little beside its copy.
DEFAULT_STAGING_BYTES = 24 << 20
_N_BUFFERS = 3
#: Buffers' worth of one send of pinned lists, which fill none: what a send costs the mover (events, a publication) is
#: then little beside its copy on the fastest bus.
_PINNED_BUFFERS = 4
#: Most bytes of one send where the sending thread copies itself: it holds the interpreter between lists, and searches
#: wait for it. A background move rests after each send.
_DIRECT_BYTES = 1 << 17
#: Sends of which size and time are remembered.
_N_SAMPLES = 512


class Write(NamedTuple):
    """Bytes of consecutive pages of one list: codes, uint8 in any memory, or pages on the host."""

    pages: I32
    source: U8 | HostPages


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStats:
    """What a copier did since it was made; of sends that were seen to be done."""

    nbytes: int = 0
    sends: int = 0
    #: Single copies that they were made of.
    runs: int = 0
    #: Time in which bytes travelled: the device's clock, or the host's on the stand-in.
    busy_s: float = 0.0
    #: How often, and how long, the mover waited because every staging buffer was in use.
    waits: int = 0
    wait_s: float = 0.0
    #: (bytes, seconds) of the last sends, for a fit of latency + bytes / bandwidth.
    samples: tuple[tuple[int, float], ...] = ()


class Ticket:
    """One send in progress, and its error."""

    __slots__ = ("error", "launched", "mark", "n_runs", "nbytes", "reads")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.n_runs = 0
        self.mark: CopyMark | None = None
        self.error: BaseException | None = None
        #: Whether a copy may have been started.
        self.launched = False
        #: Pinned memory that it copies from stays as it is while the ticket is kept. What a failed send may still read
        #: goes to pages that are kept out of use.
        self.reads: list[HostPages] = []

    @property
    def done(self) -> bool:
        """Whether :meth:`Copier.finish` would not wait. Raises when the device is lost."""
        return self.error is not None or self.mark is None or self.mark.done()

    def settled(self) -> bool:
        """Whether it is known that no copy of this send can write any more."""
        if not self.launched:
            return True
        try:
            return self.mark is not None and self.mark.done()
        except Exception:  # noqa: BLE001 - a lost device; the ticket's waiter reports it
            return False


class Copier:
    """Owner of one device's copy stream and staging buffers. One thread sends (the mover); ``stats`` from any."""

    def __init__(
        self,
        arena: PageArena,
        stream: CopyStream | None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Allocates nothing yet.

        Args:
            arena: where pages are.
            stream: None: copies are done by the sending thread, without buffers.
            staging_bytes: host memory of the ring, outside the device budget.
            clock: seconds, monotonic.

        Raises:
            InvalidInputError: ``staging_bytes`` is less than a page per buffer.
        """
        page_bytes = arena.geometry.page_bytes
        if staging_bytes < _N_BUFFERS * page_bytes:
            raise InvalidInputError(
                f"staging_bytes is {staging_bytes:,}; expected at least {_N_BUFFERS * page_bytes:,}: {_N_BUFFERS} "
                f"buffers of one page of {page_bytes:,} bytes"
            )
        self._arena = arena
        self._stream = stream
        self._clock = clock
        #: Most pages of one send that go through a buffer.
        send_bytes = staging_bytes // _N_BUFFERS
        if stream is None:
            send_bytes = min(send_bytes, _DIRECT_BYTES)
        self.send_pages = max(1, send_bytes // page_bytes)
        #: Most sends in progress at once.
        self.depth = _N_BUFFERS
        self._ring = StagingRing(
            n_buffers=_N_BUFFERS,
            n_slots=self.send_pages,
            page_bytes=page_bytes,
            page_locked=arena.device.type == "cuda",
        )
        self._n_probes = 0
        #: Pages of failed sends, until it is known that no copy writes them any more.
        self._kept: list[I32] = []
        self._lock = threading.Lock()
        self._stats = CopyStats()
        self._samples: deque[tuple[int, float]] = deque(maxlen=_N_SAMPLES)

    @property
    def most_pages(self) -> int:
        """Most pages of one send, those of pinned lists included."""
        return self.send_pages * (1 if self._stream is None else _PINNED_BUFFERS)

    @property
    def staging_bytes(self) -> int:
        """Host memory that the ring takes: none before the first send, and none on the stand-in."""
        return self._ring.nbytes

    @property
    def kept_pages(self) -> int:
        """Pages kept out of use because a failed copy may still write them."""
        return sum(len(pages) for pages in self._kept)

    @property
    def stats(self) -> CopyStats:
        with self._lock:
            return replace(self._stats, samples=tuple(self._samples))

    # Sending

    def send(self, writes: Sequence[Write]) -> Ticket:
        """Starts to copy ``writes``, at most :attr:`most_pages` pages, and returns while they travel. At most
        :attr:`send_pages` of them go through a buffer, being of no pinned list.

        Waits only when every staging buffer is in use. Mapped lists are read before it returns; pinned memory must
        stay as it is until the ticket is done. Raises nothing: errors come through the ticket.
        """
        ticket = Ticket(sum(len(write.pages) for write in writes) * self._arena.geometry.page_bytes)
        ticket.reads = [write.source for write in writes if isinstance(write.source, HostPages)]
        try:
            if self._stream is None:
                self._write_now(writes, ticket)
            else:
                self._launch(self._stream, writes, ticket)
        except BaseException as error:  # noqa: BLE001 - raised by finish
            ticket.error = error
        return ticket

    def _write_now(self, writes: Sequence[Write], ticket: Ticket) -> None:
        started = self._clock()
        for write in writes:
            source = write.source
            if isinstance(source, HostPages):
                source = source.block[source.slot : source.slot + len(write.pages)].numpy()
            self._arena.write(write.pages, source)
        ticket.n_runs = len(writes)
        ticket.mark = _Written(self._clock() - started)

    def _launch(self, stream: CopyStream, writes: Sequence[Write], ticket: Ticket) -> None:
        buffer: StagingBuffer | None = None
        placed: list[Placed] = []
        for pages, source in writes:
            if isinstance(source, HostPages):
                placed.append(Placed(pages, source.address, source.region))
                continue
            if buffer is None:
                buffer = self._free_buffer()
            placed.append(Placed(pages, buffer.fill(len(pages), source), buffer.address))
        copies = merge_runs(placed, self._arena.data.data_ptr(), self._arena.geometry.page_bytes)
        ticket.n_runs = len(copies.targets)
        ticket.launched = True
        # What a failed start may still copy goes to pages that are kept out of use: its buffer can be filled again.
        ticket.mark = stream.send(copies)
        if buffer is not None:
            buffer.mark = ticket.mark

    def _free_buffer(self) -> StagingBuffer:
        buffer = self._ring.next()
        if buffer.mark is not None and not buffer.mark.done():
            started = self._clock()
            buffer.mark.wait()
            self._count(waits=1, wait_s=self._clock() - started)
        buffer.mark = None
        buffer.n_filled = 0
        return buffer

    def finish(self, ticket: Ticket) -> None:
        """Returns when the ticket's bytes are on the device; once a ticket.

        Raises:
            what stopped the copy.
        """
        if ticket.error is not None:
            raise ticket.error
        assert ticket.mark is not None
        ticket.mark.wait()
        seconds = ticket.mark.seconds()
        with self._lock:
            self._samples.append((ticket.nbytes, seconds))
        self._count(nbytes=ticket.nbytes, sends=1, runs=ticket.n_runs, busy_s=seconds)

    def _count(self, **amounts: float) -> None:
        with self._lock:
            old = self._stats
            self._stats = replace(old, **{name: getattr(old, name) + amount for name, amount in amounts.items()})

    # Failures

    def give_back(self, pages: Iterable[I32], tickets: Iterable[Ticket]) -> None:
        """Frees pages that are not published, or keeps them while a copy of ``tickets`` may still write them.

        Kept pages come free with the next successful :meth:`probe`.
        """
        settled = all(ticket.settled() for ticket in tickets)
        for part in pages:
            if settled:
                self._arena.pages.free(part)
            else:
                self._kept.append(part)

    def probe(self) -> None:
        """Writes a free page and reads it back.

        The stream keeps its order: once this write is done, no earlier copy is in progress, and the kept pages are
        free again.

        Raises:
            DeviceError: no page is free to try, or other bytes came back.
            what else the device raises.
        """
        arena = self._arena
        # A kept page can be used: what may still write it comes before this write.
        own = None if self._kept else arena.pages.allocate(1)
        page = self._kept[0][:1] if self._kept else own
        if page is None:
            raise DeviceError(f"device {arena.device} cannot be tried: none of its pages is free")
        self._n_probes += 1
        shape = (arena.geometry.rows_per_page, arena.geometry.code_size)
        sent = np.random.default_rng(self._n_probes).integers(0, 256, shape, dtype=np.uint8)
        ticket = self.send([Write(page, sent)])
        try:
            self.finish(ticket)
            back = self.read_back(page)
        finally:
            if own is not None:
                self.give_back([own], [ticket])
        if not np.array_equal(back, sent.reshape(-1)):
            raise DeviceError(f"device {arena.device} returned different bytes than were written")
        kept, self._kept = self._kept, []
        for part in kept:
            arena.pages.free(part)

    def put(self, places: Sequence[tuple[int, U8]]) -> None:
        """Copies bytes to places of the arena, each (offset, (n,) uint8), and waits until they are there. On the thread
        that sends; no more bytes than :attr:`send_pages` pages have."""
        started, nbytes = self._clock(), sum(len(source) for _, source in places)
        if self._stream is None:
            flat = self._arena.data.view(-1).numpy()
            for at, source in places:
                flat[at : at + len(source)] = source
        else:
            buffer = self._ring.next()
            if buffer.mark is not None:
                buffer.mark.wait()
            targets = self._arena.data.data_ptr() + np.array([at for at, _ in places], dtype=np.int64)
            lengths = np.array([len(source) for _, source in places], dtype=np.int64)
            ends = np.cumsum(lengths)
            for end, (_, source) in zip(ends.tolist(), places, strict=True):
                np.copyto(buffer.flat[end - len(source) : end], source)
            buffer.n_filled = 0
            buffer.mark = self._stream.send(Copies(targets, buffer.address + ends - lengths, lengths))
            buffer.mark.wait()
        with self._lock:
            stats = self._stats
            self._stats = replace(
                stats,
                nbytes=stats.nbytes + nbytes,
                sends=stats.sends + 1,
                runs=stats.runs + len(places),
                busy_s=stats.busy_s + self._clock() - started,
            )

    def keep(self, pages: I32) -> None:
        """Keeps pages out of use that a failed copy may still write, until a probe has shown that none does."""
        if len(pages):
            self._kept.append(pages)

    def read_back(self, pages: I32) -> U8:
        """The bytes of pages, one after the other: (n_pages * page_bytes,) uint8. On the thread that sends.

        Raises:
            MemoryError: the host has no memory for them.
        """
        data, page_bytes = self._arena.data, self._arena.geometry.page_bytes
        try:
            back = data.new_empty((len(pages), page_bytes), device="cpu")
        except RuntimeError as error:
            raise MemoryError(f"the host has no {len(pages) * page_bytes:,} bytes to read pages back into") from error
        rows = [(back[at : at + 1], data[page : page + 1]) for at, page in enumerate(pages.tolist())]
        if self._stream is not None:
            self._stream.fetch(rows).wait()
        else:
            for to, page in rows:
                to.copy_(page)
        read: U8 = back.view(-1).numpy()
        return read

    def check_invariants(self) -> None:
        """Asserts that no kept page is free."""
        if self._kept:
            assert not np.isin(np.concatenate(self._kept), self._arena.pages.free_pages()).any(), "a kept page is free"

    def close(self) -> None:
        """Waits for copies in progress, so that the arena can be freed, and frees the ring."""
        if self._stream is not None:
            try:
                self._stream.drain()
            except Exception:  # noqa: BLE001 - a lost device copies nothing any more
                _log.warning("device %s was lost before its last copies ended", self._arena.device, exc_info=True)
        self._ring.clear()


class _Written:
    """The mark of copies that were done when they returned."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def seconds(self) -> float:
        return self._seconds


def open_copier(arena: PageArena, *, staging_bytes: int = DEFAULT_STAGING_BYTES) -> Copier:
    """The copier of that arena's device: a stream of its own on CUDA, none on the stand-in."""
    stream = CudaStream(arena.device) if arena.device.type == "cuda" else None
    return Copier(arena, stream, staging_bytes=staging_bytes)
