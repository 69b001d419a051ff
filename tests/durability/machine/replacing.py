"""Rules: the index is built again, rolled back, collected, and served anew."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from hybridindex.cli.console import ExitCode
from tests.durability.machine.base import Base, counts, points, running
from tests.durability.machine.model import Generation
from tests.durability.machine.world import CONTENTS, HUP, KILL, NLIST, NPROBE
from tests.durability.points import Point

__all__ = ["Replacing"]

WRITERS = points("os:pwrite", "os:fsync", "os:replace", "os:rename", "os:unlink", "shutil:rmtree")


class Replacing(Base):
    @rule(content=st.sampled_from([*CONTENTS, "a", "b"]), at=WRITERS)
    def build(self, content: str, at: Point | None) -> None:
        model = self.model
        words = ("build", self.lab.vectors(content), self.world.index, "--nlist", NLIST, "--metric", "l2")
        status, said = self.world.command(*words, "--nprobe", NPROBE, "--replace", at=at)
        if status == -KILL:
            counts["command killed"] += 1
            model.writer_killed = True
            self.generations_are(built=content)
        elif status == 0:
            there = (model.current, model.previous)
            kept = model.served if model.running and model.served in there else model.current
            built = Generation(said["generation"], content)
            assert built.number > model.current.number
            self.contents[built.number] = content
            model.current, model.previous = built, kept
        else:
            assert model.disk_full, said
            assert status == ExitCode.BUILD_FAILED, said
        self.generations_are()

    @rule(at=WRITERS)
    def roll_back(self, at: Point | None) -> None:
        model = self.model
        status, said = self.world.command("rollback", self.world.index, at=at)
        if status == -KILL:
            counts["command killed"] += 1
            model.writer_killed = True
            self.generations_are(model.previous)
        elif model.previous is None:
            assert status == ExitCode.BAD_INPUT, said
        elif status == 0:
            model.current, model.previous = model.previous, model.current
        else:
            assert model.disk_full, said
            assert status == ExitCode.BUILD_FAILED, said
            self.generations_are(model.previous)
        self.generations_are()

    @rule(at=WRITERS)
    def collect(self, at: Point | None) -> None:
        """``hybridindex gc``."""
        status, said = self.world.command("gc", self.world.index, at=at)
        if status == -KILL:
            counts["command killed"] += 1
            self.model.writer_killed = True
            self.generations_are(self.model.current)
        else:
            assert status == 0, said
            self.model.previous = None
        self.generations_are()

    @precondition(running)
    @rule(how=st.sampled_from(["route", "SIGHUP"]), deadly=st.booleans())
    def reload(self, how: Literal["route", "SIGHUP"], deadly: bool) -> None:
        model, before = self.model, self.served
        refused = CONTENTS[model.current.content][1] != CONTENTS[before.content][1]
        if how == "SIGHUP":
            if model.current == before:
                return
            assert self.world.child is not None
            number, behind = model.current.number, len(self.world.child.log)
            self.world.signal(HUP)
            words = f"generation {number} {'cannot serve' if refused else 'serves, in place of'}"
            self.world.child.wait_for(words, behind=behind)
            answer = None
        else:
            answer = self.change("/v1/reload", {}, deadly)
            if answer is None:
                self.generations_are(model.current)
                self.plans_are(changed=model.current.content)
                return
            if refused:
                assert (answer.status, answer.kind) == (409, "reload-failed"), answer
            elif answer.status != 200:
                assert model.disk_full or model.store_doubt or model.device_doubt, answer
                assert answer.status in (409, 503), answer
                self.generations_are(model.current)
                self.note_status()
                return
        if not refused:
            self._reloaded(before)
        found = self.note_status()
        assert found["reload"]["last_error"] is None or refused

    def _reloaded(self, before: Generation) -> None:
        """The plan that serves is the one that docs/service.md says."""
        model, content = self.model, self.model.current.content
        model.served, model.previous = model.current, None
        status = self.world.ask("GET", "/v1/status", self.root)
        assert status is not None
        found = status.data["plan_id"]
        if model.current == before:
            if not model.devices_open:
                model.plan = model.chosen()
        elif model.plan is None or content != before.content:
            ledger, chosen = model.plans[content], model.chosen()
            if chosen is None and model.plan is not None and ledger.profiled:
                assert found is not None, "no plan was made for the new content"
                assert found not in ledger.stored
                ledger.apply(found)
                chosen = found
            model.plan = chosen
        if model.store_doubt or model.disk_full or model.device_doubt:
            model.plan = found
        model.devices_open = model.plan is not None

    @precondition(running)
    @rule(content=st.sampled_from(["a", "b", "c"]), how=st.sampled_from(["route", "SIGHUP"]), deadly=st.booleans())
    def replace(self, content: str, how: Literal["route", "SIGHUP"], deadly: bool) -> None:
        """As users do: a build, then a reload."""
        self.build(content, None)
        self.reload(how, deadly)
