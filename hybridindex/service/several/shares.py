"""One budget of device bytes for several served indexes: divided at the start and at each change of one of them.

Who gets less gives its bytes back before another takes them, so the sum of all arenas stays within the budget at any
time. Each index keeps its own plan in its own store; a plan's budgets are its share. A refresh renews its index's plan
within that share.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridindex.errors import InfeasiblePlanError, InvalidInputError, OverloadedError, StoreError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import current_plan_id, make_current, same_decision, save_plan, stored_as
from hybridindex.plans.division import Divided, Wanted, divide_plans
from hybridindex.refresh.update_cycle import CycleStage
from hybridindex.service.core import Service
from hybridindex.service.serving import PlanChoice
from hybridindex.store.control import ControlStore

__all__ = ["SharedBudget", "kept"]

_log = logging.getLogger(__name__)
_WHY = "the device budget was divided"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Division:
    """See :class:`hybridindex.service.changes.shares.Division`."""

    own: str
    divided: Mapping[str, Divided]
    budgets: tuple[int, ...]
    shared: SharedBudget = field(repr=False)

    @property
    def plan(self) -> Plan:
        return self.divided[self.own].plan

    @property
    def room_bytes(self) -> tuple[int, ...]:
        request = self.plan.request
        return tuple(max(0, b - s) for b, s in zip(request.budgets, request.scratch, strict=True))

    def refuse(self, *, force: bool) -> None:
        if force:
            return
        for name, part in self.divided.items():
            now = self.shared.plan_of(name)
            if name != self.own and now is not None and now.feasible and not part.plan.feasible:
                raise InfeasiblePlanError(
                    f"index {name} would miss its SLO: {part.plan.reason}; expected a smaller budget for "
                    f"{self.own}, or force"
                )

    @contextlib.contextmanager
    def carried_out(self) -> Iterator[None]:
        others = {name: part for name, part in self.divided.items() if name != self.own}
        self.shared.refuse_busy(others)
        before = self.shared.budgets
        # Until all have changed, the larger budget holds.
        self.shared.budgets = tuple(map(max, self.budgets, before))
        try:
            self.shared.shrink(others)
            self.shared.grant(self.own, self.divided[self.own].share_bytes)
            yield
            self.shared.grow(others)
        except BaseException:
            self.shared.divide_again(before)
            raise
        self.shared.budgets = self.budgets

    def to_data(self) -> dict[str, Any]:
        return {
            name: {
                "share_bytes": list(part.share_bytes),
                "needs_bytes": part.needs_bytes,
                "verdict": str(part.plan.verdict),
            }
            for name, part in self.divided.items()
        }


class SharedBudget:
    """The budget of one daemon. Methods that change shares are called with :attr:`changing` held."""

    def __init__(self, budgets: tuple[int, ...], lookahead_bytes: int | None) -> None:
        """
        Args:
            budgets: bytes of each device.
            lookahead_bytes: of each device, that each index keeps for sessions; None: what its lists leave.
        """
        self.budgets = budgets
        self.changing = threading.Lock()
        self._lookahead_bytes = lookahead_bytes or 0
        self._services: dict[str, Service] = {}
        self._shares: dict[str, tuple[int, ...]] = {}

    def begin(self, choices: Mapping[str, tuple[PlanChoice, ControlStore]]) -> dict[str, PlanChoice]:
        """The plans that indexes start with, by name; those without a plan get no bytes."""
        plans = {name: choice.plan for name, (choice, _) in choices.items()}
        divided = self._divide({name: Wanted.by(p) for name, p in plans.items() if p is not None}, self.budgets)
        begun = {}
        for name, (choice, store) in choices.items():
            begun[name] = choice if name not in divided else kept(choice, divided[name].plan, store)
            if name in divided:
                self._shares[name] = divided[name].share_bytes
        return begun

    def add(self, name: str, service: Service) -> None:
        """One that serves; before it answers."""
        self._services[name] = service
        service.changes.join(self, name)

    def share_of(self, name: str) -> tuple[int, ...] | None:
        """Bytes of each device; None: it serves on the host. Any thread."""
        return self._shares.get(name)

    def plan_of(self, name: str) -> Plan | None:
        """What is in force on its devices."""
        router = self._services[name].router
        return router.plan if router.devices else None

    # For a service; see hybridindex.service.changes.shares.Shares

    def divide(self, own: str, plan: Plan, budget: int | Sequence[int] | None) -> _Division:
        n_devices = len(self.budgets)
        asked = self.budgets if budget is None else budget
        budgets = (asked,) * n_devices if isinstance(asked, int) else tuple(asked)
        if len(budgets) != n_devices:
            raise InvalidInputError(
                f"device_budget_bytes has {len(budgets)} entries; there are {n_devices} devices: give one per device"
            )
        return _Division(own=own, divided=self._divide(self._wanted(own, plan), budgets), budgets=budgets, shared=self)

    def refit(self, own: str, choice: PlanChoice) -> PlanChoice:
        service = self._services[own]
        others = self._divide(self._wanted(own, choice.plan), self.budgets)
        mine = others.pop(own, None)
        self.refuse_busy(others)
        self.shrink(others)
        if mine is not None:
            self.grant(own, mine.share_bytes)
            choice = kept(choice, mine.plan, service.store)
        else:
            self._shares.pop(own, None)
            service.set_budget(None)
        self.grow(others)
        return choice

    def divide_again(self, budgets: tuple[int, ...]) -> None:
        """After a change that failed: the plans in force share ``budgets``, as far as their stores take it."""
        self.budgets = budgets
        plans = {name: self.plan_of(name) for name in self._services}
        divided = self._divide({name: Wanted.by(plan) for name, plan in plans.items() if plan is not None}, budgets)
        for name in self._shares.keys() - divided:
            del self._shares[name]
        # Who gets less gives first.
        for name, part in sorted(divided.items(), key=lambda item: self._gain(*item)):
            try:
                self._serve(name, part)
            except StoreError as error:
                _log.warning("index %s: its share of the budget could not be given back: %s", name, error)

    def _gain(self, name: str, part: Divided) -> int:
        return sum(part.share_bytes) - sum(self._shares.get(name, ()))

    def _wanted(self, own: str, plan: Plan | None) -> dict[str, Wanted]:
        """In the order of the names, so that a division depends on nothing else."""
        plans = {name: plan if name == own else self.plan_of(name) for name in self._services}
        return {name: Wanted.by(each) for name, each in plans.items() if each is not None}

    def _divide(self, wanted: Mapping[str, Wanted], budgets: tuple[int, ...]) -> dict[str, Divided]:
        return divide_plans(wanted, budgets, lookahead_bytes=self._lookahead_bytes)

    # Carrying it out

    def refuse_busy(self, others: Mapping[str, Divided]) -> None:
        """Raises OverloadedError while a refresh moves the lists of an index whose share would change."""
        for name, part in others.items():
            refresher = self._services[name].refresher
            if refresher is not None and self._changes(name, part):
                stage = refresher.status().stage
                if stage is not CycleStage.IDLE:
                    raise OverloadedError(f"a refresh of index {name} is {stage}", retry_after_s=5)

    def shrink(self, others: Mapping[str, Divided]) -> None:
        """The plans of those that get less, or as much as before."""
        for name, part in others.items():
            if self._gain(name, part) <= 0:
                self._serve(name, part)

    def grow(self, others: Mapping[str, Divided]) -> None:
        """The plans of the rest."""
        for name, part in others.items():
            if self._changes(name, part):
                self._serve(name, part)

    def _changes(self, name: str, part: Divided) -> bool:
        now = self.plan_of(name)
        return self._shares.get(name) != part.share_bytes or now is None or not same_decision(now, part.plan)

    def _serve(self, name: str, part: Divided) -> None:
        if self._changes(name, part):
            service = self._services[name]
            self.grant(name, part.share_bytes)
            service.changes.serve_plan(part.plan, stored_as(service.store, part.plan), why=_WHY)

    def grant(self, name: str, share_bytes: tuple[int, ...]) -> None:
        """Lets an index take its share, as far as the others do not hold it yet."""
        held = [0] * len(self.budgets)
        for other, service in self._services.items():
            for tier in service.router.devices if other != name else ():
                held[tier.ordinal] += tier.budget_bytes
        room = tuple(max(0, min(s, b - h)) for s, b, h in zip(share_bytes, self.budgets, held, strict=True))
        if room != share_bytes:
            _log.warning("index %s gets %s of its share %s: other indexes still hold the rest", name, room, share_bytes)
        self._shares[name] = share_bytes
        self._services[name].set_budget(room)


def kept(choice: PlanChoice, plan: Plan, store: ControlStore, why: str = _WHY) -> PlanChoice:
    """``choice`` with ``plan`` in the place of its own, stored, and the current one."""
    assert choice.plan is not None
    plan_id = choice.plan_id if same_decision(choice.plan, plan) else None
    try:
        if plan_id is None:
            plan_id = stored_as(store, plan)
        if plan_id is None:
            plan, plan_id = save_plan(store, plan)
        if plan_id != current_plan_id(store, plan.index_fingerprint):
            make_current(store, plan, plan_id, verified=False, why=why)
    except StoreError as error:
        _log.warning("a plan serves, but could not be stored: %s", error)
    return replace(choice, plan=plan, plan_id=plan_id)
