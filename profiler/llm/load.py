"""One measurement of a running LLM server, stage by stage: levels, prompt lengths, steps.

What a user calls, and how measurements become one profile, is in :mod:`hybridindex.profiler.llm.measure`.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from hybridindex.errors import InvalidInputError, LLMServerError
from hybridindex.profiler.checkpoint import Checkpoint
from hybridindex.profiler.hardware import hardware_info
from hybridindex.profiler.llm.metrics import CacheState
from hybridindex.profiler.llm.server import Answer, LLMServer
from hybridindex.types import LLMLevel, LLMMeasurement, LLMProfile

__all__ = ["LLMRequest", "LLMRun", "Progress"]

#: progress(stage, done, total)
Progress = Callable[[str, int, int], None]

#: Concurrency doubles until throughput grows by less than this factor.
_WORTHWHILE: Final = 1.05
#: Requests of each client in one level: of a single one, at least, and at most where time is left.
_ROUNDS_ALONE, _MIN_ROUNDS, _MAX_ROUNDS = 4, 2, 8
_REPEATS: Final = 3
#: Least share of ``max_seconds`` for levels; single requests may leave them more.
_LEVELS_SHARE: Final = 0.6
_POLL_S: Final = 0.05
#: Words of the prompt whose tokens are counted first.
_TRIAL_WORDS: Final = 128
_MAX_TOKENS: Final = 1 << 20
#: Of the word that no other prompt begins with.
_FIRST_LETTERS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMRequest:
    """What to measure, and with what load."""

    #: One of the server's models; None: the only one that it serves.
    model: str | None = None
    #: Of one device; None: as the server's ``/metrics`` tell.
    kv_cache_bytes: int | None = None
    #: Devices that one engine's KV cache is spread over.
    n_devices: int = 1
    #: Tokens of a prompt (question and passages) and of its answer.
    input_tokens: int = 512
    output_tokens: int = 64
    max_concurrency: int = 32
    #: Prompt lengths for TTFT against length; those above what the model takes are left out and noted.
    prompt_lengths: tuple[int, ...] = (64, 256, 1024)
    #: Further steps of the pipeline, such as {"rewrite": (100, 30)}: input and output tokens.
    steps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: No request begins that would end later than this, judged by the requests before it. The first ones always run.
    max_seconds: float = 120.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_devices < 1 or (self.kv_cache_bytes is not None and self.kv_cache_bytes < 1):
            raise InvalidInputError(
                f"kv_cache_bytes is {self.kv_cache_bytes}, n_devices {self.n_devices}; expected 1 or more"
            )
        counts = {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}
        counts |= {f"prompt_lengths[{i}]": n for i, n in enumerate(self.prompt_lengths)}
        for name, pair in self.steps.items():
            counts |= {f"steps[{name}].input": pair[0], f"steps[{name}].output": pair[1]}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_TOKENS:
                raise InvalidInputError(f"{name} is {value!r}; expected 1..{_MAX_TOKENS} tokens")
        if isinstance(self.max_concurrency, bool) or not 1 <= self.max_concurrency <= 1024:
            raise InvalidInputError(f"max_concurrency is {self.max_concurrency!r}; expected 1..1024")
        if not 1 <= self.max_seconds <= 86_400:
            raise InvalidInputError(f"max_seconds is {self.max_seconds!r}; expected 1..86400 seconds")


class _Prompts:
    """Random words of about so many tokens. The first word of each is new, in every run: a prefix cache that holds
    prompts of an earlier run finds nothing."""

    def __init__(self, seed: int, nonce: str) -> None:
        self._random = random.Random(f"prompts {seed}")  # noqa: S311 - words, not secrets
        self._first = random.Random(f"first words {nonce}")  # noqa: S311
        self._tokens_per_word = 1.0

    def calibrate(self, n_words: int, n_tokens: int) -> None:
        self._tokens_per_word = max(n_tokens / n_words, 1e-3)

    def words(self, n: int) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz"
        first = "".join(self._first.choices(letters, k=_FIRST_LETTERS))
        rest = ("".join(self._random.choices(letters, k=self._random.randint(2, 8))) for _ in range(n - 1))
        return " ".join((first, *rest))

    def of_tokens(self, n: int) -> str:
        return self.words(max(1, round(n / self._tokens_per_word)))


class LLMRun:
    """One measurement, stage by stage."""

    def __init__(
        self,
        server: LLMServer,
        model: str,
        max_tokens: int | None,
        kv_bytes: int,
        state: CacheState | None,
        request: LLMRequest,
        progress: Progress,
        nonce: str | None = None,
    ) -> None:
        """``nonce``: prompts of the same one and seed are the same; None: prompts that no server has seen."""
        self._server, self._model, self._max_tokens = server, model, max_tokens
        self._kv_bytes, self._state, self._request = kv_bytes, state, request
        self._progress = progress
        self._prompts = _Prompts(request.seed, secrets.token_hex(16) if nonce is None else nonce)
        self._started = time.monotonic()
        self._notes: dict[str, Any] = {"kv_cache_tokens": state.kv_tokens} if state is not None else {}

    async def measure(self, path: Path | None) -> LLMMeasurement:
        self._refuse_too_long()
        kept = Checkpoint(path, self._key())
        await self._calibrate()
        levels = await self._levels(kept)
        # Plans need the steps; prompt lengths are only shown, and come last.
        generation = {"answer": levels[0].latency_p50_s} | await self._steps(kept, levels[0])
        prefill = await self._prefill(kept, levels[0])
        kept.remove()
        if kept.resumed:
            self._notes["resumed"] = kept.resumed
        best = max(level.throughput_rps for level in levels)
        # The least concurrency that saturates: with more, requests only queue.
        saturated = next(level for level in levels if level.throughput_rps * _WORTHWHILE >= best)
        profile = LLMProfile(
            kv_cache_bytes=self._kv_bytes,
            throughput_rps=best,
            points=((self._kv_bytes, best),),
            input_tokens=round(saturated.input_tokens),
            output_tokens=round(saturated.output_tokens),
            ttft_s=saturated.ttft_p90_s,
            generation_s=generation,
        )
        return LLMMeasurement(
            created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            hardware_fingerprint=hardware_info().fingerprint,
            model=self._model,
            method="server",
            profile=profile,
            levels=tuple(levels),
            prefill=prefill,
            notes={**self._notes, "url": self._server.url, "saturated_at": saturated.concurrency},
        )

    def _key(self) -> str:
        """What finished levels belong to. Steps and prompt lengths are in the names of their stages."""
        request, state = self._request, self._state
        # The same URL is another server on another machine, which may share the disk, or after a restart.
        where = (hardware_info().fingerprint, self._server.url, self._model, self._max_tokens)
        says = None if state is None else state.config
        asked = (request.seed, request.max_seconds, request.n_devices, request.input_tokens, request.output_tokens)
        return hashlib.sha256(repr((*where, self._kv_bytes, says, *asked)).encode()).hexdigest()

    def _refuse_too_long(self) -> None:
        asked = {"": (self._request.input_tokens, self._request.output_tokens), **self._request.steps}
        for name, (n_in, n_out) in asked.items():
            if self._max_tokens is not None and n_in + n_out > self._max_tokens:
                what = f"step {name}" if name else "input_tokens and output_tokens"
                raise InvalidInputError(
                    f"{what}: {n_in} + {n_out} tokens; expected {self._max_tokens} at most, which is what "
                    f"{self._model} takes at {self._server.url}"
                )

    async def _calibrate(self) -> None:
        self._progress("first request", 0, 1)
        trial = self._prompts.words(_TRIAL_WORDS)
        await self._server.settle_dialect(self._model, trial)
        self._prompts.calibrate(_TRIAL_WORDS, await self._server.count_tokens(self._model, trial))
        self._progress("first request", 1, 1)

    async def _levels(self, kept: Checkpoint) -> list[LLMLevel]:
        wanted = [
            2**i for i in range(self._request.max_concurrency.bit_length()) if 2**i <= self._request.max_concurrency
        ]
        each_s = self._request.max_seconds * _LEVELS_SHARE / len(wanted)
        levels: list[LLMLevel] = []
        for concurrency in wanted:
            before = levels[-1] if levels else None
            known = kept.get(f"level {concurrency}")
            if known is not None:
                levels.append(LLMLevel(**known[0]))
            else:
                until = self._levels_until(levels)
                # A saturated server takes twice as long for twice the clients.
                least_s = 0.0 if before is None else 2 * _MIN_ROUNDS * before.latency_p50_s
                if before is not None and time.monotonic() + least_s > until:
                    self._notes["stopped"] = (
                        f"before concurrency {concurrency}, which takes about {least_s:.3g} s: "
                        f"{self._request.max_seconds:g} s were given"
                    )
                    break
                fitting = _ROUNDS_ALONE if before is None else int(each_s / max(before.latency_p50_s, 1e-6))
                rounds = min(max(fitting, _MIN_ROUNDS), _MAX_ROUNDS)
                levels.append(await self._level(concurrency, concurrency * rounds, until))
                kept.put(f"level {concurrency}", asdict(levels[-1]))
            least = concurrency * (_ROUNDS_ALONE if before is None else _MIN_ROUNDS)
            self._note_fewer(f"concurrency {concurrency}", levels[-1].n_requests, least)
            if before is not None and levels[-1].throughput_rps < before.throughput_rps * _WORTHWHILE:
                break
        if len(levels) == len(wanted) > 1 and levels[-1].throughput_rps >= levels[-2].throughput_rps * _WORTHWHILE:
            self._notes["not_saturated"] = f"concurrency {wanted[-1]} still brought more requests/s"
        return levels

    def _levels_until(self, levels: Sequence[LLMLevel]) -> float:
        """When levels must end: time is left for single requests, and by the first level for others."""
        seconds = self._request.max_seconds
        if not levels:
            return self._started + seconds * _LEVELS_SHARE / 2
        singles = [*self._request.steps.values(), *((n_in, 1) for n_in in self._request.prompt_lengths)]
        rest_s = _REPEATS * sum(_about_s(n_in, n_out, levels[0]) for n_in, n_out in singles)
        return self._started + seconds - min(rest_s, seconds * (1 - _LEVELS_SHARE))

    async def _level(self, concurrency: int, n_requests: int, until: float) -> LLMLevel:
        """A closed loop; the peak of KV usage is watched beside it."""
        peak: list[float] = []
        before = await self._look()
        watcher = asyncio.create_task(self._watch(peak)) if self._state is not None else None
        try:
            n_in, n_out = self._request.input_tokens, self._request.output_tokens
            started = time.perf_counter()
            answers = await self._closed_loop(f"concurrency {concurrency}", concurrency, n_requests, n_in, n_out, until)
            seconds = time.perf_counter() - started
        except LLMServerError as error:
            fewer = f" (--max-concurrency {concurrency // 2} stops before it)" if concurrency > 1 else ""
            raise LLMServerError(f"at concurrency {concurrency}: {error}{fewer}") from error
        finally:
            if watcher is not None:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
        after = await self._look()
        first, token, total = (
            np.array([getattr(a, name) for a in answers]) for name in ("first_token_s", "per_token_s", "total_s")
        )
        counted = [a.input_tokens for a in answers if a.input_tokens is not None]
        return LLMLevel(
            concurrency=concurrency,
            n_requests=len(answers),
            input_tokens=float(np.mean(counted)) if counted else float(n_in),
            output_tokens=float(np.mean([a.output_tokens for a in answers])),
            throughput_rps=len(answers) / seconds,
            ttft_p50_s=float(np.median(first)),
            ttft_p90_s=float(np.quantile(first, 0.9)),
            tpot_p50_s=float(np.median(token)),
            tpot_p90_s=float(np.quantile(token, 0.9)),
            latency_p50_s=float(np.median(total)),
            latency_p90_s=float(np.quantile(total, 0.9)),
            kv_usage=max(peak) if peak else None,
            preemptions=_grown(before, after),
        )

    async def _closed_loop(
        self, stage: str, concurrency: int, n_requests: int, n_in: int, n_out: int, until: float
    ) -> list[Answer]:
        """Each client sends one request, and more while one as long as its last would end before ``until``."""
        waiting = [self._prompts.of_tokens(n_in) for _ in range(n_requests)]
        answers: list[Answer] = []

        async def client() -> None:
            last_s: float | None = None
            while waiting and (last_s is None or time.monotonic() + last_s <= until):
                answer = await self._server.complete(self._model, waiting.pop(), n_out)
                last_s = answer.total_s
                answers.append(answer)
                self._progress(stage, len(answers), n_requests)

        self._progress(stage, 0, n_requests)
        clients = [asyncio.create_task(client()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        if len(answers) < n_requests:
            self._progress(stage, len(answers), len(answers))
        return answers

    async def _watch(self, peak: list[float]) -> None:
        while (state := await self._look()) is not None:
            if state.usage is not None:
                peak.append(state.usage)
            await asyncio.sleep(_POLL_S)

    async def _look(self) -> CacheState | None:
        """The cache now. After a failure the server is not asked again."""
        if self._state is None:
            return None
        try:
            return await self._server.cache_state()
        except LLMServerError as error:
            self._state = None
            self._notes["metrics"] = str(error)
            return None

    async def _steps(self, kept: Checkpoint, one: LLMLevel) -> dict[str, float]:
        seconds = {}
        for name, (n_in, n_out) in self._request.steps.items():
            stage = f"step {name}={n_in}:{n_out}"
            measured = await self._alone(kept, stage, n_in, n_out, _about_s(n_in, n_out, one))
            if measured is not None:
                seconds[name] = measured[2]
        return seconds

    async def _prefill(self, kept: Checkpoint, one: LLMLevel) -> tuple[tuple[int, float], ...]:
        # Prompts are as long as asked within a tenth or so.
        fitting = [n for n in self._request.prompt_lengths if self._max_tokens is None or n * 1.2 < self._max_tokens]
        if len(fitting) < len(self._request.prompt_lengths):
            self._notes["prompt_lengths_left_out"] = [n for n in self._request.prompt_lengths if n not in fitting]
        points: list[tuple[int, float]] = []
        for length in sorted(fitting):
            about_s = _grown_ttft(length, *(points[-1] if points else (one.input_tokens, one.ttft_p50_s)))
            measured = await self._alone(kept, f"prompt of {length} tokens", length, 1, about_s)
            if measured is not None:
                points.append((round(measured[0]), measured[1]))
        return tuple(points)

    async def _alone(
        self, kept: Checkpoint, stage: str, n_in: int, n_out: int, about_s: float
    ) -> tuple[float, float, float] | None:
        """Medians of single requests: prompt tokens, TTFT, whole time. None, and a note: no time was left for one."""
        known = kept.get(stage)
        if known is None:
            until = self._started + self._request.max_seconds
            if time.monotonic() + about_s > until:
                self._notes.setdefault("no_time_for", []).append(stage)
                return None
            answers = await self._closed_loop(stage, 1, _REPEATS, n_in, n_out, until)
            columns = ((a.input_tokens or n_in, a.first_token_s, a.total_s) for a in answers)
            kept.put(stage, [float(np.median(c)) for c in zip(*columns, strict=True)] + [len(answers)])
            known = kept.get(stage)
            assert known is not None
        tokens, first_s, total_s, n_answers = known[0]
        self._note_fewer(stage, n_answers, _REPEATS)
        return tokens, first_s, total_s

    def _note_fewer(self, stage: str, n_requests: int, wanted: int) -> None:
        if n_requests < wanted:
            self._notes.setdefault("fewer_requests", {})[stage] = f"{n_requests} of {wanted}"


def _about_s(n_in: int, n_out: int, one: LLMLevel) -> float:
    """Seconds of a single request, by those of the first level."""
    return _grown_ttft(n_in, one.input_tokens, one.ttft_p50_s) + one.tpot_p50_s * (n_out - 1)


def _grown_ttft(n_tokens: int, known_tokens: float, known_s: float) -> float:
    """An upper estimate: in proportion to the prompt, and never less than ``known_s``."""
    return known_s * max(1.0, n_tokens / max(1.0, known_tokens))


def _grown(before: CacheState | None, after: CacheState | None) -> int | None:
    if before is None or after is None or before.preemptions is None or after.preemptions is None:
        return None
    return max(0, after.preemptions - before.preemptions)
