"""What HTTP adds: binary searches of a daemon in its own process against ``router.search`` in this one.

Latency: batch 1, one connection, sides interleaved; the target is at most 1 ms more at the median. Beside it: the unix
socket, JSON, and a client that is nothing but ``http.client``, which tells the daemon's share from httpx's.

Throughput: 16 callers in a closed loop, nprobe chosen so that one search takes 5 ms or more; the target is 70 % of what
16 threads get from the router in-process. The load generator is a third process; daemon, generator and scan share the
machine's cores, the in-process side has no generator to share with.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Timing, arguments, interleave, show, write

_DIM = 128
_RAW = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vectors", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--seconds", type=float, default=3.0, help="per saturated round")
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--generate", nargs=4, metavar=("PORT", "NPROBE", "CALLERS", "SECONDS"), help="internal")


@contextmanager
def daemon(index: Path, uds: Path) -> Iterator[tuple[str, int]]:
    """A daemon on the host alone; gives its unix address and its port."""
    command = [sys.executable, "-m", "hybridindex", "serve", str(index), "--port", "0", "--uds", str(uds), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        unix, tcp = json.loads(process.stdout.readline())["urls"]
        yield unix, int(tcp.rsplit(":", 1)[1])
    finally:
        process.terminate()
        process.wait(60)


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


def generate(port: int, nprobe: int, callers: int, seconds: float) -> None:
    """The load generator's process: prints requests per second."""
    queries = _queries(callers, 2)
    searches = [bare_search(port, nprobe) for _ in range(callers)]
    print(closed_loop(lambda i: searches[i](queries[i].tobytes()), callers, seconds))


def _queries(n: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((n, _DIM)).astype(np.float32)


def _generated(port: int, nprobe: int, callers: int, seconds: float) -> float:
    words = [str(w) for w in (port, nprobe, callers, seconds)]
    command = [sys.executable, "-m", "benchmarks.http_overhead", "--generate", *words]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def latencies(router: Any, unix: str, port: int, nprobe: int, repeats: int) -> dict[str, Timing]:
    from hybridindex.answers import decode_answer
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
    if args.generate is not None:
        port, nprobe, callers, seconds = args.generate
        generate(int(port), int(nprobe), int(callers), float(seconds))
        return
    import hybridindex as hx

    nlist = 256
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "idx"
        vectors = _queries(args.vectors, 0)
        with (
            hx.build(vectors, path, nlist=nlist, metric="l2", nprobe=8) as index,
            index.router() as router,
            daemon(path, Path(folder) / "socket") as (unix, port),
        ):
            timed = latencies(router, unix, port, 8, args.repeats)
            # Everything is probed: an index of this size takes 5 ms for that on a few cores.
            heavy = nlist
            query = _queries(1, 1)
            alone = interleave({"one": lambda: router.search(query, 10, heavy)}, repeats=21)["one"].median
            own = _queries(args.callers, 2)
            rounds = []
            for number in range(3):
                sides = {
                    "in-process": lambda: closed_loop(
                        lambda i: router.search(own[i : i + 1], 10, heavy), args.callers, args.seconds
                    ),
                    "daemon": lambda: _generated(port, heavy, args.callers, args.seconds),
                }
                order = list(sides) if number % 2 else list(sides)[::-1]
                rounds.append({name: sides[name]() for name in order})
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
        ("in-process/s", "daemon/s", "ratio"),
        [(r["in-process"], r["daemon"], ratio) for r, ratio in zip(rounds, ratios, strict=True)],
    )
    extra_ms = next(r["extra_us"] for r in rows if r["side"] == "client, loopback") / 1e3
    print(f"added p50 {extra_ms:.2f} ms (at most 1: {extra_ms <= 1}); ratio {np.median(ratios):.2f} (at least 0.7)")
    results = {"rows": rows, "saturated": rounds, "ratios": ratios, "alone_ms": alone * 1e3, "nlist": nlist}
    write(args.json, "http_overhead", results)


if __name__ == "__main__":
    main()
