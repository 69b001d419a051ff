"""Turns: nobody runs beside another, and an interrupt at any call leaves no turn taken."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from hybridindex.index.ivf import IVFIndex
from hybridindex.router import Router
from hybridindex.router.batch.batching import MAX_BATCHES_IN_FLIGHT
from hybridindex.router.turn import Turn
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.test_router import check
from tests.stuck import WAIT_S, ended


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("turn") / "i", nprobe=8) as index:
        yield index


def interrupted_at(number, call):
    """Makes ``call`` and raises KeyboardInterrupt where the interpreter would, at the ``number``-th of these places:
    where a Python function begins, or a built-in one has returned. Whether there were so many."""
    left = number

    def count(_frame, event, _argument):
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(count)
    try:  # not suppress, which is a function, too
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left < 0


@pytest.mark.parametrize("where", ["host", "device", "host, by faiss", "host, with a listener"])
def test_an_interrupt_at_any_call_of_a_search_leaves_the_router_as_it_was(index, where, monkeypatch):
    queries, number = clustered(3), 0
    placed = {"plan": hand_made_plan(index, np.tile([0, -1], NLIST // 2)), "devices": ["cpu"]}
    if "faiss" in where:
        monkeypatch.setattr(IVFIndex, "quantizes_itself", False)  # else no thread is adopted
    router = Router(index, **(placed if where == "device" else {}))
    if "listener" in where:
        router.on_batch.append(lambda report: None)
    engine, residency = router._served.engine, router._served.residency
    router.search(queries)
    while interrupted_at(number, lambda: router.search(queries)):
        # The engine's thread, and whoever comes next.
        check(index, queries, 10, 8, router.submit(queries).result(WAIT_S))
        check(index, queries, 10, 8, router.search(queries))
        engine.wait_idle(WAIT_S)
        assert (engine._slots.qsize(), residency.n_leases) == (MAX_BATCHES_IN_FLIGHT, 0), f"at call {number}"
        number += 1
    assert number > 50
    ended(router.close)


def test_a_turn_is_one_threads_and_is_given_back_whatever_raises():
    turn, idle = Turn(), lambda: True

    def nested():
        return turn.held_here(), turn.run(idle, lambda: "inner")

    assert turn.run(idle, nested) == (True, None)
    assert not turn.held_here()
    with pytest.raises(ZeroDivisionError):
        turn.run(idle, lambda: 1 / 0)
    assert turn.run(lambda: False, lambda: "busy") is None
    with turn.of_engine():
        assert turn.run(idle, lambda: "beside the engine") is None
    found = []
    others = threading.Thread(target=lambda: found.append(turn.run(idle, lambda: "stands in for another")))
    others.start()
    others.join(WAIT_S)
    assert found == [None]
    assert turn.run(idle, lambda: "again") == "again"
    turn.acquire()
    assert turn.run(idle, lambda: "for good") is None
