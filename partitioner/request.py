"""What a plan is asked for, validated at the edge."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.paging import DEFAULT_PAGE_BYTES, centroid_share, least_with_centroids, scratch_for_budget
from hybridindex.types import DEFAULT_HEADROOM, HitRateChoice, LLMProfile

__all__ = ["PlanRequest", "SloStage", "check_batch", "split_bytes"]

SloStage = Literal["search", "ttft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What :func:`hybridindex.partitioner.plan.make_plan` decides for. :meth:`resolve` checks the values."""

    slo_ms: float
    #: Bytes per device.
    budgets: tuple[int, ...]
    #: Scan scratch per device, inside its budget, with what else the tier takes there besides lists.
    scratch: tuple[int, ...]
    rate_qps: float | None
    llm: LLMProfile | None
    epsilon: float | None
    percentile: float
    coverage: float | None
    slo_stage: SloStage
    #: The model of hit rates that decides; "best": the one that predicts held-back queries best.
    hit_rate_model: HitRateChoice
    #: What search must have to spare, as a fraction: of the rate that it sustains, and of the SLO.
    headroom: float
    page_bytes: int
    #: Whether the device tier can scan the index's codec; when not, nothing is placed.
    scannable: bool
    #: Why not, where that is known.
    unscannable: str = ""
    #: Page bytes, of all devices, to fill with hot lists even where the SLO needs fewer; 0: the fewest.
    fill_bytes: int = 0
    #: Of all codes, where they are what is placed: scratch follows them. 0: rows are.
    code_bytes: int = 0
    #: Of the centroids, which the first device has where its budget is not small.
    centroid_bytes: int = 0
    #: Host memory that rows on disk have; ``None``: all rows are in memory.
    row_cache_bytes: int | None = None

    @classmethod
    def resolve(
        cls,
        *,
        slo_ms: float,
        device_budget_bytes: int | Sequence[int],
        rate_qps: float | None = None,
        llm: LLMProfile | None = None,
        n_devices: int = 1,
        epsilon: float | None = None,
        percentile: float = 90.0,
        coverage: float | None = None,
        slo_stage: SloStage = "search",
        hit_rate_model: HitRateChoice = "best",
        headroom: float = DEFAULT_HEADROOM,
        page_bytes: int = DEFAULT_PAGE_BYTES,
        scratch_bytes: int | Sequence[int] | None = None,
        fixed_bytes: int = 0,
        centroid_bytes: int = 0,
        scannable: bool = True,
        unscannable: str = "",
        fill_bytes: int = 0,
        code_bytes: int = 0,
        row_cache_bytes: int | None = None,
    ) -> PlanRequest:
        """Check every argument and spell budgets out per device.

        Args:
            slo_ms: bound on search including its queueing (or on TTFT, see ``slo_stage``), at ``percentile``.
            device_budget_bytes: bytes of each device: one number for all, or one per device.
            rate_qps: offered load; with ``llm`` the smaller of it and what the LLM takes counts.
            epsilon: queueing time over batch time (Eq. 3); 1 is the paper's worst case. None: from the batching model,
                at the rate; without a rate 1.
            coverage: fix the fraction of lists instead of solving for it.
            slo_stage: "search", or "ttft" = search + ``llm.ttft_s``.
            hit_rate_model: "beta" (VectorLiteRAG), "beta_binomial", "empirical", or "best" of them on unseen queries.
            headroom: what search must have to spare, as a fraction: of the rate and of the SLO. The default was
                calibrated: with it at least 95 % of feasible plans meet their SLO in the simulator.
            scratch_bytes: scan scratch per device, inside the budget; by default what the arena sets aside.
            fixed_bytes: what the tier takes of each budget besides lists and that default scratch.
            centroid_bytes: what the first device takes besides where its budget is not small.
            scannable: False where no device tier scans this codec: everything stays on the host.
            unscannable: why not, for the reason.
            fill_bytes: page bytes to fill with hot lists beyond what the SLO needs; see
                :mod:`hybridindex.partitioner.division`.
            code_bytes: of all codes, where devices hold codes: the default scratch follows them; 0: they hold rows.
            row_cache_bytes: host memory that is left for rows, where they are on disk (rows = "mapped"). None: all rows
                are in memory.

        Raises:
            InvalidInputError: naming the argument, its value and what would be right.
        """
        if not _positive(slo_ms):
            raise InvalidInputError(f"slo_ms is {slo_ms!r}; give a finite number of milliseconds > 0")
        if not _integral(n_devices) or n_devices < 1:
            raise InvalidInputError(f"n_devices is {n_devices!r}; give an integer >= 1")
        if rate_qps is not None and not _positive(rate_qps):
            raise InvalidInputError(f"rate_qps is {rate_qps!r}; give a finite number > 0, or None when it is not known")
        if epsilon is not None and (not _finite(epsilon) or epsilon < 0):
            raise InvalidInputError(
                f"epsilon is {epsilon!r}; give a finite number >= 0, or None for the batching model"
            )
        if not _finite(percentile) or not 0.0 < percentile < 100.0:
            raise InvalidInputError(f"percentile is {percentile!r}; give a number between 0 and 100")
        if coverage is not None and not (_finite(coverage) and 0.0 <= coverage <= 1.0):
            raise InvalidInputError(f"coverage is {coverage!r}; give a fraction of lists in [0, 1], or none to solve")
        if llm is not None and not isinstance(llm, LLMProfile):
            raise InvalidInputError(f"llm is {llm!r}; give an LLMProfile, or None when no LLM shares the device")
        if slo_stage not in ("search", "ttft"):
            raise InvalidInputError(f"slo_stage is {slo_stage!r}; give 'search' or 'ttft'")
        if slo_stage == "ttft" and llm is None:
            raise InvalidInputError("slo_stage is 'ttft' but llm is None; give an LLM profile with its ttft_s")
        if llm is not None and (not math.isfinite(llm.ttft_s) or llm.ttft_s < 0):
            raise InvalidInputError(f"llm.ttft_s is {llm.ttft_s}; give finite seconds >= 0")
        if isinstance(hit_rate_model, str):
            hit_rate_model = hit_rate_model.replace("-", "_")  # type: ignore[assignment]
        if hit_rate_model not in get_args(HitRateChoice):
            choices = ", ".join(repr(name) for name in get_args(HitRateChoice))
            raise InvalidInputError(f"hit_rate_model is {hit_rate_model!r}; give one of {choices}")
        if not _finite(headroom) or not 0.0 <= headroom <= 10.0:
            raise InvalidInputError(f"headroom is {headroom!r}; give a fraction of the rate in [0, 10]")
        if not _integral(page_bytes) or page_bytes < 1:
            raise InvalidInputError(f"page_bytes is {page_bytes!r}; give an integer >= 1")
        if row_cache_bytes is not None and (not _integral(row_cache_bytes) or row_cache_bytes < 0):
            raise InvalidInputError(
                f"row_cache_bytes is {row_cache_bytes!r}; give whole bytes >= 0, or None when all rows are in memory"
            )
        budgets = _per_device("device_budget_bytes", device_budget_bytes, n_devices)
        if scratch_bytes is None:
            scratch = _scratch(budgets, code_bytes, fixed_bytes, centroid_bytes)
        else:
            scratch = _per_device("scratch_bytes", scratch_bytes, n_devices)
        return cls(
            slo_ms=float(slo_ms),
            budgets=budgets,
            scratch=scratch,
            rate_qps=None if rate_qps is None else float(rate_qps),
            llm=llm,
            epsilon=None if epsilon is None else float(epsilon),
            percentile=float(percentile),
            coverage=None if coverage is None else float(coverage),
            slo_stage=slo_stage,
            hit_rate_model=hit_rate_model,
            headroom=float(headroom),
            page_bytes=int(page_bytes),
            scannable=scannable,
            unscannable=unscannable,
            fill_bytes=int(fill_bytes),
            code_bytes=int(code_bytes),
            centroid_bytes=int(centroid_bytes),
            row_cache_bytes=None if row_cache_bytes is None else int(row_cache_bytes),
        )

    def within(self, budgets: Sequence[int], fill_bytes: int = 0) -> PlanRequest:
        """The same for other bytes of each device: scratch follows, and what the tier takes besides stays."""
        scratch = _scratch(budgets, self.code_bytes, self.fixed_bytes, self.centroid_bytes)
        return dataclasses.replace(self, budgets=tuple(budgets), scratch=scratch, fill_bytes=fill_bytes)

    @property
    def fixed_bytes(self) -> int:
        """What the tier takes of each budget besides lists, scratch and centroids."""
        return max(0, self.scratch[0] - _scratch(self.budgets[:1], self.code_bytes, 0, self.centroid_bytes)[0])

    @property
    def n_devices(self) -> int:
        return len(self.budgets)

    @property
    def search_slo_s(self) -> float:
        """What the SLO leaves for search, queueing included; not positive when the LLM alone takes longer."""
        spent = self.llm.ttft_s if self.slo_stage == "ttft" and self.llm is not None else 0.0
        return self.slo_ms / 1e3 - spent

    def slo_ms_of(self, search_s: float) -> float:
        """The SLO at which search may take ``search_s``, waiting included."""
        spent = self.llm.ttft_s if self.slo_stage == "ttft" and self.llm is not None else 0.0
        return (search_s + spent) * 1e3

    def capacity_pages(self, page_bytes: int) -> tuple[int, ...]:
        """Pages of each device once its scratch is set aside."""
        if not self.scannable:
            return (0,) * self.n_devices
        rooms = [max(0, budget - scratch) for budget, scratch in zip(self.budgets, self.scratch, strict=True)]
        least = least_with_centroids(self.centroid_bytes)
        if self.budgets[0] < least:
            # Lists take no more than where the centroids come, or a larger budget would have room for fewer lists. What
            # is left is for sessions.
            (scratch,) = _scratch((least,), self.code_bytes, self.fixed_bytes, self.centroid_bytes)
            rooms[0] = min(rooms[0], max(0, least - scratch))
        return tuple(room // page_bytes for room in rooms)

    def least_bytes(self, pages: int, largest: int, page_bytes: int) -> int | None:
        """Fewest bytes of all devices, in the proportions of their budgets and with scratch, in which lists of
        ``pages`` pages, none of more than ``largest``, find room in whatever order they are placed; None: no bytes
        do."""

        def holds(total: int) -> bool:
            rooms = self.within(split_bytes(total, self.budgets)).capacity_pages(page_bytes)
            if len(rooms) == 1:
                return rooms[0] >= pages
            # While a list finds no room, every device has less than its pages free.
            return sum(max(0, room - largest + 1) for room in rooms) >= pages

        if not pages:
            return 0
        if not self.scannable or not any(self.budgets):
            return None
        low, high = 0, pages * page_bytes
        while not holds(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def to_data(self) -> dict[str, Any]:
        """JSON-able."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["budgets"] = list(self.budgets)
        data["scratch"] = list(self.scratch)
        if not self.code_bytes:
            del data["code_bytes"]  # as requests of rows always were
        if not self.centroid_bytes:
            del data["centroid_bytes"]
        if self.row_cache_bytes is None:
            del data["row_cache_bytes"]
        if self.llm is not None:
            llm = {f.name: getattr(self.llm, f.name) for f in dataclasses.fields(self.llm)}
            llm["points"] = [list(point) for point in self.llm.points]
            llm["generation_s"] = dict(self.llm.generation_s)
            data["llm"] = llm
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> PlanRequest:
        """Inverse of :meth:`to_data`."""
        # Plans of before 0.3 had no margin, and were decided with the held-back queries themselves.
        values = {"hit_rate_model": "best", "headroom": 0.0, **data}
        values["budgets"] = tuple(int(b) for b in values["budgets"])
        values["scratch"] = tuple(int(b) for b in values["scratch"])
        if values["llm"] is not None:
            llm = dict(values["llm"])
            llm["points"] = tuple((int(kv), float(rps)) for kv, rps in llm["points"])
            values["llm"] = LLMProfile(**llm)
        return cls(**values)


def split_bytes(total: int, budgets: Sequence[int]) -> tuple[int, ...]:
    """``total`` bytes over the devices, in proportion to ``budgets``."""
    whole = max(1, sum(budgets))
    return tuple(total * budget // whole for budget in budgets)


def check_batch(batch: int) -> None:
    """Refuse what is no batch size.

    Raises:
        InvalidInputError: ``batch`` is no integer >= 1.
    """
    if not _integral(batch) or batch < 1:
        raise InvalidInputError(f"batch is {batch!r}; give an integer >= 1: a batch has at least 1 query")


# Callers' values may be of any type, whatever the annotations say.


def _finite(value: Any) -> bool:
    """An integer above all floats is not."""
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def _positive(value: Any) -> bool:
    return _finite(value) and bool(value > 0)


def _integral(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral)


def _scratch(budgets: Sequence[int], code_bytes: int, fixed_bytes: int, centroid_bytes: int) -> tuple[int, ...]:
    """Of each device: what is no room for lists. The first one has the centroids."""
    shares = [centroid_share(budgets[0], centroid_bytes)] + [0] * (len(budgets) - 1)
    return tuple(
        scratch_for_budget(budget, code_bytes) + fixed_bytes + share
        for budget, share in zip(budgets, shares, strict=True)
    )


def _per_device(name: str, value: Any, n_devices: int) -> tuple[int, ...]:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        values = tuple(value)
        if len(values) != n_devices:
            raise InvalidInputError(f"{name} has {len(values)} entries; n_devices is {n_devices}: give one per device")
    else:
        values = (value,) * int(n_devices)
    for v in values:
        if not _finite(v) or int(v) != v or v < 0:
            raise InvalidInputError(f"{name} is {value!r}; give whole bytes >= 0: one number, or one per device")
    return tuple(int(v) for v in values)
