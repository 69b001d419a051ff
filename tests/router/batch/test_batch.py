"""A batch answers each of its requests once: with its own rows and k, as soon as its own scans are done."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hybridindex.config import SearchParams
from hybridindex.errors import IncompleteAnswerError
from hybridindex.router.batch import batch as module
from hybridindex.router.batch.batch import Batch
from hybridindex.router.batch.replies import FutureReply
from hybridindex.router.batch.request import Request
from hybridindex.router.batch.split import split_probes_reference

#: Lists that are never damaged.
WHOLE = SimpleNamespace(marks=[0], seen=0)
#: Lists 0 and 1 lie on the host, list 2 on a device.
LIST_DEVICE = np.array([-1, -1, 0], dtype=np.int16)
LIST_BYTES = np.array([10, 20, 30])
#: k of each request, and the probes of each of its queries.
K = [2, 1, 3]
PROBES = [[[0, 2], [1, -1]], [[2, -1]], [[-1, -1]]]


def begin(probes=PROBES, integrity=WHOLE, reranker=None):
    """(batch, its split, the requests' futures, the batches that finished)."""
    requests = [
        Request(
            queries=np.zeros((len(own), 4), np.float32), params=SearchParams(k=k), nprobe=2, kept=k, reply=FutureReply()
        )
        for k, own in zip(K, probes, strict=False)
    ]
    batch, finished = Batch(requests, keep_max=False, integrity=integrity, reranker=reranker), []
    joined = np.array([row for own in probes for row in own], dtype=np.int64)
    split = split_probes_reference(joined, np.zeros(joined.shape, np.float32), LIST_DEVICE, LIST_BYTES, 1)
    batch.begin(split, finished.append)
    return batch, split, [request.reply.future for request in requests], finished


def found(rows, k, first):
    """Distances and ids of a scan: ``first`` and the numbers after it for every row."""
    ids = np.tile(np.arange(first, first + k), (len(rows), 1)).astype(np.int64)
    return ids.astype(np.float32), ids


def test_a_request_that_probes_nothing_is_answered_at_once_and_alone():
    _, _, futures, finished = begin()
    assert [future.done() for future in futures] == [False, False, True]
    answer = futures[2].result()
    assert answer.ids.tolist() == [[-1] * 3]
    assert np.isinf(answer.distances).all()
    assert (answer.nprobe_used.tolist(), answer.hit_rate.tolist()) == ([0], [0.0])
    assert not finished


def test_a_batch_that_probes_nothing_is_over_when_it_begins():
    batch, split, [future], finished = begin([[[-1, -1], [-1, -1]]])
    assert split.parts == ()
    assert future.result().ids.tolist() == [[-1, -1]] * 2
    assert finished == [batch]


def test_each_request_gets_its_own_rows_and_k_of_all_scans():
    batch, split, futures, _ = begin()
    host, device = split.parts
    batch.complete_part(device, *found(device.rows, batch.k, 5))
    assert [future.done() for future in futures] == [False, True, True]
    batch.complete_part(host, *found(host.rows, batch.k, 4))
    first, second = futures[0].result(), futures[1].result()
    # The first query was scanned by both, the second on the host alone, the other request's on the device alone.
    assert first.ids.tolist() == [[4, 5], [4, 5]]
    assert first.nprobe_used.tolist() == [2, 1]
    assert first.hit_rate.tolist() == [pytest.approx(0.75), 0.0]
    assert (second.ids.tolist(), second.hit_rate.tolist()) == ([[5]], [1.0])


def test_a_batch_is_over_when_all_of_its_scans_have_ended():
    batch, _, _, finished = begin()
    batch.end_scan()
    assert not finished
    batch.end_scan()
    assert finished == [batch]


def test_a_failure_reaches_only_those_without_an_answer_and_no_later_scan_answers():
    batch, split, futures, _ = begin()
    host, device = split.parts
    batch.complete_part(device, *found(device.rows, batch.k, 5))
    batch.fail(RuntimeError("the first"))
    batch.fail(RuntimeError("the second"))
    batch.complete_part(host, *found(host.rows, batch.k, 4))
    with pytest.raises(RuntimeError, match="the first"):
        futures[0].result(0)
    assert futures[1].result(0).ids.tolist() == [[5]]
    assert futures[2].exception(0) is None


def test_a_failure_before_the_split_reaches_everybody():
    query = np.zeros((1, 4), np.float32)
    requests = [Request(queries=query, params=SearchParams(), nprobe=1, kept=10, reply=FutureReply()) for _ in range(2)]
    Batch(requests, keep_max=False, integrity=WHOLE).fail(RuntimeError("no room"))
    assert [str(request.reply.future.exception(0)) for request in requests] == ["no room"] * 2


def test_reranks_on_two_threads_keep_each_others_answers(monkeypatch):
    reached, go = threading.Event(), threading.Event()

    def pause():
        if threading.current_thread() is late:
            reached.set()
            go.wait()

    def rerank(queries, positions, k):
        pause()
        return found(range(len(queries)), k, 7)

    def empty_topk(*args, **kwargs):
        pause()
        return make_empty(*args, **kwargs)

    batch, split, futures, _ = begin([[[0, -1]], [[2, -1]]], reranker=SimpleNamespace(rerank=rerank))
    host, device = split.parts
    batch.complete(host.rows[:0], *found([], batch.k, 0))  # the candidates' places are there
    late = threading.Thread(target=batch.complete_part, args=(device, *found(device.rows, batch.k, 5)))
    make_empty, whole_rerank = module.empty_topk, batch._rerank
    monkeypatch.setattr(module, "empty_topk", empty_topk)

    def rerank_then_let_the_other_go(*args):
        answer = whole_rerank(*args)
        if threading.current_thread() is not late:
            go.set()
            late.join()
        return answer

    monkeypatch.setattr(batch, "_rerank", rerank_then_let_the_other_go)
    late.start()
    reached.wait()
    batch.complete_part(host, *found(host.rows, batch.k, 5))
    assert [future.result(0).ids.tolist() for future in futures] == [[[7, 8]], [[7]]]
    assert batch.candidates == 2 + 1


def test_a_rerank_that_read_damage_fails_where_the_rest_of_its_batch_failed_meanwhile():
    integrity = SimpleNamespace(marks=[0], seen=0)

    def rerank(queries, positions, k):
        integrity.marks[0] += 1
        batch.fail(RuntimeError("no room"))
        return found(range(len(queries)), k, 7)

    batch, split, futures, _ = begin([[[0, -1]], [[2, -1]]], integrity, SimpleNamespace(rerank=rerank))
    batch.complete_part(split.parts[0], *found(split.parts[0].rows, batch.k, 5))
    assert batch.stale
    assert batch.take_open() == []
    assert [str(future.exception(0)) for future in futures] == ["no room"] * 2


@pytest.mark.parametrize("allowed", [None, 1.0, 0.5])
def test_a_byte_that_nobody_read_is_never_rounded_away(allowed):
    params = SearchParams(k=2, allow_partial=allowed)
    request = Request(queries=np.zeros((2, 4), np.float32), params=params, nprobe=2, kept=2, reply=FutureReply())
    batch = Batch([request], keep_max=False, integrity=WHOLE)
    batch.expect(np.full(2, 1 << 40))
    batch.lose(np.array([1]), np.array([1]))
    probes = np.full((2, 2), -1, np.int64)
    batch.begin(split_probes_reference(probes, probes.astype(np.float32), LIST_DEVICE, LIST_BYTES, 1), lambda _: None)
    future = request.reply.future
    if allowed == 0.5:
        coverage = future.result(0).coverage
        assert (coverage[0], coverage[1] < 1) == (1, True)
    else:
        assert isinstance(future.exception(0), IncompleteAnswerError)
