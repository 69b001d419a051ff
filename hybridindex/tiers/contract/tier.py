"""What the router needs of a device's tier, whatever holds the lists there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from hybridindex.tiers.contract.devices import DeviceInfo
from hybridindex.tiers.contract.protocol import Scanner
from hybridindex.tiers.contract.residency import Residency, ResidencyStore
from hybridindex.types import I32

__all__ = ["LoadReport", "PageOwner", "Tier", "WithoutRoom"]

#: What a tier does whose device has no room at its opening, and would have were it empty: it raises, or counts as
#: failed, for good or until a trial finds room.
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


class Tier(Protocol):
    """One device: its budget, its lists, its mover thread and its state. Every method may be called from any thread."""

    #: Number of the device in its router.
    ordinal: int
    #: The device as it was found when the tier was opened.
    info: DeviceInfo
    #: Hard limit of bytes on the device.
    budget_bytes: int
    #: Why it holds nothing, when it cannot; empty where it can.
    disabled_reason: str

    @property
    def label(self) -> str:
        """What tables and logs print."""
        ...

    @property
    def pages(self) -> PageOwner:
        """To whom retired pages go back."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """What made this device fail, or None while it works. A :class:`DeviceSlowError`: its lists are intact."""
        ...

    @property
    def usable(self) -> bool:
        """Whether it works and can hold a list."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes on the device that lists take, those included that only older leases still read."""
        ...

    @property
    def moved_bytes(self) -> int:
        """Bytes that were copied to the device since it was opened."""
        ...

    @property
    def capacity_bytes(self) -> int:
        """Bytes on the device that lists may take."""
        ...

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the budget that are for scans, not for lists."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of :attr:`used_bytes` that nobody can use until the device has recovered."""
        ...

    @property
    def context_bytes(self) -> int | None:
        """Device memory of the runtime's context, outside the budget; None where it is not known."""
        ...

    @property
    def host_bytes(self) -> int:
        """Host memory taken for copies."""
        ...

    @property
    def n_failures(self) -> int:
        """How often it went from working to failed."""
        ...

    def load(
        self,
        lists: Sequence[int],
        store: ResidencyStore,
        cancelled: Callable[[], bool] | None = None,
        *,
        bandwidth_share: float | None = None,
    ) -> Future[LoadReport]:
        """Queues the move of ``lists``, in order, beside what is here, and returns at once."""
        ...

    def scanner(self, residency: Residency) -> Scanner:
        """A scanner over this device's lists of one leased snapshot; also of a slow device, which is tried with it.

        Raises:
            DeviceError: the device failed, or cannot scan this index.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Marks the device as failed, or by a :class:`DeviceSlowError` as slow: nothing is loaded or scanned here until
        :meth:`recover`."""
        ...

    def retry_due(self, now: float) -> bool:
        """Whether :meth:`recover` should be called."""
        ...

    def recover(self, trial: Callable[[], None] | None = None) -> Future[bool]:
        """Tries a failed device and returns at once; the future says whether it takes lists again.

        Args:
            trial: how a slow device is tried, on the mover's thread; raises while it is.
        """
        ...

    def hurry(self) -> None:
        """Loads rest no more, whatever their share: what is cancelled ends at once. For good; any thread."""

    def owns_current_thread(self) -> bool:
        """Whether the mover asks, in a callback: waiting for a move there would wait for ever."""
        ...

    def check_invariants(self) -> None:
        """Asserts what must hold at any time, the budget among it."""
        ...

    def close(self, limit_s: float | None = None, *, scanned: bool = False) -> bool:
        """Ends queued moves, joins the mover and lets the memory go. Nobody may start a scan any more.

        Args:
            limit_s: how long a move that goes on is waited for; None: until it ends. Then it is left behind.
            scanned: a scan that was given up goes on: everything is left behind at once.

        Returns:
            Whether the memory went. False: it is kept for whatever uses it, and who waits for a move is told.
        """
        ...
