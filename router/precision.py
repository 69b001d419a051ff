"""Whether a router's searches scan codes or rows, and how many candidates a search by codes has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridindex.config import MAX_BATCH_QUERIES, MAX_K, RouterConfig
from hybridindex.errors import InvalidInputError, ProfileMismatchError, UnsupportedIndexError, without_path
from hybridindex.index.ivf import CodedIndex, IVFIndex
from hybridindex.index.rabitq.codes import RabitqCodes
from hybridindex.index.rabitq.spec import RabitqSpec
from hybridindex.tiers.host.host_scanner import HostScanner, open_host_scanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner

__all__ = ["CandidateCount", "Precision", "choose_precision"]

#: Queries times candidates of one request: as much memory as the largest answer takes at 12 bytes a place. A candidate
#: takes about 40: its place in the answer of a scan, and what scans hold to choose from. A call that has more is
#: divided; one query never has.
_MOST_CELLS = MAX_BATCH_QUERIES * MAX_K * 12 // 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What searches scan."""

    #: As they see it: by its codes, or by its rows. Plans must be of this.
    index: IVFIndex
    #: Whether devices hold what plans place.
    has_devices: bool
    #: Why rows although the index has codes, or was to have some; else empty.
    why: str = ""

    @property
    def codes(self) -> RabitqCodes | None:
        """None: rows."""
        return self.index.codes if isinstance(self.index, CodedIndex) else None

    def describe_rows(self) -> str:
        """Of searches by rows: "rows", and why where the index has codes."""
        return f"rows: {self.why}" if self.why else "rows"

    def open_scanner(self, config: RouterConfig) -> HostScanner:
        """What scans on the host.

        Raises:
            InvalidInputError, UnsupportedIndexError: as :func:`hybridindex.tiers.host.host_scanner.open_host_scanner`.
        """
        if self.codes is None:
            return open_host_scanner(
                self.index, threads=config.threads, name=config.host_scanner, beside_devices=self.has_devices
            )
        return HostRabitqScanner(self.index, self.codes, threads=config.threads, rows=config.rows)

    def check_plan(self, fingerprint: str) -> None:
        """Refuses a plan that is not of what searches scan; ``fingerprint``: of what it was made for. Without devices a
        plan gives nprobe alone, and one of the rows serves codes, too, and the reverse.

        Raises:
            ProfileMismatchError: of another index, or of its rows where its codes are scanned, or the reverse.
        """
        index, rows = self.index, self.index.rows
        if fingerprint == index.fingerprint:
            return
        of_rows = fingerprint == rows.fingerprint
        of_codes = rows.rabitq is not None and fingerprint == rows.by_codes().fingerprint
        if (of_rows or of_codes) and not self.has_devices:
            return
        if of_rows:
            raise ProfileMismatchError(
                "the plan is of rows, and codes are scanned; profile and plan with precision 'codes', or search with "
                "precision 'rows'"
            )
        if of_codes:
            raise ProfileMismatchError(
                "the plan is of codes, and rows are scanned; profile and plan with precision 'rows', or search with "
                "precision 'codes'"
            )
        lost = f"; {rows.rabitq_problem}" if rows.rabitq_problem else ""
        raise ProfileMismatchError(
            f"the plan was made for index {fingerprint}, this is index {index.fingerprint}{lost}; profile and plan "
            "this index again"
        )


def choose_precision(index: IVFIndex, config: RouterConfig, planned: str | None = None) -> Precision:
    """What ``config`` asks for, as far as the index and this installation have it.

    Args:
        planned: the fingerprint that the plan was made for; None: there is none.

    Raises:
        UnsupportedIndexError: codes were asked for, and the index has none; or rows are to stay on disk, and would be
            scanned.
    """

    def rows(why: str = "") -> Precision:
        if config.rows == "mapped":
            raise UnsupportedIndexError(
                f"rows is 'mapped', and searches would scan rows: {why or 'the index has no codes'}; make codes "
                "(hybridindex compress) or plan with precision 'codes', or give rows 'resident'"
            )
        # Why is for clients, too, who are told no paths.
        why = without_path(why, index.path)
        return Precision(index=index, has_devices=bool(config.devices), why=why)

    def codes() -> Precision:
        index.load_codes()
        return Precision(index=index.by_codes(), has_devices=bool(config.devices))

    if config.precision == "rows":
        return rows()
    if config.precision == "codes":
        return codes()
    if index.rabitq is None:
        return rows(index.rabitq_problem)
    if config.devices and planned == index.fingerprint:
        return rows("the index has codes, but the plan is of rows")
    if not config.devices or planned != index.by_codes().fingerprint:
        if config.host_scanner == "faiss":
            return rows("the index has codes, but host_scanner 'faiss' scans rows")
        if not HostRabitqScanner.is_fast():
            return rows("the index has codes, but the extension that scans them is missing")
        asked = config.candidates is not None or config.rows == "mapped"
        if not asked and (reason := index.rabitq.spec.hardly_pays(index.nprobe)):
            return rows(f"the index has codes, but {reason}")
    return rows(index.rabitq_problem) if index.load_codes() is None else codes()


def without_devices(config: RouterConfig, index: IVFIndex, planned: str | None) -> RouterConfig:
    """``config`` for a host that stands in for devices and scans what they would, so that answers stay the same.

    Args:
        planned: the fingerprint that the plan was made for; None: there is none.
    """
    config = replace(config, devices=(), device_budget_bytes=None, pin_host_lists=0)
    if planned is None or config.precision != "auto":
        return config
    if planned == index.fingerprint:
        return replace(config, precision="rows")
    if index.rabitq is not None and planned == index.by_codes().fingerprint:
        return replace(config, precision="codes", host_scanner="auto")
    return config


class CandidateCount:
    """How many rows a search by codes compares exactly."""

    def __init__(self, spec: RabitqSpec, fixed: int | None) -> None:
        """``fixed``: for all searches; None: what was measured when the index was compressed."""
        self._spec = spec
        self._fixed = fixed

    def of(self, k: int, nprobe: int, asked: int | None) -> int:
        """For one query, ``k`` at least; ``asked``: by the search, None: as configured.

        ``nprobe`` is the one that was asked for. Where a deadline lowers it the candidates stay: they suffice for more
        lists.

        Raises:
            InvalidInputError: fewer than ``k`` are asked for or configured.
        """
        fixed = self._fixed if asked is None else asked
        if fixed is None:
            return self._spec.candidates_for(k, nprobe)
        if fixed < k:
            raise InvalidInputError(f"candidates is {fixed} and k is {k}; expected candidates of k at least")
        return max(k, min(fixed, self._spec.count))

    def queries_at_once(self, candidates: int) -> int:
        """Most queries of one request that each have so many."""
        return _MOST_CELLS // candidates

    def usual(self, k: int, nprobe: int) -> int:
        """Of a search that names none; what was configured may be too few for it."""
        return self._spec.candidates_for(k, nprobe) if self._fixed is None else self._fixed

    def describe(self, k: int, nprobe: int) -> str:
        """ "codes: rabitq 1 bit, 230 candidates for k 10 at nprobe 64"."""
        bits = self._spec.bits
        number = self.usual(k, nprobe)
        held = "" if self._fixed is not None else f" for k {k} at nprobe {nprobe}"
        return f"codes: rabitq {bits} bit{'s' if bits > 1 else ''}, {number} candidates{held}"
