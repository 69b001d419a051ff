"""``vllm bench serve`` beside us: what an LLM's clients see while a daemon on the same machine answers searches.

    build/vllm/bin/python -m benchmarks.rag.bench_serve --json benchmarks/results/bench_serve.json

Run it where vLLM is installed (``make test-vllm``). vLLM's own benchmark asks a server by a Poisson process, in turns
with nobody searching, nobody again (the floor), and searches that come to a daemon by a process of their own. The
daemon has the last core and the server the others, as ``taskset`` would give them; all clients share the daemon's.
``--llm URL --model NAME --tokenizer FOLDER`` asks a server that is there instead, beside the daemon of ``--search URL
--queries FILE``; nothing is pinned to a core then. ``HYBRIDINDEX_KEY`` has the daemon's key.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.measure import arguments, show, write
from benchmarks.common.serving import shipped_daemon
from benchmarks.service.cluster.nodes import make_workload, mixed_queries
from hybridindex.client import Client
from hybridindex.types import F32
from tests.vllm.server import offline, vllm_server
from tests.vllm.tiny_llama import make_tiny_llama

_NAME = "random-llama"
_K = 10
_ENGINE = ("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "32",
           "--enforce-eager", "--no-enable-prefix-caching")  # fmt: skip
#: Of their result, and what it is called here.
_SEEN = {
    "median_ttft_ms": "ttft_ms",
    "p99_ttft_ms": "ttft_p99_ms",
    "median_tpot_ms": "tpot_ms",
    "output_throughput": "tokens_per_s",
}
_QUIET = "nobody searches"
_SIDES = (_QUIET, "nobody, again", "searches")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--llm", metavar="URL", help="a vLLM server that is there; none: one with a small random model")
    parser.add_argument("--model", default=_NAME, help="name under which it serves; with --llm")
    parser.add_argument("--tokenizer", help="its tokenizer's folder or name; with --llm")
    parser.add_argument("--search", metavar="URL", help="a daemon that is there; none: one over a made index")
    parser.add_argument("--queries", type=Path, metavar="FILE", help="its queries, a .npy of (n, d); with --search")
    parser.add_argument("--search-rate", type=float, default=50.0, help="searches a second")
    parser.add_argument("--request-rate", type=float, default=1.0, help="requests a second of the LLM")
    parser.add_argument("--prompts", type=int, default=40, help="of each turn")
    parser.add_argument("--tokens", type=int, nargs=2, default=[256, 64], metavar=("IN", "OUT"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nprobe", type=int, default=64)
    parser.add_argument("--mib", type=int, default=98, help="of the made index")


class _Searches:
    """An open loop of searches by a Poisson process, until the block ends."""

    def __init__(self, url: str, queries: F32, rate: float, nprobe: int) -> None:
        self._url, self._queries, self._rate, self._nprobe = url, queries, rate, nprobe
        self._stop = threading.Event()
        self.taken_s: list[float] = []
        self._error: Exception | None = None

    def __enter__(self) -> _Searches:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise SystemExit(f"a search failed: {self._error}")

    def _run(self) -> None:
        draw = random.Random(1)
        key = os.environ.get("HYBRIDINDEX_KEY")
        with Client(self._url, key=key) as client, ThreadPoolExecutor(16) as pool:
            due = time.monotonic()
            while not self._stop.wait(max(0.0, due - time.monotonic())):
                pool.submit(self._search, client, draw.randrange(len(self._queries)), due)
                due += draw.expovariate(self._rate)

    def _search(self, client: Client, number: int, due: float) -> None:
        try:
            client.search(self._queries[number : number + 1], _K, self._nprobe)
        except Exception as error:  # noqa: BLE001 - told at the end
            self._error = error
        else:
            self.taken_s.append(time.monotonic() - due)


def _their_benchmark(url: str, tokenizer: str, options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """One run of ``vllm bench serve``; of its result what is kept."""
    n_in, n_out = options.tokens
    words = ["bench", "serve", "--backend", "openai", "--base-url", url, "--model", options.model,
             "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", str(n_in),
             "--random-output-len", str(n_out), "--ignore-eos", "--num-prompts", str(options.prompts),
             "--request-rate", str(options.request_rate), "--seed", str(seed), "--disable-tqdm", "--save-result",
             "--result-dir", str(folder), "--result-filename", "theirs.json"]  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
    done = subprocess.run(command, env=offline(VLLM_PLUGINS=""), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
    theirs = json.loads((folder / "theirs.json").read_text())
    if theirs["completed"] != options.prompts:
        raise SystemExit(f"vllm bench serve: {theirs['completed']} of {options.prompts} requests were answered")
    return {ours: theirs[name] for name, ours in _SEEN.items()}


def main() -> None:
    options = arguments(__doc__ or "", _options)
    if options.llm and not options.tokenizer:
        raise SystemExit("--llm needs --tokenizer: vllm bench serve counts tokens with it")
    if bool(options.search) != bool(options.queries):
        raise SystemExit("--search and --queries need each other: searches of a daemon that is there are of its index")
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llm, tokenizer = options.llm, options.tokenizer
        if llm is None:
            make_tiny_llama(folder / "llama")
            of_llm = cores[:-1] or cores
            os.sched_setaffinity(0, of_llm)  # what is started has it, too
            served = vllm_server(
                folder / "llama", 256 << 20, *_ENGINE, name=_NAME, log=folder / "vllm.log", VLLM_PLUGINS="",
                VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, of_llm)),
            )  # fmt: skip
            llm, tokenizer = stack.enter_context(served).url, str(folder / "llama")
            os.sched_setaffinity(0, cores[-1:])
        if options.search:
            search, queries = options.search, np.load(options.queries).astype(np.float32)
        else:
            workload = make_workload(
                folder / "index", nbytes=options.mib << 20, dim=96, nlist=1024, nprobe=options.nprobe
            )
            queries = mixed_queries(workload.centres, 2048, seed=2)
            _, (search, *_) = stack.enter_context(shipped_daemon(workload.path, "--threads", "1"))
        _their_benchmark(llm, tokenizer, options, 0, folder)  # warms up
        rounds: list[dict[str, Any]] = []
        taken: list[float] = []
        for number in range(options.rounds):
            row = {}
            for turn in range(len(_SIDES)):
                side = _SIDES[(number + turn) % len(_SIDES)]
                seed = 1 + number * len(_SIDES) + turn  # prompts that the server knows would cost it nothing
                with ExitStack() as beside:
                    if side == "searches":
                        load = _Searches(search, queries, options.search_rate, options.nprobe)
                        beside.enter_context(load)
                    row[side] = _their_benchmark(llm, tokenizer, options, seed, folder)
                if side == "searches":
                    taken += load.taken_s
            rounds.append(row)
    os.sched_setaffinity(0, cores)
    ratios = {
        side: {name: [row[side][name] / row[_QUIET][name] for row in rounds] for name in _SEEN.values()}
        for side in _SIDES[1:]
    }
    rows = []
    for side in _SIDES:
        shown = [statistics.median(row[side][name] for row in rounds) for name in _SEEN.values()]
        of = (
            [statistics.median(ratios[side][name]) for name in _SEEN.values()] if side in ratios else [1.0] * len(_SEEN)
        )
        rows.append([side, *(f"{value:.1f} ({ratio:.2f})" for value, ratio in zip(shown, of, strict=True))])
    show(f"{options.request_rate:g} requests/s: vLLM's own medians (over nobody's)", ["side", *_SEEN.values()], rows)
    percentiles = {str(p): 1e3 * float(np.percentile(taken, p)) for p in (50, 95, 99)}
    show("searches", ["n", *(f"p{p}, ms" for p in percentiles)], [[len(taken), *percentiles.values()]])
    write(
        options.json, "bench_serve",
        {"options": {name: value for name, value in vars(options).items() if name not in ("json", "queries")},
         "rounds": rounds,
         "ratios": ratios, "searches": len(taken), "search_ms": percentiles, "cores": len(cores)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
