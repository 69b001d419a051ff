"""Comparisons of candidates end once, whoever compares which part of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from hybridindex.config import SearchParams
from hybridindex.router.batch.batch import Batch, FutureReply, Request, RowsAt
from hybridindex.router.batch.comparison import Comparison, split_positions
from hybridindex.router.batch.split import split_probes_reference
from hybridindex.router.batch.stages import BatchClock
from tests.router.batch.test_batch import WHOLE

#: Rows of list 1 lie on device 0, those of list 2 on device 1.
ROW_DEVICE = np.array([-1, 0, 1], dtype=np.int16)
POSITIONS = np.array([[(1 << 32) + 5, 3, (2 << 32) + 1, -1], [4, (1 << 32) + 6, -1, -1]], dtype=np.int64)


class Host:
    """A reranker for which a row's id is its position, and the smaller one is nearer."""

    keep_max = False

    def rerank(self, queries, positions, k):
        order = np.argsort(np.where(positions < 0, np.iinfo(np.int64).max, positions), axis=1, kind="stable")[:, :k]
        ids = np.take_along_axis(positions, order, axis=1)
        return np.where(ids < 0, np.inf, ids).astype(np.float32), ids

    def ids_of(self, positions):
        return positions


def on_device(positions):
    return np.where(positions < 0, np.nan, positions).astype(np.float32)


def test_candidates_go_where_their_rows_are():
    parts = dict(split_positions(POSITIONS, ROW_DEVICE))
    assert parts[0].tolist() == [[(1 << 32) + 5, -1, -1, -1], [-1, (1 << 32) + 6, -1, -1]]
    assert parts[1].tolist() == [[-1, -1, (2 << 32) + 1, -1], [-1] * 4]
    assert not list(split_positions(POSITIONS, np.full(3, -1, np.int16)))


def test_a_comparison_ends_with_its_last_part():
    ended, errors, clock = [], [], BatchClock()
    comparison = Comparison(Host(), np.zeros((2, 4), np.float32), 3, clock, ended.append, errors.append)
    parts = dict(split_positions(POSITIONS, ROW_DEVICE))
    for _ in parts:
        comparison.add()
    comparison.compare_here(np.where(POSITIONS < 1 << 32, POSITIONS, -1))
    comparison.complete(parts[1], on_device(parts[1]))
    assert not ended
    comparison.compare_instead(parts[0])
    assert ended == [comparison]
    assert comparison.found[1].tolist() == [[3, (1 << 32) + 5, (2 << 32) + 1], [4, (1 << 32) + 6, -1]]
    assert (comparison.n_on_devices, comparison.n_fallbacks, errors) == (1, 1, [])
    assert [n_candidates for n_candidates, _ in clock.host_reranks] == [2, 2]


def test_a_comparison_fails_once_and_never_ends_then():
    ended, errors = [], []
    comparison = Comparison(Host(), np.zeros((2, 4), np.float32), 3, BatchClock(), ended.append, errors.append)
    comparison.add()
    comparison.add()
    for number in range(2):
        comparison.fail(RuntimeError(number))
        comparison.complete(POSITIONS, on_device(POSITIONS))
    comparison.compare_here(POSITIONS)
    assert [str(error) for error in errors] == ["0"]
    assert not ended


def test_the_host_compares_for_a_device_that_takes_nothing_any_more():
    request = Request(
        queries=np.zeros((2, 4), np.float32), params=SearchParams(k=3), nprobe=1, kept=4, reply=FutureReply()
    )
    batch, finished, asked = Batch([request], keep_max=False, integrity=WHOLE, reranker=Host()), [], []

    def put(device, own_batch, comparison, positions):
        asked.append(device)
        if device == 1:
            return False
        comparison.complete(positions, on_device(positions))
        own_batch.end_scan()
        return True

    batch.rows_at = RowsAt(ROW_DEVICE, put)
    probes = np.zeros((2, 1), np.int64)
    split = split_probes_reference(probes, np.zeros((2, 1), np.float32), np.full(3, -1, np.int16), np.ones(3, int), 2)
    batch.begin(split, finished.append)
    batch.complete_part(split.parts[0], np.arange(8, dtype=np.float32).reshape(2, 4), POSITIONS.copy())
    answer = request.reply.future.result(0)
    assert answer.ids.tolist() == [[3, (1 << 32) + 5, (2 << 32) + 1], [4, (1 << 32) + 6, -1]]
    assert not finished
    batch.end_scan()
    assert finished == [batch]
    assert (asked, batch.candidates, batch.device_candidates) == ([0, 1], 5, 2)


def test_nothing_is_compared_of_a_batch_whose_bytes_turned_out_to_be_damaged():
    integrity = SimpleNamespace(marks=[0], seen=0)
    request = Request(
        queries=np.zeros((2, 4), np.float32), params=SearchParams(k=3), nprobe=1, kept=4, reply=FutureReply()
    )
    batch, kept = Batch([request], keep_max=False, integrity=integrity, reranker=Host()), []
    batch.rows_at = RowsAt(ROW_DEVICE, lambda device, batch, comparison, own: kept.append((comparison, own)) or True)
    probes = np.zeros((2, 1), np.int64)
    split = split_probes_reference(probes, np.zeros((2, 1), np.float32), np.full(3, -1, np.int16), np.ones(3, int), 2)
    batch.begin(split, lambda _batch: None)
    batch.complete_part(split.parts[0], np.arange(8, dtype=np.float32).reshape(2, 4), POSITIONS.copy())
    integrity.marks[0] = 1
    for comparison, own in kept:
        comparison.complete(own, on_device(own))
    assert batch.stale
    assert not request.reply.future.done()
    assert batch.take_open() == [request]
