"""When requests come, and how long their prompts and answers are: Poisson, bursty, or a recorded trace.

Each request is one search of one query; :mod:`hybridindex.studies.simulator.query_pool` says which query.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import InvalidInputError
from hybridindex.types import F64, I64

__all__ = ["MAX_REQUESTS", "Workload", "bursty", "check_number", "from_trace", "poisson"]

#: Memory grows with the requests.
MAX_REQUESTS = 5_000_000
#: Most periods of a bursty load, for the same reason.
_MAX_PERIODS = 10_000_000
#: Longest trace file and line that is read, in bytes and characters.
_MAX_TRACE_BYTES = 1 << 30
_MAX_LINE = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Requests in order of arrival."""

    #: (n,) float64 seconds, ascending, from 0.
    arrivals: F64
    #: (n,) int64 each, or None: the LLM's own lengths.
    input_tokens: I64 | None = None
    output_tokens: I64 | None = None

    @property
    def rate(self) -> float:
        """Offered requests per second."""
        span = float(self.arrivals[-1])
        return len(self.arrivals) / span if span > 0 else math.inf

    def at_rate(self, rate: float) -> Workload:
        """The same requests, closer together or further apart.

        Raises:
            InvalidInputError: no such rate, or the requests come all at once.
        """
        check_number("rate", rate, above=0.0)
        if not math.isfinite(self.rate):
            raise InvalidInputError(
                f"all {len(self.arrivals)} requests of the workload come at the same time; expected some seconds from "
                "the first to the last, so that they can be given a rate"
            )
        scale = self.rate / rate
        return Workload(
            arrivals=self.arrivals * scale, input_tokens=self.input_tokens, output_tokens=self.output_tokens
        )


def check_number(name: str, value: float, *, above: float = -math.inf, least: float = -math.inf) -> None:
    """Raises InvalidInputError, which names the field, unless ``value`` is finite, > ``above`` and >= ``least``."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value > above and value >= least):
        bound = f"a finite number > {above:g}" if above > -math.inf else f"a finite number >= {least:g}"
        raise InvalidInputError(f"{name} is {value!r}; give {bound}")


def _check_count(n: int) -> None:
    if not 1 <= n <= MAX_REQUESTS:
        raise InvalidInputError(f"requests is {n}; give 1 to {MAX_REQUESTS}")


def poisson(rate: float, n: int, *, seed: int) -> Workload:
    """``n`` requests with independent exponential gaps, ``rate`` per second."""
    check_number("rate", rate, above=0.0)
    _check_count(n)
    return Workload(arrivals=np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, n)))


def bursty(rate: float, n: int, *, burstiness: float, period_s: float, seed: int) -> Workload:
    """``n`` requests of an on/off process: Poisson at ``burstiness`` * ``rate`` while on, nothing while off.

    On times are exponential with mean ``period_s`` / burstiness, off times with the rest of ``period_s``, so the mean
    rate is ``rate``. Burstiness 1 is Poisson.
    """
    check_number("rate", rate, above=0.0)
    check_number("burstiness", burstiness, least=1.0)
    check_number("period_s", period_s, above=0.0)
    _check_count(n)
    rng = np.random.default_rng(seed)
    busy = np.cumsum(rng.exponential(1.0 / (rate * burstiness), n))
    if burstiness == 1.0:
        return Workload(arrivals=busy)
    mean_on = period_s / burstiness
    least_s = float(busy[-1]) * burstiness / _MAX_PERIODS
    if period_s < least_s:
        raise InvalidInputError(
            f"period_s is {period_s:g}: {n} requests at {rate:g} per second take more than {_MAX_PERIODS:,} periods; "
            f"give {least_s:.3g} or more"
        )
    n_periods = int(busy[-1] / mean_on * 1.5) + 20
    on = rng.exponential(mean_on, n_periods)
    while on.sum() < busy[-1]:
        on = np.concatenate((on, rng.exponential(mean_on, n_periods)))
    off = rng.exponential(period_s - mean_on, on.size)
    before = np.concatenate(([0.0], np.cumsum(on)[:-1]))
    waited = np.concatenate(([0.0], np.cumsum(off)[:-1]))
    return Workload(arrivals=busy + waited[np.searchsorted(before, busy, side="right") - 1])


def from_trace(path: Path, *, limit: int = MAX_REQUESTS) -> Workload:
    """The first ``limit`` requests of a trace, moved to start at 0. Each line is JSON: seconds, or an object with
    ``t`` in seconds and optionally ``input_tokens`` and ``output_tokens`` (RAGPulse's fields).

    Raises:
        InvalidInputError: the file cannot be read or is too large, or a line (it is named) has no time, or no
            lengths where others have some.
    """
    _check_count(limit)
    rows: list[tuple[float, int, int]] = []
    try:
        if (nbytes := filesystem.stat(path).st_size) > _MAX_TRACE_BYTES:
            raise InvalidInputError(f"trace {path} has {nbytes} bytes; give at most {_MAX_TRACE_BYTES}")
        with filesystem.open_text(path) as file:
            while len(rows) < limit and (line := file.readline(_MAX_LINE)):
                if line.strip():
                    rows.append(_row(line, f"trace {path}, request {len(rows) + 1}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"trace {path} cannot be read: {error}") from error
    if not rows:
        raise InvalidInputError(f"trace {path} holds no request")
    _refuse_mixed(path, rows)
    rows.sort()
    times, inputs, outputs = (np.array(column) for column in zip(*rows, strict=True))
    known = bool(inputs[0])
    return Workload(
        arrivals=times.astype(np.float64) - float(times[0]),
        input_tokens=inputs.astype(np.int64) if known else None,
        output_tokens=outputs.astype(np.int64) if known else None,
    )


def _refuse_mixed(path: Path, rows: list[tuple[float, int, int]]) -> None:
    """All requests have both lengths, or none has one."""
    told = [i for i, (_, n_in, n_out) in enumerate(rows) if n_in > 0 or n_out > 0]
    short = [i for i, (_, n_in, n_out) in enumerate(rows) if n_in < 1 or n_out < 1]
    if told and short:
        _, n_in, n_out = rows[short[0]]
        raise InvalidInputError(
            f"trace {path}, request {short[0] + 1}: input_tokens and output_tokens are {n_in} and {n_out}, and request "
            f"{told[0] + 1} tells its lengths; expected both above 0 for each request, or for none"
        )


def _row(line: str, where: str) -> tuple[float, int, int]:
    try:
        said: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{where}: not JSON; expected a time in seconds or an object with t") from error
    fields = said if isinstance(said, dict) else {"t": said}
    values = [fields.get("t"), fields.get("input_tokens", 0), fields.get("output_tokens", 0)]
    for name, value in zip(("t", "input_tokens", "output_tokens"), values, strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
            raise InvalidInputError(f"{where}: {name} is {value!r}; expected a number >= 0")
    return float(values[0]), int(values[1]), int(values[2])
