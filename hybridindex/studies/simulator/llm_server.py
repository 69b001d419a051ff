"""An LLM server in virtual time: prefill first, continuous batching, a limited KV cache.

A request waits until a sequence slot and KV-cache tokens for its prompt *and* its answer are free: nothing is
preempted. Waiting requests are prefilled together while decoding pauses; then every decoding request takes one token
per step. All steps between two events are taken at once, so the simulation's cost does not depend on tokens.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.partitioner.models.throughput import throughput_model
from hybridindex.studies.simulator.arrivals import check_number
from hybridindex.types import F64, I64, LLMProfile

__all__ = ["Generated", "LLMServer", "fit_llm", "generate"]

#: vLLM's defaults.
_MAX_SEQUENCES = 256
_MAX_PREFILL_TOKENS = 8192
#: Of the requests whose first token comes within a profile's TTFT.
_MEASURED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServer:
    """Costs and limits of one of ``replicas`` equal engines, among which requests go round robin. Raises
    InvalidInputError, which names the field."""

    #: Seconds of one prompt token, during which the engine does not decode.
    prefill_per_token_s: float
    #: Seconds until the first token beyond that: latency, not work.
    first_token_s: float
    #: Seconds of one decode step, and of each sequence in it.
    step_s: float
    step_per_sequence_s: float
    kv_tokens: int
    input_tokens: int
    output_tokens: int
    max_sequences: int = _MAX_SEQUENCES
    max_prefill_tokens: int = _MAX_PREFILL_TOKENS
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("prefill_per_token_s", "first_token_s", "step_s", "step_per_sequence_s"):
            check_number(name, getattr(self, name), least=0.0)
        for name in ("input_tokens", "output_tokens", "max_sequences", "max_prefill_tokens", "replicas"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} is {getattr(self, name)}; give an integer >= 1")
        if self.kv_tokens < self.input_tokens + self.output_tokens:
            raise InvalidInputError(
                f"kv_tokens is {self.kv_tokens}: a request needs {self.input_tokens} + {self.output_tokens} tokens"
            )

    @property
    def sequences(self) -> int:
        """Most requests of the usual length that decode at once."""
        return min(self.max_sequences, self.kv_tokens // (self.input_tokens + self.output_tokens))

    @property
    def capacity_rps(self) -> float:
        """Requests per second of all replicas with all slots taken."""
        n = self.sequences
        step = self.step_s + n * self.step_per_sequence_s
        each = self.prefill_per_token_s * self.input_tokens + (self.output_tokens - 1) * step / n
        return self.replicas / each if each > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generated:
    """(n,) float64 seconds in the order of the requests; NaN where a request is too large for the KV cache."""

    first_token_s: F64
    done_s: F64
    #: Mean over time, and maximum, of the part of the KV cache in use.
    kv_mean: float
    kv_peak: float


def fit_llm(
    profile: LLMProfile, *, index_bytes: int, kv_bytes_per_token: float, replicas: int = 1, share: float = 1.0
) -> LLMServer | None:
    """A server that takes mu(KV) requests per second when saturated, beside an index of ``index_bytes``; None where
    that leaves no room for a request.

    mu(KV) is the profile's curve (measured points, or the linear rule). The profile's TTFT is that of nine requests of
    ten where all slots are taken: the wait for the step under way, which the simulation adds, is left out of it. The
    rest is prefill, at most half of 1/mu of it as work, since engines prefill requests together. Steps take the rest of
    1/mu, whatever the batch.

    Args:
        share: the LLM's part of the devices; the others serve retrieval alone.

    Raises:
        InvalidInputError: a number is out of range, or the profile lacks token counts.
    """
    check_number("kv_bytes_per_token", kv_bytes_per_token, above=0.0)
    if profile.input_tokens < 1 or profile.output_tokens < 1:
        raise InvalidInputError(
            f"llm.input_tokens is {profile.input_tokens}, llm.output_tokens {profile.output_tokens}; give both >= 1"
        )
    mu = throughput_model(profile).at(index_bytes) * share
    left = int((profile.kv_cache_bytes - index_bytes) * share / replicas / kv_bytes_per_token)
    if mu <= 0 or left < profile.input_tokens + profile.output_tokens:
        return None
    each = replicas / mu
    prefill = min(profile.ttft_s, each / 2)
    server = LLMServer(
        prefill_per_token_s=prefill / profile.input_tokens,
        first_token_s=0.0,
        step_s=0.0,
        step_per_sequence_s=0.0,
        kv_tokens=left,
        input_tokens=profile.input_tokens,
        output_tokens=profile.output_tokens,
        replicas=replicas,
    )
    step = (each - prefill) * server.sequences / max(profile.output_tokens - 1, 1)
    return replace(server, step_s=step, first_token_s=max(0.0, profile.ttft_s - prefill - _MEASURED * step))


def generate(
    ready: F64,
    server: LLMServer,
    *,
    inputs: I64 | None = None,
    outputs: I64 | None = None,
    slower: F64 | None = None,
    slower_s: float = 1.0,
) -> Generated:
    """Serves requests that become ready at ``ready`` (n,), in any order.

    Args:
        inputs, outputs: (n,) tokens; by default the server's own.
        slower: factors >= 1 on the LLM's times, one for each ``slower_s`` seconds of virtual time; the last one
            continues.
    """
    n = len(ready)
    order = np.argsort(ready, kind="stable")
    first, done = np.full(n, np.nan), np.full(n, np.nan)
    prompt = np.full(n, server.input_tokens) if inputs is None else inputs
    answer = np.full(n, server.output_tokens) if outputs is None else outputs
    factors = np.ones(1) if slower is None or not len(slower) else slower
    kv_seconds = span = peak = 0.0
    for replica in range(server.replicas):
        mine = order[replica :: server.replicas]
        run = _Engine(server, factors, slower_s)
        run.serve(ready[mine].tolist(), prompt[mine].tolist(), answer[mine].tolist())
        first[mine], done[mine] = run.first, run.done
        kv_seconds, span, peak = kv_seconds + run.kv_seconds, span + run.now, max(peak, run.peak)
    return Generated(
        first_token_s=first,
        done_s=done,
        kv_mean=kv_seconds / (span * server.kv_tokens) if span > 0 else 0.0,
        kv_peak=peak / server.kv_tokens,
    )


class _Engine:
    """One replica's run."""

    def __init__(self, server: LLMServer, factors: F64, factor_s: float) -> None:
        self._server = server
        self._factors, self._factor_s = factors, factor_s
        self.now = 0.0
        self.kv_seconds = 0.0
        self.peak = 0
        self._held = 0
        self.first: list[float] = []
        self.done: list[float] = []

    def _factor(self) -> float:
        """On times that begin now."""
        return float(self._factors[min(int(self.now / self._factor_s), len(self._factors) - 1)])

    def _pass(self, seconds: float) -> None:
        factor = self._factor()
        self.now += seconds * factor
        self.kv_seconds += self._held * seconds * factor

    def serve(self, ready: list[float], prompt: list[int], answer: list[int]) -> None:
        server, n = self._server, len(ready)
        self.first, self.done = [math.nan] * n, [math.nan] * n
        #: (step at which it ends, request)
        active: list[tuple[int, int]] = []
        steps = nxt = 0
        while nxt < n or active:
            if nxt < n and prompt[nxt] + answer[nxt] > server.kv_tokens:
                nxt += 1
                continue
            if not active and nxt < n and ready[nxt] > self.now:
                self.now = ready[nxt]
            taken, tokens = nxt, 0
            while taken < n and ready[taken] <= self.now and len(active) + taken - nxt < server.max_sequences:
                need = prompt[taken] + answer[taken]
                if self._held + need > server.kv_tokens:
                    break
                if taken > nxt and tokens + prompt[taken] > server.max_prefill_tokens:
                    break
                self._held += need
                tokens += prompt[taken]
                taken += 1
            if taken > nxt:
                self.peak = max(self.peak, self._held)
                self._pass(tokens * server.prefill_per_token_s)
                for i in range(nxt, taken):
                    self.first[i] = self.now + server.first_token_s
                    heapq.heappush(active, (steps + answer[i] - 1, i))
                nxt = taken
            elif active:
                steps += self._decode(active, steps, ready[nxt] if nxt < n else math.inf)
            while active and active[0][0] <= steps:
                _, i = heapq.heappop(active)
                self.done[i] = self.now + server.first_token_s
                self._held -= prompt[i] + answer[i]

    def _decode(self, active: list[tuple[int, int]], steps: int, comes: float) -> int:
        """Decodes until the next end, or until the next arrival if a slot is free; returns the number of steps."""
        server = self._server
        step = server.step_s + len(active) * server.step_per_sequence_s
        count = active[0][0] - steps
        factor = self._factor()
        if self.now < comes < self.now + count * step * factor and len(active) < server.max_sequences:
            count = min(count, max(1, math.ceil((comes - self.now) / (step * factor))))
        self._pass(count * step)
        return count
