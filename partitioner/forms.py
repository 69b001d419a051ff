"""In which order forms of lists come to devices: the code of a list, its rows, or both.

A list has up to two *pieces*: what is scanned of it, and the rows beside its code. A path is an order of pieces; a plan
takes a prefix of one. On each path a piece comes before all that save the host less work per page byte. What a
comparison weighs against a scan depends on how far devices hide scans, so there are paths for several weights, and one
without rows. Paths depend on neither target, rate nor budget: that keeps plans monotone (ADR 0031). Which prefix of
which path a plan takes is :mod:`hybridindex.partitioner.solver`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridindex.partitioner.models.coverage import CoverageCurve
from hybridindex.partitioner.models.latency import LatencyModel
from hybridindex.types import F64, I64

__all__ = ["Path", "paths_of", "scanned_alone"]

#: How much the seconds of comparisons weigh against those of scans.
_WEIGHTS = (0.25, 1.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Path:
    """What the first 0..m pieces are: (m + 1,) int64 each, ascending."""

    #: Lists of the hot order whose scanned form is there, and lists of the order of rows whose rows are.
    lists: I64
    rows: I64
    #: Pages of both.
    pages: I64
    #: Longest prefix worth a try.
    useful: int
    #: Ranks of those lists in these orders, where some are left out; ``None``: none is.
    list_ranks: I64 | None = None
    row_ranks: I64 | None = None
    #: Larger pieces are left out; ``None``: none is.
    most_pages: int | None = None

    def pieces(self, places: I64) -> tuple[I64, I64]:
        """Of the pieces at ``places`` (m,) int64, ascending: ranks of lists in the hot order, and in the order of
        rows."""
        is_row = np.diff(self.rows)[places] > 0
        lists, rows = self.lists[places[~is_row]], self.rows[places[is_row]]
        return (
            lists if self.list_ranks is None else self.list_ranks[lists],
            rows if self.row_ranks is None else self.row_ranks[rows],
        )

    def left_out(self, lists: I64, rows: I64) -> int:
        """Pieces of no place here that come before the ranks ``lists`` and ``rows`` of :meth:`pieces`."""
        pairs = ((self.list_ranks, lists), (self.row_ranks, rows))
        return sum(
            int(ranks[-1] - np.searchsorted(known, ranks[-1]))
            for known, ranks in pairs
            if known is not None and ranks.size
        )

    def without_larger(self, most_pages: int) -> Path:
        """The same without the pieces of more than ``most_pages`` pages; itself where there are none."""
        each, is_row = np.diff(self.pages), np.diff(self.rows) > 0
        fits = each <= most_pages
        if fits.all():
            return self
        list_ranks, row_ranks = self.pieces(np.flatnonzero(fits))
        return Path(
            lists=np.concatenate(([0], np.cumsum(~is_row[fits]))),
            rows=np.concatenate(([0], np.cumsum(is_row[fits]))),
            pages=np.concatenate(([0], np.cumsum(each[fits]))),
            useful=int(fits[: self.useful].sum()),
            list_ranks=list_ranks,
            row_ranks=row_ranks,
            most_pages=most_pages,
        )


def scanned_alone(curve: CoverageCurve) -> Path:
    """The hot order of lists, without rows beside codes."""
    every = np.arange(curve.nlist + 1, dtype=np.int64)
    return Path(lists=every, rows=np.zeros_like(every), pages=curve.prefix_pages, useful=curve.useful_count())


def paths_of(curve: CoverageCurve, latency: LatencyModel) -> tuple[Path, ...]:
    """All that are tried; the first is :func:`scanned_alone`, and the only one where rows on devices save no work."""
    first = scanned_alone(curve)
    rows, rerank = curve.rows, latency.rerank
    # A device that was timed and did not compare leaves the comparisons to the host.
    unable = latency.device is not None and latency.device_rerank is None
    if rows is None or not rows.on_devices or rerank is None or rerank.per_candidate_s <= 0 or unable:
        return (first,)
    useful = curve.useful_count()
    nothing = curve.at(0)
    scan_s = float(latency.parts(curve, nothing, 1).host_s.mean()) / max(float(nothing.work.mean()), 1.0)
    saved = (curve.accesses_by_rank * curve.bytes_by_rank)[:useful] * scan_s
    lists = _per_page(saved, curve.pages_by_rank[:useful])
    each_s = rerank.per_candidate_s
    if nothing.row_faults is not None and latency.row_faults is not None:
        # On the host a candidate may have to be read from disk first.
        each_s += latency.row_faults.per_page_s * float(nothing.row_faults.sum() / max(rows.every.sum(), 1e-300))
    beside = _per_page(rows.candidates_by_rank * each_s, rows.list_pages[rows.order])
    return (first, *(_merged(curve, lists, weight * beside) for weight in _WEIGHTS))


def _per_page(saved_s: F64, pages: npt.NDArray[np.integer]) -> F64:
    """Seconds saved per page, never more than by a piece before; what takes no page comes at once."""
    each = np.full(saved_s.size, np.inf)
    np.divide(saved_s, pages, out=each, where=pages > 0)
    return np.minimum.accumulate(each) if each.size else each


def _merged(curve: CoverageCurve, lists: F64, rows: F64) -> Path:
    assert curve.rows is not None
    is_row = np.argsort(-np.concatenate((lists, rows)), kind="stable") >= lists.size
    n_lists = np.concatenate(([0], np.cumsum(~is_row)))
    n_rows = np.concatenate(([0], np.cumsum(is_row)))
    pages = curve.prefix_pages[n_lists] + curve.rows.prefix_pages[n_rows]
    return Path(lists=n_lists, rows=n_rows, pages=pages, useful=is_row.size)
