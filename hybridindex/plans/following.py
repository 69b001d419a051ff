"""Routers follow their index: once it was compacted, they serve the new generation, by a plan for its lists.

Who opens an index here has one of these beside it. A compaction of this process calls :meth:`Following.look`; for those
of other processes a thread looks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakKeyDictionary, ref

from hybridindex.config import RouterConfig
from hybridindex.errors import HybridIndexError, ProfileError, RouterClosedError
from hybridindex.index.changes.writer import IndexWriter
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.plan import Plan, make_plan
from hybridindex.plans.inherit import inherited, parents_of
from hybridindex.plans.planner import devices_of, request_other_content
from hybridindex.plans.precision import precision_of, views_of
from hybridindex.plans.replan import PlanChanges, replan
from hybridindex.store.control import ControlStore

__all__ = ["Followable", "Following", "plan_of_heir"]

_log = logging.getLogger(__name__)

#: Between looks, and before what failed is tried again.
_LOOK_S, _RETRY_S = 1.0, 60.0

#: The control store of the index; None: there is none.
OpenStore = Callable[[], AbstractContextManager[ControlStore | None]]


class Followable(Protocol):
    """As :class:`hybridindex.router.router.Router`."""

    config: RouterConfig

    @property
    def index(self) -> IVFIndex: ...

    @property
    def plan(self) -> Plan | None: ...

    @property
    def devices(self) -> tuple[object, ...]: ...

    def owns_current_thread(self) -> bool: ...

    def follow(self, index: IVFIndex, *, heir_of: Callable[[Plan], Plan]) -> None: ...


class Following:
    """Of one :class:`hybridindex.api.Index`. From any thread."""

    def __init__(self, writer: IndexWriter, store: OpenStore) -> None:
        """
        Args:
            writer: says which generation is the newest.
            store: where profiles are, for a router that is more than one generation behind.
        """
        self._writer, self._store = writer, store
        #: When each may be tried again.
        self._routers: WeakKeyDictionary[Followable, float] = WeakKeyDictionary()
        self._looking, self._adding = threading.Lock(), threading.Lock()
        self._looker: threading.Thread | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, router: Followable) -> None:
        """From now on it follows, until it is closed."""
        with self._adding:
            self._routers[router] = 0.0
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=_look_again, args=(ref(self), self._closed), name="hybridindex-following", daemon=True
                )
                self._thread.start()

    def look(self) -> None:
        """Has all routers serve the newest generation; returns when they do. What goes wrong is logged, and tried
        again: meanwhile a router sees all changes in the generation that it has. In a callback on a thread of a router
        it returns at once: others follow."""
        with self._adding:
            routers = list(self._routers.items())
        if self._looker is threading.current_thread() or any(router.owns_current_thread() for router, _ in routers):
            return
        with self._looking:
            self._looker = threading.current_thread()
            try:
                self._look(routers)
            finally:
                self._looker = None

    def _look(self, routers: list[tuple[Followable, float]]) -> None:
        try:
            # Of other processes' compactions it learns when it is asked for changes.
            self._writer.newest.live.current()
            newest = self._writer.newest
        except Exception as error:  # noqa: BLE001 - the next look tries again
            _log.warning("whether %s was compacted is not known now: %s", self._writer.path, error)
            return
        for router, not_before_s in routers:
            if self._closed.is_set():
                return
            if time.monotonic() >= not_before_s:
                self._bring(router, newest)

    def _bring(self, router: Followable, newest: IVFIndex) -> None:
        try:
            serves = router.index.rows.fingerprint == newest.fingerprint
            if not serves or len(router.devices) != len(router.config.devices):
                router.follow(newest, heir_of=lambda plan: self._plan_of_heir(newest, plan))
        except RouterClosedError:
            with self._adding:
                self._routers.pop(router, None)
        except Exception as error:  # noqa: BLE001 - the other routers follow
            with self._adding:
                self._routers[router] = time.monotonic() + _RETRY_S
            _log.error(
                "a router of %s does not serve generation %d, and tries again in %g s: %s",
                newest.path, newest.generation, _RETRY_S, error, exc_info=not isinstance(error, HybridIndexError),
            )  # fmt: skip

    def _plan_of_heir(self, newest: IVFIndex, plan: Plan) -> Plan:
        with self._store() as store:
            return plan_of_heir(newest, plan, store)

    def close(self) -> None:
        """Nobody follows any more. Twice is harmless."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _look_again(following: ref[Following], closed: threading.Event) -> None:
    """Holds on to nobody who was forgotten."""
    while not closed.wait(_LOOK_S):
        if (found := following()) is None:
            return
        found.look()
        del found


def plan_of_heir(ivf: IVFIndex, plan: Plan, store: ControlStore | None) -> Plan:
    """What ``plan``, of an earlier generation, asked for, decided for the lists of ``ivf``.

    Args:
        store: where a profile of ``ivf`` may be, if its lists are no heirs of those that ``plan`` is of.

    Raises:
        ProfileError: there is no profile. UnsupportedIndexError: ``plan`` is of codes, and ``ivf`` has none.
        InvalidInputError: the request cannot be met with the lists of ``ivf``.
    """
    profile = plan.analysis.profile
    codes = profile.notes.get("codes")
    [view] = (each for each in views_of(ivf, "rows" if codes is None else "codes"))
    if view.fingerprint == plan.index_fingerprint:
        return plan
    devices = devices_of(view, plan.n_devices)
    of_rows = profile.index_fingerprint if codes is None else codes["of"]
    if ivf.manifest.notes.get("compacted") == of_rows:
        # Nothing else has changed: latencies are of bytes.
        return make_plan(inherited(profile, view, parents_of(ivf)), replan(plan.request, PlanChanges(), devices))
    if store is None:
        raise ProfileError(f"no profile of this index's {precision_of(view)} is stored; profile it, and plan again")
    return make_plan(*request_other_content(view, store, plan.request, devices))
