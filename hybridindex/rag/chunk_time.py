"""How long the next chunk will take to generate: the window that a retrieval can hide in (PipeRAG, §3.2, S3).

The first token's time is a line in the tokens that the server has not seen yet, the time per token one in the sequence
length (O2: attention grows with it), fitted to what was seen lately: old chunks fade, so the model follows the LLM's
load. A retrieval counts on the shortest of such chunks, not on the average one; what nprobe fits into it is the
router's matter (``router.deadline``). Pure but for its own state.
"""

from __future__ import annotations

from hybridindex.online_fit import FadingLine, RecentValues
from hybridindex.types import LLMMeasurement

__all__ = ["ChunkTimeModel"]

#: Of chunks, should take as long as a retrieval counts on.
_AS_LONG = 0.95


class ChunkTimeModel:
    """Learns from chunks as they are generated. One thread."""

    def __init__(self, keep: float = 0.8) -> None:
        """``keep``: worth of a chunk beside the one after it."""
        # Of one chunk, the first with a long prompt, the next one's could not be told without.
        self._first = FadingLine(keep, through_origin=0.02)
        self._per_token = FadingLine(keep)
        #: Seconds over the predicted ones, of chunks that the lines had not seen.
        self._ratios = RecentValues()

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

    def observe(
        self, length: int, tokens: int, first_token_s: float, seconds: float, *, unseen: int | None = None
    ) -> None:
        """One chunk: ``tokens`` generated after a prompt of ``length`` tokens, of which the server's cache of what came
        before lacks ``unseen``; None: all."""
        predicted = self.predict_s(length, tokens, unseen=unseen)
        if predicted:
            self._ratios.add(seconds / predicted)
        self._first.observe(length if unseen is None else unseen, first_token_s)
        if tokens > 1:
            # Half of the chunk's own tokens stand before the average one.
            self._per_token.observe(length + tokens / 2, (seconds - first_token_s) / (tokens - 1))

    def predict_s(self, length: int, tokens: int, *, unseen: int | None = None) -> float | None:
        """Seconds to generate ``tokens`` after ``length``, as in :meth:`observe`; None while nothing is known."""
        first = self._first.predict(length if unseen is None else unseen)
        per_token = self._per_token.predict(length + tokens / 2)
        if first is None:
            return None
        return first + max(0, tokens - 1) * (per_token or 0.0)

    def predict_least_s(self, length: int, tokens: int, *, unseen: int | None = None) -> float | None:
        """Seconds that 95 % of such chunks take or exceed: what a retrieval may count on.

        From how far the last chunks were from what was predicted for them; never more than :meth:`predict_s`.
        """
        predicted = self.predict_s(length, tokens, unseen=unseen)
        if predicted is None:
            return None
        return predicted * min(1.0, self._ratios.lower(_AS_LONG) or 1.0)
