"""Small clustered data and indexes for the tests of tiers, router and command line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

import hybridindex as hx
from hybridindex.index import build, from_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.paging import DEFAULT_PAGE_BYTES, PageGeometry, scratch_for_budget
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.planner import devices_of, plan_index
from hybridindex.plans.replan import PlanChanges
from hybridindex.tiers.serving import tier_of
from hybridindex.types import F32, I64, Metric, Profile

DIM = 24
NLIST = 32


def clustered(n: int, dim: int = DIM, *, n_centers: int = 60, seed: int = 0, offset: float = 0.0) -> F32:
    """(n, dim) float32 around ``n_centers`` centers with a Zipf-like popularity; the same centers for every seed."""
    centers = np.random.default_rng(99).standard_normal((n_centers, dim))
    popularity = 1 / np.arange(1, n_centers + 1)
    rng = np.random.default_rng(seed)
    chosen = rng.choice(n_centers, size=n, p=popularity / popularity.sum())
    return (centers[chosen] + 0.6 * rng.standard_normal((n, dim)) + offset).astype(np.float32)


def share_of_ids(share: float, seed: int = 0, n: int = 3000) -> I64:
    """About so many of the ids of :func:`small_index`, at random."""
    chosen: I64 = np.flatnonzero(np.random.default_rng(seed).random(n) < share)
    return chosen


def page_bytes_of(index, most: int | None = None) -> int:
    """Of a page of arenas. ``most``: what a plan says; None: of a router without one."""
    most = tier_of(index, "cpu").page_bytes if most is None else most
    return PageGeometry.for_code_size(index.page_row_bytes, most, group_rows=index.group_rows).page_bytes


def plan_in_pages(index: hx.Index, profile: Profile, page_bytes: int, budget: int, coverage: float) -> Plan:
    """As :meth:`hybridindex.Index.plan` makes it, but for pages of at most ``page_bytes`` bytes: so were all plans of
    rows made in earlier versions, with 64 KiB."""
    changes = PlanChanges(slo_ms=50, device_budget_bytes=budget, coverage=coverage)
    return plan_index(index.ivf, profile, changes, devices_of(index.ivf, 1, page_bytes=page_bytes))


def small_index(
    path: Path,
    *,
    codec: str = "flat",
    metric: Metric = "l2",
    n: int = 3000,
    dim: int = DIM,
    nlist: int = NLIST,
    **options,
) -> IVFIndex:
    """An index over :func:`clustered` data; nprobe 8. ``codec`` "faiss:SQ4": an import of that faiss index."""
    options.setdefault("nprobe", min(8, nlist))
    if codec.startswith("faiss:"):
        import faiss

        code = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        made = faiss.index_factory(dim, f"IVF{nlist},{codec.removeprefix('faiss:')}", code)
        data = clustered(n, dim, seed=1)
        made.train(data)
        made.add(data)
        return from_faiss(made, path, **options)
    return build(clustered(n, dim, seed=1), path, nlist=nlist, metric=metric, codec=codec, **options)


def hand_made_plan(
    index: IVFIndex,
    list_device: np.ndarray,
    *,
    row_device: np.ndarray | None = None,
    n_devices: int = 1,
    budget: int = 64 << 20,
) -> Plan:
    """What the router reads of a plan, with a placement chosen by the test; ``row_device``: of rows beside codes."""
    resident: I64 = np.flatnonzero(list_device >= 0)
    rows = np.full(len(list_device), -1) if row_device is None else row_device
    plan = SimpleNamespace(
        index_fingerprint=index.fingerprint,
        n_devices=n_devices,
        feasible=True,
        nprobe=index.nprobe,
        request=SimpleNamespace(
            budgets=(budget,) * n_devices,
            scratch=(scratch_for_budget(budget),) * n_devices,
            page_bytes=DEFAULT_PAGE_BYTES,
            llm=None,
        ),
        list_device=list_device.astype(np.int16),
        resident_lists=resident,
        row_device=rows.astype(np.int16),
        resident_rows=np.flatnonzero(rows >= 0),
        analysis=SimpleNamespace(profile=SimpleNamespace(access=SimpleNamespace(list_accesses=index.list_sizes * 0.5))),
    )
    return cast("Plan", plan)
