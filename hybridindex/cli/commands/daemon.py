"""Commands around a running daemon: status, repartition, apply, reload, drain; and keys.

All but ``keys`` talk to a running daemon: the one of the index directory, or the one at ``--url``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.live import Live
from rich.table import Table

import hybridindex as hx
from hybridindex.cli.console import ExitCode, emit, err, out, parse_bytes, readable_bytes, require_store, to_json
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import BandwidthShare, Force, Json, Key, RowCache, StoreUrl
from hybridindex.cli.proposal_table import proposal_table, proposal_words
from hybridindex.client.client import Client
from hybridindex.errors import InvalidInputError, StoreError, UnreachableError
from hybridindex.index.storage.generation import require_directory
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import apply_offline, current_plan_id
from hybridindex.plans.precision import choose_view, view_of
from hybridindex.plans.replan import ALL_IN_MEMORY, SOLVE, PlanChanges
from hybridindex.plans.stored import load_plan
from hybridindex.service.auth import KeyFile
from hybridindex.service.daemon_address import find_daemon
from hybridindex.store.control import ControlStore

__all__ = ["register"]

Index = Annotated[Path | None, typer.Argument(metavar="INDEX", help="Index directory.", show_default=False)]
Url = Annotated[
    str | None,
    typer.Option("--url", help="http://host:port or unix:/path; default: the daemon of the index.", show_default=False),
]
KeyPath = Annotated[Path, typer.Argument(metavar="FILE", help="Key file.", show_default=False)]
#: Longest time of a call that changes no plan.
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """What the next plan is asked for."""

    slo_ms: Annotated[float | None, typer.Option("--slo-ms", help="SLO; default: the current plan's.")] = None
    budget: Annotated[list[str] | None, typer.Option("--budget", help="Bytes per device.")] = None
    rate: Annotated[float | None, typer.Option("--rate", help="Requests per second to sustain.")] = None
    coverage: Annotated[
        str | None, typer.Option(metavar="FRACTION|solve", help="Fraction of lists on devices, or solve for it again.")
    ] = None
    hit_rate_model: Annotated[
        str | None, typer.Option(help="Hit-rate model: beta, beta-binomial, empirical or best.")
    ] = None
    headroom: Annotated[
        float | None, typer.Option(help="Fraction of the rate and of the SLO that search must have to spare.")
    ] = None

    row_cache: RowCache = None

    def changes(self) -> PlanChanges:
        """Raises InvalidInputError where ``coverage`` is no number."""
        budgets = [parse_bytes(b) for b in self.budget or ()]
        coverage: float | Literal["solve"] | None = None
        try:
            if self.coverage is not None:
                coverage = SOLVE if self.coverage == SOLVE else float(self.coverage)
        except ValueError:
            expected = f"expected a fraction of lists, or {SOLVE!r}"
            raise InvalidInputError(f"--coverage is {self.coverage!r}; {expected}") from None
        return PlanChanges(
            slo_ms=self.slo_ms,
            device_budget_bytes=budgets[0] if len(budgets) == 1 else budgets or None,
            rate_qps=self.rate,
            coverage=coverage,
            hit_rate_model=self.hit_rate_model and self.hit_rate_model.replace("-", "_"),  # type: ignore[arg-type]
            headroom=self.headroom,
            row_cache_bytes=None if self.row_cache is None else read_row_cache(self.row_cache),
        )


def read_row_cache(given: str) -> int | Literal["all"]:
    """Of ``--row-cache``. Raises InvalidInputError where it is no number of bytes."""
    return ALL_IN_MEMORY if given == ALL_IN_MEMORY else parse_bytes(given)


def _connect(index: Path | None, url: str | None, key: str | None) -> Client:
    """Raises UnreachableError where the index has no daemon."""
    if url is not None:
        return Client(url, key=key, timeout_s=_TIMEOUT_S)
    if index is None:
        raise InvalidInputError("INDEX and --url are both missing; expected an index directory or an address")
    found = find_daemon(index)
    if found is None or not found.urls:
        require_directory(index)
        raise UnreachableError(f"no daemon serves {index}; start one with: hybridindex serve {index}")
    return Client(found.urls[0], key=key, index=found.index, timeout_s=_TIMEOUT_S)


def _status_table(status: dict[str, Any]) -> Table:
    index, queue, router = status["index"], status["queue"], status["router"]
    state = "draining" if status["draining"] else "ready" if status["ready"] else "warming up"
    table = Table(title=f"{index['codec']}, {index['count']:,} x {index['dim']}: {state}", show_header=False)
    slo = "none" if status["slo_ms"] is None else f"{status['slo_ms']:g} ms"
    table.add_row("plan, SLO", f"{status['plan_id'] or 'none'}, {slo}")
    table.add_row("hit rate", f"{router['hit_rate']:.1%}{_expected(status)}")
    mean = router["queries"] / max(1, router["batches"])
    table.add_row("queries", f"{router['queries']:,} in {router['batches']:,} batches (mean {mean:.1f})")
    refused = ", ".join(f"{name} {count}" for name, count in queue["refused"].items() if count) or "none"
    if precision := index.get("precision"):  # a daemon of 0.2 has none
        table.add_row("scans", f"{precision}; rows on disk" if index.get("rows") == "mapped" else precision)
    table.add_row("queue", f"{queue['waiting']} of {queue['limit']} waiting, {queue['in_flight']} in flight")
    table.add_row("refused", refused)
    table.add_row("sessions", f"{status['sessions']['open']} open, {status['sessions']['expired']} expired")
    whole, beside = index.get("list_bytes"), status["residency"].get("rows")  # a daemon of 0.2 has none
    of = "" if whole is None or beside else f" of {readable_bytes(whole)}"
    of += f" with the rows of {beside:,} lists" if beside else ""
    for tier in status["devices"]:
        words = "failed" if tier["failed"] else tier["disabled_reason"] or "works"
        moved = f"{readable_bytes(tier['resident_bytes'])}{of} resident, {readable_bytes(tier['moved_bytes'])} moved"
        table.add_row(tier["name"], f"{words}; {moved}")
    if follows := status["refresher"]:
        ended = ", ".join(f"{count} {outcome}" for outcome, count in follows["updates"].items()) or "none yet"
        words = f"{follows['drift_state']}, {follows['queries_kept']:,} queries kept; updates: {ended}"
        table.add_row("refresh", words if follows["stage"] == "idle" else f"{follows['stage']}; {words}")
    if note := status.get("note"):
        table.add_row("note", note)
    if reloads := status.get("reload"):  # a daemon of 0.2 has none
        table.add_row("index", _reloads(index["generation"], reloads))
    if changes := status.get("changes"):  # a daemon of 0.2 has none
        table.add_row("rows", _rows(changes))
    table.add_row("fallbacks", f"{router['device_fallbacks']}, {router['unplaced_lists']} lists unplaced")
    return table


def _expected(status: dict[str, Any]) -> str:
    """By the lists that are on devices, and by the plan where it wants others."""
    expected, planned = status["expected_hit_rate"], status.get("planned_hit_rate")  # a daemon of 0.2 has one of them
    if expected is None:
        return ""
    beside = "" if planned in (None, expected) else f"; with all lists of the plan {planned:.1%}"
    return f" (expected {expected:.1%}{beside})"


def _show(answer: dict[str, Any], *, as_json: bool) -> None:
    """Raises Exit with status 10 where the SLO is not met by what is placed."""
    emit(answer, as_json=as_json, table=proposal_table(answer))
    if not as_json:
        for sentence in proposal_words(answer):
            out.print(sentence, highlight=False, soft_wrap=True)
    if answer["placed"]["verdict"] == "infeasible":
        raise typer.Exit(ExitCode.INFEASIBLE)


def _rows(changes: dict[str, Any]) -> str:
    words = [f"{changes['live']:,} live; since the lists were written {changes['added']:,} added"]
    words[0] += f", {changes['deleted']:,} deleted"
    words[0] += f" ({changes['changed_share']:.1%})"
    words.append(f"change {changes['number']:,}, log {readable_bytes(changes['log_bytes'])}")
    shaped = f" ({changes['split']} lists split, {changes['dissolved']} dissolved)" if changes["compactions"] else ""
    words.append(f"{changes['compactions']} compactions{shaped}")
    words.append("writing" if changes["writer"] else "may write" if changes["writes"] else "accepts no changes")
    return "; ".join([*words, *([changes["problem"]] if changes["problem"] else [])])


def _reloads(generation: int, found: dict[str, Any]) -> str:
    words = [f"generation {generation}, reload {found['mode']}: {found['done']} done, {found['failed']} failed"]
    if found["under_way"]:
        words.append("one in progress")
    if found["last_error"]:
        words.append(found["last_error"])
    words += [f"{old['sessions']} session(s) still use generation {old['generation']}" for old in found["retired"]]
    return "; ".join(words)


#: (index, store, plan in force) -> a plan, and its id where it is stored.
_Decide = Callable[[hx.Index, ControlStore, Plan | None], tuple[Plan, int | None]]


def _offline(
    index: Path, store: str | None, decide: _Decide, bandwidth_share: float | None, *, apply: bool, force: bool
) -> dict[str, Any]:
    """A daemon's answer, against the control store and empty devices: what the next daemon would load."""
    from hybridindex.plans.proposal import Served, propose
    from hybridindex.tiers.contract.copy_queue import check_share

    share = 1.0 if bandwidth_share is None else bandwidth_share
    check_share(share)
    require_store(store)
    if bandwidth_share is not None:
        err.print("no daemon runs: --bandwidth-share only affects the predicted duration of the move", highlight=False)
    with hx.open(index, verify="quick") as opened, opened.store(store) as control:
        view = choose_view(opened.ivf, control)
        serves = current_plan_id(control, view.fingerprint) is not None
        try:
            found = load_plan(view, "current", control) if serves else None
        except StoreError as error:  # its row is damaged; another one may take its place
            err.print(f"the current plan is ignored: {error}", highlight=False)
            found = None
        current = None if found is None else found[1]
        plan, plan_id = decide(opened, control, current)
        if current is not None and current.index_fingerprint != plan.index_fingerprint:
            err.print("the current plan is of the other precision: it is not compared", highlight=False)
            current = None
        served = Served.nowhere(current, opened.nlist)
        proposal = propose(plan, current, served, reason="requested", bandwidth_share=share)
        if apply:
            of = view_of(opened.ivf, plan.index_fingerprint) or view
            plan_id = apply_offline(of, control, plan if plan_id is None else plan_id, force=force)
    known = {"applied": apply, "plan_id": plan_id, "unplaced_lists": None, "update": None}
    err.print("no daemon runs; compared with empty devices", highlight=False)
    answer: dict[str, Any] = to_json({**proposal.to_data(), **known})
    return answer


def register(app: typer.Typer) -> None:
    """Adds the commands of this file."""

    @app.command()
    def status(
        index: Index = None,
        url: Url = None,
        key: Key = None,
        watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second (on a terminal).")] = False,
        json: Json = False,
    ) -> None:
        """Show what a running daemon serves, where lists are and what waits. Exit status 8 if none answers."""
        with _connect(index, url, key) as client:
            found = client.status()
            if json or not (watch and out.is_terminal):
                emit(found, as_json=json, table=_status_table(found))
                return
            with Live(_status_table(found), console=out) as live:
                while True:
                    time.sleep(1)
                    live.update(_status_table(client.status()))

    @app.command()
    @grouped
    def repartition(
        index: Index = None,
        apply: Annotated[
            bool, typer.Option("--apply", help="Apply the plan; otherwise only show what would change.")
        ] = False,
        force: Force = False,
        *,
        asked: TargetOptions,
        bandwidth_share: BandwidthShare = None,
        url: Url = None,
        key: Key = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Plan anew: what is on devices now, what is planned, what fits. --apply moves lists while searches go on.

        Without a running daemon, the plan is for the next one (and with --apply becomes the current plan). Exit status
        10 if the SLO cannot be met: such a plan is applied only with --force. Options that are not given keep their
        values; --coverage solve ends a fixed coverage.
        """
        changes = asked.changes()

        def decide(opened: hx.Index, control: ControlStore, current: Plan | None) -> tuple[Plan, None]:
            from hybridindex.plans.planner import devices_of, plan_next

            view = choose_view(opened.ivf, control)
            devices = devices_of(view, 1 if current is None else current.n_devices)
            return plan_next(view, control, current, changes, devices), None

        if url is None and index is not None and find_daemon(index) is None:
            answer = _offline(index, store, decide, bandwidth_share, apply=apply, force=force)
        else:
            with _connect(index, url, key) as client:
                answer = client.repartition(
                    apply=apply, force=force or None, bandwidth_share=bandwidth_share, **changes.given()
                )
        _show(answer, as_json=json)

    @app.command(name="apply")
    @grouped
    def apply_(
        index: Index = None,
        plan: Annotated[str, typer.Option("--plan", help="Plan id, or 'latest'.")] = "latest",
        force: Force = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
        *,
        bandwidth_share: BandwidthShare = None,
        url: Url = None,
        key: Key = None,
        store: StoreUrl = None,
        json: Json = False,
    ) -> None:
        """Make a stored plan the current one; a running daemon moves its lists, the next daemon resumes it.

        Exit status 10 if the plan cannot meet its SLO; such a plan is applied only with --force.
        """

        def decide(opened: hx.Index, control: ControlStore, _current: Plan | None) -> tuple[Plan, int]:
            found = load_plan(choose_view(opened.ivf, control, plan), plan, control)
            if found is None:
                raise InvalidInputError("--plan is 'none'; expected a plan id or 'latest'")
            return found[1], found[0]

        if url is None and index is not None and (store is not None or find_daemon(index) is None):
            answer = _offline(index, store, decide, bandwidth_share, apply=not dry_run, force=force)
        else:
            with _connect(index, url, key) as client:
                answer = client.apply_plan(plan, dry_run=dry_run, force=force or None, bandwidth_share=bandwidth_share)
        _show(answer, as_json=json)

    @app.command()
    def reload(index: Index = None, url: Url = None, key: Key = None, json: Json = False) -> None:
        """Make a running daemon serve the current generation of its index, while searches go on.

        Use it after build or import with --replace, or rollback. If that generation cannot serve, the previous one
        continues and the exit status is 8. A daemon that started without a plan takes up one made since.
        """
        with _connect(index, url, key) as client:
            answer = client.reload()
        before, now = answer["generation_before"], answer["generation"]
        if answer["reloaded"]:
            plan = "no plan" if answer["plan_id"] is None else f"plan {answer['plan_id']}, {answer['plan_origin']}"
            place = "with its devices" if now == before else f"in place of {before}"
            words = f"generation {now} serves, {place}; {plan}"
        else:
            words = f"generation {now} serves already"
        emit(answer, as_json=json, table=words + (f"; {answer['note']}" if answer["note"] else ""))

    @app.command()
    def drain(
        index: Index = None,
        url: Url = None,
        key: Key = None,
        json: Json = False,
    ) -> None:
        """Stop a running daemon after it has answered its requests."""
        with _connect(index, url, key) as client:
            client.drain()
        emit({"draining": True}, as_json=json, table="draining")

    _register_keys(app)


def _register_keys(app: typer.Typer) -> None:
    keys = typer.Typer(help="API keys of a daemon.", no_args_is_help=True, add_completion=False)
    app.add_typer(keys, name="keys")

    @keys.command()
    def add(
        file: KeyPath,
        name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.", show_default=False)],
        role: Annotated[
            str, typer.Option(help="search; write: also change rows; admin: also plans and the daemon.")
        ] = "search",
        json: Json = False,
    ) -> None:
        """Make a key. It is shown once; the file stores its hash."""
        key = KeyFile(file).add(name, role)
        emit({"name": name, "role": role, "key": key}, as_json=json)
        if not json:
            # Alone on standard output, so that it can be piped into a secret store.
            typer.echo(key)

    @keys.command(name="list")
    def list_(file: KeyPath, json: Json = False) -> None:
        """List names, roles and dates."""
        found = KeyFile(file).read()
        table = Table("name", "role", "made")
        for key in found:
            table.add_row(key.name, key.role, key.created_at)
        entries = [{"name": k.name, "role": str(k.role), "created_at": k.created_at} for k in found]
        emit({"keys": entries}, as_json=json, table=table)

    @keys.command()
    def revoke(
        file: KeyPath,
        name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key.", show_default=False)],
        json: Json = False,
    ) -> None:
        """Revoke a key. A running daemon notices at its next request."""
        keys = KeyFile(file)
        keys.read()  # refuses a file that is not there
        keys.revoke(name)
        emit({"revoked": name}, as_json=json, table=f"revoked {name}")
