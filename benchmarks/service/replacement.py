"""A served index is replaced again and again under load: does a search fail, does an answer mix two generations?

Two contents, with ids that tell them apart, each with a stored plan. A daemon with the stand-in device serves one.
Clients search, alone and in sessions with lookahead, some of which outlast a replacement; they send nothing twice. Each
replacement writes the other content beside the one that serves and reloads the daemon. Every answer is compared with
what a router over one content alone answers. Latencies are compared with those of the same daemon without replacements.
Load generator and daemon share the cores.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import hybridindex as hx
from benchmarks.common.measure import arguments, environment, show, write
from benchmarks.common.serving import daemon, sorted_clusters
from hybridindex.client.client import Client
from hybridindex.client.retry import RetryPolicy
from hybridindex.errors import HybridIndexError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import make_current
from hybridindex.types import F32, SearchResult

DIM, NLIST, NPROBE, K = 64, 256, 16, 10
#: Ids of the second content begin here.
SECOND = 1_000_000
BUDGET = 16 << 20
#: Every so many turns of a client are a session of a lookahead and some searches.
SESSION_EVERY = 8
#: Searches of a session of the first client; those of others have two.
LONG_SESSION = 200


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replacements", type=int, default=20)
    parser.add_argument("--vectors", type=int, default=100_000, help="of each content")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--quiet-s", type=float, default=15.0, help="seconds of load without replacements")


def make(path: Path, number: int, vectors: int, queries: F32) -> SearchResult:
    """One content with its profile and plan; and its answers to ``queries``."""
    rows = sorted_clusters(vectors, DIM, n_centres=200, seed=1 + number)
    ids = np.arange(vectors) + number * SECOND
    with hx.build(rows, path, nlist=NLIST, metric="l2", nprobe=NPROBE, ids=ids) as index:
        profile = index.profile(sorted_clusters(400, DIM, n_centres=50, seed=9), NPROBE, devices=["cpu"], max_seconds=2)
        assert profile.id is not None
        with index.store() as store:
            plan = index.plan(50, BUDGET, profile, coverage=0.3)
            make_current(store, plan, store.save_plan(plan.to_record(), profile.id), verified=False, why="benchmark")
        with index.router() as router:
            return router.search(queries, K)


@dataclass(slots=True)
class Tally:
    """What the clients of one side saw; each list is appended to by any of them."""

    seconds: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    #: By content; the last one counts answers that are of neither.
    answers: list[int] = field(default_factory=lambda: [0, 0, 0])
    sessions: int = 0
    #: Sessions whose searches were answered from two generations.
    split_sessions: int = 0
    failures: list[str] = field(default_factory=list)


class Clients:
    """Threads that search until :meth:`stop`."""

    def __init__(self, port: int, n: int, queries: F32, truths: list[SearchResult]) -> None:
        self._port, self._queries, self._truths = port, queries, truths
        self._stop, self._lock = threading.Event(), threading.Lock()
        self.tally = Tally()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(n)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Tally:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return self.tally

    def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        with Client(f"http://127.0.0.1:{self._port}", retry=RetryPolicy(attempts=1)) as client:
            turn = number
            while not self._stop.is_set():
                turn += 1
                row = int(rng.integers(len(self._queries)))
                try:
                    if turn % SESSION_EVERY:
                        self._search(client, row)
                    else:
                        self._session(client, row, searches=2 if number else LONG_SESSION)
                except HybridIndexError as error:
                    with self._lock:
                        self.tally.failures.append(repr(error))

    def _session(self, client: Client, row: int, searches: int) -> None:
        with client.session(lookahead_bytes=1 << 20) as session:
            session.lookahead(self._queries[row])
            seen = {self._search(session, row) for _ in range(searches)}
        with self._lock:
            self.tally.sessions += 1
            self.tally.split_sessions += len(seen) > 1

    def _search(self, searched: Any, row: int) -> int:
        began = time.perf_counter()
        found = searched.search(self._queries[row], K)
        ended = time.perf_counter()
        content = self._content(found, row)
        with self._lock:
            self.tally.seconds.append(ended - began)
            self.tally.at_s.append(began)
            self.tally.answers[content] += 1
        return content

    def _content(self, found: SearchResult, row: int) -> int:
        """Which content answered; 2: neither alone."""
        for content, truth in enumerate(self._truths):
            near = np.allclose(found.distances[0], truth.distances[row], rtol=2e-4)
            # Equal distances may be in another order.
            if near and set(found.ids[0].tolist()) == set(truth.ids[row].tolist()):
                return content
        return 2


def _percentiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{p}_ms": float(np.percentile(seconds, p) * 1e3) for p in (50, 90, 99, 100)}


def main() -> None:
    args = arguments(__doc__ or "", _options)
    queries = sorted_clusters(500, DIM, n_centres=50, seed=3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truths = [make(folder / f"content-{number}", number, args.vectors, queries) for number in (0, 1)]
        path = folder / "served"
        contents = [hx.open(folder / f"content-{number}") for number in (0, 1)]
        # The store that both plans are in.
        contents[0].save(path).close()
        with contents[1].store() as other, contents[0].store(str(path / "control.sqlite")) as store:
            profile = store.save_profile(other.load_profile(1))
            assert profile.id is not None
            plan = Plan.from_record(other.load_plan(1).record, profile)
            make_current(store, plan, store.save_plan(plan.to_record(), profile.id), verified=False, why="benchmark")
        with daemon(path, "--device", "cpu", "--threads", "1") as (_, port):
            quiet = Clients(port, args.clients, queries, truths)
            time.sleep(args.quiet_s)
            without = quiet.stop()
            loaded = Clients(port, args.clients, queries, truths)
            spans, answers = [], []
            try:
                with Client(f"http://127.0.0.1:{port}", timeout_s=120) as admin:
                    for number in range(args.replacements):
                        contents[(number + 1) % 2].save(path, replace=True, plans=False).close()
                        began = time.perf_counter()
                        answers.append(admin.reload())
                        spans.append((began, time.perf_counter()))
                    status = admin.status()
            finally:
                with_them = loaded.stop()
        left = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("gen-"))
        for content in contents:
            content.close()
    at = np.array(with_them.at_s)
    during = np.zeros(len(at), dtype=bool)
    for began, ended in spans:
        during |= (at >= began) & (at <= ended)
    reload_s = [ended - began for began, ended in spans]
    seconds = np.array(with_them.seconds)
    summary = {
        "replacements": len(answers),
        "replacements that took effect, with the plan of their content on the device": sum(
            answer["reloaded"] and answer["plan_origin"] == "stored" and not answer["note"] for answer in answers
        ),
        "searches": len(seconds),
        "failed": len(with_them.failures) + len(without.failures),
        "answers from a mixture": with_them.answers[2] + without.answers[2],
        "answers by content": with_them.answers[:2],
        "searches that began during a reload": int(during.sum()),
        "sessions": with_them.sessions,
        "sessions answered from two generations": with_them.split_sessions,
        "reload_s, median and longest": [float(np.median(reload_s)), float(max(reload_s))],
        "generations on disk at the end": left,
    }
    latencies = {
        "no replacement": _percentiles(without.seconds),
        "replacements, outside of reloads": _percentiles(seconds[~during].tolist()),
        "replacements, during reloads": _percentiles(seconds[during].tolist()),
    }
    show("replacement of a served index", ("what", "value"), [*summary.items(), *environment().items()])
    rows = [(when, *percentiles.values()) for when, percentiles in latencies.items()]
    show("latency of a search, ms", ("when", "p50", "p90", "p99", "max"), rows)
    write(
        args.json,
        "replacement",
        {
            "device": "cpu (stand-in)",
            "vectors": args.vectors,
            "dim": DIM,
            "clients": args.clients,
            "summary": summary,
            "latencies": latencies,
            "reload_s": reload_s,
            "failures": with_them.failures[:20] + without.failures[:20],
            "status": status["reload"],
        },
    )
    if summary["failed"] or summary["answers from a mixture"] or with_them.split_sessions:
        raise SystemExit("a search failed, or an answer was of two generations")


if __name__ == "__main__":
    main()
