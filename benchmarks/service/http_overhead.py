"""What HTTP adds: binary searches of a daemon in its own process against ``router.search`` in this one.

Latency: batch 1, one connection, sides interleaved; the target is at most 1 ms more at the median. Beside it: the unix
socket, JSON, and a client that is nothing but ``http.client``, which tells the daemon's share from httpx's.

Throughput: 16 callers in a closed loop, nprobe chosen so that one search takes 5 ms or more; the target is 70 % of what
16 threads get from the router in-process. The load generator is a third process
(:mod:`benchmarks.service.http_load`); daemon,
generator and scan share the machine's cores, the in-process side has no generator to share with. What the generator
takes, what a request costs the daemon in CPU time where there is next to nothing to scan, and how large the router's
batches are on either side stand beside the ratio: a busy machine distorts those less.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import Timing, arguments, interleave, show, write
from benchmarks.common.serving import shipped_daemon

_DIM = 128
_RAW = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vectors", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--seconds", type=float, default=3.0, help="per saturated round")
    parser.add_argument("--callers", type=int, default=16)


def bare_search(port: int, nprobe: int) -> Callable[[bytes], bytes]:
    """A search over one kept connection of the standard library."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    path = f"/v1/search?k=10&nprobe={nprobe}"

    def search(body: bytes) -> bytes:
        connection.request("POST", path, body, _RAW)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        return content

    return search


def closed_loop(search: Callable[[int], Any], callers: int, seconds: float) -> float:
    """Requests per second that ``callers`` threads get, each with its own number."""
    counts = [0] * callers
    ends = time.perf_counter() + seconds

    def call(number: int) -> None:
        while time.perf_counter() < ends:
            search(number)
            counts[number] += 1

    threads = [threading.Thread(target=call, args=(i,)) for i in range(callers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


def _queries(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((n, _DIM)).astype(np.float32)


def _generated(port: int, nprobe: int, callers: int, seconds: float) -> dict[str, float]:
    """What :mod:`benchmarks.service.http_load` printed."""
    options = {"--port": port, "--nprobe": nprobe, "--dim": _DIM, "--callers": callers, "--seconds": seconds}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "benchmarks.service.http_load", *words]
    found: dict[str, float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _mean_batch(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Queries per batch between two readings of a router's counters."""
    return float((after["queries"] - before["queries"]) / max(1, after["batches"] - before["batches"]))


def saturate(router: Any, port: int, nprobe: int, callers: int, seconds: float) -> list[dict[str, float]]:
    """Rounds of both sides, in an order that changes: requests per second and mean batch of each."""
    from hybridindex.client import Client

    own = _queries(callers, 2)
    rounds = []
    with Client(f"http://127.0.0.1:{port}") as client:

        def inside() -> dict[str, float]:
            before = asdict(router.stats())
            rate = closed_loop(lambda i: router.search(own[i : i + 1], 10, nprobe), callers, seconds)
            return {"in-process": rate, "batch in-process": _mean_batch(before, asdict(router.stats()))}

        def outside() -> dict[str, float]:
            before = client.status()["router"]
            load = _generated(port, nprobe, callers, seconds)
            batch = _mean_batch(before, client.status()["router"])
            return {"daemon": load["requests_per_s"], "batch daemon": batch, "generator cores": load["cpu"]}

        for number in range(3):
            sides = (inside, outside) if number % 2 else (outside, inside)
            rounds.append({name: value for side in sides for name, value in side().items()})
    return rounds


def latencies(router: Any, unix: str, port: int, nprobe: int, repeats: int) -> dict[str, Timing]:
    from hybridindex.answer_codec import decode_answer
    from hybridindex.client import Client

    query = _queries(1, 1)
    body, as_json = query.tobytes(), json.dumps({"queries": query.tolist(), "k": 10, "nprobe": nprobe})
    bare = bare_search(port, nprobe)
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def json_search() -> bytes:
        connection.request("POST", "/v1/search", as_json, {"content-type": "application/json"})
        return connection.getresponse().read()

    with Client(f"http://127.0.0.1:{port}") as tcp, Client(unix) as local:
        expected = router.search(query, 10, nprobe).ids
        for found in (decode_answer(bare(body)), tcp.search(query, 10, nprobe), local.search(query, 10, nprobe)):
            assert np.array_equal(found.ids, expected), "answers differ"
        assert json.loads(json_search())["ids"] == expected.tolist()
        return interleave(
            {
                "in-process": lambda: router.search(query, 10, nprobe),
                "in-process again": lambda: router.search(query, 10, nprobe),
                "router.submit": lambda: router.submit(query, 10, nprobe).result(),
                "client, loopback": lambda: tcp.search(query, 10, nprobe),
                "client, unix socket": lambda: local.search(query, 10, nprobe),
                "http.client, loopback": lambda: bare(body),
                "http.client, JSON": json_search,
            },
            repeats=repeats,
            calls=8,
        )


def main() -> None:
    args = arguments(__doc__, _options)
    import hybridindex as hx

    nlist = 256
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idx"
        vectors = _queries(args.vectors, 0)
        with (
            hx.build(vectors, path, nlist=nlist, metric="l2", nprobe=8) as index,
            index.router() as router,
            shipped_daemon(path, "--uds", f"{folder}/socket") as (pid, (unix, tcp)),
        ):
            port = int(tcp.rsplit(":", 1)[1])
            timed = latencies(router, unix, port, 8, args.repeats)
            # Everything is probed: an index of this size takes 5 ms for that on a few cores.
            heavy = nlist
            query = _queries(1, 1)
            alone = interleave({"one": lambda: router.search(query, 10, heavy)}, repeats=21)["one"].median
            rounds = saturate(router, port, heavy, args.callers, args.seconds)
            cpu_s = _cpu_s(pid)
            cheap = _generated(port, 1, args.callers, args.seconds)
            request_us = (_cpu_s(pid) - cpu_s) / cheap["n_requests"] * 1e6
    base = timed["in-process"]
    rows = []
    for name, timing in timed.items():
        extra = np.percentile(np.array(timing.seconds) - np.array(base.seconds), [25, 50, 75]) * 1e6
        rows.append({"side": name, "p50_us": timing.median * 1e6, "extra_us": extra[1], "quartiles_us": list(extra)})
    show(
        "batch 1, nprobe 8: added to router.search",
        ("side", "p50 us", "extra us", "quartiles"),
        [
            (r["side"], r["p50_us"], r["extra_us"], f"{r['quartiles_us'][0]:.0f}..{r['quartiles_us'][2]:.0f}")
            for r in rows
        ],
    )
    ratios = [r["daemon"] / r["in-process"] for r in rounds]
    show(
        f"{args.callers} callers, nprobe {heavy}, one search alone {alone * 1e3:.1f} ms, {os.cpu_count()} cores",
        ("in-process/s", "daemon/s", "ratio", "batch in-process", "batch daemon", "generator cores"),
        [
            (r["in-process"], r["daemon"], ratio, r["batch in-process"], r["batch daemon"], r["generator cores"])
            for r, ratio in zip(rounds, ratios, strict=True)
        ],
    )
    print(f"a request with nprobe 1 takes {request_us:.0f} us of the daemon's CPU time, its search included")
    extra_ms = next(r["extra_us"] for r in rows if r["side"] == "client, loopback") / 1e3
    print(f"added p50 {extra_ms:.2f} ms (at most 1: {extra_ms <= 1}); ratio {np.median(ratios):.2f} (at least 0.7)")
    results = {"rows": rows, "saturated": rounds, "ratios": ratios, "alone_ms": alone * 1e3, "nlist": nlist}
    results["request_cpu_us"] = request_us
    write(args.json, "http_overhead", results)


if __name__ == "__main__":
    main()
