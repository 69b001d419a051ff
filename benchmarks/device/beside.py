"""What another user of the device loses while lists move to it or are scanned on it.

A process beside ours repeats one operation and counts: adding one large tensor to another (bound by memory), a bfloat16
matrix product (bound by arithmetic, as prefill is), or steps as an LLM decodes: a small copy from the host, small
kernels one after another, and a wait for them. It counts in turns: alone, while lists move as fast as lookahead may,
while batches are scanned one after another. Ratios are of neighbouring turns; *alone* against *alone* is the A/A noise.
Target: moving lists costs it 5 % at most. Kernels of two processes take turns at a GPU unless CUDA's MPS serves both,
so that scanning costs the other process the time that our kernels last, whatever they use; an LLM in the same process
would lose less. The results say which it was; :mod:`benchmarks.device.calls.mps` runs this under MPS.

Last, what our own scans lose: their p99 while lists move to the same device as fast as they can, over the p99 of turns
alone. On the stand-in device the other process shares the cores with us, the figures claim nothing, and all of it is
small.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.clusters import import_lists, make_clusters, make_queries
from benchmarks.common.measure import Attempts, arguments, show, write
from benchmarks.device.reclaim import pin_all, reclaim_into
from benchmarks.device.targets import BESIDE_TARGET
from hybridindex.tiers.contract.driver import mps_directory

LOADS = ("decode", "memory", "matmul")
#: Layers of a step of decoding, dimensions of each, and rows in the batch.
_LAYERS, _WIDTH, _ROWS = 16, 2048, 16
#: Scans of one batch that are timed at least in each turn.
_LEAST_SCANS = 20
#: Lists of one lookahead: their order changes with every turn.
_LISTS_A_MOVE = 64
#: Longest wait for the other process beyond what it was asked for; its start is the longest.
_PATIENCE_S = 60.0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cuda:N, cpu (stand-in), or auto")
    parser.add_argument("--mib", type=int, help="MiB of lists; default 1024 on a GPU, 32 on the stand-in")
    parser.add_argument("--seconds", type=float, help="of one turn; default 0.7 on a GPU, 0.3 on the stand-in")
    parser.add_argument("--rounds", type=int, default=4)


def repeat(device: str, load: str, pipe: Any) -> None:
    """The process beside ours: for every number of seconds that comes in, operations a second go out."""
    import torch

    large = device != "cpu"

    def wait() -> None:
        if large:
            torch.cuda.synchronize()

    if load == "memory":
        a = torch.ones((1 << 28) if large else (1 << 20), dtype=torch.float32, device=device)
        b = torch.empty_like(a)

        def operation() -> None:
            torch.add(a, 1.0, out=b)
    elif load == "decode":
        width = _WIDTH if large else 64
        weights = [torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(_LAYERS)]
        tokens = torch.randn(_ROWS, width, dtype=torch.bfloat16, pin_memory=large)
        state = torch.empty(_ROWS, width, dtype=torch.bfloat16, device=device)

        def operation() -> None:
            state.copy_(tokens, non_blocking=large)
            for weight in weights:
                torch.matmul(state, weight).tanh_()
            wait()

    else:
        size = 8192 if large else 256
        x = torch.randn(size, size, dtype=torch.bfloat16, device=device)
        y = torch.empty_like(x)

        def operation() -> None:
            torch.matmul(x, x, out=y)

    for _ in range(5):
        operation()
    wait()
    pipe.send(0.0)
    while (seconds := pipe.recv()) is not None:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(4):
                operation()
            wait()
            count += 4
        pipe.send(count / (time.perf_counter() - start))


class Mover:
    """Moves lists in and out of an arena until it is stopped; counts bytes."""

    def __init__(self, tier: Any, store: Any, nlist: int) -> None:
        self._tier, self._store, self._nlist = tier, store, nlist
        self.nbytes = 0

    def __call__(self, stop: threading.Event) -> None:
        rng = np.random.default_rng(0)
        while not stop.is_set():
            report = self._tier.load(rng.permutation(self._nlist)[:_LISTS_A_MOVE].tolist(), self._store).result()
            self.nbytes += report.nbytes
            dropped = self._store.publish({}, drops=report.loaded)
            self._store.wait_reclaimed(dropped.version, 10.0)


class Scans:
    """Scans resident lists batch after batch; counts batches."""

    def __init__(self, tier: Any, store: Any, index: Any, queries: Any, nprobe: int) -> None:
        self._tier, self._store, self._queries = tier, store, queries
        self._probes, self._coarse = index.ivf.quantize(queries, nprobe)
        self.batches = 0

    def __call__(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.scan()

    def scan(self) -> float:
        """Scans one batch; seconds."""
        start = time.perf_counter()
        with self._store.lease() as residency:
            self._tier.scanner(residency).scan(self._queries, self._probes, self._coarse, 10)
        self.batches += 1
        return time.perf_counter() - start


class Neighbour:
    """The process beside ours; a context manager, which ends it."""

    def __init__(
        self,
        device: str,
        load: str,
        *,
        patience_s: float = _PATIENCE_S,
        target: Callable[[str, str, Any], None] = repeat,
    ) -> None:
        self._patience_s = patience_s
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(device, load, theirs), daemon=True)
        self._process.start()
        # With our copy open, its end would not be seen.
        theirs.close()

    def __enter__(self) -> Neighbour:
        try:
            self._answer(0.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._ours.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def rate(self, seconds: float) -> float:
        """Its operations a second, counted for so long.

        Raises:
            RuntimeError: it died, or does not answer.
        """
        with suppress(OSError):  # a dead one is found below
            self._ours.send(seconds)
        return self._answer(seconds)

    def _answer(self, seconds: float) -> float:
        if not self._ours.poll(seconds + self._patience_s):
            raise RuntimeError(f"the other process did not answer for {seconds + self._patience_s:g} s")
        try:
            return float(self._ours.recv())
        except (EOFError, OSError) as error:
            self._process.join(5.0)
            raise RuntimeError(f"the other process ended with status {self._process.exitcode}") from error


@contextmanager
def working(work: Callable[[threading.Event], None] | None) -> Iterator[None]:
    """Runs ``work`` on a thread meanwhile; what it raised is raised at the end: a loop that died disturbs nobody."""
    if work is None:
        yield
        return
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work, stop)
        try:
            yield
        finally:
            stop.set()
        running.result()


def measure(device: str, load: str, works: dict[str, Any], *, seconds: float, rounds: int) -> dict[str, Any]:
    """Rates of the other process by what we do meanwhile; each of ours paired with the turn alone before it."""
    ratios: dict[str, list[float]] = {name: [] for name in ("alone", *works)}
    alone_rates = []
    with Neighbour(device, load) as other:
        for _ in range(rounds):
            for name, work in (("alone", None), *works.items()):
                alone_rates.append(other.rate(seconds))
                with working(work):
                    ratios[name].append(other.rate(seconds) / alone_rates[-1])
    return {
        "load": load,
        "alone per s": float(np.median(alone_rates)),
        **{name: [float(v) for v in np.percentile(values, [50, 25, 75])] for name, values in ratios.items()},
    }


def scans_beside_copies(scans: Scans, mover: Mover, *, seconds: float, rounds: int) -> dict[str, Any]:
    """p99 and median of scans while lists move as fast as they can, over those of the turns between."""
    taken: dict[str, list[float]] = {"alone": [], "moving": []}
    spent = 0.0
    for _ in range(rounds):
        for name, work in (("alone", None), ("moving", mover)):
            with working(work):
                start, count = time.perf_counter(), 0
                while (now := time.perf_counter()) - start < seconds or count < _LEAST_SCANS:
                    taken[name].append(scans.scan())
                    count += 1
                spent += now - start if work else 0.0
    halves = [np.percentile(part, 99) for part in (taken["alone"][::2], taken["alone"][1::2])]
    p99, median = ({name: float(np.percentile(own, q)) * 1e3 for name, own in taken.items()} for q in (99, 50))
    return {
        "scans": {name: len(own) for name, own in taken.items()},
        "p99_ms": p99,
        "median_ms": median,
        "p99_ratio": p99["moving"] / p99["alone"],
        "noise": float(halves[0] / halves[1]),
        "moved GB/s": mover.nbytes / spent / 1e9,
    }


def sharing(stand_in: bool) -> str:
    """How two processes share the device."""
    if stand_in:
        return "two processes on the same cores"
    return "two processes, time-sliced: no MPS" if mps_directory() is None else "two processes, through CUDA's MPS"


def main() -> None:
    args = arguments(__doc__, _options)
    import torch

    from hybridindex.tiers.contract.residency import ResidencyStore
    from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
    from hybridindex.tiers.serving import page_bytes_of

    name = args.device if args.device != "auto" else "cuda:0" if torch.cuda.is_available() else "cpu"
    stand_in = name == "cpu"
    mib = args.mib or (32 if stand_in else 1024)
    seconds = args.seconds or (0.3 if stand_in else 0.7)
    data = make_clusters(256, mib << 20)
    rows: list[dict[str, Any]] = []
    busy: dict[str, Any] = {}
    attempts = Attempts()
    label = name

    def save(*, complete: bool = False) -> None:
        result = {"device": label, "stand_in": stand_in, "complete": complete, "sharing": sharing(stand_in),
                  "moving_target": BESIDE_TARGET, "mib": mib, "rows": rows, "scans": busy,
                  "failed": attempts.failed}  # fmt: skip
        write(args.json, "device_beside", result)

    with (
        tempfile.TemporaryDirectory() as folder,
        import_lists(data.vectors, data.lists, data.centres, "flat", "ip", Path(folder) / "idx") as index,
    ):
        wanted = int(index.list_bytes.sum()) + index.ivf.nlist * 65_536
        plain = PagedMemory(page_bytes=page_bytes_of(index.ivf))
        pinned = replace(plain, pinned=pin_all(index.ivf, page_locked=not stand_in)[0])
        tiers = [
            DeviceTier(index.ivf, name, 0, budget_bytes=wanted + (64 << 20), wanted_bytes=wanted, memory=memory)
            for memory in (pinned, plain)
        ]
        with closing(tiers[0]), closing(tiers[1]):
            stores = [ResidencyStore(index.ivf.nlist, reclaim_into(tier)) for tier in tiers]
            tiers[1].load(range(index.ivf.nlist), stores[1]).result()
            queries = make_queries(data.centres, 16, "low")
            mover = Mover(tiers[0], stores[0], index.ivf.nlist)
            scans = Scans(tiers[1], stores[1], index, queries, min(64, index.ivf.nlist))
            label = tiers[0].label
            for load in LOADS:
                mover.nbytes, scans.batches = 0, 0
                with attempts(f"beside a {load} loop"):
                    row = measure(name, load, {"moving": mover, "scanning": scans}, seconds=seconds, rounds=args.rounds)
                    spent = seconds * args.rounds
                    rows.append(row | {"moved GB/s": mover.nbytes / spent / 1e9, "batches/s": scans.batches / spent})
                save()
            with attempts("scans while lists move"):
                mover.nbytes = 0
                busy.update(scans_beside_copies(scans, mover, seconds=seconds, rounds=args.rounds))
            save()
    save(complete=not attempts.failed)
    claim = "stand-in: claims nothing" if stand_in else ""
    show(
        f"rate of another process on {label}, over its rate alone ({sharing(stand_in)})",
        ("load", "A/A", "moving", "GB/s", f">= {BESIDE_TARGET:g}", "scanning", "batches/s"),
        [
            (
                r["load"],
                f"{r['alone'][0]:.3f}",
                f"{r['moving'][0]:.3f}",
                r["moved GB/s"],
                claim or ("yes" if r["moving"][0] >= BESIDE_TARGET else "NO"),
                f"{r['scanning'][0]:.3f}",
                r["batches/s"],
            )
            for r in rows
        ],
    )
    if busy:
        show(
            f"scans of 16 queries on {label} while lists move to it",
            ("p99 ms", "alone", "ratio", "A/A", "median ms", "alone", "moved GB/s"),
            [
                (
                    busy["p99_ms"]["moving"],
                    busy["p99_ms"]["alone"],
                    f"{busy['p99_ratio']:.2f}",
                    f"{busy['noise']:.2f}",
                    busy["median_ms"]["moving"],
                    busy["median_ms"]["alone"],
                    busy["moved GB/s"],
                )
            ],
        )
    attempts.end()


if __name__ == "__main__":
    main()
