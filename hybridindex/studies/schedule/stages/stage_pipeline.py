"""When the requests of a burst leave a pipeline of batching stages, and the sustained rate of the pipeline.

A burst of n requests, n a power of two, arrives at once. ``times[i]`` is when the first 2**i of them are done. Stages
with their own chips work in parallel, each as soon as it has a whole batch (RAGO, Figure 14(a)). Stages that share
chips take turns: the last stage that has its inputs goes first, and all pause during a retrieval between them (Figure
14(b), section 6.1).

Compared with a step-by-step simulation of the burst, this is exact for one group of stages, and for separate stages
whose batches do not get smaller. Where batches get smaller it is an upper bound: requests that formed a batch once are
assumed to arrive together at every later stage. Stages that share chips after other stages are assumed to be free when
their last inputs come, which may be one batch early. All times are monotone: earlier inputs never come out later.
Searches prune by that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from hybridindex.types import F64, I64

__all__ = ["SIZES", "Run", "Subsystem", "Ways", "before", "no_stage", "through"]

#: Burst sizes 2**0 .. 2**(SIZES - 1).
SIZES = 8
_COUNTS = 2.0 ** np.arange(SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One stage with its batch size: seconds of a batch, and until the next can begin."""

    stage: str
    log2_batch: int
    latency_s: float
    interval_s: float
    #: Weights and cache on each of its chips.
    memory_bytes: float = 0.0
    #: How its chips share the work, in words.
    how: str = ""

    @property
    def batch(self) -> int:
        """Requests."""
        return 1 << self.log2_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subsystem:
    """Stages that share ``chips`` chips, in order; 0 chips: its own servers."""

    chips: int
    runs: tuple[Run, ...]
    #: Seconds of its chips per request in the long run.
    period_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ways:
    """Many ways to run the same stages on the same chips: one row each."""

    #: (n, stages) index of each stage's :class:`Run` in the caller's lists.
    choices: I64
    #: (n,) seconds of the chips per request in the long run.
    period_s: F64
    #: (n,) log2 of the inputs of the first batch, and of the largest batch.
    log2_first: I64
    log2_largest: I64
    #: (n, SIZES) log2 of the number of inputs for the first 2**i outputs.
    needs: I64
    #: (n, SIZES) seconds of work for the first 2**i outputs.
    work_s: F64
    #: (n, SIZES) seconds from the last input to the last output when the last 2**i inputs come at once.
    tail_s: F64
    #: (n,) bytes on each chip.
    memory_bytes: F64

    def __len__(self) -> int:
        return len(self.period_s)

    def take(self, rows: I64) -> Ways:
        """The ways of ``rows``."""
        return Ways(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def columns(self) -> F64:
        """(n, m): a way that is at most as large in all columns is never worse, whatever comes before or after it."""
        scalars = np.column_stack([self.period_s, self.memory_bytes, self.log2_first, self.log2_largest])
        # ``needs`` follows from the largest batch.
        return np.hstack([scalars, self.work_s, self.tail_s])

    def ttft_s(self) -> F64:
        """(n,) seconds until a burst as large as the largest batch is done, if no stage comes before."""
        return self.work_s[np.arange(len(self)), self.log2_largest]


def no_stage() -> Ways:
    """The single way to run no stage."""
    return Ways(
        choices=np.empty((1, 0), dtype=np.int64),
        period_s=np.zeros(1),
        log2_first=np.zeros(1, dtype=np.int64),
        log2_largest=np.zeros(1, dtype=np.int64),
        needs=np.arange(SIZES)[None],
        work_s=np.zeros((1, SIZES)),
        tail_s=np.zeros((1, SIZES)),
        memory_bytes=np.zeros(1),
    )


def before(runs: Sequence[Run], rest: Ways) -> Ways:
    """Each of ``runs`` before each way of ``rest``, on the same chips."""
    batch = np.array([run.log2_batch for run in runs])[:, None]
    latency = np.array([run.latency_s for run in runs])[:, None]
    interval = np.array([run.interval_s for run in runs])[:, None]
    memory = np.array([run.memory_bytes for run in runs])[:, None]
    n, m = len(runs), len(rest)
    # The last inputs of the later stages come at once, at least as many as this stage's batch.
    at_once = np.maximum(np.arange(SIZES), batch)
    tail = latency + (_COUNTS[at_once - batch] - 1.0) * interval
    needs = np.maximum(rest.needs[None], batch[..., None])
    batches = _COUNTS[needs - batch[..., None]]
    work = rest.work_s[None] + (batches - 1.0) * interval[..., None] + latency[..., None]
    numbers = np.broadcast_to(np.arange(n)[:, None, None], (n, m, 1))
    rest_choices = np.broadcast_to(rest.choices[None], (n, *rest.choices.shape))
    return Ways(
        choices=np.concatenate([numbers, rest_choices], axis=2).reshape(n * m, 1 + rest.choices.shape[1]),
        period_s=(rest.period_s[None] + interval / 2.0**batch).reshape(-1),
        log2_first=np.broadcast_to(batch, (n, m)).reshape(-1),
        log2_largest=np.maximum(rest.log2_largest[None], batch).reshape(-1),
        needs=needs.reshape(n * m, SIZES),
        work_s=work.reshape(n * m, SIZES),
        tail_s=(rest.tail_s.T[at_once].transpose(0, 2, 1) + tail[:, None]).reshape(n * m, SIZES),
        memory_bytes=(rest.memory_bytes[None] + memory).reshape(-1),
    )


def through(ways: Ways, row: int, times: F64, at_once: I64) -> F64:
    """(n, SIZES) when a burst leaves way ``row``: it is busy from its first batch on, or waits for its last inputs.

    Args:
        times: (n, SIZES) when the first 2**i inputs come.
        at_once: (n,) log2 of how many of them come together.
    """
    needs = ways.needs[row]
    busy = times[:, ways.log2_first[row], None] + ways.work_s[row]
    waiting = times[:, needs] + ways.tail_s[row][np.minimum(at_once[:, None], needs)]
    return np.asarray(np.maximum(busy, waiting), dtype=np.float64)
