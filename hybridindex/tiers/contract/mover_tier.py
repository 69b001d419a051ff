"""What tiers of every kind share: a mover thread that steps queued moves, the device's state, and a bounded close."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from hybridindex.errors import DeviceError, OutOfBudgetError, RouterClosedError
from hybridindex.tiers.contract.bounded_join import join_within
from hybridindex.tiers.contract.copy_queue import CopyQueue
from hybridindex.tiers.contract.device_health import Probe, TierHealth
from hybridindex.tiers.contract.devices import DeviceInfo
from hybridindex.tiers.contract.futures import done, fail
from hybridindex.tiers.contract.tier import WithoutRoom

if TYPE_CHECKING:
    import torch

__all__ = ["Move", "MoverTier"]

_log = logging.getLogger(__name__)


class Move(Protocol):
    """Work for the mover, done in steps; ``future`` tells who waits for it."""

    future: Future[Any]

    def step(self) -> bool:
        """Does the next step; False when it was the last one. Raises what stopped it."""
        ...

    def abort(self, error: BaseException) -> None:
        """Cleans up after a step that raised, and fails the future."""
        ...


M = TypeVar("M", bound=Move)


class MoverTier(ABC, Generic[M]):
    """Base of tiers. Every method may be called from any thread; the mover thread alone moves lists.

    See :class:`hybridindex.tiers.contract.tier.Tier` for what the public methods promise.
    """

    device: torch.device
    info: DeviceInfo

    def __init__(self, ordinal: int, budget_bytes: int, without_room: WithoutRoom, clock: Callable[[], float]) -> None:
        """The mover waits for :meth:`_start_mover`."""
        self.ordinal = ordinal
        self.budget_bytes = budget_bytes
        self.disabled_reason = ""
        self._without_room = without_room
        #: Whether the device had room once.
        self._opened = False
        self._clock = clock
        self._health = TierHealth(lambda: self.label, clock)
        self._moves: CopyQueue[M | Probe] = CopyQueue()
        self._work = threading.Condition()
        self._closed = self._hurried = False
        self._mover = threading.Thread(target=self._run_mover, name=f"hybridindex-mover-{ordinal}", daemon=True)

    # What a kind of tier has to say

    @property
    @abstractmethod
    def used_bytes(self) -> int: ...

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
        return self.info.label

    @property
    def failure(self) -> BaseException | None:
        return self._health.failure

    @property
    def n_failures(self) -> int:
        return self._health.n_failures

    @property
    def n_probes(self) -> int:
        """How often a failed device was tried again."""
        return self._health.n_probes

    @property
    def context_bytes(self) -> int | None:
        return self.info.context_bytes

    def fail(self, error: BaseException) -> None:
        """Marks the device as failed until :meth:`recover`. Logged once a failure. Its lists stay where they are until
        who serves them drops them from the residency."""
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

    def _put(self, move: M, bandwidth_share: float | None = None) -> None:
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
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits; the device is marked
                more = False
                self.fail(error)
                move.abort(error)
            ended = self._clock()
            with self._work:
                self._moves.stepped(move, more=more, busy_s=ended - started, now_s=ended)
            del move  # an idle thread must not keep the last one's lists alive

    def _next_move(self) -> M | Probe | None:
        """Waits for the next move; None when the tier is closed and all are done."""
        with self._work:
            while True:
                move, rest_s = self._moves.next(self._clock(), hurry=self._hurried)
                if move is not None or (self._closed and not self._moves):
                    return move
                self._work.wait(rest_s)

    def hurry(self) -> None:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.hurry`."""
        with self._work:
            self._hurried = True
            self._work.notify_all()

    def owns_current_thread(self) -> bool:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.owns_current_thread`."""
        return threading.current_thread() is self._mover

    def close(self, limit_s: float | None = None, *, scanned: bool = False) -> bool:
        """See :meth:`hybridindex.tiers.contract.tier.Tier.close`. Lists that were not sent are skipped, and their
        futures are done."""
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
