"""Rules: a daemon starts, drains, is killed; a second one is refused; a process that holds its clients forks."""

from __future__ import annotations

from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from hybridindex.cli.console import ExitCode
from hybridindex.types import SearchResult
from tests.durability.machine.base import CHANGERS, SEEDS, Base, counts, down, running
from tests.durability.machine.hooks import HELD
from tests.durability.machine.world import KILL, TERM
from tests.durability.points import Point

__all__ = ["Living"]

#: Longest end of a daemon beside searches that its drain waits for.
_BESIDE_DRAIN_S = 5.0


class Living(Base):
    @initialize(point=CHANGERS)
    def first_start(self, point: Point | None) -> None:
        self.start("current", 30, point)

    @precondition(down)
    @rule(
        asked=st.sampled_from(["current", "current", "current", "latest", "none"]),
        drain_s=st.sampled_from([30, 30, 1]),
        point=CHANGERS,
    )
    def start(self, asked: str, drain_s: int, point: Point | None) -> None:
        model = self.model
        if model.keys_damaged:
            # Nobody could get in: the one start that is refused.
            child = self.world.serve(asked, drain_s, None)
            assert child.wait() == ExitCode.BAD_INPUT
            assert "keys.json" in child.log
            return
        self.plans_are()
        self.generations_are()
        armed = None if point is None else point.armed(self.world.armed_by)
        self.world.start(asked, drain_s, armed)
        counts["starts"] += 1
        model.running, model.asked, model.drain_s = True, asked, drain_s
        model.served, model.previous, model.writer_killed = model.current, None, False
        # A store that cannot be used now is asked again, and the plan served then.
        model.store_doubt = model.store_damaged or model.disk_full
        model.device_doubt = model.device_broken
        model.plan = model.chosen()
        model.devices_open = model.plan is not None
        ledger = self.model.plans[self.served.content]
        if asked == "latest" and model.plan not in (None, ledger.current) and not model.store_doubt:
            assert model.plan is not None
            ledger.apply(model.plan)
        self.note_status()
        for key in model.keys.values():
            answer = self.world.ask("GET", "/v1/status", key)
            assert answer is not None
            assert answer.status == 200, f"the key of {key.name} was acknowledged"
        left = self.world.left_behind(self.served, None)
        assert left <= {"daemon.json"}, left

    @precondition(running)
    @rule()
    def kill(self) -> None:
        self.world.signal(KILL)
        counts["daemon killed at rest"] += 1
        self.ended(-KILL)
        self.plans_are()

    @precondition(running)
    @rule(held=st.booleans(), seed=SEEDS)
    def terminate(self, held: bool, seed: int) -> None:
        """SIGTERM; ``held``: while searches are under way, which end only then, or, where the drain is short, never."""
        asked = self.lab.queries(self.served.content, 2, seed)
        waiting = []
        if held:
            self.world.switch(HELD, on=True)
            waiting = [self.world.searching(self.root, asked, 5, 3) for _ in range(3)]
            while self._in_flight() < len(waiting) * len(asked):
                assert not any(search.done() for search in waiting)
        self.world.signal(TERM)
        child = self.world.child
        assert child is not None
        child.wait_for("draining")
        never = held and self.model.drain_s == 1
        self.world.switch(HELD, on=never)
        assert child.ends_within((self.model.drain_s if never else 0) + _BESIDE_DRAIN_S), child.log
        self.world.switch(HELD, on=False)
        for search in waiting:
            found = search.result()
            assert never or isinstance(found, SearchResult), f"an admitted search was not answered: {found}"
            if isinstance(found, SearchResult):
                self.lab.check(self.served.content, asked, 5, 3, found.ids, found.distances)
        counts["drained"] += 1
        self.ended(0)
        assert not self.world.uds.exists()
        left = self.world.left_behind(self.model.current, self.model.previous)
        assert self.model.writer_killed or not left, left
        self.plans_are()

    def _in_flight(self) -> int:
        answer = self.world.ask("GET", "/v1/status", self.root)
        assert answer is not None
        found: int = answer.data["queue"]["in_flight"]
        return found

    @precondition(running)
    @rule()
    def second_daemon(self) -> None:
        child = self.world.serve("current", 30, None, uds=self.world.outside / "second")
        code, words = ExitCode.SERVICE, "another daemon"
        if self.model.keys_damaged:
            code, words = ExitCode.BAD_INPUT, "keys.json"
        assert child.wait() == code, child.log
        assert words in child.log
        assert not (self.world.outside / "second").exists()

    @precondition(running)
    @rule()
    def fork(self) -> None:
        """A process that holds a router, sessions and clients of this daemon forks."""
        script = Path(__file__).with_name("carried.py")
        child = self.lab.launcher.start(script, self.world.index, self.world.url, self.root.secret)
        assert child.wait() == 0, child.log
        counts["forks"] += 1
