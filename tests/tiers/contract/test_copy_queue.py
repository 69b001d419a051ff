"""Turns: foreground first, background for its share of the time and no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.tiers.contract.copy_queue import CopyQueue, check_share


def test_foreground_goes_between_two_background_steps():
    moves = CopyQueue()
    moves.put("plan", 1.0)
    assert moves.next(0.0) == ("plan", None)
    moves.put("lookahead")  # arrives while the step runs
    moves.stepped("plan", more=True, busy_s=1.0, now_s=1.0)
    assert moves.next(1.0) == ("lookahead", None)
    moves.stepped("lookahead", more=True, busy_s=1.0, now_s=2.0)
    assert moves.next(2.0) == ("lookahead", None)
    moves.stepped("lookahead", more=False, busy_s=1.0, now_s=3.0)
    assert moves.next(3.0) == ("plan", None)
    moves.stepped("plan", more=False, busy_s=1.0, now_s=4.0)
    assert moves.next(4.0) == (None, None)


def test_each_queue_is_first_come_first_served():
    moves = CopyQueue()
    for name, share in [("a", None), ("b", 1.0), ("c", None), ("d", 1.0)]:
        moves.put(name, share)
    order = []
    while (move := moves.next(0.0)[0]) is not None:
        order.append(move)
        moves.stepped(move, more=False, busy_s=1.0, now_s=0.0)
    assert order == ["a", "c", "b", "d"]


@given(share=st.floats(0.01, 1.0), busy=st.lists(st.floats(1e-4, 10.0), min_size=1, max_size=30))
def test_a_background_move_is_busy_for_its_share(share, busy):
    moves = CopyQueue()
    moves.put("plan", share)
    now = 0.0
    for busy_s in busy:
        move, rest_s = moves.next(now)
        if move is None:
            now += rest_s
            move, rest_s = moves.next(now + 1e-9)
        assert move == "plan"
        now += busy_s
        moves.stepped("plan", more=True, busy_s=busy_s, now_s=now)
    rest_s = moves.next(now)[1] or 0.0
    assert sum(busy) / (now + rest_s) == pytest.approx(share, rel=1e-3)


def test_rest_holds_back_no_foreground_and_ends_when_hurried():
    moves = CopyQueue()
    moves.put("plan", 0.1)
    moves.stepped("plan", more=True, busy_s=1.0, now_s=1.0)
    assert moves.next(1.0) == (None, 9.0)
    assert moves.next(1.0, hurry=True) == ("plan", None)
    moves.put("lookahead")
    assert moves.next(1.0) == ("lookahead", None)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_a_share_out_of_range_is_named(share):
    with pytest.raises(InvalidInputError, match="bandwidth_share is"):
        check_share(share)
