"""Commands of a cluster: start, status, plan, repartition, apply, add-node, drain, restart, search, stop."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hybridindex.cli.console import (
    CliProgress,
    ExitCode,
    emit,
    err,
    load_ids,
    load_npy,
    out,
    parse_bytes,
    readable_bytes,
)
from hybridindex.cli.option_groups import grouped
from hybridindex.cli.options import (
    AllowIds,
    BandwidthShare,
    Candidates,
    DenyIds,
    Force,
    IndexPath,
    Json,
    Key,
    Nprobe,
    Where,
)
from hybridindex.cluster import ClusterRequest, NodeOptions, connect, plan_nodes, start
from hybridindex.cluster import stop as stop_cluster

__all__ = ["register"]

Address = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="auto|HOST:PORT",
        help="Address of a running Ray cluster; auto: the one that --local started for this index, or this machine's.",
    ),
]
State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Folder of the cluster's state; default: cluster/ in the index."),
]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as status shows it.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """How lists are placed."""

    memory_per_node: Annotated[
        str, typer.Option("--memory-per-node", metavar="BYTES", help="Memory that lists may take on each node.")
    ] = "auto"
    replicas: Annotated[int, typer.Option("--replicas", help="Fewest nodes that hold each list.", min=1)] = 2
    replicate: Annotated[
        str,
        typer.Option(
            "--replicate",
            metavar="hot|none",
            help="hot: memory beyond the replicas holds the hottest lists on every node. none: it stays free.",
        ),
    ] = "hot"
    refresh_every: Annotated[
        float | None,
        typer.Option(
            "--refresh-every",
            metavar="SECONDS",
            help="Time between two checks whether queries probe other lists now; lists move if that pays. "
            "Default: never.",
        ),
    ] = None

    def memory_bytes(self) -> int:
        """Three quarters of this machine's memory, unless given."""
        if self.memory_per_node != "auto":
            return parse_bytes(self.memory_per_node)
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.75)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOptions:
    """What nodes are started with."""

    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Folder on each machine for the shares; default: in ~/.cache."),
    ] = None
    host: Annotated[
        str,
        typer.Option("--host", help="Address that nodes listen on; auto: each machine's own, as Ray knows it."),
    ] = "127.0.0.1"
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE.pem", help="Certificate of all nodes.")
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE.pem", help="Key of the certificate.")] = (
        None
    )
    tls_ca: Annotated[
        Path | None, typer.Option("--tls-ca", metavar="FILE.pem", help="CA that signed the nodes' certificates.")
    ] = None
    insecure_network: Annotated[
        bool, typer.Option("--insecure-network", help="Let other machines reach nodes without TLS.")
    ] = False
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="OPTIONS", help="More options of hybridindex serve for each node, quoted."),
    ] = None


def register(app: typer.Typer) -> None:
    """Adds the group of this file."""
    group = typer.Typer(
        help="Several machines: lists spread over the nodes of a Ray cluster.",
        no_args_is_help=True,
        add_completion=False,
    )
    app.add_typer(group, name="cluster")

    @group.command(name="start")
    @grouped
    def start_command(
        index: IndexPath,
        placement: PlacementOptions,
        nodes: NodesOptions,
        address: Address = "auto",
        local: Annotated[
            int | None,
            typer.Option("--local", metavar="N", help="Start N nodes on this machine, with a Ray of their own.", min=1),
        ] = None,
        repair_after: Annotated[
            float,
            typer.Option("--repair-after", help="Seconds until the lists of a lost node are copied again.", min=0),
        ] = 10.0,
        copy_rate: Annotated[
            str, typer.Option("--copy-rate", metavar="BYTES", help="Most bytes per second of such copies on each node.")
        ] = "200MiB",
        dry_run: Annotated[
            int | None,
            typer.Option("--dry-run", metavar="N", help="Only show where lists would be placed on N nodes.", min=1),
        ] = None,
        state: State = None,
        json: Json = False,
    ) -> None:
        """Start a node on each machine of a Ray cluster, and spread the lists over them.

        The newest profile of the index says which lists are hot and probed together (hybridindex profile INDEX);
        without one, lists count by their bytes. Searches go to any node, over HTTP: status shows the addresses.

        To try it here: hybridindex cluster start INDEX --local 4 --memory-per-node 1GiB
        """
        request = ClusterRequest(
            replicas=placement.replicas,
            replicate=placement.replicate,  # type: ignore[arg-type]
            repair_after_s=repair_after,
            copy_bytes_per_s=parse_bytes(copy_rate),
            refresh_s=placement.refresh_every,
        )
        memory = placement.memory_bytes()
        if dry_run is not None:
            plan = plan_nodes(index, dry_run, memory, request)
            emit(plan.to_json(), as_json=json, table=plan.explain())
            return
        options = NodeOptions(
            memory_bytes=memory,
            data=nodes.data or _cache(),
            host=nodes.host,
            tls_cert=nodes.tls_cert,
            tls_key=nodes.tls_key,
            tls_ca=nodes.tls_ca,
            insecure_network=nodes.insecure_network,
            serve=tuple(shlex.split(nodes.serve or "")),
        )
        with CliProgress(quiet=not err.is_terminal) as progress:
            told = _told(progress)
            cluster = start(
                index, address=address, local=local, request=request, nodes=options, folder=state, progress=told
            )
        with cluster:
            status = cluster.status()
            emit(status, as_json=json, table=_table(status))
            if not json:
                out.print(cluster.plan()["explanation"])

    @group.command()
    def status(index: IndexPath, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """Show nodes, who holds what, and what is missing."""
        with connect(index, address=address, folder=state) as cluster:
            said = cluster.status()
            emit(said, as_json=json, table=_table(said))

    @group.command()
    def plan(index: IndexPath, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """Show where lists would be placed now, why, and how much would move; changes nothing."""
        with connect(index, address=address, folder=state) as cluster:
            said = cluster.plan()
            emit(said, as_json=json, table=_moves(said))

    @group.command()
    def repartition(index: IndexPath, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """Place lists anew by the newest profile, and move the difference, while nodes serve."""
        with connect(index, address=address, folder=state) as cluster, _progress() as progress:
            done = cluster.repartition(progress)
        emit(done, as_json=json, table=_moved(done))

    @group.command(name="apply")
    def apply_command(
        index: IndexPath,
        plan: Annotated[str, typer.Option("--plan", help="Plan id, or 'latest'.")] = "latest",
        force: Force = False,
        bandwidth_share: BandwidthShare = None,
        address: Address = "auto",
        state: State = None,
        json: Json = False,
    ) -> None:
        """Make a stored plan the current one; one node after the other moves its devices' lists, and serves meanwhile.

        Exit status 8 if a node could not take the plan; the others did.
        """
        with connect(index, address=address, folder=state) as cluster, _progress() as progress:
            done = cluster.apply_plan(plan, progress, force=force, bandwidth_share=bandwidth_share)
        emit(done, as_json=json, table=_applied(done))
        if any(node["problem"] for node in done["nodes"]):
            raise typer.Exit(ExitCode.SERVICE)

    @group.command(name="add-node")
    def add_node(index: IndexPath, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """Start one more node, and move lists to it."""
        with connect(index, address=address, folder=state) as cluster, _progress() as progress:
            done = cluster.add_node(progress)
        emit(done, as_json=json, table=_moved(done))

    @group.command()
    def drain(index: IndexPath, node: Node, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """Move the lists of a node to the others, and end it."""
        with connect(index, address=address, folder=state) as cluster, _progress() as progress:
            done = cluster.drain(node, progress)
        emit(done, as_json=json, table=_moved(done))

    @group.command()
    def restart(
        index: IndexPath,
        node: Annotated[
            str | None, typer.Argument(metavar="NODE", help="One node only; default: all.", show_default=False)
        ] = None,
        force: Annotated[
            bool,
            typer.Option(
                "--force", help="Restart even if some lists are on one node only: searches miss them meanwhile."
            ),
        ] = False,
        address: Address = "auto",
        state: State = None,
        json: Json = False,
    ) -> None:
        """Restart nodes, one after the other, while the others answer.

        They then use attributes and codes that the index has got since they started. A restart of all nodes also hands
        them the plan that was applied last.
        """
        with connect(index, address=address, folder=state) as cluster, _progress() as progress:
            done = cluster.restart(node, progress, force=force)
        emit(done, as_json=json, table=f"restarted: {', '.join(done['nodes'])}")

    @group.command()
    def search(
        index: IndexPath,
        queries: Annotated[Path, typer.Option("--queries", "-q", metavar="FILE.npy", help="Queries, (n, d).")],
        k: Annotated[int, typer.Option("-k", help="Neighbours per query.", min=1)] = 10,
        nprobe: Nprobe = None,
        candidates: Candidates = None,
        allow_partial: Annotated[
            float | None,
            typer.Option("--allow-partial", help="Least fraction of a query's work that an answer may rest on, 0..1."),
        ] = None,
        allow_ids: AllowIds = None,
        deny_ids: DenyIds = None,
        where: Where = None,
        address: Annotated[
            str,
            typer.Option("--address", help="Address of Ray, or http(s)://host:port of any node, which needs no Ray."),
        ] = "auto",
        key: Key = None,
        ca: Annotated[
            Path | None, typer.Option("--tls-ca", metavar="FILE.pem", help="CA that signed the nodes' certificates.")
        ] = None,
        state: State = None,
        json: Json = False,
    ) -> None:
        """Search a cluster, to try it."""
        asked = load_npy(queries, "queries")
        allowed = None if allow_ids is None else load_ids(allow_ids, "--allow-ids")
        denied = None if deny_ids is None else load_ids(deny_ids, "--deny-ids")
        with connect(index, address=address, key=key, ca=ca, folder=state) as cluster, cluster.router() as router:
            router.wait_until_known()
            found = router.search(
                asked,
                k,
                nprobe,
                candidates=candidates,
                allow_partial=allow_partial,
                allow_ids=allowed,
                deny_ids=denied,
                where=where,
            )
        payload: dict[str, Any] = {
            "ids": found.ids.tolist(),
            "distances": found.distances.tolist(),
            "coverage": None if found.coverage is None else found.coverage.tolist(),
        }
        table = Table("query", "ids", "coverage", title=f"{len(found.ids)} queries")
        for row, ids in enumerate(found.ids[:20].tolist()):
            part = "all" if found.coverage is None else f"{found.coverage[row]:.3f}"
            table.add_row(str(row), " ".join(map(str, ids)), part)
        emit(payload, as_json=json, table=table)

    @group.command()
    def stop(index: IndexPath, address: Address = "auto", state: State = None, json: Json = False) -> None:
        """End the nodes and the manager, and the Ray that --local started. Shares stay on disk for the next start."""
        stop_cluster(index, address=address, folder=state)
        emit({"stopped": True}, as_json=json, table="the cluster has ended")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridindex" / "nodes"


def _told(progress: CliProgress) -> Any:
    def told(words: str, done: int | None, total: int | None) -> None:
        progress(words, (done or 0) >> 20, None if total is None else max(1, total >> 20))

    return told


@contextmanager
def _progress() -> Iterator[Any]:
    with CliProgress(quiet=not sys.stderr.isatty()) as progress:
        yield _told(progress)


def _table(status: dict[str, Any]) -> Table:
    words = f"{status['cluster']}: generation {status['generation']}, {status['nlist']} lists, "
    words += f"{readable_bytes(status['index_bytes'])}, {status['replicas']} replicas, map {status['map_version']}"
    table = Table("node", "state", "lists", "bytes", "of", "url", title=words)
    for node in status["nodes"]:
        state = f"{node['state']}, drained" if node["drains"] else node["state"]
        table.add_row(
            node["name"], state, str(node["lists"]), readable_bytes(node["bytes"]),
            readable_bytes(node["memory_bytes"]), node["url"],
        )  # fmt: skip
    below, nobody = status["lists_below_replicas"], status["lists_of_nobody"]
    if below or nobody:
        table.caption = f"{below} lists have too few replicas; {nobody} have none that answers"
    of_nodes = [f"node {node['name']}: {node['problem']}" for node in status["nodes"] if node["problem"]]
    for words in dict.fromkeys(filter(None, [status["problem"], *of_nodes])):
        table.caption = f"{table.caption or ''}\n{words}".strip()
    return table


def _applied(done: dict[str, Any]) -> Table:
    table = Table("node", "plan", "lists moved", "bytes", "no room for", "problem")
    for node in done["nodes"]:
        if node["problem"]:
            table.add_row(node["name"], "", "", "", "", node["problem"])
            continue
        table.add_row(
            node["name"], str(node["plan_id"]), str(node["moved_lists"]), readable_bytes(node["moved_bytes"]),
            str(node["unplaced_lists"]), "",
        )  # fmt: skip
    return table


def _moves(said: dict[str, Any]) -> str:
    take, drop = readable_bytes(said["take_bytes"]), readable_bytes(said["drop_bytes"])
    return f"{said['explanation']}\n\n{said['changed_lists']} lists would change: {take} to copy, {drop} to give up"


def _moved(done: dict[str, Any]) -> str:
    taken, dropped = readable_bytes(done["taken_bytes"]), readable_bytes(done["dropped_bytes"])
    return f"{done['explanation']}\n\n{done['changed_lists']} lists changed: {taken} copied, {dropped} given up"
