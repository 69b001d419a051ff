"""Windows: how long a session's copies can hide behind generation, and how many bytes that is.

Step times come from ``profile llm``, bandwidth and miss rates from the plan's profile. Without them nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridindex.errors import InvalidInputError, ProfileError
from hybridindex.paging import format_bytes
from hybridindex.partitioner.plan import Plan
from hybridindex.types import LLMProfile

__all__ = ["Windows"]

#: Budgets that are remembered, by window.
_MAX_KNOWN = 256


class Windows:
    """Of one router. Thread-safe: what is remembered can be computed twice, to the same."""

    def __init__(self, window_ms: float | None, llm: LLMProfile | None, *, pinned: bool) -> None:
        """
        Args:
            window_ms: of sessions that do not say; None: the longest measured step.
            llm: whose step times are used; None: the plan's.
            pinned: copies come from page-locked memory.
        """
        self._window_ms = window_ms
        self._llm = llm
        self._pinned = pinned
        self._known: dict[tuple[int, float, int], tuple[Plan, int]] = {}
        self._share: tuple[Plan, int | None] | None = None

    def steps(self, plan: Plan | None) -> Mapping[str, float]:
        """Step -> seconds of generation; empty where no LLM was measured."""
        llm = self._llm or (None if plan is None else plan.request.llm)
        return {} if llm is None else llm.generation_s

    def default_ms(self, plan: Plan | None) -> float | None:
        """The window of sessions that do not say; None where nothing is known."""
        if self._window_ms is not None:
            return self._window_ms
        longest = max(self.steps(plan).values(), default=0.0)
        return longest * 1e3 if longest > 0 else None

    def of_step(self, plan: Plan | None, step: str) -> float:
        """Milliseconds of one pipeline step.

        Raises:
            InvalidInputError: it was not measured.
        """
        steps = self.steps(plan)
        if step not in steps:
            known = f"one of {', '.join(steps)}" if steps else "window_ms: no LLM was measured, see profile llm"
            raise InvalidInputError(f"step is {step!r}; expected {known}")
        return steps[step] * 1e3

    def nbytes(self, plan: Plan | None, window_ms: float, share_bytes: int) -> int:
        """What to move in a window, at most ``share_bytes``: the plan's answer. Remembered, as pipelines have few steps
        and asking takes longer than a small search.

        Raises:
            InvalidInputError: there is no plan. ProfileError: its profile timed no copies.
        """
        if share_bytes == 0:  # no device: no copies were timed, and none will be made
            return 0
        if plan is None:
            raise InvalidInputError("window_ms needs a router with a plan; give lookahead_bytes")
        key = (id(plan), window_ms, share_bytes)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            # The plan is kept beside its answer: no other gets its id meanwhile.
            budget = plan.lookahead_budget(window_ms, share_bytes=share_bytes, pinned=self._pinned)
            known = self._known[key] = plan, budget.nbytes
        return known[1]

    def share_bytes(self, plan: Plan | None) -> int | None:
        """What can be copied in the default window; None where window or bandwidth is not known."""
        if plan is None:
            return None
        share = self._share
        if share is None or share[0] is not plan:
            window_ms = self.default_ms(plan)
            bandwidth = None if window_ms is None else self._bandwidth(plan)
            nbytes = None if window_ms is None or bandwidth is None else int(window_ms / 1e3 * bandwidth)
            share = self._share = plan, nbytes
        return share[1]

    def describe(self, plan: Plan | None) -> str:
        """Where :meth:`share_bytes` comes from; empty where it is not known."""
        if plan is None or self.share_bytes(plan) is None:
            return ""
        window_ms, bandwidth = self.default_ms(plan), self._bandwidth(plan)
        assert window_ms is not None
        assert bandwidth is not None
        return f"{window_ms:.4g} ms of generation at {format_bytes(bandwidth)}/s"

    def _bandwidth(self, plan: Plan) -> float | None:
        try:
            return plan.copy_bytes_per_s(pinned=self._pinned)
        except ProfileError:
            return None
