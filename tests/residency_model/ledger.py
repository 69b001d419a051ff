"""The model of a refresh: one plan is tried while another is the current one, and the store remembers which. Pure.

What serves, what the store names (a restart resumes that), and what a caller was told. A store can refuse a write, or
take it and lose the answer; the process can end at any time. :mod:`tests.residency_model.memory` says how lists move.

Not modelled: how a plan is made and weighed, back-off, windows; a person who applies a plan without a refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.residency_model.check import Refused, need_of

__all__ = ["INVARIANTS", "Instance", "Ledger", "Rules"]

IDLE, SAVING, MOVING, VERIFYING, COMMITTING, WRITTEN, ROLLING_BACK, BACK = (
    "idle",
    "saving",
    "moving",
    "verifying",
    "committing",
    "written",
    "rolling back",
    "back",
)


class Ledger(NamedTuple):
    stage: str = IDLE
    #: Plans by number: what the router has, what the update began with, and what it tries.
    served: int = 0
    base: int = 0
    trial: int = -1
    #: What the store names as the current one, and what it has.
    current: int = 0
    stored: frozenset[int] = frozenset({0})
    #: Plans that kept their promise, or served before.
    good: frozenset[int] = frozenset({0})
    #: The plan that the last update ended with, as everybody was told.
    told: int | None = None
    #: A write failed, and the store may have it: what serves has to be written again.
    owed: bool = False


class Rules:
    def __init__(self, dropped: tuple[str, ...] = ()) -> None:
        self._dropped = frozenset(dropped)
        self.need = need_of(dropped)

    def _in(self, s: Ledger, *stages: str) -> None:
        if s.stage not in stages:
            raise Refused(f"in stage {s.stage}")

    def request(self, s: Ledger, trial: int) -> Ledger:
        self._in(s, IDLE)
        return s._replace(stage=SAVING, base=s.served, trial=trial)

    def decline(self, s: Ledger) -> Ledger:
        """It was not worth its move, or could not be made."""
        self._in(s, SAVING)
        return s._replace(stage=IDLE, trial=-1)

    def save(self, s: Ledger) -> Ledger:
        """Stored as a trial: no restart resumes it."""
        self._in(s, SAVING)
        current = s.trial if "a_trial_is_not_current" in self._dropped else s.current
        return s._replace(stored=s.stored | {s.trial}, current=current)

    def move(self, s: Ledger) -> Ledger:
        self._in(s, SAVING)
        self.need(s.trial in s.stored, "saved_before_it_moves")
        return s._replace(stage=MOVING)

    def moved(self, s: Ledger) -> Ledger:
        self._in(s, MOVING)
        return s._replace(stage=VERIFYING, served=s.trial)

    def verified(self, s: Ledger) -> Ledger:
        """Windows were as good as promised, or nobody came who could tell."""
        self._in(s, VERIFYING)
        return s._replace(stage=COMMITTING, good=s.good | {s.trial})

    def commit_unseen(self, s: Ledger) -> Ledger:
        self._in(s, VERIFYING)
        self.need(False, "verified_before_it_is_committed")
        return s._replace(stage=COMMITTING)

    def fail(self, s: Ledger) -> Ledger:
        """The move fails, or the new plan is worse."""
        self._in(s, MOVING, VERIFYING)
        return s._replace(stage=ROLLING_BACK)

    def write(self, s: Ledger) -> Ledger:
        self._in(s, COMMITTING)
        return s._replace(stage=WRITTEN, current=s.trial)

    def write_fails(self, s: Ledger, *, taken: bool) -> Ledger:
        """``taken``: the store has it all the same."""
        self._in(s, COMMITTING)
        owed = "what_a_store_may_have_is_written_again" not in self._dropped
        return s._replace(stage=ROLLING_BACK, current=s.trial if taken else s.current, owed=owed)

    def tell_committed(self, s: Ledger) -> Ledger:
        self._in(s, COMMITTING, WRITTEN)
        self.need(s.stage == WRITTEN, "durable_before_it_is_told")
        return s._replace(stage=IDLE, told=s.trial, trial=-1)

    def go_back(self, s: Ledger) -> Ledger:
        """The old plan serves again."""
        self._in(s, ROLLING_BACK)
        return s._replace(stage=BACK, served=s.base)

    def pay(self, s: Ledger) -> Ledger:
        """What serves is written as the current plan."""
        self._in(s, BACK, IDLE)
        self.need(s.owed, "only_what_is_owed_is_paid")
        return s._replace(current=s.served, owed=False)

    def tell_rolled_back(self, s: Ledger) -> Ledger:
        self._in(s, ROLLING_BACK, BACK)
        self.need(s.stage == BACK, "back_before_it_is_told")
        return s._replace(stage=IDLE, told=s.base, trial=-1)

    def crash(self, s: Ledger) -> Ledger:
        """The process ends, and another resumes the current plan. What was owed is forgotten."""
        told = None if s.owed or s.stage == WRITTEN else s.told
        return s._replace(stage=IDLE, served=s.current, trial=-1, told=told, owed=False)

    def reload(self, s: Ledger) -> Ledger:
        """Another router of the same content takes over, with a refresh of its own, which first makes current what it
        serves. A trial is not carried over."""
        tried = s.stage not in (IDLE, SAVING, BACK)
        served = s.base if tried and "a_trial_is_not_carried_over" not in self._dropped else s.served
        return s._replace(stage=IDLE, served=served, current=served, trial=-1, told=None, owed=False)


def the_current_plan_is_stored(s: Ledger) -> bool:
    return s.current in s.stored


def only_a_verified_plan_is_current(s: Ledger) -> bool:
    return s.current in s.good


def what_moved_can_be_found_again(s: Ledger) -> bool:
    return s.served in s.stored


def what_was_told_is_durable(s: Ledger) -> bool:
    return s.told is None or s.owed or s.stage == WRITTEN or s.current == s.told


def what_was_told_serves(s: Ledger) -> bool:
    return s.told is None or s.stage != IDLE or s.served == s.told


INVARIANTS: tuple[Callable[[Ledger], bool], ...] = (
    the_current_plan_is_stored,
    only_a_verified_plan_is_current,
    what_moved_can_be_found_again,
    what_was_told_is_durable,
    what_was_told_serves,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    refreshes: int = 2
    dropped: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    invariants: tuple[Callable[[Ledger], bool], ...] = INVARIANTS

    @property
    def initial(self) -> Ledger:
        return Ledger()

    def settled(self, s: Ledger) -> bool:
        return s.stage == IDLE and not s.owed and s.current == s.served

    def canonical(self, s: Ledger) -> Ledger:
        return s

    def moves(self, s: Ledger) -> Iterator[tuple[str, Ledger]]:
        rules = Rules(self.dropped)
        trial = max(s.stored) + 1
        proposed: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in _ACTIONS] + [
            ("write_fails", {"taken": taken}) for taken in (False, True)
        ]
        if trial <= self.refreshes:
            proposed.append(("request", {"trial": trial}))
        for name, options in proposed:
            if name in self.without:
                continue
            try:
                reached = getattr(rules, name)(s, **options)
            except Refused:
                continue
            yield f"{name} {options or ''}", reached


_ACTIONS = (
    *("decline", "save", "move", "moved", "verified", "commit_unseen", "fail", "write", "tell_committed", "go_back"),
    *("pay", "tell_rolled_back", "crash", "reload"),
)
