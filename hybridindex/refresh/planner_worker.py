"""The planning process: reads calls from standard input, answers on standard output, ends with its input.

:mod:`hybridindex.refresh.planner_process` starts it as ``python -m hybridindex.refresh.planner_worker NICE``. Both ways
carry frames of :mod:`hybridindex.refresh.pipe_codec`. It has the lowest priority, and ends at once when the serving
process is gone.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hybridindex.processes import take_pipes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hybridindex.partitioner.plan import Plan
    from hybridindex.partitioner.request import PlanRequest
    from hybridindex.plans.planner import Arenas
    from hybridindex.plans.proposal import Served, Weighed
    from hybridindex.types import F32, U8, AccessSample, Profile

__all__ = ["main"]


class _Calls:
    """State of one update."""

    def __init__(self) -> None:
        self._profile: Profile | None = None
        self._plan: Plan | None = None

    @property
    def known(self) -> dict[str, object]:
        """Objects that the serving process has too."""
        found: dict[str, object] = {} if self._profile is None else {"profile": self._profile}
        return found if self._plan is None else {**found, "plan": self._plan, "analysis": self._plan.analysis}

    def answer(self, message: dict[str, Any]) -> Any:
        """Carries out one call."""
        match message.pop("call"):
            case "prepare":
                return self._prepare()
            case "renew":
                return self._renew(**message)
            case "solve":
                return self._solve(**message)
            case "weigh":
                return self._weigh(**message)
            case other:
                raise ValueError(f"no such call: {other}")

    def _prepare(self) -> None:
        """Imports what the other calls need, which takes most of the start."""
        import hybridindex.plans.planner
        import hybridindex.plans.proposal
        import hybridindex.profiler.recent  # noqa: F401
        from hybridindex.index.faiss_model import require_faiss

        require_faiss()

    def _renew(
        self, *, model: U8, profile: Profile, queries: F32, **options: Any
    ) -> tuple[AccessSample, Mapping[str, Any], str]:
        from hybridindex.index.coarse import CoarseModel
        from hybridindex.profiler.recent import renew_profile

        coarse = CoarseModel.from_bytes(model, fingerprint=profile.index_fingerprint)
        renewed = self._profile = renew_profile(profile, coarse, queries, **options)
        return renewed.access, renewed.notes, renewed.created_at

    def _solve(self, *, request: PlanRequest, arenas: Arenas | None, profile: Profile | None = None) -> Plan:
        from hybridindex.plans.planner import plan_again

        self._profile = profile or self._profile
        assert self._profile is not None, "nothing was renewed, and no profile was given"
        plan = self._plan = plan_again(self._profile, request, arenas)
        # Caches are large; the serving process fills its own.
        return replace(plan, analysis=replace(plan.analysis, curve=plan.analysis.curve.without_caches()))

    def _weigh(self, *, served: Served, bandwidth_share: float, room_bytes: Sequence[int] | None) -> Weighed:
        from hybridindex.plans.proposal import weigh_plan

        assert self._plan is not None, "weigh before solve"
        return weigh_plan(self._plan, served, bandwidth_share, room_bytes)


def main() -> None:
    """Serves calls until standard input ends."""
    calls_in, answers_out = take_pipes(int(sys.argv[1]))

    from hybridindex.refresh.pipe_codec import read_frame, write_frame
    from hybridindex.refresh.planner import CODEC

    calls = _Calls()
    while (frame := read_frame(calls_in)) is not None:
        try:
            answer = {"value": calls.answer(CODEC.decode(frame))}
        except Exception as error:  # noqa: BLE001 - raised again on the other side
            answer = {"error": type(error).__name__, "text": str(error)}
        write_frame(answers_out, CODEC.encode(answer, calls.known))


if __name__ == "__main__":
    main()
