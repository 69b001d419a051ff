"""An exhaustive checker: every state of a small instance, breadth first, and from each of them a way to the end.

It finds the shortest way to a broken invariant. Liveness here means that no state is a dead end: from every state that
can be reached, a settled one can be reached, in which nothing is leased, moving or kept. It does not say that the
product takes this way; a scan that never ends keeps its lease for ever, and the product counts on that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Broken", "Explored", "Refused", "Spec", "explore", "need_of"]

S = TypeVar("S", bound=Hashable)


class Refused(Exception):  # noqa: N818 - an action that a guard does not let happen is no error
    """The guard that does not hold."""


def need_of(dropped: Sequence[str]) -> Callable[[bool, str], None]:
    """``need(holds, guard)``: raises Refused unless ``guard`` holds, or is among those ``dropped``."""
    without = frozenset(dropped)

    def need(holds: bool, guard: str) -> None:
        if not holds and guard not in without:
            raise Refused(guard)

    return need


class Spec(Protocol[S]):
    """One instance of a model."""

    initial: S
    #: What must hold in every state; its name tells.
    invariants: Sequence[Callable[[S], bool]]

    def moves(self, state: S) -> Iterator[tuple[str, S]]:
        """Actions that are allowed, in words, and where each leads."""
        ...

    def canonical(self, state: S) -> S:
        """One state for all that differ in names alone."""
        ...

    def settled(self, state: S) -> bool:
        """Whether nothing is under way."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A state that must not be."""

    #: The invariant's name, or "a dead end".
    what: str
    #: The shortest way there: actions in words.
    way: tuple[str, ...]
    state: object

    def __str__(self) -> str:
        return "\n".join(
            [self.what, *(f"  {number:2} {action}" for number, action in enumerate(self.way)), "", str(self.state)]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    states: int
    transitions: int
    #: Actions of the longest of all shortest ways.
    depth: int
    broken: Broken | None
    #: First words of the actions that were taken.
    actions: frozenset[str]


def explore(spec: Spec[S], most_states: int = 5_000_000) -> Explored:
    """Every state, until an invariant breaks.

    Raises:
        AssertionError: there are more states than ``most_states``.
    """
    first = spec.canonical(spec.initial)
    number_of: dict[S, int] = {first: 0}
    #: By states as they were reached: most are reached on several ways, and renaming costs most.
    seen: dict[S, int] = {}
    states, came_from, depths = [first], [(-1, "")], [0]
    before: list[list[int]] = [[]]
    waiting = deque([0])
    actions: set[str] = set()
    n_transitions = 0

    def way_to(number: int) -> tuple[str, ...]:
        way = []
        while number > 0:
            number, action = came_from[number]
            way.append(action)
        return tuple(reversed(way))

    def explored(broken: Broken | None) -> Explored:
        return Explored(
            states=len(states), transitions=n_transitions, depth=depths[-1], broken=broken, actions=frozenset(actions)
        )

    def broken_in(number: int) -> Broken | None:
        for holds in spec.invariants:
            if not holds(states[number]):
                return Broken(what=holds.__name__, way=way_to(number), state=states[number])
        return None

    if (broken := broken_in(0)) is not None:
        return explored(broken)
    while waiting:
        number = waiting.popleft()
        for action, reached in spec.moves(states[number]):
            n_transitions += 1
            actions.add(action.partition(" ")[0])
            there = seen.get(reached)
            if there is not None:
                before[there].append(number)
                continue
            canonical = spec.canonical(reached)
            there = number_of.get(canonical)
            if there is None:
                there = number_of[canonical] = len(states)
                assert there < most_states, f"more than {most_states:,} states"
                states.append(canonical)
                came_from.append((number, action))
                depths.append(depths[number] + 1)
                before.append([])
                waiting.append(there)
                if (broken := broken_in(there)) is not None:
                    return explored(broken)
            seen[reached] = there
            before[there].append(number)
    ends = [number for number, state in enumerate(states) if spec.settled(state)]
    leads = set(ends)
    while ends:
        for number in before[ends.pop()]:
            if number not in leads:
                leads.add(number)
                ends.append(number)
    stuck = next((number for number in range(len(states)) if number not in leads), None)
    return explored(None if stuck is None else Broken(what="a dead end", way=way_to(stuck), state=states[stuck]))
