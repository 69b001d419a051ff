"""A thread is waited for as long as was said, and left behind only where that is allowed."""

from __future__ import annotations

import threading

import pytest

from hybridindex.tiers.contract.bounded_join import join_within


@pytest.fixture
def thread():
    """(a thread that goes on, the event that ends it)."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, daemon=True)
    thread.start()
    yield thread, go_on
    go_on.set()
    thread.join(300)


def test_what_goes_on_is_left_after_its_time(thread):
    assert not join_within(thread[0], 0.01)
    assert not join_within(thread[0], 0)


def test_what_ends_is_joined(thread):
    thread[1].set()
    assert join_within(thread[0], 30)
    assert join_within(thread[0], None)


def test_what_may_not_be_left_is_waited_for(thread):
    asked = []

    def may_leave():
        asked.append(True)
        if len(asked) == 3:
            thread[1].set()
        return False

    assert join_within(thread[0], 0.01, may_leave)
    assert len(asked) >= 3


def test_nobody_is_asked_before_the_time_is_over(thread):
    looks = []
    join = thread[0].join
    thread[0].join = lambda timeout: (looks.append(timeout), join(0))
    assert not join_within(thread[0], 1.0, lambda: len(looks) == 5)
    assert looks == [0.25] * 5
