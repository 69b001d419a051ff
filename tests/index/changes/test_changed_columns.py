"""Attributes of added rows while the columns of the index change: in copies, in a log written anew, and in calls that
were under way."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError
from hybridindex.index.changes import write
from hybridindex.index.live import store
from tests.clustered import clustered

ROWS = clustered(60, seed=1)


@pytest.fixture
def index(tmp_path):
    with hx.build(ROWS[:50], tmp_path / "i", nlist=4, attributes={"a": np.arange(50)}) as made:
        yield made


def found(index, where):
    with index.router(devices=[]) as router:
        ids = router.search(ROWS[:1], 60, 4, where=where).ids[0]
    return sorted(ids[ids >= 0].tolist())


def test_rows_that_came_after_a_change_of_columns_keep_theirs(index, tmp_path, monkeypatch):
    index.delete(index.add(ROWS[50:51], None, {"a": [1]}))
    index.set_attributes({"b": ["old"] * 50})
    index.add(ROWS[51:53])
    index.add(ROWS[53:56], None, {"b": ["x", "y", "z"]})
    new = [53, 54, 55]
    monkeypatch.setattr(store, "_REWRITE_TIMES", 0)
    for step in range(4):
        assert found(index, "b IN ('x', 'y', 'z')") == new
        assert found(index, "b IS NULL") == [51, 52]
        if step == 0:
            index.save(tmp_path / "copy")
            with hx.open(tmp_path / "copy") as copy:
                assert found(copy, "b IN ('x', 'y', 'z')") == new
        elif step == 1:
            assert index.ivf.live.rewrite(least_bytes=1)
        elif step == 2:
            index.compact()


@pytest.mark.parametrize("given", [{"b": ["old"] * 50}, {"a": ["old"] * 50}, None])
@pytest.mark.parametrize("change", ["add", "upsert"])
def test_columns_that_change_while_rows_are_prepared(index, monkeypatch, given, change):
    as_it_was = write._commit

    def late(*args, **options):
        monkeypatch.setattr(write, "_commit", as_it_was)
        index.remove_attributes() if given is None else index.set_attributes(given)
        return as_it_was(*args, **options)

    monkeypatch.setattr(write, "_commit", late)
    ids = None if change == "add" else [7]
    with pytest.raises(InvalidInputError, match=r"no attribute 'a'|holds int; the index has string|the index has none"):
        getattr(index, change)(ROWS[50:51], ids, {"a": [7]})
    assert index.n_live == 50
    assert index.ivf.live.number == 0
    # The same columns once more change nothing.
    if given == {"b": ["old"] * 50}:
        monkeypatch.setattr(write, "_commit", late)
        assert len(index.add(ROWS[51:52], None, {"b": ["new"]})) == 1
        assert found(index, "b = 'new'") != []


def test_columns_without_a_value_are_of_the_kind_that_the_index_has(tmp_path):
    of = {"f": [0.5] * 50, "tags": [["x"]] * 50, "s": ["t"] * 50}
    with hx.build(ROWS[:50], tmp_path / "i", nlist=4, attributes=of) as index:
        index.add(ROWS[50:51], None, {"f": [1], "tags": [[]], "s": [None]})
        index.add(ROWS[51:52], None, {"f": [None], "tags": [[None]]})
        index.add(ROWS[52:53], None, {"tags": [None]})
        assert found(index, "f = 1") == [50]
        assert found(index, "s IS NULL") == [50, 51, 52]
        assert found(index, "tags IS NULL") == [52]
        for wrong in ({"s": [1]}, {"tags": [1]}, {"tags": [[1]]}, {"f": ["1"]}):
            with pytest.raises(InvalidInputError):
                index.add(ROWS[53:54], None, wrong)


def test_masked_ids_are_refused(index):
    with pytest.raises(InvalidInputError, match="ids is masked; expected"):
        index.delete(np.ma.array([1, 2], mask=[True, False]))
