"""What all rules share: the world, the model, and whether one is as the other says."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from hybridindex.service.auth import KeyFile
from tests.durability.machine.model import Generation, Key, Model
from tests.durability.machine.world import KILL, Answer, Lab, World
from tests.durability.points import Point

__all__ = ["CHANGERS", "NUMBERS", "SEEDS", "Base", "counts", "down", "points", "running"]

#: What was done, over all examples: for the report of a long run.
counts: Counter[str] = Counter()


def points(*targets: str) -> st.SearchStrategy[Point | None]:
    """Moments at which a process dies; None, as often: it does not."""
    point = st.builds(
        lambda target, when, count: Point(name=f"{when} {target} {count}", target=target, when=when, count=count),
        st.sampled_from(targets),
        st.sampled_from(["before", "after"]),
        st.integers(1, 3),
    )
    return st.none() | point


_STORE = "hybridindex.store.control:ControlStore"
#: Of a daemon that changes its plan or index.
CHANGERS = points(
    f"{_STORE}.save_plan",
    f"{_STORE}.record_event",
    "hybridindex.router.router:Router.apply_plan",
    "hybridindex.tiers.contract.residency:ResidencyStore.publish",
    "hybridindex.service.reload:Generations._swap",
    "hybridindex.service.reload:Generations._retire",
    "hybridindex.service.reload:open_index",
    "os:replace",
    "shutil:rmtree",
)
SEEDS = st.integers(0, 9)
#: Where several things are there, which one.
NUMBERS = st.integers(0, 5)


def running(self: Base) -> bool:
    return self.model.running


def down(self: Base) -> bool:
    return not self.model.running


class Base(RuleBasedStateMachine):
    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.world = World(lab)
        self.contents = {3: "a"}
        current, previous = self.world.generations(self.contents)
        roles = {"root": "admin", "guest": "search"}
        keys = {name: Key(name, KeyFile(self.world.keys).add(name, role), role) for name, role in roles.items()}
        self.model = Model(current=current, previous=previous, plans=self.world.ledger(), keys=keys)
        counts["examples"] += 1

    @property
    def root(self) -> Key:
        return self.model.keys["root"]

    @property
    def served(self) -> Generation:
        assert self.model.served is not None
        return self.model.served

    def key(self, number: int) -> Key:
        found = list(self.model.keys.values())
        return found[number % len(found)]

    def change(self, path: str, body: dict[str, Any], deadly: bool) -> Answer | None:
        """A call that changes something. ``deadly``: the daemon's point is armed; None: it died there."""
        self.world.switch("armed", on=deadly)
        answer = self.world.ask("POST", path, self.root, json=body)
        self.world.switch("armed", on=False)
        if answer is None:
            assert deadly, f"no answer: {self.world.child and self.world.child.log}"
            counts["daemon killed in a change"] += 1
            self.ended(-KILL)
        return answer

    def ended(self, status: int) -> None:
        found = self.world.ended()
        assert found == status, (found, self.world.log)
        self.model.stopped()

    def plans_are(self, changed: str | None = None) -> None:
        """The ledger on disk is the model's. ``changed``: a killed call may have stored a plan of this content, and
        applied it or one that was there."""
        model = self.model
        if changed is not None:
            model.unsettled.add(changed)
        # On a full disk it cannot be read: later.
        if model.store_damaged or model.disk_full or not (self.world.index / "control.sqlite").exists():
            return
        for content, found in self.world.ledger().items():
            known = model.plans[content]
            if model.store_doubt:
                # The daemon saves what it holds in the store that it finds: more is there than was acknowledged.
                assert found.stored >= known.stored, "an acknowledged plan is gone"
                assert content in model.unsettled or known.current in (None, found.current)
            elif content in model.unsettled:
                assert found.stored >= known.stored, "an acknowledged plan is gone"
                assert found.current in {known.current, *found.stored}
                assert found.profiled == known.profiled
            else:
                assert found == known, f"of {content}"
            model.plans[content] = found
        model.unsettled.clear()

    def generations_are(self, *maybe: Generation | None, built: str | None = None) -> None:
        """The generations on disk are the model's. ``maybe``: one that a killed call may have made the current one;
        ``built``: or a new one with this content."""
        current, previous = self.world.generations(self.contents)
        known = self.model.current
        if current != known and current not in maybe:
            assert built is not None, f"generation {known} was acknowledged, {current} is there"
            assert current.number > known.number
            assert current.content == built
        if not maybe and built is None:
            assert previous == self.model.previous
        self.model.current, self.model.previous = current, previous

    def note_status(self) -> dict[str, Any]:
        """What the daemon says of itself is what the model says."""
        answer = self.world.ask("GET", "/v1/status", self.root)
        assert answer is not None
        assert answer.status == 200
        data, model = answer.data, self.model
        assert data["index"]["generation"] == self.served.number
        assert data["index"]["fingerprint"] == self.lab.references[self.served.content].fingerprint
        if model.store_doubt:
            model.plan, model.devices_open = data["plan_id"], bool(data["devices"])
        assert data["plan_id"] == model.plan
        assert bool(data["devices"]) == model.devices_open
        assert data["sessions"]["open"] == len(model.sessions)
        return data
