"""What a node searches itself and what others ask of it, in one turn of the engine: one scan of the host for both."""

from __future__ import annotations

import asyncio
import logging
import queue

import numpy as np
import pytest

from hybridindex.router import Router
from hybridindex.router.batch.batching import MAX_BATCHES_IN_FLIGHT
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.slots import share_slot
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.oracle import check_answer
from tests.router.slow_copies import until
from tests.router.test_router import check
from tests.stuck import held_quantizer


@pytest.fixture(scope="module", params=[("flat", "l2"), ("flat", "ip"), ("sq8", "ip"), ("pq6", "l2")], ids=str)
def index(request, tmp_path_factory):
    codec, metric = request.param
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric) as index:
        yield index


@pytest.fixture(scope="module")
def flat(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("flat") / "i") as index:
        yield index


def asked_by_others(index, n, width, seed):
    """Queries and their lists."""
    queries = index.transform(clustered(n, seed=seed))
    return queries, GivenProbes(*index.quantize(queries, width))


async def in_one_turn(router, entered, resume, own, given):
    """Answers of searches and of scans (queries, k and what else each takes), all of which wait for the same turn; a
    search that fails answers its error."""
    first = asyncio.ensure_future(router.asearch(clustered(1, seed=99)))
    assert await asyncio.to_thread(entered.wait, 300)
    tasks = [asyncio.ensure_future(router.asearch(*each)) for each in own]
    tasks += [asyncio.ensure_future(router.ascan(*each)) for each in given]
    await asyncio.sleep(0)  # all are asked
    resume.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def counted(router, fail_with_more_than=NLIST):
    """Queries of each of the host's scans."""
    host, scans = router._served.host, []
    scan = host.scan_checked

    def noted(queries, *args, **kwargs):
        scans.append(len(queries))
        if len(queries) > fail_with_more_than:
            raise OSError("the scan failed")
        return scan(queries, *args, **kwargs)

    host.scan_checked = noted
    return scans


@pytest.mark.parametrize("early", [True, False])
def test_own_searches_and_those_of_others_are_one_scan(index, monkeypatch, early):
    own = [(clustered(n, seed=n), k, nprobe) for n, k, nprobe in ((1, 10, 8), (3, 1, 2), (2, 25, NLIST))]
    given = [(asked_by_others(index, n, width, seed=20 + n), k) for n, k, width in ((2, 4, 5), (1, 40, 12))]
    with Router(index, early_dispatch=early) as router:
        scans = counted(router)
        gates = held_quantizer(index, monkeypatch)
        scans_of_others = [(queries, k, lists) for (queries, lists), k in given]
        found = asyncio.run(in_one_turn(router, *gates, own, scans_of_others))
    assert scans == [1, 6 + 3]
    for (queries, k, nprobe), result in zip(own, found, strict=False):
        check(index, queries, k, nprobe, result)
    for ((queries, lists), k), result in zip(given, found[len(own) :], strict=True):
        assert result.ids.shape == (len(queries), k)
        check_answer(index, queries, lists.probes, k, result.distances, result.ids)


def test_devices_scan_their_parts_of_both(flat, monkeypatch):
    rng = np.random.default_rng(5)
    plan = hand_made_plan(flat, np.where(rng.random(NLIST) < 0.5, 0, -1))
    queries, lists = asked_by_others(flat, 3, 6, seed=8)
    with Router(flat, plan=plan, devices=["cpu"]) as router:
        scans = counted(router)
        own, others = [(clustered(4, seed=3), 10, 8)], [(queries, 7, lists)]
        mine, theirs = asyncio.run(in_one_turn(router, *held_quantizer(flat, monkeypatch), own, others))
        assert router.stats().device_work_bytes > 0
        # Both had one slot, which came back once.
        until(lambda: router._served.engine._slots.qsize() == MAX_BATCHES_IN_FLIGHT)
    assert len(scans) <= 2
    check(flat, clustered(4, seed=3), 10, 8, mine)
    check_answer(flat, queries, lists.probes, 7, theirs.distances, theirs.ids)


def test_a_scan_that_fails_fails_both_and_nothing_after_it(flat, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL, logger="hybridindex")
    queries, lists = asked_by_others(flat, 3, 6, seed=8)
    with Router(flat) as router:
        counted(router, fail_with_more_than=3)
        own, others = [(clustered(2, seed=3),)], [(queries, 7, lists)]
        found = asyncio.run(in_one_turn(router, *held_quantizer(flat, monkeypatch), own, others))
        assert [str(each) for each in found] == ["the scan failed"] * 2
        check(flat, clustered(2, seed=3), 10, 8, router.search(clustered(2, seed=3)))
        router.check_invariants()


def test_a_slot_that_batches_share_comes_back_once_with_the_last():
    tokens = queue.SimpleQueue()
    first, second = share_slot(tokens, 2)
    first.give_back()
    first.give_back()
    assert tokens.empty()
    second.give_back()
    second.give_back()
    assert tokens.qsize() == 1
