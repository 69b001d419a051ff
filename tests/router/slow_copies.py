"""Routers whose copies wait at a gate, and searches that wait for them: what lands when is decided by the test.

The paces are set by hand: host and device are the same cores, where waiting never pays.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import Any

import pytest

from hybridindex.router import Router
from hybridindex.router.batch.deadline import PaceEstimator
from hybridindex.router.request_queue import RequestQueue

NPROBE = 8
#: Seconds after which a test fails that hangs.
SOON_S = 300


class Gate:
    """Stands in front of a device's copies: each waits until it is let through."""

    def __init__(self, tier):
        self._send, self._open = tier._copier.send, threading.Semaphore(0)
        tier._copier.send = self.send
        tier._copier.send_pages = 1  # a page at a time

    def send(self, writes):
        assert self._open.acquire(timeout=2 * SOON_S)
        return self._send(writes)

    def let_through(self, n=10_000):
        self._open.release(n)


def pace(seconds, nbytes=1_000_000):
    """An estimator that nothing teaches any better."""
    pace = PaceEstimator()
    pace.observe(nbytes, seconds)
    pace.observe = lambda *_: None  # type: ignore[method-assign]
    return pace


class Slow:
    """A router whose copies wait at a gate, and which believes that they pay."""

    def __init__(self, router):
        self.router = router
        self.gate = Gate(router.devices[0])
        wait_for_loads = router._served.wait_for_loads
        wait_for_loads._host_pace = wait_for_loads._host_line = pace(100.0)
        wait_for_loads._device_pace = pace(1e-3)
        for route in wait_for_loads._routes.values():
            route.pace = pace(1.0)

    def fly(self, session, query, **options):
        """Starts a lookahead and returns when its lists are on their way."""
        landed = session.lookahead(query, **options)
        until(lambda: self.flights)
        return landed

    def n_pages(self, lists):
        """Of ``lists``: each is a send of its own."""
        return int(self.router.devices[0].geometry.pages_for(self.router.index.list_sizes[lists]).sum())

    def until_a_search_waits(self):
        until(lambda: self.router._served.wait_for_loads._waiting)

    @property
    def route(self):
        return self.router._served.wait_for_loads._routes[0]

    @property
    def flights(self):
        return self.route.flights

    @property
    def waits(self):
        stage = self.router.stats().stages.get("lookahead_wait")
        return stage.count if stage else 0


@contextmanager
def slow(index, *, longest_s=1e3, **options):
    """``longest_s``: tests end waits themselves, however slow the machine is."""
    every: dict[str, Any] = {"devices": ["cpu"], "device_budget_bytes": 32 << 20, "cache_fraction": 0} | options
    with pytest.MonkeyPatch.context() as patched, Router(index, **every) as router:
        patched.setattr("hybridindex.router.lookahead.wait_for_loads._LONGEST_S", longest_s)
        slow = Slow(router)
        try:
            yield slow
            router.check_invariants()
        finally:
            slow.gate.let_through()


def until(condition):
    ends = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < ends, "it never came so far"
        time.sleep(1e-3)


def submitted(way, session, query, **options):
    """A search, by any of its three ways: a function that waits for the answer."""
    if way == "submit":
        future = session.submit(query, 5, NPROBE, **options)
        return lambda: future.result(SOON_S)
    found = []

    def search():
        if way == "search":
            found.append(session.search(query, 5, NPROBE, **options))
        else:
            found.append(asyncio.run(session.asearch(query, 5, NPROBE, **options)))

    thread = threading.Thread(target=search, daemon=True)
    thread.start()

    def answer():
        thread.join(SOON_S)
        return found[0]

    return answer


@contextmanager
def one_batch(monkeypatch):
    """What is submitted in the block comes into one batch."""
    held = threading.Event()
    take = RequestQueue.take
    with monkeypatch.context() as patched:
        patched.setattr(RequestQueue, "take", lambda waiting, requests: (held.wait(SOON_S), take(waiting, requests))[1])
        yield
        held.set()
