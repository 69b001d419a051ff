"""Starts, calls, limits and ends the planning process; runs in the serving process.

The process runs :mod:`hybridindex.refresh.planner_worker` with the interpreter and the module path of this one, so
that it works inside any program, also where the main module is not guarded. It is started for one plan and ended with
it: its start costs time of low priority only, and between plans it holds no memory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import RawIOBase
from typing import Any, cast

import hybridindex.errors as errors
from hybridindex.errors import HybridIndexError, PlanningError, RefreshError
from hybridindex.index.ivf import IVFIndex
from hybridindex.partitioner.plan import Plan
from hybridindex.partitioner.request import PlanRequest
from hybridindex.plans.planner import Arenas
from hybridindex.plans.proposal import Served, Weighed
from hybridindex.processes import ONE_THREAD, OfOneProcess, usual_switch_interval
from hybridindex.refresh.pipe_codec import read_frame, write_frame
from hybridindex.refresh.planner import CODEC, RenewOptions
from hybridindex.types import F32, Profile

__all__ = ["PlanningProcess"]

#: After its output ended.
_EXIT_TIMEOUT_S = 5.0


class PlanningProcess(OfOneProcess):
    """A :class:`hybridindex.refresh.planner.Planner`. Calls from one thread; :meth:`stop` from any."""

    def __init__(self, index: IVFIndex, *, timeout_s: float, nice: int) -> None:
        """Starts the process; returns at once.

        Args:
            index: whose coarse quantizer is used.
            timeout_s: longest time of all calls together; the process is killed then.
            nice: 0 to 19, added to the niceness of this process; 19 gives way to everything.

        Raises:
            PlanningError: no process can be started here.
        """
        self._index = index
        self._timeout_s = timeout_s
        #: What the process has.
        self._profile: Profile | None = None
        #: Why the process was killed; empty while it was not.
        self._killed = ""
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no input of users
                # -P: the working directory is no place to import from unless it was one here.
                [sys.executable, "-P", "-m", "hybridindex.refresh.planner_worker", str(int(nice))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C goes to the serving process, which ends this one. No session of its own: where kernels group
                # by session, niceness only counts within the group.
                process_group=0,
                env={**os.environ, **ONE_THREAD, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path},
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error  # without paths
            raise PlanningError(
                f'no process could be started to plan in ({why}); RefreshConfig(planning="here") plans without one'
            ) from error
        self._timer = threading.Timer(timeout_s, self._kill, (f"it took more than {timeout_s:g} s",))
        self._timer.daemon = True
        self._timer.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self) -> None:
        """See :class:`hybridindex.refresh.planner.Planner`."""
        self._call({"call": "prepare"})

    def renew(self, profile: Profile, queries: F32, options: RenewOptions) -> Profile:
        """See :class:`hybridindex.refresh.planner.Planner`."""
        ivf = self._index
        access, notes, created_at = self._call(
            {
                "call": "renew",
                "model": ivf.mapped_model(),
                "profile": profile,
                "queries": queries,
                "n_hot": options.n_hot,
                "decay": options.decay,
                "seed": options.seed,
                "min_queries": options.min_queries,
                "notes": options.notes,
            }
        )
        renewed = self._profile = replace(profile, id=None, created_at=created_at, access=access, notes=notes)
        return renewed

    def solve(self, profile: Profile, request: PlanRequest, arenas: Arenas | None) -> Plan:
        """See :class:`hybridindex.refresh.planner.Planner`."""
        told = {} if profile is self._profile else {"profile": profile}
        self._profile = profile
        plan: Plan = self._call({"call": "solve", "request": request, "arenas": arenas, **told}, {"profile": profile})
        return plan

    def weigh(
        self, plan: Plan, served: Served, bandwidth_share: float, room_bytes: Sequence[int] | None = None
    ) -> Weighed:
        """See :class:`hybridindex.refresh.planner.Planner`."""
        room = None if room_bytes is None else list(room_bytes)
        weighed: Weighed = self._call(
            {"call": "weigh", "served": served, "bandwidth_share": bandwidth_share, "room_bytes": room},
            {"profile": self._profile, "plan": plan, "analysis": plan.analysis},
        )
        return weighed

    def _call(self, message: Mapping[str, Any], known: Mapping[str, object] | None = None) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        parts = CODEC.encode(message)
        try:
            write_frame(cast("RawIOBase", self._process.stdin), parts)
            with usual_switch_interval():
                frame = read_frame(cast("RawIOBase", self._process.stdout))
        except (OSError, RefreshError) as error:
            raise self._ended() from error
        if frame is None:
            raise self._ended()
        try:
            answer = CODEC.decode(frame, known)
        except RefreshError as error:
            raise PlanningError(str(error)) from error
        if "error" in answer:
            kind = getattr(errors, answer["error"], None)
            known_kind = isinstance(kind, type) and issubclass(kind, HybridIndexError)
            text = answer["text"] if known_kind else f"planning failed: {answer['error']}: {answer['text']}"
            raise (kind if known_kind and kind is not None else PlanningError)(text)
        return answer["value"]

    def _ended(self) -> PlanningError:
        try:
            code = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill("its answer made no sense")
            code = 0
        if self._killed:
            return PlanningError(f"the process that plans was ended: {self._killed}")
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return PlanningError(f"the process that plans ended by itself with {how}; its messages are on standard error")

    def _kill(self, why: str) -> None:
        if self._process.poll() is None:
            self._killed = self._killed or why
            self._process.kill()

    def stop(self) -> None:
        """Kills the process: the running call fails."""
        self._kill("it was told to stop")

    def close(self) -> None:
        """Ends the process and waits a short while: at high niceness it takes time to get the processor and die."""
        self._timer.cancel()
        self._kill("the update is over")
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_TIMEOUT_S)
        self._timer.join()
