"""Batches of a cluster's client: which queries go to which node, and the answer of all parts."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from hybridindex.cluster.batches import BatchPart, divide, put_together
from hybridindex.errors import UnreachableError
from hybridindex.partitioner.nodes.nearest import LOCAL_WORTH
from hybridindex.router.remote.locality import Locality
from hybridindex.types import SearchResult

NAMES = ("a", "b", "c")


def table(shares):
    """Four landmarks on each axis, one list each."""
    vectors, shares = np.repeat(np.eye(3, dtype=np.float32), 4, axis=0), np.repeat(shares, 4, axis=0)
    return Locality(
        version=1, names=NAMES, vectors=vectors, offsets=np.zeros(12, np.float32), unit=False, nlist=12, nprobe=1,
        shares=shares.astype(np.float32),
    )  # fmt: skip


APART = table(np.eye(3))


def along(*axes):
    return 9 * np.eye(3, dtype=np.float32)[list(axes)]


def test_queries_go_where_their_lists_are():
    parts = divide(along(0, 2, 0, 2, 2), None, APART)
    assert [part.rows.tolist() for part in parts] == [[0, 2], [1, 3, 4]]
    assert min(parts[0].remote, key=parts[0].remote.get) == "a"
    assert min(parts[1].remote, key=parts[1].remote.get) == "c"
    assert parts[0].remote["b"] > LOCAL_WORTH / 2


@pytest.mark.parametrize(
    ("queries", "locality"),
    [
        (along(0, 1, 2), None),
        (along(1), APART),
        (along(1, 1, 1), APART),
        (along(0, 1, 2), table([[1, 1, 1]] * 3)),
        (along(0, 1, 2), table([[0.5, 0.5, 0]] * 3)),
        (along(*[0] * 8, 1), APART),
    ],
)
def test_a_batch_stays_whole_where_parts_gain_little(queries, locality):
    (part,) = divide(queries, None, locality)
    assert part.rows.tolist() == list(range(len(queries)))
    assert bool(part.remote) == (locality is not None)


def answer(rows, coverage=None):
    rows = np.array(rows)
    return SearchResult(
        ids=np.stack([rows, rows + 100], axis=1),
        distances=np.stack([rows, rows], axis=1).astype(np.float32),
        nprobe_used=rows.astype(np.int32),
        hit_rate=rows.astype(np.float32),
        coverage=None if coverage is None else np.full(len(rows), coverage, np.float32),
    )


PARTS = [BatchPart(np.array([1, 3]), {}), BatchPart(np.array([0, 2, 4]), {})]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_answers_come_in_the_order_of_the_queries(order):
    found = [Future(), Future()]
    whole = put_together(PARTS, found)
    for number in order:
        assert not whole.done()
        found[number].set_result(answer(PARTS[number].rows, coverage=0.5 if number else None))
    result = whole.result(0)
    assert result.ids.tolist() == [[row, row + 100] for row in range(5)]
    for name in ("nprobe_used", "hit_rate"):
        assert getattr(result, name).tolist() == list(range(5))
    assert result.distances[:, 0].tolist() == list(range(5))
    assert result.coverage.tolist() == [0.5, 1.0, 0.5, 1.0, 0.5]


def test_what_is_answered_whole_has_no_coverage():
    found = [Future(), Future()]
    for part, each in zip(PARTS, found, strict=True):
        each.set_result(answer(part.rows))
    assert put_together(PARTS, found).result(0).coverage is None


def test_a_part_that_fails_fails_the_whole():
    found = [Future(), Future()]
    whole = put_together(PARTS, found)
    found[1].set_exception(UnreachableError("gone"))
    assert not whole.done()
    found[0].set_result(answer(PARTS[0].rows))
    with pytest.raises(UnreachableError, match="gone"):
        whole.result(0)


def test_what_nobody_waits_for_is_let_go():
    found = [Future(), Future()]
    whole = put_together(PARTS, found)
    assert whole.cancel()
    for part, each in zip(PARTS, found, strict=True):
        each.set_result(answer(part.rows))
    assert whole.cancelled()
