"""What the manager knows of one node now, from a thread that looks at it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.nodes.calls import NodeCalls, generation_of
from hybridindex.cluster.state import NodeEntry
from hybridindex.errors import HybridIndexError, ServiceError, UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.router.remote.cluster_map import ClusterMap, IndexGeneration

__all__ = ["LOOK_S", "SEEN_WITHIN_S", "NodeState", "Watch"]

_log = logging.getLogger(__name__)

#: Between two looks at a node, and for how long it may be silent. Together below a second.
LOOK_S, _SILENT_S = 0.2, 0.8
#: For what a node says of itself.
_SAID_S = 2.0
#: Before a generation that a node could not open is opened again.
_OPEN_AGAIN_S = 10.0
#: For which a node is not up while others, that it may reach, do not count on it yet.
SEEN_WITHIN_S = 2.0

#: ``starting``: it did not answer yet, or answers and lacks lists of the map, or its generation, which it takes.
#: ``refused``: it answers, and does not do what it is asked. ``down``: it does not answer.
NodeState = Literal["starting", "up", "refused", "down"]

#: The map in force, and the rate at which lists are taken.
Wanted = Callable[[], tuple[ClusterMap | None, int | None]]


class Watch:
    """Owner of the thread that looks at one node, and brings it up: it has the newest map, and the lists in it."""

    def __init__(self, entry: NodeEntry, calls: NodeCalls, wanted: Wanted, on_change: Callable[[], None]) -> None:
        """``on_change``: told, on the thread, that the node is up or is not any more."""
        self.entry, self.calls = entry, calls
        self._wanted, self._on_change = wanted, on_change
        #: Others may ask it: it had the lists of the map when it was looked at, and answered since.
        self.up = False
        #: It answered the last look.
        self.answers = False
        self._was_heard = self._was_looked_at = False
        #: When it did that last; before that, when it was first looked at.
        self.heard_s = time.monotonic()
        #: What is wrong with it; empty: nothing.
        self.problem = ""
        #: Of the map that it has.
        self.version = 0
        #: (nlist,) bool lists that this told it to take last.
        self._told: npt.NDArray[np.bool_] | None = None
        #: Before then it is not asked again to open a generation that it could not open.
        self._open_again_s = 0.0
        #: Since when it has all that it is to have, and is not up.
        self._ready_s: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hybridindex-watch-{entry.name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> NodeState:
        """For people."""
        if not self.answers:
            return "down" if self._was_heard else "starting"
        if self.problem:
            return "refused"
        return "up" if self.up else "starting"

    @property
    def is_unknown(self) -> bool:
        """Whether it serves others cannot be seen: it was not looked at yet, or refuses."""
        return not self._was_looked_at or self.state == "refused"

    def has(self, map_: ClusterMap) -> None:
        """It took a map, and the lists in it."""
        self.version, self.up, self._ready_s = map_.version, True, None

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look()
        self.calls.close()

    def _look(self) -> None:
        was_up = self.up
        try:
            self.calls.watch(_SILENT_S)
            map_, bytes_per_s = self._wanted()
            if map_ is not None and (not self.up or self.version != map_.version):
                self._bring_up(map_, bytes_per_s)
        except UnreachableError as error:
            self.up = self.answers = False
            self._told = self._ready_s = None
            self._say(str(error))
        except HybridIndexError as error:
            # It answers, and what it does for others is as before.
            self._heard(str(error))
        except Exception as error:  # noqa: BLE001 - of another version, or out of its mind: the next look must come
            self._heard(f"what it says cannot be read: {error!r}")
        else:
            self._heard("")
        self._was_looked_at = True
        if self.up != was_up:
            _log.log(logging.INFO if self.up else logging.WARNING, "node %s is %s", self.entry.name, self.state)
            self._on_change()

    def _heard(self, problem: str) -> None:
        self.answers = self._was_heard = True
        self.heard_s = time.monotonic()
        self._say(problem)

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("node %s: %s", self.entry.name, problem)
        self.problem = problem

    def _bring_up(self, map_: ClusterMap, bytes_per_s: int | None) -> None:
        """Gives a node the newest map; one that came back holds what the map says of it, or takes it first.

        Raises:
            ServiceError: it refuses, or could not open the generation. UnreachableError: it does not answer.
        """
        said = self.calls.node(_SAID_S)
        wanted = map_.of
        of = generation_of(said, wanted)
        if of is None or of["state"] == "failed":
            self._have_it_open(wanted, said, of)
            return
        if of["state"] == "opening":
            return
        if of["state"] in ("left", "over"):
            self.calls.let_go(map_.generation)
            return
        own = map_.index_of(self.entry.name)
        if own is None:
            return
        missing = map_.held_by(own) & ~mask_of(of["held"], len(map_.holders))
        if missing.any():
            self._have_it_take(missing, of["holding"], bytes_per_s, map_.generation)
            return
        self._told = None
        if of["map_version"] < map_.version or of["state"] != "serves":
            self.calls.apply(map_)
            if not self.up:
                return  # those that it asks by this map are known at the next look
        if self.up or self._is_seen(said["peers"]):
            self.has(map_)

    @property
    def is_seen(self) -> bool:
        """Whether nodes that it reaches have it up: they tell it of changes then. Asks it.

        Raises:
            UnreachableError, ServiceError: it does not say.
        """
        return all(peer["sees_this"] for peer in self.calls.node(_SAID_S)["peers"])

    def describe(self, map_: ClusterMap | None, list_bytes: npt.NDArray[np.int64]) -> dict[str, Any]:
        """For people: the node, and what it holds by a map."""
        own = None if map_ is None else map_.index_of(self.entry.name)
        held = np.zeros(len(list_bytes), dtype=np.bool_) if map_ is None or own is None else map_.held_by(own)
        return {
            "name": self.entry.name,
            "url": self.entry.url,
            "state": self.state,
            "problem": self.problem,
            "drains": self.entry.drains,
            "lists": int(held.sum()),
            "bytes": int(list_bytes[held].sum()),
            "memory_bytes": self.entry.memory_bytes,
            "map_version": self.version,
        }

    def _have_it_open(self, wanted: IndexGeneration, said: dict[str, Any], of: dict[str, Any] | None) -> None:
        """The generation of the map, which it does not have.

        Raises:
            ServiceError: it could not, when it was asked last.
        """
        now = time.monotonic()
        if of is None or now >= self._open_again_s:
            self._open_again_s = now + _OPEN_AGAIN_S
            self.calls.open(wanted)
        if of is not None:
            raise ServiceError(
                f"it has generation {said['generation']} of index {said['fingerprint']}, and not {wanted.generation} "
                f"of {wanted.fingerprint}: {of['error']}"
            )

    def _is_seen(self, peers: list[dict[str, Any]]) -> bool:
        """Whether nodes that it reaches have it up: they tell it of changes then."""
        now = time.monotonic()
        if self._ready_s is None:
            self._ready_s = now
        return all(peer["sees_this"] for peer in peers) or now - self._ready_s > SEEN_WITHIN_S

    def _have_it_take(
        self, missing: npt.NDArray[np.bool_], job: dict[str, object] | None, rate: int | None, generation: int
    ) -> None:
        runs = job is not None and job["running"]
        # One that is up may take lists of a map to come; what it lacks is asked of others.
        if runs and (self.up or (self._told is not None and not (missing & ~self._told).any())):
            return
        self._told = missing
        self.calls.hold(missing, rate, generation=generation, replace=True)

    def stop(self, *, wait: bool) -> None:
        """Ends the thread."""
        self._stop.set()
        if wait:
            self._thread.join()
