"""What follows from a profile alone: computed once, shared by every plan, curve and picture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import ProfileError
from hybridindex.paging import PageGeometry, usual_page_bytes
from hybridindex.partitioner.models.coverage import CoverageCurve, build_coverage_curve, code_size_of
from hybridindex.partitioner.models.latency import LatencyModel, fit_latency_model
from hybridindex.partitioner.models.validate_hitrate import HitRateValidation, validate_hit_rate_models
from hybridindex.partitioner.request import PlanRequest
from hybridindex.types import Profile

__all__ = ["Analysis", "analyse"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Analysis:
    """Coverage statistics, hit-rate validation and latency fits of one profile."""

    profile: Profile
    curve: CoverageCurve
    hit_rates: HitRateValidation
    latency: LatencyModel

    def configured_for(self, request: PlanRequest) -> Analysis:
        """:meth:`configured` for the devices of ``request`` that can hold a list. Raises as it does."""
        found = self.configured(page_bytes=request.page_bytes, n_devices=1, row_cache_bytes=request.row_cache_bytes)
        room = tuple(pages for pages in request.capacity_pages(found.curve.geometry.page_bytes) if pages > 0)
        latency = dataclasses.replace(found.latency, n_devices=max(1, len(room)), room=room)
        return dataclasses.replace(found, latency=latency)

    def configured(self, *, page_bytes: int, n_devices: int, row_cache_bytes: int | None = None) -> Analysis:
        """The same statistics for another page size, number of devices that have room for all lists, and memory for
        rows; None: all are in memory.

        Raises:
            ProfileError: rows are on disk, and the profile is of rows, or did not measure what reading them takes.
        """
        curve = self.curve
        latency = dataclasses.replace(self.latency, n_devices=n_devices, room=())
        now = curve.geometry
        geometry = PageGeometry.for_code_size(now.code_size, page_bytes, group_rows=now.group_rows)
        if geometry != now:
            pages = geometry.pages_for(self.profile.list_sizes[curve.order])
            prefix = np.concatenate(([0], np.cumsum(pages)))
            curve = dataclasses.replace(
                curve,
                geometry=geometry,
                pages_by_rank=pages,
                prefix_pages=prefix,
                rows=curve.rows and curve.rows.in_pages(geometry.page_bytes),
                cell_cache={},
                touch_cache={},
            )
        if row_cache_bytes is not None:
            self._check_row_cache(row_cache_bytes)
        if curve.rows is not None and (row_cache_bytes is not None or curve.rows.cache is not None):
            curve = dataclasses.replace(curve, rows=curve.rows.with_cache(self.profile, row_cache_bytes))
        return dataclasses.replace(self, latency=latency, curve=curve)

    def _check_row_cache(self, nbytes: int) -> None:
        profile = self.profile
        if profile.bits is None:
            raise ProfileError(
                f"row_cache_bytes is {nbytes}, and the profile is of rows, which searches scan; give a profile of "
                "codes, or no row_cache_bytes"
            )
        if self.curve.rows is not None and self.latency.row_faults is not None:
            return
        why = profile.notes.get("row_faults", {}).get("skipped")
        raise ProfileError(
            f"row_cache_bytes is {nbytes}, and the profile did not measure what reading rows from disk takes"
            f"{f' ({why})' if why else ''}; profile again with rows 'mapped', or give no row_cache_bytes"
        )


def analyse(profile: Profile, *, page_bytes: int | None = None, seed: int = 0) -> Analysis:
    """Fit everything that a plan needs from ``profile``. Deterministic for one profile and seed.

    Args:
        page_bytes: of device pages; None: those of what was profiled.

    Raises:
        ProfileError: too few held-back queries, no ``host_scan`` samples, or arrays that do not fit ``nlist``.
    """
    if page_bytes is None:
        page_bytes = usual_page_bytes(profile.codec, code_size_of(profile), profile.list_sizes)
    curve = build_coverage_curve(profile, page_bytes=page_bytes, seed=seed)
    return Analysis(
        profile=profile,
        curve=curve,
        hit_rates=validate_hit_rate_models(curve),
        latency=fit_latency_model(profile, curve, seed=seed),
    )
