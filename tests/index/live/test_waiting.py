"""Calls that come together share a record, whoever of them is interrupted."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import FileError, HybridIndexError
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
    append = LogFile.append

    def failing(self, *given, **options):
        with lock:
            unlucky = fate.random() < 0.1
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
