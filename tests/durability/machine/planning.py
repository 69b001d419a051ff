"""Rules: plans are made, stored and applied, by a daemon and by commands."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hybridindex.cli.console import ExitCode
from tests.durability.machine.base import Base, counts, down, points, running
from tests.durability.machine.world import KILL, Answer
from tests.durability.points import Point

__all__ = ["Planning"]

_STORE = "hybridindex.store.control:ControlStore"
PLANNERS = points(f"{_STORE}.save_plan", "hybridindex.store.plans:insert_plan", f"{_STORE}.record_event")
COVERAGES = st.sampled_from([0.1, 0.3, 0.6, 0.9])


class Planning(Base):
    @precondition(running)
    @rule(coverage=COVERAGES, apply=st.booleans(), deadly=st.booleans())
    def repartition(self, coverage: float, apply: bool, deadly: bool) -> None:
        model, content = self.model, self.served.content
        body: dict[str, Any] = {"coverage": coverage, "apply": apply}
        answer = self.change("/v1/repartition", body, apply and deadly)
        if answer is None:
            self.plans_are(changed=content)
            return
        if answer.status != 200:
            self._refused(answer, {400} if not model.devices_open else set())
        elif apply:
            model.plan = answer.data["plan_id"]
            assert model.plan is not None
            assert model.store_doubt or model.plan not in model.plans[content].stored
            model.plans[content].apply(model.plan)
        self.note_status()

    def _refused(self, answer: Answer, known: set[int]) -> None:
        """A change of the plan; ``known``: what the plans alone account for."""
        model, allowed = self.model, set(known)
        if model.device_doubt:
            allowed.add(409)
        if model.disk_full:
            allowed.add(507)
        if model.store_doubt:
            allowed |= {400, 404, 409, 503, 507}
        assert answer.status in allowed, answer

    @precondition(running)
    @rule(which=st.sampled_from(["latest", "unknown", 0, 1, 2, 3]), dry=st.booleans(), deadly=st.booleans())
    def apply_stored(self, which: str | int, dry: bool, deadly: bool) -> None:
        model, content = self.model, self.served.content
        ledger = model.plans[content]
        known = sorted(set().union(*(plans.stored for plans in model.plans.values())))
        if isinstance(which, int) and not known:
            return
        choice = known[which % len(known)] if isinstance(which, int) else "latest" if which == "latest" else 99999
        plan = ledger.latest if choice == "latest" else choice
        answer = self.change(f"/v1/plans/{choice}/apply", {"dry_run": dry, "force": True}, deadly and not dry)
        if answer is None:
            self.plans_are(changed=content)
            return
        if answer.status != 200:
            missing = {404, 409} if plan not in ledger.stored else set()
            self._refused(answer, {400} if not model.devices_open and model.asked == "none" else missing)
        elif not dry:
            found = answer.data["plan_id"]
            assert found == plan if not model.store_doubt else plan in (found, None, *ledger.stored, choice)
            ledger.apply(found)
            model.plan, model.devices_open = found, True
        self.note_status()

    @rule(coverage=COVERAGES, at=PLANNERS)
    def plan_command(self, coverage: float, at: Point | None) -> None:
        """``hybridindex plan`` stores a plan, which serves nobody."""
        model, content = self.model, self.model.current.content
        words = ("plan", self.world.index, "--slo-ms", 5000, "--budget", "16MiB", "--coverage", coverage)
        status, said = self.world.command(*words, at=at)
        if status == -KILL:
            counts["command killed"] += 1
            self.plans_are(changed=content)
        elif status:
            self._no_plan(status, said)
        else:
            model.plans[content].store(said["plan_id"])

    @precondition(down)
    @rule(coverage=COVERAGES, at=PLANNERS)
    def repartition_command(self, coverage: float, at: Point | None) -> None:
        """Without a daemon, for the next one."""
        model, content = self.model, self.model.current.content
        words: list[object] = ["--coverage", coverage]
        if model.plans[content].current is None or coverage > 0.5:
            words = ["--slo-ms", 5000, "--budget", "16MiB", "--coverage", "solve"]
        status, said = self.world.command("repartition", self.world.index, *words, "--apply", at=at)
        if status == -KILL:
            counts["command killed"] += 1
            self.plans_are(changed=content)
        elif status:
            self._no_plan(status, said)
        else:
            model.plans[content].apply(said["plan_id"])

    def _no_plan(self, status: int, said: dict[str, Any]) -> None:
        """A command that plans was refused."""
        model = self.model
        assert status == ExitCode.NO_PROFILE, said
        broken = model.disk_full or model.store_damaged or model.store_doubt
        assert broken or not model.plans[model.current.content].profiled, said
