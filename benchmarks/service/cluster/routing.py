"""What a search pays because a node answers it: with all lists on that node, and with all of them on another one."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.common.measure import Timing, interleave, show
from benchmarks.common.quota import pinned
from benchmarks.common.serving import shipped_daemon
from benchmarks.service.cluster.nodes import Nodes, Workload, mixed_queries, until
from hybridindex.answer_codec import ANSWER_TYPE, decode_answer
from hybridindex.api import open_index
from hybridindex.cluster.node_process import NodeProcess, NodeSpec
from hybridindex.cluster.nodes.calls import NodeCalls
from hybridindex.cluster.router import ClusterRouter
from hybridindex.config import RouterConfig
from hybridindex.index.opening import open_index as open_ivf
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.router.remote.cluster_map import ClusterMap, MapNode
from hybridindex.router.remote.remote_lists import RemoteLists
from hybridindex.service.auth import KeyFile, Role, new_key
from hybridindex.types import F32

__all__ = ["measure_costs", "measure_routing"]

_K = 10


def _searcher(url: str, key: str, nprobe: int) -> Callable[[bytes], bytes]:
    """Over one connection of the standard library, which stays open."""
    address = urlsplit(url).netloc
    connection = http.client.HTTPConnection(address)
    headers = {
        "content-type": "application/octet-stream", "accept": ANSWER_TYPE, "authorization": f"Bearer {key}",
    }  # fmt: skip

    def search(body: bytes) -> bytes:
        connection.request("POST", f"/v1/search?k={_K}&nprobe={nprobe}", body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise AssertionError(f"{url} answered {answer.status}: {content[:300]!r}")
        return content

    return search


def _map(workload: Workload, cluster: str, urls: dict[str, str], holder: int) -> ClusterMap:
    """One node holds all lists."""
    with open_index(workload.path) as index:
        ivf = index.ivf
        return ClusterMap(
            cluster=cluster,
            version=1,
            fingerprint=ivf.fingerprint,
            generation=ivf.generation,
            nodes=tuple(MapNode(name=name, url=url) for name, url in urls.items()),
            holders=np.full(ivf.nlist, 1 << holder, dtype=np.uint64),
            replicas=1,
        )


def _hold_all(calls: NodeCalls, nlist: int) -> None:
    calls.hold(np.ones(nlist, dtype=np.bool_), None)

    def ended() -> bool:
        job = calls.node()["holding"]
        if job["error"]:
            raise SystemExit(f"the node could not take its lists: {job['error']}")
        return not job["running"]

    until(ended, 300.0)


class _Rotating:
    """Calls a side with one query after the other; both sides see the same ones."""

    def __init__(self, call: Callable[[Any], object], queries: list[Any]) -> None:
        self._call, self._queries, self._at = call, queries, 0

    def __call__(self) -> None:
        self._call(self._queries[self._at % len(self._queries)])
        self._at += 1


def _rows(nprobe: int, timed: dict[str, Timing], pairs: dict[str, str]) -> list[dict[str, Any]]:
    """Each side, and what it takes beyond the one that it is compared with, round by round."""
    rows = []
    for name, timing in timed.items():
        row: dict[str, Any] = {"nprobe": nprobe, "side": name, "p50_us": 1e6 * timing.median}
        if base := pairs.get(name):
            extra = 1e6 * (np.array(timing.seconds) - np.array(timed[base].seconds))
            low, middle, high = np.percentile(extra, [25, 50, 75])
            row |= {"beyond": base, "extra_us": float(middle), "extra_quartiles_us": [float(low), float(high)]}
        rows.append(row)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sides:
    """Two nodes, one with all lists and one with none, and routers of this process."""

    full: NodeProcess
    empty: NodeProcess
    key: str
    #: Of the whole index; and one whose lists are all on ``full``.
    here: Router
    there: Router
    #: (256, d).
    queries: F32


@contextmanager
def _sides(workload: Workload, folder: Path, threads: int | None = None) -> Iterator[_Sides]:
    """``threads``: that scan, of each; None: the default."""
    options = () if threads is None else ("--threads", str(threads))
    key = new_key()
    with ExitStack() as stack:
        nodes = {}
        for name in ("full", "empty"):
            spec = NodeSpec(
                name=name, index=str(workload.path), data=str(folder / name), memory_bytes=2 * workload.index_bytes,
                key=key, options=options,
            )  # fmt: skip
            nodes[name] = NodeProcess(spec)
            stack.callback(nodes[name].close)
        map_ = _map(workload, "routing", {name: node.url for name, node in nodes.items()}, 0)
        calls = {name: NodeCalls(node.url, key) for name, node in nodes.items()}
        _hold_all(calls["full"], workload.nlist)
        for each in calls.values():
            each.apply(map_)
        share = folder / "asking"
        create_share(share, FolderSource(workload.path))
        index = stack.enter_context(open_index(workload.path))
        here = stack.enter_context(index.router(config=RouterConfig(threads=threads)))
        asking = open_ivf(share)
        stack.callback(asking.close)
        remote = RemoteLists(asking, "asking", key=key)
        stack.callback(remote.close)
        there = Router(asking, remote=remote)
        stack.callback(there.close)
        remote.apply(map_)
        until(lambda: all(peer["state"] == "up" for peer in remote.status()), 30.0)
        until(lambda: all(peer["state"] == "up" for peer in calls["empty"].node()["peers"]), 30.0)
        queries = mixed_queries(workload.centres, 256, seed=9)
        yield _Sides(full=nodes["full"], empty=nodes["empty"], key=key, here=here, there=there, queries=queries)


def measure_routing(workload: Workload, folder: Path, *, repeats: int) -> dict[str, Any]:
    """Batch 1. A node with all lists against a daemon over the whole index; a node with none of them against the one
    that has them all; and the same hop without a daemon in front, from a router in this process."""
    folder = folder / "routing"
    keys = folder / "keys.json"
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    with _sides(workload, folder) as sides:
        KeyFile(keys).add_known("cluster", Role.ADMIN, sides.key)
        with shipped_daemon(workload.path, "--keys", str(keys), "--no-write") as (_, (plain,)):
            for nprobe in (workload.nprobe, min(8 * workload.nprobe, workload.nlist)):
                rows += _compared(nprobe, plain, sides, repeats)
        costs = _costs(sides, workload, workload.nprobe, repeats)
    show(
        "batch 1: what a node adds, and what a hop over the loopback adds",
        ("nprobe", "side", "p50 us", "beyond", "extra us", "quartiles"),
        [
            (r["nprobe"], r["side"], r["p50_us"], r.get("beyond", ""), r.get("extra_us", ""),
             "..".join(f"{v:.0f}" for v in r.get("extra_quartiles_us", [])))
            for r in rows
        ],
    )  # fmt: skip
    request = costs["request"]
    show(
        "processor time of the messages of one search, both processes",
        ("queries", "searches", "us", "range"),
        [(r["queries"], r["searches"], r["messages_us"], "..".join(f"{v:.0f}" for v in r["messages_range_us"]))
         for r in costs["processor"]],
    )  # fmt: skip
    show(
        "a search over HTTP of lists that the node holds, on a core of its own, beyond that search: processor time of "
        f"the node, and the rest; a hop from there takes {costs['pinned_hop_us']:.0f} us more",
        ("searches", "us", "range", "rest of the latency us"),
        [
            (request["searches"], request["request_us"], "..".join(f"{v:.0f}" for v in request["request_range_us"]),
             request["client_us"])
        ],
    )  # fmt: skip
    return {"rows": rows, **costs, "repeats": repeats}


def measure_costs(
    workload: Workload, folder: Path, alone: Nodes, nprobes: Sequence[int], *, repeats: int
) -> dict[int, dict[str, Any]]:
    """What requests and messages take of nodes with one thread, for each of ``nprobes``: ``processor``, ``request`` and
    ``pinned_hop_us`` of :func:`measure_routing`. After a long scan the same code takes longer: no cache holds it.

    And ``alone``: as ``request``, of a cluster of one node, whose clients have no node to choose.
    """
    pids = [process.pid for process in alone.processes.values()]
    with _sides(workload, folder, threads=1) as sides, pinned(pids), alone.router() as client:
        return {
            nprobe: _costs(sides, workload, nprobe, repeats, sizes=(1,))
            | {"alone": _request(sides.here, client, pids[0], nprobe, sides.queries, repeats)}
            for nprobe in nprobes
        }


def _costs(
    sides: _Sides, workload: Workload, nprobe: int, repeats: int, sizes: Sequence[int] = (1, 16, 64)
) -> dict[str, Any]:
    """``sizes``: queries of the searches whose messages are measured."""
    full, queries = sides.full, sides.queries
    processor = _processor(sides.here, sides.there, full.pid, nprobe, queries, repeats, sizes)
    # As the nodes of a forecast.
    with (
        pinned([full.pid, sides.empty.pid]),
        ClusterRouter({"full": full.url}, dim=workload.dim, key=sides.key) as client,
    ):
        request = _request(sides.here, client, full.pid, nprobe, queries, repeats)
        hop_us = _hop(sides.key, full.url, sides.empty.url, nprobe, queries, repeats)
    return {"processor": processor, "request": request, "pinned_hop_us": hop_us}


def _hop(key: str, full: str, empty: str, nprobe: int, queries: F32, repeats: int) -> float:
    """Median of what a search takes longer where the node that is asked has to ask the other one."""
    bodies = [query.tobytes() for query in queries]
    sides: dict[str, Callable[[], object]] = {
        name: _Rotating(_searcher(url, key, nprobe), bodies) for name, url in (("full", full), ("empty", empty))
    }
    timed = interleave(sides, repeats=repeats, calls=8)
    return float(1e6 * np.median(np.array(timed["empty"].seconds) - np.array(timed["full"].seconds)))


def _request(here: Router, client: ClusterRouter, node: int, nprobe: int, queries: F32, repeats: int) -> dict[str, Any]:
    """Of a search of one query that a node has all lists of, beyond the same search in this process: processor time of
    the node, whose process is ``node``; and the rest of the median latency."""
    calls, beyond, latencies = 8 * repeats, [], []
    singles = [query[None] for query in queries]

    def timed(search: Callable[[F32], object]) -> float:
        """Median seconds of one."""
        taken = []
        for i in range(calls):
            began = time.perf_counter()
            search(singles[i % len(singles)])
            taken.append(time.perf_counter() - began)
        return float(np.median(taken))

    timed(lambda query: client.search(query, _K, nprobe))
    for _ in range(5):
        its = _spent_s(node)
        over = timed(lambda query: client.search(query, _K, nprobe))
        its, own = _spent_s(node) - its, time.process_time()
        over -= timed(lambda query: here.search(query, _K, nprobe))
        beyond.append(1e6 * (its - (time.process_time() - own)) / calls)
        latencies.append(1e6 * over)
    request_us = float(np.median(beyond))
    return {
        "searches": calls,
        "request_us": request_us,
        "request_range_us": [min(beyond), max(beyond)],
        "client_us": float(np.median(latencies)) - request_us,
    }


def _processor(
    here: Router, there: Router, node: int, nprobe: int, queries: F32, repeats: int, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Processor time of a search with all lists on another node, in both processes, beyond that of the same search
    here: what the messages cost. ``node``: id of its process."""
    rows = []
    for n in sizes:
        batch, calls = queries[:n], max(1, 8 * repeats // n)
        beyond, asking = [], []
        for _ in range(5):
            spent = {}
            for name, router in (("here", here), ("there", there)):
                own, its = time.process_time(), _spent_s(node)
                for _ in range(calls):
                    router.search(batch, _K, nprobe)
                spent[name] = time.process_time() - own, _spent_s(node) - its
            asking.append(1e6 * spent["there"][0] / calls)
            beyond.append(1e6 * (sum(spent["there"]) - spent["here"][0]) / calls)
        rows.append(
            {
                "queries": n,
                "searches": calls,
                "asking_us": float(np.median(asking)),
                "messages_us": float(np.median(beyond)),
                "messages_range_us": [min(beyond), max(beyond)],
            }
        )
    return rows


def _spent_s(pid: int) -> float:
    """Processor time of a process and its threads so far."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has just ended
            spent += int((thread / "schedstat").read_text().split()[0])
    return 1e-9 * spent


def _compared(nprobe: int, plain: str, sides: _Sides, repeats: int) -> list[dict[str, Any]]:
    full, empty, key = sides.full.url, sides.empty.url, sides.key
    here, router, queries = sides.here, sides.there, sides.queries
    expected = here.search(queries, _K, nprobe).ids
    bodies = [query.tobytes() for query in queries]
    searchers = {
        "daemon": _searcher(plain, key, nprobe),
        "daemon again": _searcher(plain, key, nprobe),
        "node, all lists here": _searcher(full, key, nprobe),
        "node, all lists there": _searcher(empty, key, nprobe),
    }
    for name, search in searchers.items():
        for i, body in enumerate(bodies[:64]):
            if not np.array_equal(decode_answer(search(body)).ids[0], expected[i]):
                raise AssertionError(f"{name}: the answer differs")
    if not np.array_equal(router.search(queries, _K, nprobe).ids, expected):
        raise AssertionError("the answers of the router over another node differ")
    singles = [query[None] for query in queries]
    calls: dict[str, Callable[[], object]] = {name: _Rotating(each, bodies) for name, each in searchers.items()}
    calls |= {
        "router": _Rotating(lambda query: here.search(query, _K, nprobe), singles),
        "router again": _Rotating(lambda query: here.search(query, _K, nprobe), singles),
        "router, all lists there": _Rotating(lambda query: router.search(query, _K, nprobe), singles),
    }
    timed = interleave(calls, repeats=repeats, calls=8)
    pairs = {
        "daemon again": "daemon",
        "node, all lists here": "daemon",
        "node, all lists there": "node, all lists here",
        "router again": "router",
        "router, all lists there": "router",
    }
    return _rows(nprobe, timed, pairs)
