"""Whatever a callback does, the thread that completes the future goes on."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from hybridindex.tiers.contract.futures import done, fail, settle


def leaves(_future):
    raise SystemExit


def test_a_callback_that_leaves_ends_nothing():
    settled, failed = Future(), Future()
    for future in (settled, failed):
        future.add_done_callback(leaves)
    settle(settled, 3)
    fail(failed, ValueError("no"))
    assert settled.result(0) == 3
    assert isinstance(failed.exception(0), ValueError)


def test_what_is_done_stays_as_it_is():
    future = done(1)
    settle(future, 2)
    fail(future, ValueError("late"))
    assert future.result(0) == 1


def test_what_was_given_up_is_left_alone():
    future = Future()
    assert future.cancel()
    settle(future, 2)
    fail(future, ValueError("late"))
    assert future.cancelled()


def test_an_error_reaches_who_waits():
    future = Future()
    fail(future, ValueError("why"))
    with pytest.raises(ValueError, match="why"):
        future.result(0)
