"""When the client tries again, and when it does not."""

from __future__ import annotations

import contextlib

import pytest

from hybridindex.client.retry import Attempts, RetryPolicy
from hybridindex.errors import AccessDeniedError, InvalidInputError, OverloadedError, UnreachableError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def attempts(timeout_s=10.0, draw=0.5, **policy):
    clock = Clock()
    return Attempts(RetryPolicy(**policy), timeout_s, clock=clock, draw=lambda: draw), clock


LOST = UnreachableError("nobody")


def test_pauses_grow_and_are_bounded():
    tried, _ = attempts(attempts=6, first_pause_s=1, longest_pause_s=3)
    assert [tried.pause_after(LOST, repeatable=True) for _ in range(4)] == [0.5, 1.0, 1.5, 1.5]


def test_pauses_are_spread_over_the_whole_range():
    assert attempts(draw=0.0)[0].pause_after(LOST, repeatable=True) == 0
    tried, _ = attempts(draw=0.999, first_pause_s=1)
    assert tried.pause_after(LOST, repeatable=True) == pytest.approx(0.999)


def test_attempts_are_counted():
    tried, _ = attempts(attempts=3)
    tried.pause_after(LOST, repeatable=True)
    tried.pause_after(LOST, repeatable=True)
    with pytest.raises(UnreachableError):
        tried.pause_after(LOST, repeatable=True)


def test_a_daemon_that_says_when_is_asked_until_the_time_is_over():
    tried, clock = attempts(timeout_s=30.0, attempts=2)
    refused, pauses = OverloadedError("full", retry_after_s=0.1), []
    with contextlib.suppress(OverloadedError):
        while clock.now < 30:
            pauses.append(tried.pause_after(refused, repeatable=False))
            clock.now += pauses[-1]
    assert len(pauses) > 4
    assert pauses[0] < pauses[-1] <= 5
    assert 20 < clock.now < 30
    once, _ = attempts(timeout_s=30.0, attempts=1)
    with pytest.raises(OverloadedError):
        once.pause_after(OverloadedError("full", retry_after_s=0.1), repeatable=True)


def test_a_daemon_may_refuse_any_number_of_times():
    tried, _ = attempts(timeout_s=3600.0)
    refused = OverloadedError("full", retry_after_s=0)
    assert {tried.pause_after(refused, repeatable=False) for _ in range(1100)} >= {2.5}


def test_retry_after_is_the_least_pause():
    tried, _ = attempts(first_pause_s=0)
    assert 2 <= tried.pause_after(OverloadedError("full", retry_after_s=2), repeatable=False) <= 2.2


def test_no_pause_goes_past_the_deadline():
    tried, clock = attempts(timeout_s=3)
    clock.now = 1.5
    assert tried.remaining_s() == 1.5
    with pytest.raises(OverloadedError):
        tried.pause_after(OverloadedError("full", retry_after_s=2), repeatable=True)
    clock.now = 5
    assert tried.remaining_s() > 0


def test_what_is_not_repeatable_is_not_repeated():
    with pytest.raises(UnreachableError):
        attempts()[0].pause_after(LOST, repeatable=False)


def test_other_errors_are_final():
    with pytest.raises(AccessDeniedError):
        attempts()[0].pause_after(AccessDeniedError("no"), repeatable=True)


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"attempts": True}, {"first_pause_s": -1}, {"longest_pause_s": "x"}])
def test_policies_are_checked(bad):
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        RetryPolicy(**bad)
