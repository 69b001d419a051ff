"""How long the next chunk will take to generate: the window that a retrieval can hide in (PipeRAG, §3.2, S3).

The first token's time and the time per token are each a line in the sequence length (O2: attention grows with it),
fitted to what was seen lately: old chunks fade, so the model follows the LLM's load. Pure but for its own state.
"""

from __future__ import annotations

from hybridindex.errors import InvalidInputError
from hybridindex.types import LLMMeasurement

__all__ = ["ChunkTimeModel", "FadingLine"]


class FadingLine:
    """y = a + b·x by least squares, b never below 0; an observation is worth ``keep`` of the next. One thread."""

    def __init__(self, keep: float = 0.8) -> None:
        """Raises InvalidInputError: ``keep`` not in (0, 1]."""
        if not 0 < keep <= 1:
            raise InvalidInputError(f"keep is {keep!r}; expected a number above 0, 1 at most")
        self._keep = keep
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        """Takes one point into account."""
        # Means and central sums, updated in place: plain sums of squares would cancel.
        self._weight = self._keep * self._weight + 1.0
        share = 1.0 / self._weight
        dx, dy = x - self._x, y - self._y
        self._x += share * dx
        self._y += share * dy
        self._xx = self._keep * self._xx + (1 - share) * dx * dx
        self._xy = self._keep * self._xy + (1 - share) * dx * dy

    def predict(self, x: float) -> float | None:
        """y at ``x``, never below 0; None before the first observation. The mean where x never varied."""
        if self._weight == 0:
            return None
        slope = max(0.0, self._xy / self._xx) if self._xx > 1e-9 else 0.0
        return max(0.0, self._y + slope * (x - self._x))


class ChunkTimeModel:
    """Learns from chunks as they are generated. One thread."""

    def __init__(self, keep: float = 0.8) -> None:
        """``keep``: worth of a chunk beside the one after it."""
        self._first = FadingLine(keep)
        self._per_token = FadingLine(keep)

    @classmethod
    def of_measurement(cls, measurement: LLMMeasurement, keep: float = 0.8) -> ChunkTimeModel:
        """Knows what single requests took when the LLM was measured; chunks that come weigh more, one by one.

        A measurement without such times (vLLM's offline loop has none) teaches nothing.
        """
        model = cls(keep)
        for length, first_token_s in measurement.prefill:
            model._first.observe(length, first_token_s)
        alone = min(measurement.levels, key=lambda level: level.concurrency, default=None)
        if alone is not None and alone.ttft_p50_s > 0:
            model._first.observe(alone.input_tokens, alone.ttft_p50_s)
            model._per_token.observe(alone.input_tokens + alone.output_tokens / 2, alone.tpot_p50_s)
        return model

    def observe(self, length: int, tokens: int, first_token_s: float, seconds: float) -> None:
        """One chunk: ``tokens`` generated after a prompt of ``length`` tokens."""
        self._first.observe(length, first_token_s)
        if tokens > 1:
            # Half of the chunk's own tokens stand before the average one.
            self._per_token.observe(length + tokens / 2, (seconds - first_token_s) / (tokens - 1))

    def predict_s(self, length: int, tokens: int) -> float | None:
        """Seconds to generate ``tokens`` after ``length``; None while nothing is known."""
        first = self._first.predict(length)
        per_token = self._per_token.predict(length + tokens / 2)
        if first is None:
            return None
        return first + max(0, tokens - 1) * (per_token or 0.0)
