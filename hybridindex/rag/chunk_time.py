"""Predicts how long the next chunk takes to generate: the window that hides a retrieval (PipeRAG, §3.2, S3).

The time of the first token is linear in the tokens that the server has not cached, the time per token in the sequence
length (O2: attention grows with it). Old chunks fade, so the model follows the LLM's load. A retrieval gets the window
of the shortest such chunks, not of the average one; the router chooses the nprobe that fits. Pure but for its state.
"""

from __future__ import annotations

from hybridindex.online_fit import FadingLine, RecentValues
from hybridindex.types import LLMMeasurement

__all__ = ["ChunkTimeModel"]

#: Fraction of chunks that take at least the predicted least time.
_AS_LONG = 0.95


class ChunkTimeModel:
    """Learns from chunks as they are generated. One thread."""

    def __init__(self, keep: float = 0.8) -> None:
        """``keep``: weight of a chunk relative to the one after it."""
        # Without the prior, one chunk (the first, with a long prompt) would not predict the next.
        self._first = FadingLine(keep, through_origin=0.02)
        self._per_token = FadingLine(keep)
        #: Measured over predicted seconds, of chunks that the lines had not seen.
        self._ratios = RecentValues()

    @classmethod
    def of_measurement(cls, measurement: LLMMeasurement, keep: float = 0.8) -> ChunkTimeModel:
        """Starts from single requests of a measurement; later chunks weigh more, one by one.

        A measurement without such times (vLLM's offline loop has none) adds nothing.
        """
        model = cls(keep)
        for length, first_token_s in measurement.prefill:
            model._first.observe(length, first_token_s)
        alone = min(measurement.levels, key=lambda level: level.concurrency, default=None)
        if alone is not None and alone.ttft_p50_s > 0:
            model._first.observe(alone.input_tokens, alone.ttft_p50_s)
            model._per_token.observe(alone.input_tokens + alone.output_tokens / 2, alone.tpot_p50_s)
        return model

    def observe(
        self, length: int, tokens: int, first_token_s: float, seconds: float, *, unseen: int | None = None
    ) -> None:
        """One chunk: ``tokens`` generated after a prompt of ``length`` tokens, ``unseen`` of which are not in the
        server's prefix cache; None: all."""
        predicted = self.predict_s(length, tokens, unseen=unseen)
        if predicted:
            self._ratios.add(seconds / predicted)
        self._first.observe(length if unseen is None else unseen, first_token_s)
        if tokens > 1:
            # The average token has half of the chunk's tokens before it.
            self._per_token.observe(length + tokens / 2, (seconds - first_token_s) / (tokens - 1))

    def predict_s(self, length: int, tokens: int, *, unseen: int | None = None) -> float | None:
        """Seconds to generate ``tokens`` after ``length``, as in :meth:`observe`; None while nothing is known."""
        first = self._first.predict(length if unseen is None else unseen)
        per_token = self._per_token.predict(length + tokens / 2)
        if first is None:
            return None
        return first + max(0, tokens - 1) * (per_token or 0.0)

    def predict_least_s(self, length: int, tokens: int, *, unseen: int | None = None) -> float | None:
        """Seconds that 95 % of such chunks take or exceed, by the errors of the last predictions.

        Never more than :meth:`predict_s`.
        """
        predicted = self.predict_s(length, tokens, unseen=unseen)
        if predicted is None:
            return None
        return predicted * min(1.0, self._ratios.lower(_AS_LONG) or 1.0)
