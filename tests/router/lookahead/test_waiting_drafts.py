"""The queue of drafts: bounded in bytes, fair between keys, the oldest dropped first."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.router.lookahead.list_refs import SessionLists
from hybridindex.router.lookahead.waiting_drafts import ROUND_PROBES, Draft, WaitingDrafts


def draft(owner: str, *, n: int = 1, nprobe: int = 1) -> Draft:
    return Draft(
        session=SessionLists(owner=owner),
        queries=np.zeros((n, 4), np.float32),
        nprobe=nprobe,
        budget_bytes=1,
        round_bytes=1,
        future=Future(),
    )


ONE = draft("a").nbytes


def put(queue: WaitingDrafts, *drafts: Draft) -> list[Draft]:
    dropped = [lost for each in drafts for lost in queue.put(each)]
    queue.check_invariants()
    return dropped


def test_a_key_alone_may_fill_the_queue_and_then_loses_its_oldest():
    queue = WaitingDrafts(3 * ONE)
    drafts = [draft("a") for _ in range(5)]
    assert put(queue, *drafts) == drafts[:2]
    assert queue.nbytes == 3 * ONE
    assert queue.take() == drafts[2:]
    assert not queue
    assert queue.nbytes == 0


def test_a_newcomer_gets_in_and_the_one_that_has_the_most_loses_its_oldest():
    queue = WaitingDrafts(4 * ONE)
    flood, modest = [draft("flood") for _ in range(4)], [draft("modest") for _ in range(2)]
    put(queue, *flood)
    assert put(queue, *modest) == flood[:2]
    # Now both have the same: each makes way for itself.
    assert put(queue, again := draft("flood")) == [flood[2]]
    assert put(queue, draft("modest")) == [modest[0]]
    # A third takes from both.
    assert put(queue, draft("third")) in ([flood[3]], [modest[1]])
    assert again in queue.take()


def test_large_drafts_count_by_their_bytes():
    queue = WaitingDrafts(8 * ONE)
    small = [draft("small") for _ in range(8)]
    put(queue, *small)
    large = draft("large", n=4 * ONE // 16 - 200)
    dropped = put(queue, large)
    assert dropped == small[: len(dropped)]
    assert len(dropped) == -(-large.nbytes // ONE)
    with pytest.raises(InvalidInputError, match=r"draft_queries take .* lookahead_queue_bytes"):
        queue.put(draft("large", n=8 * ONE))
    queue.check_invariants()


def test_a_round_is_bounded_and_begins_with_the_key_that_got_the_least():
    queue = WaitingDrafts(1 << 20)
    nprobe = ROUND_PROBES // 4
    flood = [draft("flood", nprobe=nprobe) for _ in range(8)]
    put(queue, *flood)
    assert queue.take() == flood[:4]
    modest = draft("modest", nprobe=nprobe)
    put(queue, modest)
    taken = queue.take()
    assert modest in taken
    assert len(taken) == 4
    put(queue, huge := draft("huge", n=8, nprobe=nprobe))
    assert queue.take() == [huge], "a round alone"
    assert queue.take() == flood[7:]
    assert queue.take() == []


def test_clearing_gives_all_of_it_back():
    queue = WaitingDrafts(1 << 20)
    drafts = [draft(owner) for owner in "abab"]
    put(queue, *drafts)
    assert set(queue.clear()) == set(drafts)
    assert queue.nbytes == 0
    assert not queue
    queue.check_invariants()
