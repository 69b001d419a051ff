"""Slowdown of decoding by batches of iterative retrievals (RAGO, section 5.3 and Figure 10).

A sequence that asks for a retrieval stops until a whole batch of sequences have asked. Retrieval and prefix take no
time here, as in the figure: sequences only wait for each other.

These assumptions reproduce the figure within 0.1 in every printed cell: one retrieval of a sequence comes before
decoding, the others at uniformly drawn tokens; a new sequence replaces a finished one at once; the slowdown is that of
tokens decoded per step over a long time.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from hybridindex.errors import InvalidInputError

__all__ = ["decode_slowdown"]


@lru_cache(maxsize=1024)
def decode_slowdown(
    decode_batch: int, retrieval_batch: int, *, retrievals: int = 4, tokens: int = 256, rounds: int = 400, seed: int = 0
) -> float:
    """Time per token over time per token without iterative retrieval; at least 1.

    Args:
        decode_batch: sequences that decode at once.
        retrieval_batch: sequences that must ask before any continues; at most ``decode_batch``.
        retrievals: per sequence, the one before decoding included.
        tokens: decoded per sequence.
        rounds: retrieval batches to simulate; more give a smoother result.

    Raises:
        InvalidInputError: a number is out of range.
    """
    if not 1 <= retrieval_batch <= decode_batch:
        raise InvalidInputError(f"retrieval_batch is {retrieval_batch}; expected 1 to decode_batch, {decode_batch}")
    if not 1 <= retrievals <= tokens:
        raise InvalidInputError(f"retrievals is {retrievals}; expected 1 to tokens, {tokens}")
    if retrievals == 1:
        return 1.0
    rng = np.random.default_rng(seed)
    during = retrievals - 1
    pauses = [_pauses(rng, during, tokens) for _ in range(decode_batch)]
    taken = [0] * decode_batch
    # (time at which it asks, sequence); one token takes one unit of time.
    asking: list[tuple[float, int]] = [(pauses[i][0], i) for i in range(decode_batch)]
    heapq.heapify(asking)
    waiting: list[int] = []
    now = 0.0
    decoded = 0
    rounds = max(rounds, 40 * decode_batch // retrieval_batch)
    # Leave out the first quarter: all sequences start at once, unlike in a running system.
    settled, settled_at, settled_decoded = rounds // 4, 0.0, 0
    for done in range(rounds):
        if done == settled:
            settled_at, settled_decoded = now, decoded
        while len(waiting) < retrieval_batch:
            now, i = heapq.heappop(asking)
            waiting.append(i)
        for i in waiting:
            at = pauses[i][taken[i]]
            decoded += at - (pauses[i][taken[i] - 1] if taken[i] else 0)
            taken[i] += 1
            if taken[i] < during:
                ahead = pauses[i][taken[i]] - at
            else:
                decoded += tokens - at
                pauses[i], taken[i] = _pauses(rng, during, tokens), 0
                ahead = tokens - at + pauses[i][0]
            heapq.heappush(asking, (now + ahead, i))
        waiting.clear()
    return max(1.0, (now - settled_at) * decode_batch / (decoded - settled_decoded))


def _pauses(rng: np.random.Generator, during: int, tokens: int) -> list[int]:
    return sorted(rng.integers(0, tokens, during).tolist())
