"""The replay of refreshes and of swaps; :mod:`tests.residency_model.replay` does that of routers."""

from __future__ import annotations

from typing import Any

from hybridindex.plans.current import current_plan_id, same_decision
from tests.residency_model import generations, ledger
from tests.residency_model.check import Refused
from tests.residency_model.ledger import Ledger
from tests.residency_model.observe import Event

__all__ = ["Refresh", "Swaps"]


class Refresh:
    """What one store knows of one index, over all refreshers that follow each other."""

    EVENTS = frozenset(("updates", "request", "save", "move", "moved", "stage", "go back", "ended", "make current"))

    def __init__(self, event: Event) -> None:
        self.rules = ledger.Rules()
        self.s = Ledger()
        self.updates: Any = event.owner
        self.store: Any = event.owner._store
        #: Plans by number, and the rows of those that are stored.
        self._plans: list[Any] = [event.facts["plan"]]
        self._rows: dict[int, int] = {}

    def follow(self, event: Event) -> None:
        getattr(self, "_" + event.what.replace(" ", "_"))(event)
        for holds in ledger.INVARIANTS:
            if not holds(self.s):
                raise Refused(holds.__name__)

    def _updates(self, event: Event) -> None:
        if event.owner is self.updates:
            return
        self.updates, self.s = event.owner, self.rules.reload(self.s)
        carried = event.facts["plan"]
        self.rules.need(carried is self._plans[self.s.served], "a_trial_is_not_carried_over")

    def _request(self, event: Event) -> None:
        base = event.facts["base"]
        if base is not self._plans[self.s.served]:
            # Somebody applied another plan to the router.
            number = self._number_of(base)
            good, stored = self.s.good | {number}, self.s.stored | {number}
            self.s = self.s._replace(served=number, good=good, stored=stored, told=None)
        self._plans.append(None)
        self.s = self.rules.request(self.s, len(self._plans) - 1)

    def _number_of(self, plan: object) -> int:
        for number, known in enumerate(self._plans):
            if known is plan:
                return number
        self._plans.append(plan)
        return len(self._plans) - 1

    def _save(self, event: Event) -> None:
        self._plans[self.s.trial] = event.facts["plan"]
        if event.facts["plan_id"] is not None:
            self._rows[self.s.trial] = event.facts["plan_id"]
        self.s = self.rules.save(self.s)

    def _move(self, event: Event) -> None:
        self.s = self.rules.move(self.s)

    def _moved(self, event: Event) -> None:
        self.s = self.rules.moved(self.s)

    def _stage(self, event: Event) -> None:
        source, target = event.facts["source"], event.facts["target"]
        if (source, target) == ("verifying", "committing"):
            self.s = self.rules.verified(self.s)
            if self.store is None:
                self.s = self.rules.write(self.s)
        elif (source, target) == ("committing", "rolling_back"):
            self.s = self.rules.write_fails(self.s, taken=self._in_store() == self._rows.get(self.s.trial, -1))
        elif target == "rolling_back" and source != "rolling_back":
            if self.s.stage == ledger.SAVING:  # it could not be stored
                self.s = self.s._replace(stage=ledger.ROLLING_BACK)
            else:
                self.s = self.rules.fail(self.s)

    def _in_store(self) -> int | None:
        return current_plan_id(self.store, self.updates._router.index.fingerprint)

    def _make_current(self, event: Event) -> None:
        if event.owner is not self.store:
            return
        row = event.facts["plan_id"]
        if self.s.stage == ledger.COMMITTING:
            self.rules.need(row == self._rows[self.s.trial], "what_was_verified_is_written")
            self.s = self.rules.write(self.s)
            return
        served = same_decision(event.facts["plan"], self._plans[self.s.served])
        self.rules.need(served, "only_what_serves_or_was_verified_is_written")
        self._rows[self.s.served] = row
        if self.s.owed:
            self.s = self.rules.pay(self.s)
        else:  # what served before the refresh began
            self.s = self.s._replace(current=self.s.served)

    def _go_back(self, event: Event) -> None:
        self.s = self.rules.go_back(self.s)

    def _ended(self, event: Event) -> None:
        outcome = event.facts["outcome"]
        if outcome == "committed":
            self.s = self.rules.tell_committed(self.s)
        elif outcome == "rolled_back":
            self.s = self.rules.tell_rolled_back(self.s)
        else:
            self.s = self.rules.decline(self.s)

    def differences(self) -> list[str]:
        """Where the model ended otherwise than the product."""
        found = []
        if self.updates._router.plan is not self._plans[self.s.served]:
            found.append("another plan serves")
        if self.store is not None and not self.s.owed and self._in_store() != self._rows.get(self.s.current):
            found.append(f"plan {self._in_store()} is current; expected {self._rows.get(self.s.current)}")
        return found


class Swaps:
    """Which generation serves, and who uses which."""

    EVENTS = frozenset(
        ("opened", "serves", "enter", "leave", "open session", "close session", "use", "unuse", "close serving")
    )

    def __init__(self) -> None:
        self.rules = generations.Rules()
        self.s = generations.Service(routers=(), files=frozenset())
        self._numbers: dict[int, int] = {}
        #: Where each session is, until it ends.
        self._sessions: dict[int, int] = {}

    def follow(self, event: Event) -> None:
        getattr(self, "_" + event.what.replace(" ", "_"))(event)
        for holds in generations.INVARIANTS:
            if event.facts.get("reason") != "the end" and not holds(self.s):
                raise Refused(holds.__name__)

    def _opened(self, event: Event) -> None:
        self._numbers[id(event.owner)] = len(self.s.routers)
        self.s = self.rules.open(self.s, event.facts["generation"], memory=event.facts["memory"])

    def _serves(self, event: Event) -> None:
        self.s = self.s._replace(current=self._numbers[id(event.owner)])

    def _change(self, at: int, **changes: int) -> None:
        router = self.s.routers[at]
        values = {name: getattr(router, name) + change for name, change in changes.items()}
        self.s = generations.with_router(self.s, at, **values)

    def _enter(self, event: Event) -> None:
        self._change(self._numbers[id(event.owner)], users=1)

    def _leave(self, event: Event) -> None:
        self._change(self._numbers[id(event.owner)], users=-1)

    def _open_session(self, event: Event) -> None:
        at = self._sessions[id(event.facts["session"])] = self._numbers[id(event.owner)]
        self._change(at, sessions=1)

    def _close_session(self, event: Event) -> None:
        self._change(self._sessions[id(event.facts["session"])], sessions=-1)

    def _use(self, event: Event) -> None:
        self._change(self._sessions[id(event.facts["session"])], used=1)

    def _unuse(self, event: Event) -> None:
        self._change(self._sessions[id(event.facts["session"])], used=-1)

    def _close_serving(self, event: Event) -> None:
        at = self._numbers[id(event.owner)]
        if event.facts["reason"] == "the end":
            self.s = generations.with_router(self.s, at, open=False, memory=False)
        else:
            self.s = self.rules.close(self.s, at, files=event.facts["files"])
