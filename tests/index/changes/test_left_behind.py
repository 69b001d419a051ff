"""What others did meanwhile: compactions that nobody saw, attributes from elsewhere, a rollback and what came then."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest

import hybridindex as hx
from hybridindex.errors import BuildError, InvalidInputError, LeftBehindError
from hybridindex.index.live import store
from tests.clustered import clustered

N, NLIST, DIM = 400, 8, 16
ROWS = clustered(N, DIM, seed=1)


@pytest.fixture
def path(tmp_path):
    hx.build(ROWS, tmp_path / "i", nlist=NLIST, metric="l2", attributes={"a": np.arange(N)}).close()
    return tmp_path / "i"


def elsewhere(path, *lines):
    """Done by another process, in an index that it opens as ``index``."""
    script = [f"import numpy as np, hybridindex as hx\nwith hx.open({str(path)!r}) as index:", *lines]
    subprocess.run([sys.executable, "-c", "\n    ".join(script)], check=True, timeout=120)


TWO_COMPACTIONS = (
    "for row in range(2):",
    f"    index.delete([row]); index.add(np.full((1, {DIM}), 50 + row, 'f4'), [1000 + row]); index.compact()",
)


def found(router, row):
    return int(router.search(ROWS[row], 1, NLIST).ids[0, 0])


def eventually(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_an_index_that_looked_at_nothing_opens_the_generation_that_is_there(path):
    with hx.open(path) as index:
        elsewhere(path, *TWO_COMPACTIONS)
        eventually(lambda: index.ivf.generation == 3)
        assert int(index.search(ROWS[0], 1, NLIST).ids[0, 0]) not in (0, 1)
        assert index.search(np.full((1, DIM), 51, np.float32), 1, NLIST).ids.tolist() == [[1001]]
        assert index.n_live == N
        assert index.add(ROWS[:1]).tolist() == [1002]


def test_a_change_goes_to_the_generation_that_is_there(path):
    with hx.open(path) as index:
        elsewhere(path, *TWO_COMPACTIONS)
        assert index.add(ROWS[:1]).tolist() == [1002]
        assert index.delete([0, 1, 2]) == 1


def test_a_router_that_follows_serves_it_and_one_that_does_not_refuses(path):
    with hx.open(path) as index, index.router() as follows, index.router(follow=False) as stays:
        assert (found(follows, 0), found(stays, 0)) == (0, 0)
        # Neither looks meanwhile.
        index._following.close()
        elsewhere(path, *TWO_COMPACTIONS)
        time.sleep(store.LOOK_AGAIN_S)
        for _ in range(2):
            with pytest.raises(LeftBehindError, match=r"gen-000001 .* was replaced before all its changes were read"):
                stays.search(ROWS[0], 1, NLIST)
        follows.follow(index.ivf)
        assert found(follows, 0) not in (0, 1)
        assert found(follows, 2) == 2


def test_a_rollback_to_it_serves_again(path):
    with hx.open(path) as index, index.router(follow=False) as router:
        assert found(router, 0) == 0
        elsewhere(path, *TWO_COMPACTIONS)
        hx.rollback(path, force=True)
        eventually(lambda: index.ivf.generation == 2)
        assert index.n_live == N
        with pytest.raises(BuildError):
            router.search(ROWS[0], 1, NLIST)


def test_a_compaction_keeps_attributes_and_codes_that_another_index_gave(path):
    with hx.open(path, write=True) as writer:
        with hx.open(path) as other:
            other.set_attributes({"a": np.arange(N) + 1, "b": np.arange(N) % 3})
            other.compress(1)
        writer.delete([3])
        writer.compact()
        assert writer.attributes == {"a": "int", "b": "int"}
        assert writer.ivf.rabitq is not None
        with writer.router() as router:
            assert router.search(ROWS[7], 1, where="a = 8").ids.tolist() == [[7]]
        with hx.open(path) as other:
            other.remove_attributes()
        writer.delete([4])
        writer.compact()
        assert writer.attributes == {}


def test_rows_take_the_attributes_that_another_index_gave(path):
    with hx.open(path) as index, hx.open(path) as other:
        other.set_attributes({"b": np.arange(N)})
        with pytest.raises(InvalidInputError, match="no attribute 'a'"):
            index.add(ROWS[:1], attributes={"a": [1]})
        index.add(ROWS[:1], [5000], attributes={"b": [1000]})
        with index.router() as router:
            assert router.search(ROWS[0], 1, where="b = 1000").ids.tolist() == [[5000]]


def test_rows_that_are_gone_had_other_attributes(path):
    with hx.open(path) as index:
        index.delete(index.add(ROWS[:2], attributes={"a": [7, 8]}))
        index.set_attributes({"a": [str(row) for row in range(N)], "b": np.arange(N)})
        index.add(ROWS[:1], [5000], attributes={"b": [9], "a": ["x"]})
        with index.router() as router:
            assert sorted(router.search(ROWS[0], 2, where="b = 9").ids[0].tolist()) == [9, 5000]
            assert router.search(ROWS[0], 1, where="a = 'x'").ids.tolist() == [[5000]]
        index.compact()
        assert index.delete(where="b = 9") == 2


def test_attributes_are_refused_where_a_row_came_meanwhile(path, monkeypatch):
    from hybridindex.index.filters import write_attributes

    with hx.open(path) as index:
        in_row_order = write_attributes.in_row_order
        monkeypatch.setattr(
            write_attributes,
            "in_row_order",
            lambda *a: index.add(ROWS[:1], attributes={"a": [1]}) is None or in_row_order(*a),
        )
        with pytest.raises(BuildError, match="was changed meanwhile"):
            index.set_attributes({"b": np.arange(N)})
        assert index.attributes == {"a": "int"}


def test_a_copy_has_its_rows_attributes_whatever_is_compacted_meanwhile(path, tmp_path):
    with hx.open(path) as index:
        index.upsert(ROWS[:100] + 3, np.arange(100), {"a": np.arange(100)})
        compacted = []

        def meanwhile(*_):
            if not compacted:
                compacted.append(index.compact())

        with index.save(tmp_path / "copy", progress=meanwhile) as copy, copy.router() as router:
            for row in (0, 57, 99, 100, 350):
                assert router.search(ROWS[row], 1, where=f"a = {row}").ids.tolist() == [[row]]
        assert compacted == [True]


def test_numbers_above_the_largest_id_may_not_fit(path):
    with hx.open(path) as index:
        index.add(ROWS[:1], [2**63 - 3])
        with pytest.raises(InvalidInputError, match=r"3 numbers above the largest id so far, .* do not fit 64 bits"):
            index.add(ROWS[:3])
        assert index.add(ROWS[:2]).tolist() == [2**63 - 2, 2**63 - 1]
        with pytest.raises(InvalidInputError, match="do not fit"):
            index.add(ROWS[:1])
        index.compact()
        assert index.n_live == N + 3


@pytest.mark.parametrize("how", ["compacted", "rewritten"])
def test_a_number_that_came_and_went_is_given_to_no_other_row(path, how):
    """Whoever keeps something beside a row, by its id, would find it beside another one."""
    with hx.open(path) as index:
        first = index.add(ROWS[:2])
        index.delete([int(first[1])])
        if how == "compacted":
            index.compact()
        else:
            store = index.ivf.live
            with store._writing:
                store._rewrite(store._changes())
        assert index.add(ROWS[:1])[0] > first[1]


def test_going_forth_again_loses_no_change_unasked(path):
    with hx.open(path) as index:
        index.delete([0])
        index.compact()
        index.delete([1])
        index.delete([2])
    hx.rollback(path, force=True)
    hx.rollback(path)
    hx.rollback(path, force=True)
    with hx.open(path) as index, index.router(follow=False) as router:
        index.delete([10])
        assert (found(router, 1), found(router, 10) != 10) == (1, True)
        with pytest.raises(InvalidInputError, match="gen-000001 has 1 changes that gen-000002 does not have"):
            hx.rollback(path)
        hx.rollback(path, force=True)
        time.sleep(store.LOOK_AGAIN_S)
        # The other generation never knew of it: what is open has no generation's rows any more.
        with pytest.raises(BuildError, match="was replaced before"):
            router.search(ROWS[10], 1, NLIST)
        eventually(lambda: index.ivf.generation == 2)
        assert index.n_live == N - 3


def test_missing_lists_with_values_beneath_them(path):
    tags = pa.array([["a", "b"], None, ["c", "d"]], pa.list_(pa.string(), 2))
    with hx.open(path) as index:
        index.set_attributes({"tags": pa.array([["a", "b"]] * N)})
        index.add(ROWS[:3], [5000, 5001, 5002], attributes={"tags": tags})
        with index.router() as router:
            assert router.search(ROWS[0], 2, where="array_contains(tags, 'c')").ids.tolist() == [[5002, -1]]
            assert router.search(ROWS[0], 2, where="tags IS NULL").ids.tolist() == [[5001, -1]]
