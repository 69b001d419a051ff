"""What the manager asks of several nodes at the same time: calls, and lists that they take."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from hybridindex.cluster.watch import Watch
from hybridindex.errors import HybridIndexError, ServiceError, UnreachableError
from hybridindex.index.share.ranges import mask_of
from hybridindex.types import I64

__all__ = ["Taking", "side_by_side"]

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


class Taking:
    """Lists on their way to nodes."""

    def __init__(
        self,
        nodes: Mapping[str, Watch],
        wanted: Mapping[str, npt.NDArray[np.bool_]],
        list_bytes: I64,
        bytes_per_s: int | None,
    ) -> None:
        """Has nodes begin with what they lack.

        Args:
            nodes: by their names; those of ``wanted`` are asked.
            wanted: (nlist,) bool lists that each is to hold.
            list_bytes: (nlist,) bytes of each.
        """
        self._nodes, self._wanted, self._list_bytes = nodes, wanted, list_bytes
        #: Of nodes that could not.
        self.errors: dict[str, HybridIndexError] = {}
        #: (nlist,) bool lists that each node held when it was asked last.
        self.held: dict[str, npt.NDArray[np.bool_]] = {}
        #: (nlist,) bool lists that each has to take.
        self.missing: dict[str, npt.NDArray[np.bool_]] = {}

        def begin(node: Watch) -> npt.NDArray[np.bool_]:
            own = wanted[node.entry.name]
            missing = own & ~mask_of(node.calls.node()["held"], len(own))
            if missing.any():
                node.calls.hold(missing, bytes_per_s, replace=True)
            return missing

        for name, missing in side_by_side([nodes[name] for name in wanted], begin).items():
            if isinstance(missing, HybridIndexError):
                self.errors[name] = missing
            else:
                self.missing[name], self.held[name] = missing, wanted[name] & ~missing
        self.total_bytes = sum(int(list_bytes[missing].sum()) for missing in self.missing.values())
        self._left = {name for name, missing in self.missing.items() if missing.any()}

    @property
    def goes_on(self) -> bool:
        """Whether a node still takes lists."""
        return bool(self._left)

    @property
    def bytes_left(self) -> int:
        """As far as nodes that take lists have said it."""
        lacking = (self._wanted[name] & ~self.held[name] for name in self._left)
        return sum(int(self._list_bytes[lists].sum()) for lists in lacking)

    def look(self) -> None:
        """Asks those that take lists how far they are."""
        for name, said in side_by_side(
            [self._nodes[name] for name in self._left], lambda node: node.calls.node()
        ).items():
            problem = said if isinstance(said, HybridIndexError) else self._note(name, said)
            if problem is not None:
                self.errors[name] = problem
            if problem is not None or not (self._wanted[name] & ~self.held[name]).any():
                self._left.discard(name)

    def _note(self, name: str, said: dict[str, Any]) -> ServiceError | None:
        """Why it will not come to its end, if it will not."""
        own, job = self._wanted[name], said["holding"]
        self.held[name] = own & mask_of(said["held"], len(own))
        if (job is not None and job["running"]) or not (own & ~self.held[name]).any():
            return None
        if job is not None and job["error"]:
            return ServiceError(f"node {name} could not take its lists: {job['error']}")
        return ServiceError(f"node {name} was started anew, or told to take others, while it took lists")

    def stop(self) -> None:
        """Ends it between two lists; what was taken stays."""
        self._tell(self._left, lambda node: node.calls.hold(self._nothing(), None, replace=True))

    def undo(self) -> None:
        """Ends it, and has nodes give up what they took."""

        def give_up(node: Watch) -> None:
            node.calls.hold(self._nothing(), None, replace=True)
            node.calls.drop(self.missing[node.entry.name])

        self._tell([name for name, missing in self.missing.items() if missing.any()], give_up)

    def _nothing(self) -> npt.NDArray[np.bool_]:
        return np.zeros(len(self._list_bytes), dtype=np.bool_)

    def _tell(self, names: Iterable[str], what: Callable[[Watch], None]) -> None:
        for name, error in side_by_side([self._nodes[name] for name in names], what).items():
            if error is not None:
                _log.warning("node %s keeps lists that it took for nothing: %s", name, error)
