"""One search call on its way through the engine, and which calls may share a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybridindex.config import SearchParams
from hybridindex.index.filters.row_filter import RowFilter
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.live.state import LiveRows
from hybridindex.router.batch.replies import Reply
from hybridindex.router.batch.stages import BatchReport
from hybridindex.types import F32, I64

__all__ = ["GivenProbes", "Request", "by_kind"]

_log = logging.getLogger(__name__)


class GivenProbes(NamedTuple):
    """Lists that were chosen elsewhere, where others of the same queries may be scanned."""

    #: (n, w) int64, -1 = skip.
    probes: I64
    #: (n, w) float32.
    coarse_distances: F32
    #: Which rows each query may be answered with; None: all.
    masks: RowMasks | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One search call, checked and transformed, on its way through the engine."""

    #: (n, scan_dim) float32.
    queries: F32
    params: SearchParams
    #: The call's, or the plan's.
    nprobe: int
    #: Rows that the scan keeps of each query: k, or the candidates of a search by codes.
    kept: int
    reply: Reply
    #: Which rows may be answered; None: all.
    filter: RowFilter | None = None
    #: What had been deleted and added when it was made, at least; None: nothing. A batch has ``spare`` places more,
    #: from which it leaves out what was deleted.
    live: LiveRows | None = None
    spare: int = 0
    #: These places do not suffice; and what of a batch's work devices had, that found this out.
    short: bool = False
    hit_rate: F32 | None = None
    #: The lists to scan; None: those that are nearest.
    given: GivenProbes | None = None
    #: Monotonic time by which the answer should be there, or None: nprobe is then never lowered.
    deadline_s: float | None = None
    #: When given, receives the (n, nprobe) lists that were probed, before the answer is set.
    on_probes: Callable[[I64], None] | None = None
    #: When given, told about the batch after it has ended, so maybe after the answer.
    on_batch: Callable[[BatchReport], None] | None = None
    #: Whether it may wait for lists on their way; asked once.
    may_wait: bool = False
    #: Searched again, because bytes turned out to be damaged, or too many rows were deleted: it is counted once, and
    #: told its lists once.
    again: bool = False
    submitted_s: float = field(default_factory=time.perf_counter)

    def tell_probes(self, probes: I64) -> None:
        """Tells who wants to know which lists (n, p) were probed. Never raises."""
        if self.on_probes is None or self.again:
            return
        try:
            self.on_probes(probes.copy())
        except Exception:  # noqa: BLE001 - one caller's callback must not fail the others
            _log.exception("an on_probes callback raised")

    @property
    def partial_from_s(self) -> float | None:
        """Monotonic time from which on an answer from a part of its work is enough; None: it never is."""
        return None if self.params.allow_partial is None else self.deadline_s

    @property
    def one_by_one(self) -> bool:
        """Whether its rows are chosen and compared one by one, in no batch."""
        return self.short or self.filter is not None

    @property
    def places(self) -> int:
        """Of each query's answer, before deleted rows are left out."""
        return self.params.k + self.spare

    @property
    def width(self) -> int:
        """Entries of the largest array of each of its queries."""
        return max(self.nprobe, self.kept)


def by_kind(requests: Sequence[Request]) -> tuple[list[Request], list[Request], list[Request], list[Request]]:
    """Those that probe what is nearest; those that say their lists, without and with filters; and those whose rows are
    chosen one by one. No batch has two kinds."""
    kinds: tuple[list[Request], list[Request], list[Request], list[Request]] = ([], [], [], [])
    for request in requests:
        said = 0 if request.given is None else 1 if request.given.masks is None else 2
        kinds[3 if request.one_by_one else said].append(request)
    return kinds
