"""A copy stream whose copies happen as late as they may: when somebody waits for them, or when a test says so.

What a GPU may do and rarely does. A staging buffer that is filled too early, a page that is reused too early and a list
that is published too early all show as wrong bytes. It fails and gets lost on demand.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any, NamedTuple


class Pending(NamedTuple):
    """A copy that was started: where it goes, as an address, and how many bytes."""

    target: int
    nbytes: int
    do: Any


class LateStream:
    def __init__(self):
        self.pending: deque[Any] = deque()
        self.n_launched = 0
        self.n_done = 0
        #: Raise from the next start, after starting so many of its copies.
        self.break_after = None
        #: The device does not answer; what was started may still happen.
        self.lost = False

    def send(self, copies):
        def copy(target, source, nbytes):
            return Pending(target, nbytes, lambda: ctypes.memmove(target, source, nbytes))

        return self.start([copy(*each) for each in zip(*(part.tolist() for part in copies), strict=True)])

    def fetch(self, copies):
        def copy(target, source):
            return Pending(target.data_ptr(), target.numel(), lambda: target.copy_(source))

        return self.start([copy(*each) for each in copies])

    def start(self, copies):
        self.check()
        broken, self.break_after = self.break_after, None
        started = copies if broken is None else copies[:broken]
        self.pending.extend(started)
        self.n_launched += len(started)
        if broken is not None:
            raise RuntimeError("the launch failed")
        return LateMark(self, self.n_launched)

    def drain(self):
        self.check()
        self.progress(len(self.pending))

    def progress(self, n):
        for _ in range(min(n, len(self.pending))):
            self.pending.popleft().do()
            self.n_done += 1

    def check(self):
        if self.lost:
            raise RuntimeError("the device is lost")


class LateMark:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position

    def done(self):
        self.stream.check()
        return self.stream.n_done >= self.position

    def wait(self):
        self.stream.check()
        self.stream.progress(self.position - self.stream.n_done)

    def seconds(self):
        return 0.5
