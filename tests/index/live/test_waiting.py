"""Calls that come together share a record, whoever of them is interrupted."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import DuplicateIdError, FileError, HybridIndexError
from hybridindex.index.live.waiting import Ticket, WaitingCalls
from hybridindex.index.log.change_log import LogFile
from tests.clustered import clustered, small_index

WAIT_S = 300
N_THREADS = 12
ROWS = clustered(400, seed=41)


@pytest.fixture
def index(tmp_path):
    small_index(tmp_path / "i").close()
    with hx.open(tmp_path / "i", write=True) as index:
        yield index


def all_add(index, n_each):
    """Each thread adds rows one by one; ids of each call, and what was raised."""
    told, raised = [], []

    def work(number):
        for row in range(n_each):
            try:
                told.append((number * n_each + row, index.add(ROWS[number * n_each + row])[0]))
            except (KeyboardInterrupt, HybridIndexError) as error:
                raised.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a call waits for ever"
    return told, raised


def check(index, told):
    ids = [each for _, each in told]
    assert len(set(ids)) == len(ids)
    with index.router(devices=()) as router:
        found = router.search(ROWS[[row for row, _ in told]], 1, index.nlist)
    np.testing.assert_array_equal(found.ids[:, 0], ids)
    assert index.n_live >= 3000 + len(ids)


def test_calls_share_records_and_each_is_told_its_own_ids(index, monkeypatch):
    records = []
    append = LogFile.append
    monkeypatch.setattr(
        LogFile, "append", lambda self, changes, *a, **k: records.append(len(changes)) or append(self, changes, *a, **k)
    )
    told, raised = all_add(index, 30)
    assert not raised
    assert len(told) == 30 * N_THREADS
    assert sum(records) < len(told) / 2
    check(index, told)


def in_one_record(index, *calls):
    """Calls in this order, of threads that find the log taken."""
    store, threads, raised = index.ivf.live, [], []

    def run(call):
        try:
            call()
        except HybridIndexError as error:
            raised.append(error)

    with store._writing:
        for call in calls:
            threads.append(threading.Thread(target=run, args=(call,)))
            threads[-1].start()
            end_s = time.monotonic() + WAIT_S
            while len(store._calls._waiting) < len(threads):
                assert time.monotonic() < end_s
                time.sleep(0.001)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return raised


def rows_of(index, row_id):
    """How many rows a search of all lists finds with this id."""
    with index.router(devices=()) as router:
        return int((router.search(ROWS[:1], 5, index.nlist, allow_ids=[row_id]).ids == row_id).sum())


@pytest.mark.parametrize("second", ["upsert", "add", "delete"])
def test_a_row_that_was_numbered_now_is_seen_by_the_next_call(index, second):
    n = fresh = index.n_live  # the id that it will get
    calls = {
        "upsert": lambda: index.upsert(ROWS[1:2], [fresh]),
        "add": lambda: index.add(ROWS[1:2], [fresh]),
        "delete": lambda: index.delete([fresh]),
    }
    raised = in_one_record(index, lambda: index.add(ROWS[:1]), calls[second])
    assert [type(each) for each in raised] == ([DuplicateIdError] if second == "add" else [])
    there = 0 if second == "delete" else 1
    assert index.n_live == n + there
    assert rows_of(index, fresh) == there
    assert index.delete([fresh]) == there
    index.add(ROWS[2:3], [fresh + 1])
    assert rows_of(index, fresh) == 0


def test_rows_that_a_condition_deletes_are_gone_for_the_next_call(tmp_path):
    years = {"year": np.repeat([2019, 2020], 1500)}
    with (
        hx.build(clustered(3000, seed=2), tmp_path / "y", nlist=8, attributes=years),
        hx.open(tmp_path / "y", write=True) as index,
    ):
        raised = in_one_record(
            index, lambda: index.delete(where="year < 2020"), lambda: index.upsert(ROWS[:2], [7, 1600])
        )
        assert not raised
        assert index.n_live == 1501
        assert rows_of(index, 7) == 1
    with hx.open(tmp_path / "y") as again:
        assert again.n_live == 1501
        assert rows_of(again, 1600) == 1


def test_nobody_waits_for_ever_for_a_call_that_was_interrupted(index, monkeypatch):
    """Wherever it was: as it waited, as it gathered others, as it wrote."""
    fate = np.random.default_rng(3)
    lock = threading.Lock()

    def interrupted(method, share):
        def call(self, *given):
            with lock:
                unlucky = fate.random() < share
            if unlucky:
                raise KeyboardInterrupt
            return method(self, *given)

        return call

    monkeypatch.setattr(Ticket, "wait", interrupted(Ticket.wait, 0.1))
    monkeypatch.setattr(WaitingCalls, "gather", interrupted(WaitingCalls.gather, 0.2))
    append, appends = LogFile.append, []

    def failing(self, *given, **options):
        with lock:
            # Calls that come together are few appends: the first one fails, whatever the turns.
            unlucky = fate.random() < 0.1 or not appends
            appends.append(unlucky)
        if unlucky:
            raise FileError("EIO", "the disk is not well")
        return append(self, *given, **options)

    monkeypatch.setattr(LogFile, "append", failing)
    told, raised = all_add(index, 30)
    monkeypatch.undo()
    kinds = {type(each) for each in raised}
    assert KeyboardInterrupt in kinds
    assert len(kinds) == 2
    assert all(issubclass(each, (KeyboardInterrupt, HybridIndexError)) for each in kinds)
    assert told
    check(index, told)
    assert index.add(ROWS[-1]).size == 1
