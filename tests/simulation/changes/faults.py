"""Errors of the disk, drawn from a seed: once, for a while, or for want of room."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass
from typing import Literal

from hybridindex.filesystem import Call
from tests.faults import WRITES
from tests.simulation.changes.disk import SimDisk

__all__ = ["Faults"]

#: "sync": a sync fails, and what would undo it.
Kind = Literal["once", "full", "sick", "sync"]
#: What needs room.
_TAKES_ROOM = {"create", "write", "make_folder", "lock"}
#: Calls that are made before anything has begun, or that only the tests' own checks make.
_NEVER = {"read", "map", "parse", "faiss"}


@dataclass(slots=True)
class _Episode:
    kind: Kind
    number: int
    #: Calls that it lasts.
    left: int


class Faults:
    """Of one life of a process."""

    def __init__(self, disk: SimDisk, draw: random.Random, *, often: float) -> None:
        """``often``: errors in so many calls, about; 0: none."""
        self._disk, self._draw, self._often = disk, draw, often
        self._next = self._wait()
        self._episode: _Episode | None = None
        #: Nobody but the tests looks.
        self.muted = 0
        #: How many came; and whether what fails now may be done all the same.
        self.n = 0
        self.unsure = 0

    @property
    def goes_on(self) -> bool:
        return self._episode is not None

    def pass_time(self) -> None:
        """Somebody waits for the end of what goes on."""
        if (episode := self._episode) is not None:
            episode.left -= 5
            if episode.left <= 0:
                self._episode = None

    def _wait(self) -> int:
        return int(self._draw.expovariate(self._often)) + 1 if self._often else 1 << 60

    def see(self, call: Call) -> int | None:
        """Raises the OSError with which a call fails; of a write, how many bytes are taken, None: all."""
        if self.muted or call.name in _NEVER:
            return None
        self._next -= 1
        kinds: tuple[Kind, ...] = ("once", "once", "full", "sick")
        if self._episode is None and self._next <= 0:
            kind = "sync" if call.name == "sync" else self._draw.choice(kinds)
            self._episode = _Episode(
                kind,
                errno.ENOSPC if kind == "full" else errno.EIO,
                {"once": 1, "sync": self._draw.choice((1, 3))}.get(kind) or self._draw.choice((5, 30, 150)),
            )
            self._next = self._wait()
        if (episode := self._episode) is None:
            return None
        episode.left -= 1
        if episode.left <= 0:
            self._episode = None
        if episode.kind == "full":
            if call.name not in _TAKES_ROOM:
                return None
            if call.name == "write" and len(call.data) > 1 and self._draw.random() < 0.5:
                return len(call.data) // 2
        elif episode.kind in ("sick", "sync") and call.name not in WRITES:
            return None
        self.n += 1
        self.unsure += episode.kind in ("sick", "sync")
        if call.name == "sync" and self._draw.random() < 0.5:
            self._disk.forget_writes(call.path)
        raise OSError(episode.number, os.strerror(episode.number), call.path)
