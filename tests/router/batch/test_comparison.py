"""Comparisons of candidates end once, whoever compares which part of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.config import SearchParams
from hybridindex.errors import IncompleteAnswerError
from hybridindex.router.batch.batch import Batch, RowsAt
from hybridindex.router.batch.comparison import Comparison, split_positions
from hybridindex.router.batch.replies import FutureReply
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.split import split_probes_reference
from hybridindex.router.batch.stages import BatchClock
from tests.router.batch.test_batch import WHOLE

#: Rows of list 1 lie on device 0, those of list 2 on device 1.
ROW_DEVICE = np.array([-1, 0, 1], dtype=np.int16)
POSITIONS = np.array([[(1 << 32) + 5, 3, (2 << 32) + 1, -1], [4, (1 << 32) + 6, -1, -1]], dtype=np.int64)


class Host:
    """A reranker for which a row's id is its position, and the smaller one is nearer; or the larger one."""

    def __init__(self, keep_max=False):
        self.keep_max = keep_max
        #: How many ids were asked for.
        self.n_ids = 0

    def rerank(self, queries, positions, k):
        order = np.argsort(np.where(positions < 0, np.iinfo(np.int64).max, positions), axis=1, kind="stable")[:, :k]
        ids = np.take_along_axis(positions, order, axis=1)
        return np.where(ids < 0, np.inf, ids).astype(np.float32), ids

    def ids_of(self, positions):
        self.n_ids += np.count_nonzero(positions >= 0)
        return positions


def on_device(positions):
    return np.where(positions < 0, np.nan, positions).astype(np.float32)


def split(positions, row_device, refused=()):
    """What each device gets, and what is left."""
    parts = {}

    def put(device, own):
        parts[device] = own
        return device not in refused

    return parts, split_positions(positions, row_device, put)


def test_candidates_go_where_their_rows_are():
    parts, left = split(POSITIONS, ROW_DEVICE)
    assert parts[0].tolist() == [[(1 << 32) + 5], [(1 << 32) + 6]]
    assert parts[1].tolist() == [[(2 << 32) + 1], [-1]]
    assert left.tolist() == [[-1, 3, -1, -1], [4, -1, -1, -1]]
    parts, left = split(POSITIONS, ROW_DEVICE, refused=(1,))
    assert list(parts) == [0, 1]
    assert left.tolist() == [[-1, 3, (2 << 32) + 1, -1], [4, -1, -1, -1]]
    parts, left = split(POSITIONS, np.array([-1, -1, -1, 0], np.int16))
    assert not parts
    np.testing.assert_array_equal(left, POSITIONS)
    assert split(POSITIONS[:0], ROW_DEVICE)[0] == {}


def test_parts_of_all_devices_together_are_as_large_as_their_candidates():
    positions = np.arange(64, dtype=np.int64).reshape(2, 32) % 16 << 32
    parts, left = split(positions, np.arange(16, dtype=np.int16) // 2)
    assert len(parts) == 8
    assert sum(own.size for own in parts.values()) == positions.size
    assert (left == -1).all()


@pytest.mark.parametrize("keep_max", [False, True])
def test_ids_are_looked_up_of_the_nearest_alone(keep_max):
    rng = np.random.default_rng(1)
    positions = rng.permuted(np.tile(np.arange(50), (6, 1)), axis=1)
    positions[:, 40:] = -1
    positions[4, 2:] = -1  # fewer than k
    distances = np.where(positions < 0, np.nan, positions // 3).astype(np.float32)  # ties
    distances[5, 1:30] = np.nan
    host, ended = Host(keep_max), []
    comparison = Comparison(host, np.zeros((6, 4), np.float32), 5, BatchClock(), ended.append, pytest.fail)
    comparison.complete(positions, distances)
    assert ended
    assert host.n_ids <= 4 * 7 + 2 + 40
    for row in range(6):
        there = [(d, i) for d, i in zip(distances[row], positions[row], strict=True) if d == d]
        best = sorted(there, key=lambda hit: (-hit[0] if keep_max else hit[0], hit[1]))[:5]
        assert comparison.found[1][row].tolist() == [i for _, i in best] + [-1] * (5 - len(best))


def test_a_comparison_ends_with_its_last_part():
    ended, errors, clock = [], [], BatchClock()
    comparison = Comparison(Host(), np.zeros((2, 4), np.float32), 3, clock, ended.append, errors.append)
    parts, left = split(POSITIONS, ROW_DEVICE)
    for _ in parts:
        comparison.add()
    comparison.compare_here(left)
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
    probed = split_probes_reference(probes, np.zeros((2, 1), np.float32), np.full(3, -1, np.int16), np.ones(3, int), 2)
    batch.begin(probed, finished.append)
    batch.complete_part(probed.parts[0], np.arange(8, dtype=np.float32).reshape(2, 4), POSITIONS.copy())
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
    probed = split_probes_reference(probes, np.zeros((2, 1), np.float32), np.full(3, -1, np.int16), np.ones(3, int), 2)
    batch.begin(probed, lambda _batch: None)
    batch.complete_part(probed.parts[0], np.arange(8, dtype=np.float32).reshape(2, 4), POSITIONS.copy())
    integrity.marks[0] = 1
    for comparison, own in kept:
        comparison.complete(own, on_device(own))
    assert batch.stale
    assert not request.reply.future.done()
    assert batch.take_open() == [request]


def two_requests(reranker, **params):
    """A batch of two requests of one query each, both scanned; and its requests."""
    requests = [
        Request(
            queries=np.full((1, 4), number, np.float32),
            params=SearchParams(k=2, **params),
            nprobe=1,
            kept=4,
            reply=FutureReply(),
        )
        for number in range(2)
    ]
    batch = Batch(requests, keep_max=False, integrity=WHOLE, reranker=reranker)
    probes = np.zeros((2, 1), np.int64)
    probed = split_probes_reference(probes, np.zeros((2, 1), np.float32), np.full(3, -1, np.int16), np.ones(3, int), 1)
    return batch, requests, probed


def begin_and_scan(batch, probed):
    batch.begin(probed, lambda _batch: None)
    batch.complete_part(probed.parts[0], np.arange(8, dtype=np.float32).reshape(2, 4), POSITIONS.copy())


def test_a_request_whose_answer_lacks_too_much_leaves_the_others_theirs():
    batch, (first, second), probed = two_requests(Host())
    batch.expect(np.array([10, 10]))
    batch.lose(np.array([0]), np.array([4]))
    begin_and_scan(batch, probed)
    with pytest.raises(IncompleteAnswerError):
        first.reply.future.result(0)
    assert second.reply.future.result(0).ids.tolist() == [[4, (1 << 32) + 6]]


def test_other_nodes_compare_what_is_not_here_and_all_is_merged():
    batch, requests, probed = two_requests(Host())
    asked = []

    def elsewhere(own_batch, comparison, rows, positions, until_s):
        away = (positions >= 0) & (positions >> 32 == 1)
        comparison.add()
        own_batch.add_scan()
        asked.append((comparison, rows.tolist(), np.where(away, positions, -1), until_s))
        return np.where(away, -1, positions)

    batch.compare_beside(elsewhere)
    begin_and_scan(batch, probed)
    ((comparison, rows, positions, until_s),) = asked
    assert (rows, until_s) == ([0, 1], None)
    assert not requests[0].reply.future.done()
    found = Host().rerank(None, positions, 2)
    # Of one row alone, as where another node has no candidate of the others.
    comparison.complete_rows(np.array([1], np.int32), found[0][1:], found[1][1:])
    assert requests[0].reply.future.result(0).ids.tolist() == [[3, (2 << 32) + 1]]
    assert requests[1].reply.future.result(0).ids.tolist() == [[4, (1 << 32) + 6]]


def test_requests_that_may_give_up_are_compared_one_by_one_and_losses_are_no_more_than_all():
    batch, (first, second), probed = two_requests(Host(), allow_partial=0.25, deadline_ms=1e6)
    first.deadline_s, second.deadline_s = 5.0, 7.0
    asked = []

    def elsewhere(own_batch, comparison, rows, positions, until_s):
        asked.append((rows.tolist(), until_s))
        for _ in range(2):
            own_batch.lose_candidates(rows, np.where(rows == 0, 0.3, 1.0))
        return positions

    batch.compare_beside(elsewhere)
    begin_and_scan(batch, probed)
    assert asked == [([0], 5.0), ([1], 7.0)]
    np.testing.assert_allclose(first.reply.future.result(0).coverage, 0.4, atol=1e-5)
    with pytest.raises(IncompleteAnswerError) as raised:
        second.reply.future.result(0)
    assert raised.value.coverage == 0
