"""The command divide: one budget of device bytes between several indexes, without a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import readable_bytes
from hybridindex.config import PrecisionName
from hybridindex.errors import InvalidInputError, ServiceError
from hybridindex.partitioner.decision import refuse_infeasible
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import current_plan_id, make_current, save_plan, stored_as
from hybridindex.plans.division import Divided, Wanted, divide_plans
from hybridindex.plans.precision import choose_view
from hybridindex.plans.stored import load_plan
from hybridindex.service.daemon_address import find_daemon
from hybridindex.store.control import ControlStore

__all__ = ["divide_indexes", "division_table"]


def divide_indexes(
    paths: Mapping[str, Path],
    budgets: tuple[int, ...],
    store: str | None,
    *,
    precision: PrecisionName = "auto",
    lookahead_bytes: int,
    apply: bool,
    force: bool,
) -> dict[str, Any]:
    """What each index gets, with the SLO and rate of the plan that was applied last, or else made last.

    ``precision``: of codes or of rows alone; "auto": of either.

    Raises:
        InvalidInputError: an index without a plan. UnsupportedIndexError: one without codes, which were asked for.
        ServiceError: a daemon serves one that is to be changed.
        InfeasiblePlanError: a plan that cannot keep its SLO was to be applied, without ``force``.
    """
    with contextlib.ExitStack() as owned:
        stores: dict[str, ControlStore] = {}
        wanted: dict[str, Wanted] = {}
        for name, path in paths.items():
            if apply and (daemon := find_daemon(path)) is not None:
                raise ServiceError(f"{daemon} and divides its budget itself; change it with: hybridindex repartition")
            opened = owned.enter_context(hx.open(path, verify="quick"))
            stores[name] = owned.enter_context(opened.store(store))
            wanted[name] = Wanted.by(_plan_of(name, path, opened, stores[name], precision))
        divided = divide_plans(wanted, budgets, lookahead_bytes=lookahead_bytes)
        if apply:
            for part in divided.values():
                refuse_infeasible(part.plan, force=force)
        rows = [_row(name, part, stores[name], apply=apply) for name, part in divided.items()]
    left = [b - sum(row["share_bytes"][device] for row in rows) for device, b in enumerate(budgets)]
    return {"device_budget_bytes": list(budgets), "left_bytes": left, "applied": apply, "indexes": rows}


def _plan_of(name: str, path: Path, opened: hx.Index, store: ControlStore, precision: PrecisionName) -> Plan:
    if precision != "rows":
        opened.ivf.load_codes()  # those that turn out to be damaged have no plans
    view = choose_view(opened.ivf, store, precision=precision)
    choice = "latest" if current_plan_id(store, view.fingerprint) is None else "current"
    if choice == "latest" and store.newest_plan(view.fingerprint) is None:
        raise InvalidInputError(
            f"index {name} has no plan to take SLO and rate from; make one with: hybridindex plan {path}"
        )
    found = load_plan(view, choice, store)
    assert found is not None, "only 'none' is no plan"
    return found[1]


def _row(name: str, part: Divided, store: ControlStore, *, apply: bool) -> dict[str, Any]:
    plan, plan_id = part.plan, stored_as(store, part.plan)
    if apply:
        if plan_id is None:
            plan, plan_id = save_plan(store, plan)
        make_current(store, plan, plan_id, verified=False, why="the device budget was divided by hand")
    response_s = plan.trace[-1].response_s
    return {
        "name": name,
        "share_bytes": list(part.share_bytes),
        "needs_bytes": part.needs_bytes,
        "verdict": str(plan.verdict),
        "slo_ms": plan.request.slo_ms,
        "rate_qps": plan.rate_qps,
        "percentile": plan.request.percentile,
        "response_ms": None if response_s is None else response_s * 1e3,
        "predicted_hit_rate": plan.predicted_hit_rate,
        "n_resident": len(plan.resident_lists),
        "max_sustainable_qps": plan.max_sustainable_qps,
        "plan_id": plan_id,
        "reason": plan.reason,
    }


def division_table(found: Mapping[str, Any]) -> Table:
    """Of :func:`divide_indexes`."""
    budget = " + ".join(readable_bytes(nbytes) for nbytes in found["device_budget_bytes"])
    table = Table(title=f"{budget} between {len(found['indexes'])} indexes{', applied' if found['applied'] else ''}")
    for head in ("index", "share", "needed for SLO", "verdict", "predicted", "hit rate"):
        table.add_column(head)
    for row in found["indexes"]:
        needs, response = row["needs_bytes"], row["response_ms"]
        rate = "one at a time" if row["rate_qps"] is None else f"at {row['rate_qps']:g}/s"
        most = f"at most {row['max_sustainable_qps']:.4g} of {row['rate_qps'] or 0:g}/s"
        table.add_row(
            row["name"],
            " + ".join(readable_bytes(nbytes) for nbytes in row["share_bytes"]),
            "no size suffices" if needs is None else readable_bytes(needs),
            row["verdict"],
            most if response is None else f"p{row['percentile']:g} {response:.3g} of {row['slo_ms']:g} ms {rate}",
            f"{row['predicted_hit_rate']:.1%}",
        )
    return table
