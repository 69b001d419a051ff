"""One budget of bytes for all that requests cost: bodies, what they decode to, copies, answers until they are taken.

Each request takes its bytes before they are there: of a body with a length before it is read, of one without as it
comes; of what parsing makes before it is parsed; of an answer before it is searched, of other large answers before they
are sent. What there is no room for is refused. A request gives everything back when it ends, however it ends. One part
is set aside for the arrays of batches, which :mod:`hybridindex.router.batch.batching` bounds. Of several indexes that
share an account, each beyond the first takes as much beside it.
:mod:`hybridindex.partitioner.fair_shares` says what each client may have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from types import TracebackType

from hybridindex.errors import OverloadedError
from hybridindex.paging import format_bytes
from hybridindex.partitioner.fair_shares import FairShares, Lack

__all__ = ["Charge", "RequestMemory"]

#: Of two batches, a round of lookahead, a small JSON body while it is parsed.
_SET_ASIDE = 128 << 20
#: Task, scope, headers and futures of a request.
_FIXED_BYTES = 16 << 10
_RETRY_S = 1.0


class RequestMemory:
    """The account. On one event loop."""

    def __init__(self, limit_bytes: int, *, client_share: float) -> None:
        """
        Args:
            limit_bytes: the whole budget.
            client_share: the part that one client may have while others have none.
        """
        self.limit_bytes = limit_bytes
        self._shares = FairShares(limit_bytes - _SET_ASIDE, alone=client_share)
        #: The most that one request can have.
        self.most = self._shares.rule.most
        #: Time limits of bodies that are being read.
        self.reading: set[asyncio.Timeout] = set()
        self._stopped = False
        #: Requests refused: no room at all, or none within the client's share.
        self.refused: dict[Lack, int] = {"full": 0, "share": 0}

    @property
    def taken_bytes(self) -> int:
        return self._shares.used

    def stop_reading(self) -> None:
        """Ends the time of all bodies that have not come, and of later ones: what is not admitted is not waited for."""
        self._stopped = True
        for limit in self.reading:
            if not limit.expired():
                limit.reschedule(0.0)

    @contextlib.contextmanager
    def read_within(self, limit: asyncio.Timeout) -> Iterator[None]:
        """Around the reading of a body."""
        if self._stopped:
            limit.reschedule(0.0)
        self.reading.add(limit)
        try:
            yield
        finally:
            self.reading.discard(limit)

    def open(self, client: str) -> Charge:
        """The account of one request.

        Raises:
            OverloadedError: there is no room for it.
        """
        charge = Charge(self, client)
        charge.hold(0)
        return charge

    def take(self, client: str, nbytes: int, *, held: int) -> None:
        """``nbytes`` more, or less, for a request of ``client`` that has ``held``; see :class:`Charge`.

        Raises:
            OverloadedError: there is no room for it.
        """
        if nbytes <= 0:
            if nbytes:
                self._shares.give_back(client, -nbytes)
            return
        # As if it asked for all at once: a client's only request gets whatever is free, also when it asks bit by bit.
        others, used = self._shares.of(client) - held, self._shares.used - held
        if (lack := self._shares.rule.lack(held + nbytes, own=others, used=used)) is not None:
            self.refused[lack] += 1
            have, most = format_bytes(self._shares.of(client)), format_bytes(self._shares.capacity)
            own = f"your requests under way hold {have}, which is your share of request_memory_bytes"
            words = f"requests under way fill the {most} that request_memory_bytes leaves for them"
            raise OverloadedError(own if lack == "share" else words, retry_after_s=_RETRY_S, own_share=lack == "share")
        self._shares.take(client, nbytes)

    def check_invariants(self) -> None:
        """Asserts that the account adds up."""
        self._shares.check_invariants()


class Charge:
    """What one request holds, beside a fixed part; gives it back at the end of its block."""

    __slots__ = ("_client", "_memory", "_taken", "reading")

    def __init__(self, memory: RequestMemory, client: str) -> None:
        self._memory = memory
        self._client = client
        self._taken = 0
        self.reading = memory.read_within

    @property
    def most(self) -> int:
        """The most that :meth:`hold` can ever get."""
        return self._memory.most - _FIXED_BYTES

    @property
    def nbytes(self) -> int:
        return max(0, self._taken - _FIXED_BYTES)

    def hold(self, nbytes: int) -> None:
        """From here on ``nbytes``, whatever it was before.

        Raises:
            OverloadedError: there is no room; what was held before stays held.
        """
        wanted = _FIXED_BYTES + nbytes
        self._memory.take(self._client, wanted - self._taken, held=self._taken)
        self._taken = wanted

    def close(self) -> None:
        """Gives back all of it. Again: does nothing."""
        if self._taken:
            self._memory.take(self._client, -self._taken, held=self._taken)
            self._taken = 0

    def __enter__(self) -> Charge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
