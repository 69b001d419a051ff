"""The plan that serves: made anew, proposed, applied; one change at a time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hybridindex.errors import InvalidInputError, OverloadedError, ProfileError
from hybridindex.partitioner.plan import Plan
from hybridindex.plans.current import make_current, save_plan, stored_as
from hybridindex.plans.planner import devices_of, plan_next, request_next
from hybridindex.plans.precision import choose_view, precision_of
from hybridindex.plans.proposal import Proposal, Served, Weigh, propose
from hybridindex.plans.replan import PlanChanges, PlanDevices
from hybridindex.plans.stored import resume_plan
from hybridindex.refresh.config import UpdateRecord
from hybridindex.refresh.planning import Planning
from hybridindex.refresh.refresher import Refresher
from hybridindex.refresh.updater import arenas_of
from hybridindex.service.changes.shares import Division, Shares
from hybridindex.service.reload import Generations
from hybridindex.service.serving import Serving, precision_asked
from hybridindex.store.control import ControlStore
from hybridindex.tiers.contract.copy_queue import check_share

__all__ = ["ServedPlan"]

_log = logging.getLogger(__name__)


class ServedPlan:
    """Changes the plan of what serves now. Any thread; one that cannot begin at once is refused."""

    def __init__(
        self,
        generations: Generations,
        store: ControlStore,
        planning: Planning,
        *,
        open_devices: Callable[[str], object],
    ) -> None:
        """``planning``: where plans are made. ``open_devices``: of a daemon that began on the host."""
        self._generations = generations
        self._store = store
        self._planning = planning
        self._open_devices = open_devices
        #: Held while the plan or the generation changes.
        self.changing = threading.Lock()
        self._shares: Shares | None = None
        self._name = ""

    def join(self, shares: Shares, name: str) -> None:
        """Before it serves: its device bytes are a share of one budget from now on; ``name``: the index's there."""
        self._shares, self._name, self.changing = shares, name, shares.changing
        self._generations.refit = lambda choice: shares.refit(name, choice)

    @property
    def _now(self) -> Serving:
        return self._generations.current

    def repartition(
        self, changes: PlanChanges, *, apply: bool, bandwidth_share: float | None, force: bool
    ) -> dict[str, Any]:
        """See :meth:`hybridindex.service.core.Service.repartition`."""
        check_share(bandwidth_share)
        with self.one_change():
            share = 1.0 if bandwidth_share is None else bandwidth_share
            if self._shares is not None:
                budget = changes.device_budget_bytes
                plan = self._plan_next(replace(changes, device_budget_bytes=None))
                return self._divide(plan, "requested", share, budget, apply=apply, force=force)
            recent = self._propose_recent(changes, bandwidth_share)
            if recent is not None:
                return self._answer(recent, None, self._now.refresher, apply=apply, force=force)
            proposal = self._propose(changes, share)
            return self._answer(proposal, None, None, apply=apply, force=force)

    def apply_plan(self, choice: str, *, apply: bool, bandwidth_share: float | None, force: bool) -> dict[str, Any]:
        """See :meth:`hybridindex.service.core.Service.apply_plan`."""
        check_share(bandwidth_share)
        router, now = self._generations.config.router, self._now
        # Where the daemon started without a plan, its devices open with this one.
        closed = bool(now.note and router.devices and not now.router.devices)
        view = choose_view(now.index.ivf, self._store, choice, precision_asked(router))
        if not closed and view.fingerprint != now.planned.fingerprint:
            if choice.isdecimal():
                raise InvalidInputError(
                    f"plan {choice} is of {precision_of(view)}, but the daemon searches by "
                    f"{precision_of(now.planned)}; expected a plan of these, or a daemon with precision "
                    f"{precision_of(view)!r}"
                )
            view = now.planned
        found = resume_plan(view, choice, self._store, router.devices)
        if found is None:
            raise InvalidInputError(f"plan is {choice!r}; expected a plan id or 'latest'")
        plan_id, plan = found
        if not closed:
            self._check_devices()
        n_devices = len(self._generations.config.router.devices if closed else self._now.router.devices)
        if plan.n_devices != n_devices:
            raise InvalidInputError(f"plan {plan_id} is for {plan.n_devices} device(s); the daemon has {n_devices}")
        with self.one_change():
            share, reason = 1.0 if bandwidth_share is None else bandwidth_share, f"plan {plan_id} was chosen"
            if self._shares is not None and not closed:
                return self._divide(plan, reason, share, apply=apply, force=force)
            proposal = self._beside_current(plan, reason, share)
            if not (closed and apply):
                return self._answer(proposal, plan_id, self._now.refresher, apply=apply, force=force)
        proposal.refuse_infeasible(force=force)
        make_current(self._store, plan, plan_id, verified=False, why="applied")
        self._open_devices(f"plan {plan_id} was applied")
        serves = plan_id if self._shares is None else self._now.plan_id
        return self._told(proposal.placed_as(self._now.router.piece_device), serves, applied=True)

    @contextlib.contextmanager
    def one_change(self, of: str = "plan") -> Iterator[None]:
        """Around a change; another one meanwhile is refused.

        Raises:
            OverloadedError: one is under way.
        """
        if not self.changing.acquire(blocking=False):
            raise OverloadedError(f"another change of the {of} is under way", retry_after_s=5)
        try:
            yield
        finally:
            self.changing.release()

    def _answer(
        self,
        proposal: Proposal,
        plan_id: int | None,
        refresher: Refresher | None,
        division: Division | None = None,
        *,
        apply: bool,
        force: bool,
    ) -> dict[str, Any]:
        """Applies ``proposal`` where that is asked for, and tells of it.

        Args:
            plan_id: where its plan is stored.
            refresher: applies it and verifies it afterwards.
            division: that it is a part of.
        """
        update: UpdateRecord | None = None
        if apply:
            proposal.refuse_infeasible(force=force)
            if division is not None:
                division.refuse(force=force)
                with division.carried_out():
                    plan_id = self._apply(proposal, plan_id)
            elif refresher is None:
                plan_id = self._apply(proposal, plan_id)
            else:
                update = refresher.apply(proposal, plan_id=plan_id, force=force)
                plan_id = update.plan_id
            proposal = proposal.placed_as(self._now.router.piece_device)
        return self._told(proposal, plan_id, division, applied=apply, update=update)

    def _told(
        self,
        proposal: Proposal,
        plan_id: int | None,
        division: Division | None = None,
        *,
        applied: bool,
        update: UpdateRecord | None = None,
    ) -> dict[str, Any]:
        return {
            "applied": applied,
            **proposal.to_data(),
            "plan_id": plan_id,
            "unplaced_lists": self._now.router.stats().unplaced_lists if applied else None,
            "update": None if update is None else update.to_data(),
            **({} if division is None else {"shares": division.to_data()}),
        }

    def _check_devices(self) -> None:
        if not self._now.router.devices:
            why = f", since {note}" if (note := self._now.note) else "; start it with --device"
            raise InvalidInputError(f"devices is empty: the daemon serves on the host alone{why}")

    def _propose_recent(self, changes: PlanChanges, bandwidth_share: float | None) -> Proposal | None:
        """From recent queries; None without a refresher, or while it has seen too few searches to plan from."""
        if self._now.refresher is None:
            return None
        try:
            return self._now.refresher.propose("requested", changes, bandwidth_share=bandwidth_share)
        except ProfileError as error:
            _log.info("planning from the stored profile: %s", error)
            return None

    def _propose(self, changes: PlanChanges, bandwidth_share: float) -> Proposal:
        """From the profile of the plan in force."""
        self._check_devices()
        profile, request = request_next(self._now.planned, self._store, self._now.router.plan, changes, self._devices())
        with self._planning.of(self._now.planned) as planner:
            plan = planner.solve(profile, request, None)
            return self._beside_current(plan, "requested", bandwidth_share, weigh=planner.weigh)

    def _plan_next(self, changes: PlanChanges) -> Plan:
        """From the profile of the plan in force."""
        self._check_devices()
        return plan_next(self._now.planned, self._store, self._now.router.plan, changes, self._devices())

    def _devices(self) -> PlanDevices:
        router, budget = self._now.router, self._generations.config.router.device_budget_bytes
        return devices_of(self._now.planned, len(router.devices), budget, router.page_bytes)

    def _divide(
        self,
        plan: Plan,
        reason: str,
        bandwidth_share: float,
        budget: int | Sequence[int] | None = None,
        *,
        apply: bool,
        force: bool,
    ) -> dict[str, Any]:
        """:meth:`_answer` of what ``plan`` is asked for, within the share that the index then gets."""
        assert self._shares is not None
        # It is decided anew, and for the devices as they are open.
        plan = replace(plan, request=replace(plan.request, page_bytes=self._now.router.page_bytes))
        division = self._shares.divide(self._name, plan, budget)
        proposal = self._beside_current(division.plan, reason, bandwidth_share, division.room_bytes)
        plan_id = stored_as(self._store, division.plan)
        return self._answer(proposal, plan_id, None, division, apply=apply, force=force)

    def _beside_current(
        self,
        plan: Plan,
        reason: str,
        bandwidth_share: float,
        room_bytes: Sequence[int] | None = None,
        weigh: Weigh | None = None,
    ) -> Proposal:
        """``room_bytes``: of each device, without scratch; None: what the open arenas may take."""
        router = self._now.router
        current, there, arenas = router.plan, router.piece_device, arenas_of(router)
        if room_bytes is None and arenas is not None:
            room_bytes = [a - b for a, b in zip(arenas.room, arenas.scratch, strict=True)]
        return propose(
            plan,
            current,
            Served.by(current, there, router.page_locked_lists, router.page_bytes if router.devices else None),
            reason=reason,
            bandwidth_share=bandwidth_share,
            room_bytes=room_bytes,
            weigh=weigh,
        )

    def _apply(self, proposal: Proposal, plan_id: int | None) -> int:
        return self.serve_plan(proposal.plan, plan_id, bandwidth_share=proposal.bandwidth_share, why=proposal.reason)

    def serve_plan(self, plan: Plan, plan_id: int | None, *, bandwidth_share: float = 1.0, why: str) -> int:
        """Stores ``plan`` unless it is stored, moves its lists, and makes it the current one; its id. Blocks. For who
        holds the lock of changes."""
        if plan_id is None:
            _, plan_id = save_plan(self._store, plan)
        self._now.router.apply_plan(plan, bandwidth_share=bandwidth_share, force=True)
        # It serves, whether or not the store takes the event.
        self._now.plan_id = plan_id
        make_current(self._store, plan, plan_id, verified=False, why=why)
        return plan_id
