"""Plays a burst of requests through a pipeline, batch by batch (RAGO, section 6.1 and Figure 14).

Gives the time of every single request, which the search does without. Exact and slow: for a few schedules, not for
millions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.studies.schedule.stages.stage_pipeline import Run
from hybridindex.types import F64

__all__ = ["play_burst"]


def play_burst(groups: Sequence[Sequence[Run]], requests: int) -> F64:
    """(requests,) seconds until each request of a burst at time 0 has its first token, in order.

    Args:
        groups: stages that share chips, in order; the groups work side by side.
        requests: a multiple of every batch size.

    Raises:
        InvalidInputError: a batch size does not divide the burst.
    """
    for run in (run for group in groups for run in group):
        if requests < 1 or requests % run.batch:
            raise InvalidInputError(f"requests is {requests}; expected a multiple of {run.stage}'s batch, {run.batch}")
    come = np.zeros(requests)
    for group in groups:
        come = _play_group(group, come)
    return come


def _play_group(group: Sequence[Run], come: F64) -> F64:
    """Stages in turns: whenever the chips are free, the last stage that has a whole batch of inputs goes next."""
    done = [come, *(np.full(len(come), np.inf) for _ in group)]
    taken = [0] * len(group)
    free_at = 0.0
    while taken[-1] < len(come):
        ready = [_ready_at(done[i], taken[i], run.batch) for i, run in enumerate(group)]
        begin = max(free_at, min(ready))
        stage = max(i for i, at in enumerate(ready) if at <= begin)
        run = group[stage]
        free_at = begin + run.interval_s
        done[stage + 1][taken[stage] : taken[stage] + run.batch] = begin + run.latency_s
        taken[stage] += run.batch
    return done[-1]


def _ready_at(come: F64, taken: int, batch: int) -> float:
    return float(come[taken + batch - 1]) if taken + batch <= len(come) else np.inf
