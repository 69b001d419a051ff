"""Times query embedding, where the caller embeds through us. Knows nothing of models: it is given a function."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import StageSample

__all__ = ["time_embedding"]


def time_embedding(
    embed: Callable[[list[str]], object],
    texts: Sequence[str],
    batches: Sequence[int] = (1, 4, 16, 64),
    *,
    repeats: int = 5,
    max_seconds: float = 20.0,
    seed: int = 0,
    device: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[StageSample, ...]:
    """Samples of stage ``embed``: ``embed`` on random batches of ``texts``, in rounds over ascending batch sizes.

    One round is always finished; batch sizes above ``len(texts)`` cannot be drawn and are left out.

    Raises:
        InvalidInputError: no texts, or no usable batch size.
    """
    usable = sorted({b for b in batches if 1 <= b <= len(texts)})
    if not usable:
        raise InvalidInputError(
            f"batches are {list(batches)} and there are {len(texts)} texts; expected sizes from 1 up"
        )
    rng = np.random.default_rng(seed)
    embed([texts[0]])  # first calls load and compile
    started = clock()
    samples: list[StageSample] = []
    for repeat in range(max(1, repeats)):
        for batch in usable:
            if repeat and clock() - started >= max_seconds:
                return tuple(samples)
            chosen = [texts[i] for i in rng.choice(len(texts), batch, replace=False)]
            before = clock()
            embed(chosen)
            samples.append(StageSample(stage="embed", batch=batch, seconds=clock() - before, device=device))
    return tuple(samples)
