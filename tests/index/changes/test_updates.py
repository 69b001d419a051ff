"""Adding and replacing rows: found by every search from then on, on every tier, durably, and compacted meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import pytest

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.errors import (
    BuildError,
    BusyWritingError,
    DiskFullError,
    DuplicateIdError,
    HybridIndexError,
    InvalidInputError,
    UnsupportedIndexError,
)
from hybridindex.index import from_faiss, open_index
from hybridindex.index.changes import writer as writer_module
from hybridindex.index.changes.compact import compact
from hybridindex.index.changes.write import add, delete, upsert
from hybridindex.index.live import store as live_store
from hybridindex.router import Router
from tests.clustered import DIM, NLIST, clustered, hand_made_plan, small_index
from tests.coded import with_codes
from tests.index.changes.truth import Truth
from tests.router.code_searches import differences

WAIT_S = 300
N = 3000
MORE = clustered(900, seed=12)
KINDS = [
    *((codec, "rows") for codec in ("flat", "fp16", "bf16", "sq8", "pq8")),
    ("flat", "codes"),
    ("sq8", "codes"),
]


def opened(path, kind, metric="l2"):
    codec, precision = kind
    index = small_index(path, codec=codec, metric=metric)
    return with_codes(index) if precision == "codes" else index


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("n_devices", [0, 2])
def test_what_was_added_is_found_wherever_lists_are(tmp_path, kind, metric, n_devices):
    queries = np.concatenate([clustered(5, seed=3), MORE[:4]])
    exact = kind[1] == "rows"
    with opened(tmp_path / "i", kind, metric) as index:
        truth = Truth(index)
        view = index.by_codes() if kind[1] == "codes" else index
        plan = hand_made_plan(view, np.arange(NLIST) % (n_devices + 1) - 1, n_devices=n_devices) if n_devices else None
        options = {"plan": plan, "devices": ["cpu"] * n_devices, "precision": kind[1], "scrub_bytes_per_s": 0}
        with Router(index, **options) as router, router.session() as session:
            assert add(index, MORE[:300]).tolist() == list(range(N, N + 300))
            truth.add(MORE[:300], np.arange(N, N + 300))
            # Some of the new, some of the old, some that nobody has.
            ids = np.concatenate([np.arange(0, 60, 2), np.arange(N, N + 30), np.arange(10**6, 10**6 + 20)])
            assert upsert(index, MORE[300:380], ids) == 60
            truth.add(MORE[300:380], ids)
            gone = np.concatenate([np.arange(100, 140), np.arange(N + 20, N + 90)])
            assert delete(index, gone) == len(gone)
            truth.delete(gone)
            for k in (1, 10, 500):
                result = router.search(queries, k, NLIST)
                if exact:
                    truth.check(queries, k, result)
                assert np.isin(result.ids[result.ids >= 0], list(truth.rows)).all()
                assert differences(router.submit(queries, k, NLIST).result(WAIT_S), result) == 0
                assert differences(asyncio.run(router.asearch(queries, k, NLIST)), result) == 0
                assert differences(session.search(queries, k, NLIST), result) == 0
            futures = [router.submit(queries[i : i + 1], 10, NLIST) for i in range(len(queries))]
            together = np.concatenate([future.result(WAIT_S).ids for future in futures])
            assert np.array_equal(together, router.search(queries, 10, NLIST).ids)
            wanted = np.arange(1, 10**6 + 20, 3)
            for given in ({"allow_ids": wanted}, {"deny_ids": np.setdiff1d(list(truth.rows), wanted)}):
                truth.check(queries, 10, router.search(queries, 10, NLIST, **given), wanted)
            # A plain router on the host finds the same, at any nprobe.
            with Router(index, precision=kind[1]) as plain:
                for nprobe in (1, 5):
                    assert np.array_equal(plain.search(queries, 10, nprobe).ids, router.search(queries, 10, nprobe).ids)
            with open_index(tmp_path / "i") as again, Router(again, precision=kind[1]) as other:
                assert differences(other.search(queries, 10, NLIST), router.search(queries, 10, NLIST)) == 0


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_compaction_changes_no_answer_but_the_lists(tmp_path, kind):
    queries = np.concatenate([clustered(5, seed=3), MORE[:4]])
    metric = "ip" if kind[0] in ("sq8", "bf16") else "l2"
    with opened(tmp_path / "i", kind, metric) as index, Router(index, precision=kind[1]) as old:
        truth = Truth(index)
        add(index, MORE)
        truth.add(MORE, np.arange(N, N + len(MORE)))
        delete(index, np.arange(0, N, 2))
        truth.delete(np.arange(0, N, 2))
        done = compact(index)
        assert done.count == len(truth.rows)
        with done.index as new, Router(new, precision=kind[1]) as router:
            assert (new.rabitq is None) == (kind[1] == "rows")
            assert new.generation == 2
            assert new.live.current() is None
            ids = np.concatenate([new.list_ids(each) for each in range(new.nlist)])
            assert np.array_equal(np.sort(ids), sorted(truth.rows))
            for list_id in range(new.nlist):
                rows = new.decode_list(list_id)
                if len(rows) and metric == "l2" and not new.manifest.by_residual:
                    nearest = new.quantize(rows, 1)[0][:, 0]
                    assert (nearest == list_id).mean() > 0.97
            # The old generation follows what is written to the new one.
            new_ids = add(new, MORE[:5])
            truth.add(MORE[:5], new_ids)
            delete(new, [1, N + 7])
            truth.delete([1, N + 7])
            if kind[1] == "rows":
                for each, n in ((router, new.nlist), (old, NLIST)):
                    truth.check(queries, 10, each.search(queries, 10, n))
            for each in (router, old):
                found = each.search(MORE[:5], 3, 8).ids
                assert np.isin(found, list(truth.rows)).all()
                assert metric == "ip" or np.isin(new_ids, found).all()
        with open_index(tmp_path / "i") as again:
            assert again.live.current().added.count == 5
            assert again.live.number == index.live.number


def test_several_compactions_and_what_comes_meanwhile(tmp_path, monkeypatch):
    """Writers, searches and compactions at once: nothing is lost, found twice, or back."""
    queries = clustered(12, seed=4)
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as built:
        truth = Truth(built.ivf)
        lock, stop = threading.Lock(), threading.Event()
        with hx.open(tmp_path / "i", write=True) as index, index.router() as router, ThreadPoolExecutor(4) as pool:

            def write(seed):
                rng = np.random.default_rng(seed)
                first = 10_000 * seed
                for step in range(40):
                    ids = np.arange(first + 20 * step, first + 20 * step + 20)
                    rows = clustered(20, seed=int(rng.integers(1 << 30)))
                    index.add(rows, ids)
                    gone = rng.choice(ids, 5, replace=False)
                    index.delete(gone)
                    index.upsert(rows[:2] + 1, ids[:2])
                    with lock:
                        truth.add(rows, ids)
                        truth.delete(gone)
                        truth.add(rows[:2] + 1, ids[:2])

            def search():
                while not stop.is_set():
                    for k in (1, 30):
                        found = router.search(queries, k, NLIST).ids
                        assert all(len(np.unique(row)) == k for row in found)

            writers, searcher = [pool.submit(write, seed) for seed in (1, 2)], pool.submit(search)
            n = 0
            while not all(each.done() for each in writers) or n < 3:
                n += index.compact()
            for each in writers:
                each.result(WAIT_S)
            stop.set()
            searcher.result(WAIT_S)
            assert index.n_live == len(truth.rows)
            with index.router() as newest:
                for each, nlist in ((router, NLIST), (newest, index.nlist)):
                    truth.check(queries, 20, each.search(queries, 20, nlist))
        with hx.open(tmp_path / "i") as again, again.router() as router:
            assert again.n_live == len(truth.rows)
            truth.check(queries, 20, router.search(queries, 20, again.nlist))
            assert again.ivf.generation == n + 1


def test_attributes_come_with_rows_and_conditions_know_them(tmp_path):
    queries = clustered(6, seed=3)
    years, tags = np.arange(N) % 10, [["a", "b"] if i % 3 else [] for i in range(N)]
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2",
                  attributes={"year": years, "tags": tags}) as index:  # fmt: skip
        truth = Truth(index.ivf)
        of_year = {i: int(y) for i, y in enumerate(years)}
        with index.router() as router:
            first, prepared = router, router.filter(where="year = 3")
            for step in range(4):
                ids = index.add(MORE[step * 50 : step * 50 + 50], attributes={"year": np.arange(50) % 7 + step})
                truth.add(MORE[step * 50 : step * 50 + 50], ids)
                of_year |= dict(zip(ids.tolist(), (np.arange(50) % 7 + step).tolist(), strict=True))
            ids = index.add(MORE[200:210])  # nothing is known of them
            truth.add(MORE[200:210], ids)
            of_year |= dict.fromkeys(ids.tolist())
            index.upsert(MORE[210:215], [3, 13, 4, N, 77_777], attributes={"year": [3, 4, 3, 3, 3]})
            truth.add(MORE[210:215], [3, 13, 4, N, 77_777])
            of_year |= {3: 3, 13: 4, 4: 3, N: 3, 77_777: 3}
            index.delete([23, ids[0]])
            truth.delete([23, ids[0]])
            three = [i for i, year in of_year.items() if year == 3 and i in truth.rows]

            def check(router, nlist):
                own = prepared if router is first else router.filter(where="year = 3")
                for given in ({"row_filter": own}, {"where": "year = 3"}):
                    truth.check(queries, 10, router.search(queries, 10, nlist, **given), three)
                none = [i for i, year in of_year.items() if year is None and i in truth.rows]
                truth.check(queries, 12, router.search(queries, 12, nlist, where="year IS NULL"), none)
                few = router.search(queries, 10, nlist, where="array_contains(tags, 'a')", allow_ids=[1, 2, 3, N])
                assert set(few.ids[0].tolist()) == {1, 2, -1}

            check(router, NLIST)
            assert index.delete(where="year = 5") == sum(of_year[i] == 5 for i in truth.rows)
            truth.delete([i for i in list(truth.rows) if of_year[i] == 5])
            index.compact()
            check(router, NLIST)
            with index.router() as newest:
                check(newest, index.nlist)
                more = index.add(MORE[300:310], attributes={"year": [3] * 10})
                truth.add(MORE[300:310], more)
                of_year |= dict.fromkeys(more.tolist(), 3)
                three += more.tolist()
                check(newest, index.nlist)
                check(router, NLIST)
        with hx.open(tmp_path / "i") as again, again.router() as router:
            check(router, again.nlist)


def test_bad_rows_are_refused_by_name(tmp_path):
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        good = MORE[:3]
        bad = good.copy()
        bad[1, 2] = np.nan
        for vectors, ids, what in (
            (good[:, :5], None, r"vectors have shape \(3, 5\); expected \(n, 24\)"),
            ("x", None, "vectors have type str"),
            (bad, None, r"vectors\[1\] holds NaN"),
            (good, [1, 2], r"ids has shape \(2,\); expected \(3,\)"),
            (good, [-1, 2, 4], r"ids\[0\] is -1"),
            (good, [0.5, 1, 2], "ids has dtype float64"),
            ([[1.0, 2.0], [3.0]], None, "vectors are not an array"),
            (good.astype(str), None, "vectors have dtype <U.*; expected float32"),
            (good > 0, None, "vectors have dtype bool"),
        ):
            with pytest.raises(InvalidInputError, match=what):
                index.add(vectors, ids)
        with pytest.raises(DuplicateIdError, match="given twice: 7;"):
            index.add(good, [7, 7, 9])
        with pytest.raises(DuplicateIdError, match="2 of the ids exist already: 5, 6;"):
            index.add(good, [5, 6, N])
        with pytest.raises(InvalidInputError, match="attributes are given, and the index has none"):
            index.add(good, attributes={"x": [1, 2, 3]})
        with pytest.raises(InvalidInputError, match="ids is None"):
            index.upsert(good, None)
        index.set_attributes({"x": np.arange(N)})
        for attributes, what in (
            ({"y": [1, 2, 3]}, "the index has no attribute 'y'; it has x"),
            ({"x": ["a", "b", "c"]}, "attribute 'x' holds string; the index has int there"),
            ({"x": [1, 2]}, "attributes have 2 rows and vectors 3"),
        ):
            with pytest.raises(InvalidInputError, match=what):
                index.add(good, attributes=attributes)
        assert index.n_live == N
        assert index.ivf.live.current() is None
        assert index.add(np.empty((0, 24), np.float32)).tolist() == []
        assert index.add(np.empty((0, 24), np.float32), []).tolist() == []
        assert index.add(good[0]).tolist() == [N]
        with pytest.raises(InvalidInputError, match="compact it first"):
            index.set_attributes({"x": np.arange(N)})
        index.delete([N])
        assert index.add(good[0]).tolist() == [N + 1]
    for codec in ("pqfs12", "faiss:SQ4"):
        with small_index(tmp_path / codec.replace(":", ""), codec=codec) as index:
            with pytest.raises(
                UnsupportedIndexError, match=r"whose rows cannot be changed one by one; those of flat, fp16"
            ):
                add(index, MORE[:1])
            with pytest.raises(UnsupportedIndexError, match="cannot be changed one by one"):
                compact(index)


def test_no_rows_come_although_no_number_is_left_for_more(tmp_path):
    ids = np.append(np.arange(N - 1), 2**63 - 1)
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, ids=ids) as index:
        assert index.add(MORE[:0]).tolist() == []
        with pytest.raises(InvalidInputError, match=r"1 numbers above the largest id so far, .* do not fit 64 bits"):
            index.add(MORE[0])


def test_a_full_disk_refuses_and_then_takes(tmp_path):
    with hx.open(hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2").path, write=True) as index:
        truth = Truth(index.ivf)
        index.add(MORE[:5])
        truth.add(MORE[:5], np.arange(N, N + 5))

        def full(call):
            if call.name in ("write", "truncate", "create") and "writer" not in call.path:
                raise OSError(28, "No space left on device")

        with index.router() as router:
            with filesystem.watched_by(full):
                for change in (lambda: index.add(MORE[5:9]), lambda: index.delete([1]), index.compact):
                    with pytest.raises(DiskFullError, match="make room"):
                        change()
                truth.check(MORE[:3], 5, router.search(MORE[:3], 5, NLIST))
            index.add(MORE[5:9])
            truth.add(MORE[5:9], np.arange(N + 5, N + 9))
            truth.check(MORE[:3], 5, router.search(MORE[:3], 5, NLIST))
            assert index.compact()
            truth.check(MORE[:3], 5, router.search(MORE[:3], 5, NLIST))
    with hx.open(tmp_path / "i") as index:
        assert index.n_live == N + 9


def test_there_is_one_writer(tmp_path):
    hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2").close()
    with hx.open(tmp_path / "i", write=True) as index, hx.open(tmp_path / "i") as other:
        with pytest.raises(BuildError, match=r"open for writing in this process, \d+, since"):
            hx.open(tmp_path / "i", write=True)
        # Of this process, any may write.
        other.add(MORE[:1])
        assert index.n_added == other.n_added == 1
    with hx.open(tmp_path / "i", write=True) as index:
        assert index.n_added == 1
    with pytest.raises(InvalidInputError, match="durability is 'never'"):
        hx.open(tmp_path / "i", durability="never")
    with hx.open(tmp_path / "i", durability="written") as index:
        syncs = []
        with filesystem.watched_by(lambda call: syncs.append(call.name)):
            index.add(MORE[1:2])
        assert "sync" not in syncs
        assert index.n_added == 2


def test_a_reader_elsewhere_follows_through_compactions(tmp_path, monkeypatch):
    monkeypatch.setattr(live_store, "LOOK_AGAIN_S", 0.01)
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        truth = Truth(index.ivf)
        live_store._shared.clear()  # as another process, which shares nothing
        with hx.open(tmp_path / "i") as reader, reader.router() as router:
            assert reader.ivf.live is not index.ivf.live
            for step in range(3):
                ids = index.add(MORE[step * 20 : step * 20 + 20])
                truth.add(MORE[step * 20 : step * 20 + 20], ids)
                index.delete([step])
                truth.delete([step])
                if step < 2:
                    time.sleep(0.02)
                    router.search(MORE[:1])  # reads what came so far
                    index.compact()
                    live_store._shared.clear()
            ends = time.monotonic() + WAIT_S
            while (
                router._served.index.live.current() is None or router._served.index.live.number < index.ivf.live.number
            ):
                assert time.monotonic() < ends
                time.sleep(0.01)
            truth.check(MORE[:4], 10, router.search(MORE[:4], 10, NLIST))
            assert reader.n_live == index.n_live
            with pytest.raises(InvalidInputError, match="nprobe"):
                router.search(MORE[:1], 1, NLIST + 1)


def test_maintenance_compacts_by_itself_and_backpressure_says_when(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "_LOOK_S", 0.01)
    monkeypatch.setattr("hybridindex.index.changes.compact._WORTH_BYTES", 0)
    hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2").close()
    with hx.open(tmp_path / "i", write=True) as index:
        index.add(np.concatenate([MORE, MORE]))
        ends = time.monotonic() + WAIT_S
        while not index.writer.compactions:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert index.count == N + 2 * len(MORE)
        assert index.n_added == 0
        assert index.writer.problem == ""
        monkeypatch.setattr(writer_module, "_MOST_BYTES", 0)
        monkeypatch.setattr(writer_module, "_MOST_TIMES", 0)
        monkeypatch.setattr("hybridindex.index.changes.compact._WORTH_BYTES", 1 << 40)
        index.add(MORE[:1])
        with pytest.raises(BusyWritingError, match="try again in 5 s") as refused:
            index.add(MORE[1:2])
        assert refused.value.retry_after_s == 5
        assert index.delete([N]) == 1


def test_rows_that_came_may_be_bounded_below_the_bytes_of_the_lists(tmp_path, monkeypatch):
    monkeypatch.setattr("hybridindex.index.changes.compact._WORTH_BYTES", 1 << 40)
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        index.writer.most_bytes = 2000
        index.add(MORE[:100])  # any index gets as much
        monkeypatch.setattr(writer_module, "_MOST_BYTES", 1000)
        assert index.ivf.live.added.nbytes > 2000
        with pytest.raises(BusyWritingError, match="more than the 2000 allowed"):
            index.add(MORE[100:101])
        index.writer.most_bytes = None
        index.add(MORE[100:101])


def test_copies_and_exports_have_all_changes(tmp_path):
    with hx.build(
        clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2", attributes={"x": np.arange(N)}
    ) as index:
        index.add(MORE[:50], attributes={"x": np.arange(50)})
        index.delete([4, N + 2])
        right = index.search(MORE[:9], 10, NLIST)
        with index.save(tmp_path / "copy") as copy:
            assert differences(copy.search(MORE[:9], 10, NLIST), right) == 0
            assert copy.n_live == index.n_live
            copy.add(MORE[50:60])
            with copy.router() as router:
                assert set(router.search(MORE[0], 9, NLIST, where="x = 0").ids[0].tolist()) == {0, N, -1}
        index.to_faiss(tmp_path / "x.faiss")
        exported = faiss.read_index(str(tmp_path / "x.faiss"))
        assert exported.ntotal == N + 48
        exported.nprobe = NLIST
        assert np.array_equal(exported.search(MORE[:9], 10)[1], right.ids)


def test_lists_follow_rows_that_come_from_elsewhere(tmp_path):
    """New topics far from all others: their lists are split, those that lost their rows are dissolved."""
    far = clustered(4000, seed=5, offset=8.0)
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        index.add(far)
        index.delete(np.arange(0, N, 1)[: N - 200])
        before = index.nlist
        done = index.writer.compact()
        assert done.n_split > 0
        assert done.n_dissolved > 0
        assert index.nlist != before
        sizes = index.list_sizes
        assert sizes.max() < 8 * N / NLIST
        with index.router() as router:
            found = router.search(far[:100], 1, 4).ids[:, 0]
            assert (found == np.arange(N, N + 100)).mean() > 0.95


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(("lists_by", "rows_by"), [("ip", "l2"), ("l2", "ip"), ("ip", "ip"), ("l2", "l2")])
def test_lists_follow_rows_by_the_metric_of_the_quantizer(tmp_path, lists_by, rows_by, unit):
    """faiss lets it differ from that of the rows, and its centroids be of length 1 or not."""
    metrics = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
    source = faiss.IndexIVFFlat(faiss.IndexFlat(DIM, metrics[lists_by]), DIM, NLIST, metrics[rows_by])
    source.cp.spherical = unit
    rows = clustered(N, seed=1)
    source.train(rows)
    source.add(rows)
    from_faiss(source, tmp_path / "i", nprobe=8).close()
    exact = faiss.IndexFlat(DIM, metrics[rows_by])
    exact.add(np.concatenate([rows, MORE]))
    queries = clustered(200, seed=3)
    want = exact.search(queries, 10)[1]

    def recall(index):
        found = index.search(queries, 10, 8).ids
        return np.mean([np.isin(*each).mean() for each in zip(found, want, strict=True)])

    with hx.open(tmp_path / "i") as index:
        index.add(MORE, np.arange(N, N + len(MORE)))
        before = recall(index)
        index.compact()
        for list_id in range(index.nlist):
            assert (index.ivf.quantize(index.ivf.decode_list(list_id), 1)[0] == list_id).all()
        lengths = np.linalg.norm(index.ivf.centroids, axis=1)
        assert np.allclose(lengths, 1, atol=1e-3) == (unit and "ip" in (lists_by, rows_by))
        assert recall(index) > before - 0.03


@pytest.mark.parametrize("options", [{}, {"bits": 1}, {"attributes": {"x": np.arange(N)}}, {"codec": "sq8"}])
def test_an_index_may_be_emptied_and_filled_again(tmp_path, options):
    with hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2", **options) as index:
        index.delete(np.arange(N))
        assert index.compact()
        assert (index.count, index.nlist) == (0, NLIST)
        assert (index.search(MORE[:3], 5, NLIST).ids == -1).all()
        assert index.add(MORE).tolist() == list(range(N, N + len(MORE)))
        for _ in range(2):
            found = index.search(MORE[:50], 1, index.nlist)
            assert np.array_equal(found.ids[:, 0], np.arange(N, N + 50))
            index.compact()
        assert index.count == len(MORE)


def test_after_a_rollback_the_old_generation_takes_changes_again(tmp_path):
    path = hx.build(clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2").path
    with hx.open(path) as index, hx.open(path) as old, old.router() as router:
        index.add(MORE[:100])
        index.compact()
        index.add(MORE[100:103])
        assert old.n_live == index.n_live == N + 103
        hx.rollback(path, force=True)
        with hx.open(path) as again:
            assert again.ivf.generation == 1
            assert again.n_live == N + 100
            assert again.add(MORE[200:202]).tolist() == [N + 100, N + 101]
            assert np.isin([N + 100, N + 101], router.search(MORE[200:202], 2, NLIST).ids).all()


def test_another_process_shapes_lists_as_this_one_would(tmp_path, monkeypatch, caplog):
    from hybridindex.index.changes import compact as compact_module

    shapes = []

    def noted(elsewhere):
        def call(*given, **named):
            shapes.append(elsewhere(*given, **named))
            return shapes[-1]

        return call

    monkeypatch.setattr(compact_module, "shape_elsewhere", noted(compact_module.shape_elsewhere))
    made = []
    for apart in (True, False):
        with hx.build(clustered(N, seed=1), tmp_path / f"{apart}", nlist=NLIST, metric="l2") as index:
            index.add(clustered(1500, seed=5, offset=4.0))
            index.delete(np.arange(0, N, 3))
            index.upsert(MORE[:40], np.arange(N, N + 80, 2))
            done = compact(index.ivf, apart=apart)
            made.append(
                (np.array(done.index.centroids), [done.index.list_ids(i).tolist() for i in range(done.index.nlist)])
            )
            done.index.close()
    assert shapes[0] is not None
    assert np.array_equal(made[0][0], made[1][0])
    assert made[0][1] == made[1][1]
    # Where none can be started, or it fails, this one does it.
    for broken in ("/no/such/python", "/bin/false", "/bin/true"):
        monkeypatch.setattr("hybridindex.index.changes.shape_process.sys.executable", broken)
        with hx.build(clustered(N, seed=1), tmp_path / broken.strip("/"), nlist=NLIST, metric="l2") as index:
            index.add(MORE)
            compact(index.ivf, apart=True).index.close()
            assert shapes[-1] is None


def test_an_index_that_began_small_grows_as_one_that_is_built(tmp_path):
    rows = np.random.default_rng(0).standard_normal((4000, 16)).astype(np.float32)
    with hx.build(rows[:10], tmp_path / "i", metric="l2") as index:
        assert index.nlist == 1
        for stop in (100, 1000, 4000):
            index.add(rows[index.n_live : stop])
            index.compact()
        with hx.build(rows, tmp_path / "j", metric="l2") as built:
            assert built.nlist / 2 < index.nlist < 2 * built.nlist
        right = index.search(rows[:50], 10, index.nlist).ids
        found = index.search(rows[:50], 10).ids
        assert np.mean([len(np.intersect1d(a, b)) for a, b in zip(found, right, strict=True)]) > 8


def test_a_call_that_fails_before_it_changes_anything_keeps_nobody_waiting(tmp_path, monkeypatch):
    small_index(tmp_path / "i").close()
    with hx.open(tmp_path / "i", write=True) as index:
        live = index.ivf.live
        for bad in ({"vectors": np.zeros((1, 3), np.float32)}, {"vectors": clustered(2), "ids": [9001, 9001]}):
            with pytest.raises(HybridIndexError):
                index.add(**bad)
            assert not live._calls.n_coming
        seen, commit = [], live._commit
        monkeypatch.setattr(
            live, "_commit", lambda *given, **named: seen.append(live._calls.n_coming) or commit(*given, **named)
        )
        index.add(clustered(2))
        index.upsert(clustered(1), [5])
        index.delete([6])
        # Nobody waits for itself.
        assert seen == [0, 0, 0]
        assert not live._calls.n_coming
