"""One planner at a time: started for each plan as the settings say, ended with it, and stopped from any thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hybridindex.errors import RouterClosedError
from hybridindex.index.ivf import IVFIndex
from hybridindex.processes import short_switch_interval
from hybridindex.refresh.config import RefreshConfig
from hybridindex.refresh.planner import Planner, PlanningHere
from hybridindex.refresh.planner_process import PlanningProcess

__all__ = ["Planning"]


class Planning:
    """Owner of the running planner. One thread at a time plans; :meth:`stop` from any."""

    def __init__(self, config: RefreshConfig | None = None) -> None:
        """Starts nothing. Of ``config`` only ``planning`` and what begins with it counts."""
        self._config = config or RefreshConfig()
        #: Set from any thread: no further plan is made.
        self.closed = threading.Event()
        #: Set while a plan is made.
        self.planner: Planner | None = None

    def start(self, index: IVFIndex) -> Planner:
        """The planner of the next plan.

        Raises:
            PlanningError: no process can be started here.
        """
        assert self.planner is None, "one plan is made at a time"
        config = self._config
        if config.planning == "here":
            self.planner = PlanningHere(index)
        else:
            self.planner = PlanningProcess(index, timeout_s=config.planning_timeout_s, nice=config.planning_nice)
        if self.closed.is_set():  # stop() may have found no planner yet
            self.planner.stop()
        return self.planner

    def end(self) -> None:
        """Frees the planner; without one does nothing."""
        planner, self.planner = self.planner, None
        if planner is not None:
            planner.close()

    @contextmanager
    def of(self, index: IVFIndex) -> Iterator[Planner]:
        """A planner for the time of the block; meanwhile threads that wait for the GIL get it soon.

        Raises:
            PlanningError: as :meth:`start`. RouterClosedError: after :meth:`stop`.
        """
        if self.closed.is_set():
            raise RouterClosedError("no more plans are made: the daemon is about to stop")
        try:
            with short_switch_interval():
                yield self.start(index)
        finally:
            self.end()

    def stop(self) -> None:
        """Makes no further plan, and gives up one that is being made; from any thread. Returns at once."""
        self.closed.set()
        planner = self.planner
        if planner is not None:
            planner.stop()
