"""What the manager asks of several nodes at the same time: calls, lists that they take, generations that they close."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.nodes.calls import generation_of
from hybridindex.cluster.nodes.watch import SEEN_WITHIN_S, Watch
from hybridindex.errors import HybridIndexError, ServiceError, UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.router.remote.cluster_map import ClusterMap, IndexGeneration
from hybridindex.types import I64

__all__ = ["Taking", "close_left", "drop_spare", "side_by_side", "wait_until_seen"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Between two looks whether a node that is asked has fallen silent.
_LOOK_S = 0.05


def side_by_side(nodes: Iterable[Watch], ask: Callable[[Watch], T]) -> dict[str, T | HybridIndexError]:
    """What each node answers, or why it does not. One that falls silent is not waited for: its call ends by itself, and
    what comes of it is ignored."""
    answers: dict[str, T | HybridIndexError] = {}

    def call(node: Watch) -> None:
        try:
            answers[node.entry.name] = ask(node)
        except HybridIndexError as error:
            answers[node.entry.name] = error
        except Exception as error:  # noqa: BLE001 - what answered is no node
            answers[node.entry.name] = ServiceError(f"{node.entry.url} answers something else: {error!r}")

    asked = [(node, threading.Thread(target=call, args=(node,), daemon=True)) for node in nodes]
    for _, thread in asked:
        thread.start()
    found: dict[str, T | HybridIndexError] = {}
    for node, thread in asked:
        while thread.is_alive() and node.answers:
            thread.join(_LOOK_S)
        silent = UnreachableError(f"node {node.entry.name} does not answer")
        found[node.entry.name] = answers.get(node.entry.name, silent)
    return found


def close_left(nodes: Iterable[Watch], generation: int, known: set[str]) -> set[str]:
    """Has nodes close what they left, once all that answer serve a generation, and none asks for another.

    Args:
        known: names of nodes that left nothing, as they said before.

    Returns:
        Those that left nothing, and answered.
    """
    asked = [node for node in nodes if node.answers]
    if {node.entry.name for node in asked} <= known:
        return known
    opened: dict[str, dict[int, str]] = {}
    for name, said in side_by_side(asked, lambda node: node.calls.node()["generations"]).items():
        if isinstance(said, HybridIndexError):
            return set()
        opened[name] = {each["generation"]: each["state"] for each in said}
    if any(states.get(generation) != "serves" or "left" in states.values() for states in opened.values()):
        return set()
    done = ("over", "failed")
    over = {name: [number for number, state in states.items() if state in done] for name, states in opened.items()}

    def close(node: Watch) -> None:
        for number in over[node.entry.name]:
            node.calls.let_go(number)

    # One after the other: it takes a node a moment, in which others answer what is asked of it.
    for node in asked:
        name = node.entry.name
        if over[name] and (error := side_by_side([node], close)[name]) is not None:
            _log.warning("node %s keeps a generation that nobody asks for: %s", name, error)
    return {name for name, numbers in over.items() if not numbers}


def wait_until_seen(nodes: Iterable[Watch], stops: Callable[[], bool]) -> None:
    """A moment, until nodes that serve by a new map tell each other of changes."""
    ends = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < ends and not stops():
        seen = side_by_side([node for node in nodes if node.up], lambda node: node.is_seen)
        if False not in seen.values():
            return
        time.sleep(_LOOK_S)


def drop_spare(nodes: Iterable[Watch], map_: ClusterMap) -> int:
    """Has nodes that have a map give up the lists that it does not name; the bytes."""

    def drop(node: Watch) -> int:
        own, said = (
            map_.index_of(node.entry.name),
            generation_of(node.calls.node(), map_.of),
        )
        if own is None or said is None:
            return 0
        spare = mask_of(said["held"], len(map_.holders)) & ~map_.held_by(own)
        return node.calls.drop(spare, generation=map_.generation) if spare.any() else 0

    nbytes = 0
    for name, dropped in side_by_side([node for node in nodes if node.version == map_.version], drop).items():
        if isinstance(dropped, HybridIndexError):
            _log.warning("node %s keeps lists that it does not need: %s", name, dropped)
        else:
            nbytes += dropped
    return nbytes


class Taking:
    """Lists on their way to nodes."""

    def __init__(
        self,
        nodes: Mapping[str, Watch],
        wanted: Mapping[str, npt.NDArray[np.bool_]],
        list_bytes: I64,
        bytes_per_s: int | None,
        *,
        of: IndexGeneration,
    ) -> None:
        """Has nodes begin with what they lack.

        Args:
            nodes: by their names; those of ``wanted`` are asked.
            wanted: (nlist,) bool lists that each is to hold.
            list_bytes: (nlist,) bytes of each.
            of: which generation of the index; one that a node does not have is opened beside the one that it serves.
        """
        self._of, self._rate = of, bytes_per_s
        self._nodes, self._wanted, self._list_bytes = nodes, wanted, list_bytes
        #: Of nodes that could not.
        self.errors: dict[str, HybridIndexError] = {}
        #: (nlist,) bool lists that each node held when it was asked last.
        self.held: dict[str, npt.NDArray[np.bool_]] = {}
        #: (nlist,) bool lists that each has to take.
        self.missing: dict[str, npt.NDArray[np.bool_]] = {}

        for name, said in side_by_side([nodes[name] for name in wanted], self._begin).items():
            if isinstance(said, HybridIndexError):
                self.errors[name] = said
        self._left = set(wanted) - set(self.errors)
        # One that fell silent may still add to it.
        self._left -= {name for name, missing in list(self.missing.items()) if not missing.any()}

    def _begin(self, node: Watch) -> None:
        """Has a node take what it lacks, or first open the generation."""
        name, said = node.entry.name, generation_of(node.calls.node(), self._of)
        own = self._wanted[name]
        if said is None or said["state"] == "failed":
            node.calls.open(self._of)
        elif said["state"] in ("left", "over"):
            raise ServiceError(f"node {name} has not closed generation {self._of.generation} of before yet; try again")
        elif said["state"] != "opening":
            missing = own & ~mask_of(said["held"], len(own))
            if missing.any():
                node.calls.hold(missing, self._rate, generation=self._of.generation, replace=True)
            self.missing[name], self.held[name] = missing, own & ~missing

    @property
    def goes_on(self) -> bool:
        """Whether a node still takes lists."""
        return bool(self._left)

    @property
    def total_bytes(self) -> int:
        """Of all that have to come; while a node opens the generation, as if all of its lists had to."""
        coming = (self.missing.get(name, own) for name, own in self._wanted.items() if name not in self.errors)
        return sum(int(self._list_bytes[missing].sum()) for missing in coming)

    @property
    def bytes_left(self) -> int:
        """As far as nodes that take lists have said it."""
        nothing = self._nothing()
        lacking = (self._wanted[name] & ~self.held.get(name, nothing) for name in self._left)
        return sum(int(self._list_bytes[lists].sum()) for lists in lacking)

    def look(self) -> None:
        """Asks those that take lists how far they are."""
        # Also those that have all: one that was started anew lacks what it took beside.
        asked = [self._nodes[name] for name in self._wanted if name not in self.errors]
        for name, said in side_by_side(asked, self._ask).items():
            if isinstance(said, HybridIndexError):
                self.errors[name] = said
            if name in self.errors or (name in self.missing and not (self._wanted[name] & ~self.held[name]).any()):
                self._left.discard(name)

    def _ask(self, node: Watch) -> None:
        """Raises ServiceError: it will not come to its end."""
        name, said = node.entry.name, generation_of(node.calls.node(), self._of)
        if said is not None and said["state"] == "failed":
            raise ServiceError(f"node {name} could not open generation {self._of.generation}: {said['error']}")
        if said is None or (said["state"] == "opening" and name in self.missing):
            raise ServiceError(f"node {name} was started anew while it took lists")
        if said["state"] == "opening":
            return
        if name not in self.missing:
            self._begin(node)
            return
        own, job = self._wanted[name], said["holding"]
        self.held[name] = own & mask_of(said["held"], len(own))
        if (job is not None and job["running"]) or not (own & ~self.held[name]).any():
            return
        if job is not None and job["error"]:
            raise ServiceError(f"node {name} could not take its lists: {job['error']}")
        raise ServiceError(f"node {name} was started anew, or told to take others, while it took lists")

    def stop(self) -> None:
        """Ends it between two lists; what was taken stays."""
        self._tell(self._left & set(self.missing), self._end)

    def undo(self) -> None:
        """Ends it, and has nodes give up what they took; a generation that does not serve as a whole."""

        def give_up(node: Watch) -> None:
            said = generation_of(node.calls.node(), self._of)
            if said is not None and said["state"] in ("beside", "failed"):
                node.calls.let_go(self._of.generation)
            elif (missing := self.missing.get(node.entry.name)) is not None and missing.any():
                self._end(node)
                node.calls.drop(missing, generation=self._of.generation)

        self._tell(self._wanted, give_up)

    def _end(self, node: Watch) -> None:
        node.calls.hold(self._nothing(), None, generation=self._of.generation, replace=True)

    def _nothing(self) -> npt.NDArray[np.bool_]:
        return np.zeros(len(self._list_bytes), dtype=np.bool_)

    def _tell(self, names: Iterable[str], what: Callable[[Watch], None]) -> None:
        for name, error in side_by_side([self._nodes[name] for name in names], what).items():
            if error is not None:
                _log.warning("node %s keeps lists that it took for nothing: %s", name, error)
