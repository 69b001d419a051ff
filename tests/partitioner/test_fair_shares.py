"""Shares of one resource: a key alone, keys that compete, and whoever comes last."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hybridindex.partitioner.fair_shares import FairShares


def fill(shares: FairShares, key: str, n: int = 1) -> int:
    """Takes ``n`` at a time until that is refused; how much ``key`` then has."""
    while shares.lack(key, n) is None:
        shares.take(key, n)
    return shares.of(key)


def test_a_key_alone_may_have_all_or_its_part():
    assert fill(FairShares(100), "a") == 100
    assert fill(FairShares(100, alone=0.3), "a") == 30
    assert fill(FairShares(1, alone=0.5), "a") == 1


def test_two_that_compete_get_the_same_and_something_stays_for_a_third():
    shares = FairShares(90, alone=0.5)
    for _ in range(90):
        for key in "ab":
            if shares.lack(key, 1) is None:
                shares.take(key, 1)
    assert shares.of("a") == shares.of("b") == 30
    assert shares.lack("a", 1) == "share"
    assert fill(shares, "c") > 0


def test_whoever_has_nothing_may_take_what_is_free():
    shares = FairShares(4, alone=0.5)
    shares.take("a", 2)
    assert shares.lack("a", 1) == "share"
    assert shares.lack("b", 2) is None
    assert shares.lack("b", 3) == "full"


def test_the_one_that_has_the_most_gives_way_until_all_have_the_same():
    shares = FairShares(8)
    assert fill(shares, "a") == 8
    for key in "bc":
        while (loser := shares.who_gives_way(key, 1)) is not None:
            assert shares.lack(key, 1) == "full"
            shares.give_back(loser, 1)
            shares.take(key, 1)
    assert sorted(shares.of(key) for key in "abc") == [2, 3, 3]
    assert shares.who_gives_way("a", 1) is None


@given(
    st.integers(1, 200),
    st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), max_size=60),
)
def test_nothing_exceeds_the_capacity_or_a_key_its_part(capacity, alone, asked):
    shares = FairShares(capacity, alone=alone)
    held: list[tuple[str, int]] = []
    for key, n in asked:
        if shares.lack(key, n) is None:
            shares.take(key, n)
            held.append((key, n))
        elif held:
            shares.give_back(*held.pop(0))
        shares.check_invariants()
        assert shares.used <= capacity
        assert all(shares.of(key) <= shares.rule.most for key in "abcd")
    for each in held:
        shares.give_back(*each)
    assert shares.used == 0
    shares.check_invariants()
