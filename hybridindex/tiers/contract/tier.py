"""A device's tier: what the router needs of it, and what all kinds of tier share.

They share the mover thread that steps queued moves, the state of the device, and closing in bounded time.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from hybridindex.errors import DeviceError, OutOfBudgetError, RouterClosedError
from hybridindex.processes import OfOneProcess, weakly
from hybridindex.tiers.contract.bounded_join import join_within
from hybridindex.tiers.contract.copy_queue import CopyQueue
from hybridindex.tiers.contract.device_health import TierHealth
from hybridindex.tiers.contract.devices import DeviceInfo
from hybridindex.tiers.contract.futures import done, fail
from hybridindex.tiers.contract.protocol import Scanner
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.types import I32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["LoadReport", "Move", "PageOwner", "Tier", "WithoutRoom"]

_log = logging.getLogger(__name__)

#: What a tier does when its device has no room at the opening but would have if it were empty: it raises, or counts as
#: failed, for good ("fail") or until a trial finds room ("retry").
WithoutRoom = Literal["raise", "fail", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of one load request."""

    loaded: tuple[int, ...]
    #: Lists that did not fit the free pages, or whose turn had not come when the load was cancelled.
    skipped: tuple[int, ...]
    #: Lists that were resident already, here or on another device.
    present: tuple[int, ...]
    #: Bytes of pages of the loaded lists.
    nbytes: int
    #: Lists with more pages than the whole arena: no room will ever do. Not among ``skipped``.
    too_large: tuple[int, ...] = ()


class PageOwner(Protocol):
    """Takes back what a residency named and no lease reads any more. Outlives its tier; any thread."""

    def free(self, pages: I32) -> None:
        """Gives pages back, each once."""
        ...


class Move(Protocol):
    """Work for the mover, done in steps; ``future`` gets the result."""

    future: Future[Any]

    def step(self) -> bool:
        """Does the next step; False when it was the last one. Raises what stopped it."""
        ...

    def abort(self, error: BaseException) -> None:
        """Cleans up after a step that raised, and fails the future."""
        ...


class Tier(OfOneProcess, ABC):
    """One device: its budget, its lists, its mover thread and its state.

    Threads: every method may be called from any thread; the mover thread alone moves lists. :meth:`close` joins it.
    """

    device: torch.device
    #: The device as it was found when the tier was opened.
    info: DeviceInfo

    def __init__(self, ordinal: int, budget_bytes: int, without_room: WithoutRoom, clock: Callable[[], float]) -> None:
        """The mover waits for :meth:`_start_mover`."""
        #: Number of the device in its router.
        self.ordinal = ordinal
        #: Hard limit of bytes on the device.
        self.budget_bytes = budget_bytes
        #: Why it holds nothing, when it cannot; empty where it can.
        self.disabled_reason = ""
        self._without_room = without_room
        #: Whether the device had room once.
        self._opened = False
        self._clock = clock
        self._health = TierHealth(weakly(self, lambda tier: tier.label), clock)
        self._moves: CopyQueue[Move] = CopyQueue()
        self._work = threading.Condition()
        self._closed = self._hurried = False
        self._mover = threading.Thread(target=self._run_mover, name=f"hybridindex-mover-{ordinal}", daemon=True)

    # What each kind of tier defines

    @property
    @abstractmethod
    def pages(self) -> PageOwner:
        """To whom retired pages go back."""

    @property
    @abstractmethod
    def usable(self) -> bool:
        """Whether it works and can hold a list."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes on the device that lists take, including those that only older leases still read."""

    @property
    @abstractmethod
    def moved_bytes(self) -> int:
        """Bytes that were copied to the device since it was opened."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """Bytes on the device that lists may take."""

    @property
    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes of the budget that are for scans, not for lists."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of :attr:`used_bytes` that stay unusable until the device has recovered."""
        return 0

    @property
    def host_bytes(self) -> int:
        """Host memory taken for copies."""
        return 0

    @abstractmethod
    def load(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        cancelled: Callable[[], bool] | None = None,
        *,
        bandwidth_share: float | None = None,
    ) -> Future[LoadReport]:
        """Queues the move of ``lists``, in order, and returns at once. Resident lists stay.

        Args:
            lists: list ids.
            store: where they are published.
            cancelled: whether they are wanted no more; asked before each list.
            bandwidth_share: None: a foreground move. 0 < share <= 1: a background move, which copies for that share of
                the time.

        Raises:
            InvalidInputError: ``bandwidth_share`` is out of range.
            RouterClosedError: the tier is closed.
        """

    @abstractmethod
    def resize(self, wanted_bytes: int, budget_bytes: int, scratch_bytes: int) -> None:
        """Takes or gives back memory, so that ``wanted_bytes`` of lists have room within ``budget_bytes``, from now on
        the hard limit; ``scratch_bytes`` of it, codec tables included, are for scans. Lists that are there stay. More
        than the device has free is not taken; what is still read is not given back, and counts until it is. One thread
        at a time asks."""

    def lists_beyond(self, residency: Residency, budget_bytes: int) -> I64:
        """Resident lists whose memory has to go for a lower budget to hold: (m,) int64."""
        return np.empty(0, dtype=np.int64)

    @abstractmethod
    def scanner(self, residency: Residency) -> Scanner:
        """A scanner over this device's lists of one leased snapshot; also of a slow device, which is tried with it.

        Raises:
            DeviceError: the device failed, or cannot scan this index.
        """

    @abstractmethod
    def check_invariants(self) -> None:
        """Asserts what must hold at any time, the budget among it."""

    @abstractmethod
    def _try_device(self) -> None:
        """Takes the memory where that failed at the opening, and uses the device once. Raises what is wrong with it."""

    def _never_fits(self, error: BaseException) -> bool:
        """Whether what was wrong with the device can never pass."""
        return False

    def _mover_ends(self) -> None:
        """Runs last on the mover thread; may wait for ever, which :meth:`close` does not."""

    @abstractmethod
    def _release(self) -> None:
        """Lets the memory go; nothing scans or moves any more."""

    @abstractmethod
    def _left_bytes(self) -> int:
        """Bytes that are left behind with a scan or move that does not end."""

    # State

    @property
    def label(self) -> str:
        """What tables and logs print."""
        return self.info.label

    @property
    def failure(self) -> BaseException | None:
        """What made this device fail, or None while it works. A :class:`DeviceSlowError`: its lists are intact."""
        return self._health.failure

    @property
    def n_failures(self) -> int:
        """How often this device went from working to failed."""
        return self._health.n_failures

    @property
    def n_probes(self) -> int:
        """How often a failed device was tried again."""
        return self._health.n_probes

    @property
    def context_bytes(self) -> int | None:
        """Device memory of the runtime's context, outside the budget; None where it is not known."""
        return self.info.context_bytes

    def fail(self, error: BaseException) -> None:
        """Marks the device as failed, or by a :class:`DeviceSlowError` as slow: nothing is loaded or scanned here until
        :meth:`recover`. Logged once a failure. Its lists stay until they are dropped from the residency."""
        self._health.note(error)

    def retry_due(self, now: float) -> bool:
        """Whether :meth:`recover` should be called: 1, 2, 4 ... 60 s after the failure and each trial that failed.

        ``now`` is in seconds of the tier's clock.
        """
        return (self._opened or self._without_room == "retry") and self._health.retry_due(now)

    def recover(self, trial: Callable[[], None] | None = None) -> Future[bool]:
        """Tries a failed device on the mover and returns at once. One that had no room at its opening takes its memory
        first.

        The future says whether the device takes lists again. One that has not failed does; while another trial goes on
        it is False.

        Args:
            trial: how a slow device is tried instead: it may have no memory free for the usual trial.

        Raises:
            RouterClosedError: the tier is closed.
        """
        with self._work:
            self._refuse_closed()
            probe = self._health.probe(self._try_device, trial, self._never_fits)
            if probe is None:
                return done(self.failure is None)
            self._moves.put(probe)
            self._work.notify()
        return probe.future

    def _refuse_unusable(self) -> None:
        """Raises DeviceError where nothing may be scanned; a slow device may be."""
        if self.failure is not None and not self._health.slow:
            raise DeviceError(f"device {self.label} has failed: {self.failure!r}")
        if self.disabled_reason:
            raise DeviceError(self.disabled_reason)

    def _refuse_no_room(self, needed: int, free: int | None, parts: str) -> None:
        """Raises OutOfBudgetError where fewer than ``needed`` bytes are free; ``parts`` says what takes them."""
        if free is not None and needed > free:
            raise OutOfBudgetError(
                f"device {self.label}: {needed:,} bytes are needed ({parts}; budget {self.budget_bytes:,}) and "
                f"{free:,} are free; expected a budget within what other owners of the device leave"
            )

    # Movement

    def _put(self, move: Move, bandwidth_share: float | None = None) -> None:
        """Queues a move.

        Raises:
            RouterClosedError: the tier is closed.
        """
        with self._work:
            self._refuse_closed()
            self._moves.put(move, bandwidth_share)
            self._work.notify()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RouterClosedError("the device tier is closed")

    def _start_mover(self) -> None:
        self._mover.start()

    def _run_mover(self) -> None:
        try:
            self._step_moves()
        finally:
            self._mover_ends()

    def _step_moves(self) -> None:
        while (move := self._next_move()) is not None:
            started = self._clock()
            try:
                more = move.step()
            except BaseException as error:  # noqa: BLE001 - the future gets it; the device is marked
                more = False
                self.fail(error)
                move.abort(error)
            ended = self._clock()
            with self._work:
                self._moves.stepped(move, more=more, busy_s=ended - started, now_s=ended)
            del move  # an idle thread must not keep the last one's lists alive

    def _next_move(self) -> Move | None:
        """Waits for the next move; None when the tier is closed and all are done."""
        with self._work:
            while True:
                move, rest_s = self._moves.next(self._clock(), hurry=self._hurried)
                if move is not None or (self._closed and not self._moves):
                    return move
                self._work.wait(rest_s)

    def hurry(self) -> None:
        """Loads rest no more, whatever their share: what is cancelled ends at once. For good."""
        with self._work:
            self._hurried = True
            self._work.notify_all()

    def owns_current_thread(self) -> bool:
        """Whether the mover asks, in a callback: waiting for a move there would wait for ever."""
        return threading.current_thread() is self._mover

    def close(self, limit_s: float | None = None, *, scanned: bool = False) -> bool:
        """Ends queued moves, joins the mover and lets the memory go. Lists that were not sent are skipped, and their
        futures are done. No scan may be started any more.

        Args:
            limit_s: how long a move that goes on is waited for; None: until it ends. Then it is left behind.
            scanned: a scan that was given up goes on: everything is left behind at once.

        Returns:
            Whether the memory was freed. False: it is kept for what still uses it, and futures of moves fail.
        """
        with self._work:
            self._closed = self._hurried = True
            self._work.notify_all()
        if scanned or not join_within(self._mover, limit_s):
            self._leave("a scan" if scanned else "a move")
            return False
        self._release()
        return True

    def _leave(self, what: str) -> None:
        words = f"device {self.label}: {what} does not end; its thread and {self._left_bytes():,} bytes are left behind"
        _log.error("%s until it does, or the process ends", words)
        with self._work:
            moves = list(self._moves)
        for move in moves:
            fail(move.future, DeviceError(words))
