"""RAG requests that arrive by themselves at an LLM's server: how many get their first token in time, by rate.

An open loop: a request is sent when it is due, however many are under way. Each searches the index through a router and
then generates; its time to first token runs from when it was due.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from hybridindex.errors import LLMServerError
from hybridindex.profiler.llm.server import LLMServer
from hybridindex.router.router import Router
from hybridindex.types import F32

__all__ = ["MODEL_NAME", "Attained", "Load", "compliant_rate", "offered"]

#: Under which the server has it.
MODEL_NAME = "llm"

#: Of requests that are in time, where a rate complies: the paper's 90th percentile.
ATTAINMENT = 0.9
#: Of a request; one that fails counts as late as this.
_TIMEOUT_S = 120.0
_TRIAL_WORDS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every request asks, and for how long they come."""

    queries: F32
    k: int
    nprobe: int
    input_tokens: int
    output_tokens: int
    seconds: float
    #: At the start, while the server fills: these requests are sent and not counted.
    warmup_s: float
    #: Bounds the time to first token.
    slo_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """Of the counted requests at one rate."""

    rate_rps: float
    #: That really arrived; the arrivals are random.
    requests: int
    in_time: float
    ttft_p50_s: float
    ttft_p90_s: float
    search_p90_s: float


def offered(url: str, router: Router, load: Load, rate_rps: float, seed: int) -> Attained:
    """Poisson arrivals at ``rate_rps``."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_rps, size=int(3 * rate_rps * load.seconds) + 16)
    due = np.cumsum(gaps)
    return asyncio.run(_offer(url, router, load, rate_rps, due[due < load.seconds].tolist(), random.Random(seed)))


async def _offer(
    url: str, router: Router, load: Load, rate_rps: float, due: list[float], draw: random.Random
) -> Attained:
    loop = asyncio.get_running_loop()
    async with LLMServer(url, timeout_s=_TIMEOUT_S, connections=len(due) + 1) as server:
        trial = _words(draw, _TRIAL_WORDS)
        await server.settle_dialect(MODEL_NAME, trial)
        n_words = round(load.input_tokens * _TRIAL_WORDS / await server.count_tokens(MODEL_NAME, trial))
        # No two alike, here and at other rates: a prefix cache finds nothing.
        prompts = [_words(draw, n_words) for _ in due]
        started = loop.time()

        async def one(number: int, at: float) -> tuple[float, float]:
            """Seconds to the end of the search and to the first token; the latter the time-out where there is none."""
            await asyncio.sleep(started + at - loop.time())
            query = load.queries[number % len(load.queries)]
            await asyncio.to_thread(router.search, query[None], load.k, load.nprobe)
            searched = loop.time() - started - at
            try:
                answer = await server.complete(MODEL_NAME, prompts[number], load.output_tokens)
            except LLMServerError:
                return searched, _TIMEOUT_S
            return searched, searched + answer.first_token_s

        done = await asyncio.gather(*(one(number, at) for number, at in enumerate(due)))
    counted = np.array([times for times, at in zip(done, due, strict=True) if at >= load.warmup_s])
    searched, first = counted[:, 0], counted[:, 1]
    return Attained(
        rate_rps=rate_rps,
        requests=len(counted),
        in_time=float(np.mean(first <= load.slo_s)),
        ttft_p50_s=float(np.quantile(first, 0.5)),
        ttft_p90_s=float(np.quantile(first, 0.9)),
        search_p90_s=float(np.quantile(searched, 0.9)),
    )


def _words(draw: random.Random, n: int) -> str:
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(n))


def compliant_rate(
    measure: Callable[[float], Attained], highest_rps: float, steps: int
) -> tuple[float, list[dict[str, float]]]:
    """The largest rate at which ATTAINMENT of the requests are in time, by bisection; and every rate that was tried."""
    low, high = 0.0, highest_rps
    tried = []
    for _ in range(steps):
        rate = (low + high) / 2
        attained = measure(rate)
        tried.append(asdict(attained))
        low, high = (rate, high) if attained.in_time >= ATTAINMENT else (low, rate)
    return low, sorted(tried, key=lambda one: one["rate_rps"])
