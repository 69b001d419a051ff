"""Rows by id: whatever ids an index has."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.index import build, from_faiss
from hybridindex.index.filters.row_numbers import RowNumbers
from tests.clustered import clustered, small_index

N, NLIST = 500, 8

IDS = {
    "counted": np.arange(N),
    "shuffled": np.random.default_rng(0).permutation(N),
    "sparse": np.random.default_rng(1).choice(1 << 62, N, replace=False),
    "one is far": np.r_[np.arange(N - 1), (1 << 63) - 1],
}


@pytest.fixture(scope="module", params=IDS, ids=str)
def index(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("idx") / "i"
    with build(clustered(N), path, nlist=NLIST, metric="l2", ids=IDS[request.param].astype(np.int64)) as index:
        yield index


def id_of(index, numbers, row):
    list_id = int(np.searchsorted(numbers.first, row, "right")) - 1
    return int(index.list_ids(list_id)[row - numbers.first[list_id]])


def test_each_id_leads_to_its_row(index):
    numbers = RowNumbers(index)
    assert numbers.count == N
    assert numbers.first.tolist() == [0, *np.cumsum(index.list_sizes)]
    ids = np.concatenate([index.list_ids(each) for each in range(NLIST)])
    for chosen in (ids, ids[::-7], ids[:1], ids[:0]):
        rows = numbers.of_ids(np.ascontiguousarray(chosen))
        assert [id_of(index, numbers, row) for row in rows.tolist()] == chosen.tolist()


def test_ids_that_are_not_there_are_left_out(index):
    numbers = RowNumbers(index)
    present = index.list_ids(0)[:3]
    absent = np.array([-(1 << 63), -1, 250_000_001, (1 << 63) - 2])
    rows = numbers.of_ids(np.concatenate([absent, present]))
    assert [id_of(index, numbers, row) for row in rows.tolist()] == present.tolist()
    assert numbers.of_ids(absent).tolist() == []


@pytest.mark.parametrize("stretch", [1, 1 << 40])
def test_an_id_of_several_rows_leads_to_all_of_them(tmp_path, stretch):
    import faiss

    data = clustered(N)
    ivf = faiss.index_factory(data.shape[1], f"IVF{NLIST},Flat")
    ivf.train(data)
    ivf.add_with_ids(data, np.arange(N) // 3 * stretch)
    with from_faiss(ivf, tmp_path / "i") as index:
        numbers = RowNumbers(index)
        rows = numbers.of_ids(np.array([5, 0, 166]) * stretch)
        assert [id_of(index, numbers, row) // stretch for row in rows.tolist()] == [5, 5, 5, 0, 0, 0, 166, 166]
        assert len(np.unique(rows)) == len(rows)


def test_lists_in_quarantine_have_no_ids(tmp_path):
    with small_index(tmp_path / "i", n=N, nlist=NLIST) as index:
        lost = index.list_ids(2).copy()
        index.integrity.quarantine([2])
        numbers = RowNumbers(index)
        assert numbers.unknown.tolist() == [2]
        assert numbers.of_ids(lost).tolist() == []
        kept = index.list_ids(3)
        assert [id_of(index, numbers, row) for row in numbers.of_ids(kept).tolist()] == kept.tolist()


def test_an_empty_index_has_no_rows(tmp_path):
    with small_index(tmp_path / "i", n=N, nlist=NLIST) as index:
        index.list_sizes = np.zeros(NLIST, dtype=np.int64)
        index.list_ids = lambda _list: np.empty(0, dtype=np.int64)
        numbers = RowNumbers(index)
        assert numbers.count == 0
        assert numbers.of_ids(np.array([0, 1])).tolist() == []
