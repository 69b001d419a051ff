"""Commands about profiles and plans of this machine: profile, plan, divide, explain, history, prune, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.table import Table

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.cli.commands import what_if
from hybridindex.cli.commands.llm import chosen_llm, profile_group
from hybridindex.cli.console import (
    CliProgress,
    ExitCode,
    emit,
    err,
    load_npy,
    out,
    parse_bytes,
    readable_bytes,
    to_json,
)
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import (
    IndexPath,
    Json,
    KeepEvents,
    KeepPlans,
    KeepProfiles,
    Key,
    MachineOptions,
    PlanOptions,
    Precision,
    QueriesPath,
    Rows,
    StoreUrl,
    WhatIfOptions,
)
from hybridindex.cli.routers import profile_to_plan
from hybridindex.cli.scale_out import ClusterOptions
from hybridindex.client.client import Client
from hybridindex.errors import HybridIndexError, InvalidInputError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.benches import latest_benches
from hybridindex.plans.current import current_plan_id
from hybridindex.plans.precision import choose_view, precision_of, stored_history, views_of
from hybridindex.plans.replan import ALL_IN_MEMORY
from hybridindex.plans.stored import MOST_DIGITS, load_plan, plan_summary
from hybridindex.service.daemon_address import find_daemon
from hybridindex.store.control import ControlStore
from hybridindex.store.records import StoredEvent
from hybridindex.store.retention import Retention
from hybridindex.types import LLMProfile, Profile

__all__ = ["index_info", "register"]

#: Defaults of ``prune``.
_KEPT = Retention()


def profile_summary(profile: Profile) -> dict[str, Any]:
    """What ``profile`` answers."""
    from hybridindex.profiler.access import sample_size_error, skew_summary

    return {
        "profile_id": profile.id,
        "nprobe": profile.nprobe,
        "k": profile.k,
        "codec": profile.codec,
        "scanner": profile.scanner,
        "threads": profile.threads,
        "omp_wait_policy": profile.omp_wait_policy,
        "hardware": profile.hardware.fingerprint,
        "recall": [{"nprobe": p.nprobe, "recall": p.recall, "ndcg": p.ndcg} for p in profile.recall],
        "skew": skew_summary(profile),
        "sample_size": sample_size_error(profile.access, profile.list_bytes),
        "latencies": _latencies(profile),
        "samples": len(profile.stages),
        "transfers": len(profile.transfers),
        "notes": dict(profile.notes),
    }


def _latencies(profile: Profile) -> list[dict[str, Any]]:
    """Medians of what was timed, by stage, device and batch size. Scans on the host: those of all lists, and exact
    distances of all candidates. Whole batches: by the part of the lists that were on devices."""
    timed: dict[tuple[str, str, float, int], list[float]] = {}
    for sample in profile.stages:
        if sample.stage in ("host_scan", "rerank", "row_faults") and sample.coverage > 0:
            continue
        coverage = sample.coverage if sample.stage == "batch" else 0.0
        timed.setdefault((sample.stage, sample.device, coverage, sample.batch), []).append(sample.seconds)
    return [
        {"stage": stage, "device": device, "coverage": coverage, "batch": batch, "median_ms": 1e3 * median(seconds)}
        for (stage, device, coverage, batch), seconds in sorted(timed.items())
    ]


def _stage_words(stage: str, device: str, coverage: float) -> str:
    if stage == "batch":
        return f"whole batch, {f'{coverage:.0%} of lists on {device}' if coverage else 'host alone'}"
    return f"{stage.replace('_', ' ')}{f', {device}' if device else ''}"


def _profile_table(summary: dict[str, Any]) -> Table:
    table = Table(title=f"profile {summary['profile_id']}", show_header=False)
    table.add_row("nprobe", f"{summary['nprobe']} (k {summary['k']})")
    table.add_row("host scanner", f"{summary['scanner']}, {summary['threads']} threads")
    if codes := summary["notes"].get("codes"):
        bits = f"{codes['bits']} bit{'s' if codes['bits'] > 1 else ''}"
        table.add_row("scans", f"codes, {bits}, {codes['candidates']:,} candidates; rerank: their exact distances")
    table.add_row("OMP_WAIT_POLICY", summary["omp_wait_policy"])
    for row in summary["skew"]:
        table.add_row(
            f"hottest {row['lists']:.0%} of lists",
            f"{row['accesses_held']:.0%} of accesses, {row['work_held']:.0%} of bytes (held-out queries)",
        )
    for size in summary["sample_size"]:
        table.add_row(
            f"{size['fraction']:.1%} of the sample",
            f"{size['n_queries']} queries: hot lists lose {size['order_loss']:.3f} of the hit rate, "
            f"curve off by {size['curve_error']:.3f}",
        )
    for point in summary["recall"]:
        table.add_row(f"recall at nprobe {point['nprobe']}", f"{point['recall']:.3f} (NDCG {point['ndcg']:.3f})")
    stages: dict[str, list[str]] = {}
    for timed in summary["latencies"]:
        words = _stage_words(timed["stage"], timed["device"], timed["coverage"])
        stages.setdefault(words, []).append(f"{timed['batch']}: {timed['median_ms']:.3g}")
    for words, medians in stages.items():
        table.add_row(words, f"median ms by batch size: {', '.join(medians)}")
    table.add_row("timed runs", f"{summary['samples']} stages, {summary['transfers']} transfers")
    return table


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""
    measuring = profile_group(app)

    @measuring.command(name="index")
    @grouped
    def profile(
        index: IndexPath,
        queries: QueriesPath,
        nprobe: Annotated[int | None, typer.Option(help="Lists per query; default: the index's.", min=1)] = None,
        recall: Annotated[float | None, typer.Option(help="Choose the smallest nprobe with this recall@k.")] = None,
        k: Annotated[int, typer.Option("-k", help="Neighbours per query.", min=1)] = 10,
        precision: Precision = "auto",
        rows: Rows = "resident",
        max_seconds: Annotated[float, typer.Option(help="Approximate seconds for timing stages.")] = 60.0,
        seed: Annotated[int, typer.Option(help="Seed of the split into halves and of measured batches.")] = 0,
        no_device: Annotated[bool, typer.Option("--no-device", help="Measure only the host.")] = False,
        budget: Annotated[
            str | None, typer.Option(help="Most device memory to use for measuring; default: what the index needs.")
        ] = None,
        *,
        machine: MachineOptions,
    ) -> None:
        """Measure access skew, recall and latencies with calibration queries; store the profile.

        Without --device, the devices of this machine are measured as well: its GPUs, else the stand-in.
        """
        if no_device and machine.device:
            raise InvalidInputError("--device and --no-device are both given; expected only one")
        with hx.open(index) as opened, CliProgress(quiet=machine.json) as progress:
            measured = opened.profile(
                load_npy(queries, "--queries"),
                nprobe,
                precision=precision,  # type: ignore[arg-type]
                rows=rows,  # type: ignore[arg-type]
                recall=recall,
                k=k,
                threads=machine.threads,
                devices=0 if no_device else machine.device,
                device_budget_bytes=None if budget is None else parse_bytes(budget),
                max_seconds=max_seconds,
                seed=seed,
                store_url=machine.store,
                progress=progress,
                checkpoint=index / "profile.checkpoint",
            )
        summary = profile_summary(measured)
        emit(summary, as_json=machine.json, table=_profile_table(summary))

    @app.command()
    @grouped
    def plan(
        index: IndexPath,
        goal: PlanOptions,
        machine: what_if.MachineToSuppose,
        change: WhatIfOptions,
        cluster: ClusterOptions,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Store nothing.")] = False,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Decide which lists to keep on devices; store the plan. Exit status 10 when the SLO cannot be met.

        A stored plan takes effect once apply makes it the current one. With --hardware: predict what another machine
        would do, and store nothing; with --nodes too, how clusters of such machines would search.
        """
        if machine.hardware is not None:
            if goal.row_cache is not None:
                raise InvalidInputError("--row-cache is only for this machine; omit it with --hardware")
            if cluster.nodes is not None:
                what_if.forecast_cluster(index, goal, machine, change, cluster, store, as_json=json)
            else:
                what_if.forecast_machine(index, goal, machine, change, store, as_json=json)
            return
        if (machine, change, cluster) != (what_if.MachineToSuppose(), WhatIfOptions(), ClusterOptions()):
            raise InvalidInputError(
                "--efficiency, --host-speed, --index-scale, --input-tokens, --output-tokens, --nodes and the options "
                "of nodes are for other machines; they require --hardware"
            )
        if not goal.budget:
            raise InvalidInputError("--budget is missing; expected bytes per device, e.g. 2GiB")
        with hx.open(index) as opened, opened.store(store) as control:
            from hybridindex.profiler.hardware import hardware_info

            here = None if goal.any_hardware else hardware_info().fingerprint
            measured = profile_to_plan(opened, control, goal, here)
            llm = chosen_llm(goal.llm, control, here) if goal.llm is not None else None
            decided = _decide(opened, measured, goal, llm, goal.precision)
            beside = _other_precision(opened, control, measured, goal, llm, here)
            assert measured.id is not None
            plan_id = None if dry_run else control.save_plan(decided.to_record(), measured.id)
            serves = newest_current_id(opened, control)
        payload = {"plan_id": plan_id, "profile_id": measured.id, **plan_summary(decided)}
        if beside is not None:
            payload["other_precision"] = {"profile_id": beside.profile_id, **plan_summary(beside)}
        emit(payload, as_json=json)
        if not json:
            out.print("dry run" if plan_id is None else f"plan {plan_id}", style="bold")
            out.print(decided.explain(), highlight=False, soft_wrap=True)
            if beside is not None:
                out.print(_precision_table(decided, beside))
            out.print(
                _what_serves(index, plan_id, serves, forced=not decided.feasible), highlight=False, soft_wrap=True
            )
        if not decided.feasible:
            raise typer.Exit(ExitCode.INFEASIBLE)

    @app.command()
    def divide(
        indexes: Annotated[
            list[str],
            typer.Argument(metavar="INDEX | NAME=INDEX ...", help="Index directories.", show_default=False),
        ],
        budget: Annotated[
            list[str], typer.Option(help="Bytes of a device for all indexes; once for each device.", show_default=False)
        ],
        apply: Annotated[bool, typer.Option("--apply", help="Make each plan the current one.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Apply plans even if they cannot meet their SLO.")] = False,
        precision: Precision = "auto",
        lookahead_bytes: Annotated[
            str, typer.Option(help="Bytes of each device to reserve per index for sessions.")
        ] = "0",
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Divide one device budget between indexes, by what bytes bring to each. Stores nothing without --apply.

        SLO and rate of each are those of its plan that was applied last, else made last. As many SLOs as possible are
        met first; the other bytes go where they reduce latency most. Exit status 10 if an SLO is not met.
        """
        from hybridindex.cli.dividing import divide_indexes, division_table
        from hybridindex.service.settings import Settings
        from hybridindex.service.several.config import indexes_of

        paths = {name: told.path for name, told in indexes_of(indexes, Settings()).items() if told.path is not None}
        found = divide_indexes(
            paths,
            tuple(parse_bytes(nbytes) for nbytes in budget),
            store,
            precision=precision,  # type: ignore[arg-type]
            lookahead_bytes=parse_bytes(lookahead_bytes),
            apply=apply,
            force=force,
        )
        emit(found, as_json=json, table=division_table(found))
        if any(row["verdict"] == "infeasible" for row in found["indexes"]):
            raise typer.Exit(ExitCode.INFEASIBLE)

    @app.command()
    def explain(
        index: IndexPath,
        plan_id: Annotated[
            str,
            typer.Argument(metavar="PLAN", help="Plan id, 'latest', or 'current' (served now, or by the next daemon)."),
        ] = "latest",
        key: Key = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Explain what a plan decided, from what, and what would change it. Asks the index's daemon if one runs."""
        if plan_id not in ("latest", "current") and not (plan_id.isdecimal() and len(plan_id) <= MOST_DIGITS):
            raise InvalidInputError(f"PLAN is {plan_id[:40]!r}; expected a plan id, 'latest' or 'current'")
        with _daemon(index, key, store) as client:
            if client is not None:
                answer = client.plan(None if plan_id == "current" else plan_id)
                payload = {"plan_id": answer["plan_id"], **(answer["plan"] or {}), "explanation": answer["explanation"]}
            else:
                payload = _explain_stored(index, plan_id, store)
        emit(payload, as_json=json)
        if not json:
            out.print(payload["explanation"], highlight=False, soft_wrap=True)

    @app.command()
    def history(index: IndexPath, key: Key = None, store: StoreUrl = None, json: Json = False) -> None:
        """List stored profiles and plans of an index, newest last. Asks the index's daemon if one runs."""
        with _daemon(index, key, store) as client:
            found = to_json(_stored_history(index, store)) if client is None else client.plans()
            word = "applied" if client is None else "serves"
        table = Table("kind", "id", "made", "what")
        gone = found.get("gone", ())  # a daemon of 0.2 has none
        by = {
            made["id"]: ", of removed codes" if made["index_fingerprint"] in gone else ", of codes"
            for made in found["profiles"]
            if made["codec"].startswith("rabitq")
        }
        for made in found["profiles"]:
            what = f"nprobe {made['nprobe']}, {made['threads']} threads{by.get(made['id'], '')}"
            table.add_row("profile", str(made["id"]), made["created_at"][:19], what)
        for kept in found["plans"]:
            table.add_row(
                f"plan, {word}" if kept["id"] == found["current"] else "plan",
                str(kept["id"]),
                kept["created_at"][:19],
                f"{kept['verdict']}, SLO {kept['slo_ms']} ms, coverage {kept['coverage'] or 0:.1%}, "
                f"{readable_bytes(kept['device_bytes'] or 0)} (profile {kept['profile_id']}"
                f"{by.get(kept['profile_id'], '')})",
            )
        emit(found, as_json=json, table=table)

    @app.command()
    def prune(
        index: IndexPath,
        keep_plans: KeepPlans = _KEPT.plans,
        keep_profiles: KeepProfiles = _KEPT.profiles,
        keep_events: KeepEvents = _KEPT.events,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count what would be deleted.")] = False,
        key: Key = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Delete old plans, profiles and events, except what a restart resumes with and all that it refers to."""
        retention = Retention(plans=keep_plans, profiles=keep_profiles, events=keep_events)
        with _daemon(index, key, store) as client:
            served = None if client is None else client.plan()["plan_id"]
        with hx.open(index, verify="quick") as opened, opened.store(store) as control:
            gone = control.prune(retention, keep_plans=() if served is None else (served,), dry_run=dry_run)
        words = "would be deleted" if dry_run else "deleted"
        table = f"{gone.plans:,} plans, {gone.profiles:,} profiles and {gone.events:,} events {words}"
        emit({"dry_run": dry_run, **asdict(gone)}, as_json=json, table=table)

    @app.command()
    def report(
        index: IndexPath,
        output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Output directory.")] = Path(
            "report"
        ),
        plan_id: Annotated[str, typer.Option("--plan", help="Plan id or 'latest'.")] = "latest",
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Report on a profile, a plan and the last bench: one self-contained HTML file and its figures."""
        from hybridindex.report import write_report

        if filesystem.exists(output) and not filesystem.is_dir(output):
            raise InvalidInputError(f"--output is {output}, which is a file; expected a directory")
        with hx.open(index, verify="quick") as opened, opened.store(store) as control:
            view = choose_view(opened.ivf, control, plan_id)
            found = load_plan(view, plan_id, control)
            if found is None:
                raise InvalidInputError("--plan is 'none'; expected a plan id or 'latest'")
            number, decided = found
            benches = latest_benches(control, view.fingerprint, number)
            files = write_report(
                output,
                index_info=index_info(opened),
                profile=decided.analysis.profile,
                plan=decided,
                load=_load_rows(benches, decided.request.slo_ms),
                notes=[f"Load: as bench measured it at {', '.join(b.at[:19] for b in benches)}."] if benches else (),
                devices=[label for bench in benches for label in bench.payload["devices"]],
            )
        emit(
            {"plan_id": number, "html": files.html, "pngs": files.pngs, "csvs": files.csvs},
            as_json=json,
            table=f"wrote {files.html}",
        )


def _other_precision(
    opened: hx.Index,
    control: ControlStore,
    measured: Profile,
    goal: PlanOptions,
    llm: LLMProfile | None,
    here: str | None,
) -> Plan | None:
    """The same question asked of the newest profile of the other precision; None: there is none that can be planned
    from, or one profile was asked for."""
    if goal.row_cache is not None:  # rows that are scanned are in memory
        return None
    others = [view for view in views_of(opened.ivf) if view.fingerprint != measured.index_fingerprint]
    if not others or goal.profile_id is not None or not control.list_profiles(index_fingerprint=others[0].fingerprint):
        return None
    try:
        profile = control.load_profile(index_fingerprint=others[0].fingerprint, hardware_fingerprint=here)
        return _decide(opened, profile, goal, llm, "auto")
    except HybridIndexError as error:
        err.print(f"not compared with a plan of {precision_of(others[0])}: {error}", highlight=False)
        return None


def _decide(opened: hx.Index, measured: Profile, goal: PlanOptions, llm: LLMProfile | None, precision: str) -> Plan:
    budgets, row_cache = [parse_bytes(b) for b in goal.budget or ()], goal.row_cache or ALL_IN_MEMORY
    return opened.plan(
        goal.slo_ms,
        budgets[0] if len(budgets) == 1 else budgets,
        measured,
        precision=precision,  # type: ignore[arg-type]
        rate_qps=goal.rate,
        llm=llm,
        n_devices=goal.n_devices,
        epsilon=goal.epsilon,
        percentile=goal.percentile,
        coverage=goal.coverage,
        slo_stage=goal.slo_stage or "search",  # type: ignore[arg-type]
        hit_rate_model=goal.hit_rate_model,  # type: ignore[arg-type]
        headroom=goal.headroom,
        row_cache_bytes=None if row_cache == ALL_IN_MEMORY else parse_bytes(row_cache),
        allow_other_hardware=goal.any_hardware,
    )


def _precision_table(decided: Plan, beside: Plan) -> Table:
    """The same question, asked of rows and of codes."""
    table = Table(
        "devices hold", "verdict", "device bytes", "lists", "hit rate", "at most", "nprobe", title="precision"
    )
    for plan in sorted((decided, beside), key=lambda plan: plan.bits or 0):
        held = "rows" if plan.bits is None else f"codes, {plan.bits} bit{'s' if plan.bits > 1 else ''}"
        if plan.resident_rows.size:
            parts = plan.bytes_by_precision
            held += f": {readable_bytes(parts['codes'])}, and {readable_bytes(parts['rows'])} of rows"
        table.add_row(
            f"{held}{' (this plan)' if plan is decided else ''}",
            str(plan.verdict),
            readable_bytes(plan.device_bytes),
            f"{plan.coverage:.1%}",
            f"{plan.predicted_hit_rate:.1%}",
            f"{plan.max_sustainable_qps:,.0f}/s",
            str(plan.nprobe),
        )
    return table


def newest_current_id(opened: hx.Index, control: ControlStore) -> int | None:
    """The plan that was applied last, of rows or of codes."""
    return current_plan_id(control, choose_view(opened.ivf, control).fingerprint)


def _what_serves(index: Path, plan_id: int | None, serves: int | None, *, forced: bool) -> str:
    """``serves``: the plan that was applied last."""
    now = "No plan has been applied yet" if serves is None else f"Plan {serves} remains the current one"
    if plan_id is None:
        return f"Nothing was stored. {now}."
    return f"{now}. Apply this one with: hybridindex apply {index} --plan {plan_id}{' --force' if forced else ''}"


@contextmanager
def _daemon(index: Path, key: str | None, store: str | None) -> Iterator[Client | None]:
    """A client of the daemon that serves ``index``; None where none runs, or another store is meant."""
    found = None if store is not None else find_daemon(index)
    if found is None or not found.urls:
        yield None
        return
    with Client(found.urls[0], key=key, index=found.index) as client:
        yield client


def _explain_stored(index: Path, plan_id: str, store: str | None) -> dict[str, Any]:
    with hx.open(index, verify="quick") as opened, opened.store(store) as control:
        found = load_plan(choose_view(opened.ivf, control, plan_id), plan_id, control)
    assert found is not None, "only 'none' is no plan"
    number, decided = found
    return {"plan_id": number, **plan_summary(decided), "explanation": decided.explain()}


def _stored_history(index: Path, store: str | None) -> dict[str, Any]:
    with hx.open(index, verify="quick") as opened, opened.store(store) as control:
        return stored_history(opened.ivf, control, newest_current_id(opened, control))


def _load_rows(benches: Sequence[StoredEvent], slo_ms: float) -> list[dict[str, Any]]:
    """Rows of a report. An attainment of another SLO than the plan's is left out."""
    rows = []
    for bench in benches:
        found = bench.payload
        policy = "host" if found["plan_id"] is None else f"plan {found['plan_id']}"
        for row in found["load"]:
            met = row["attainment"] if found["slo_ms"] == slo_ms else None
            rows.append({**row, "policy": policy, "attainment": met, "device_bytes": found["resident_bytes"]})
    return rows


def index_info(index: hx.Index) -> dict[str, Any]:
    """What reports say about an index; no paths."""
    return {
        "name": index.path.name,
        "count": index.count,
        "dim": index.dim,
        "nlist": index.nlist,
        "codec": index.codec,
        "metric": index.metric,
    }
