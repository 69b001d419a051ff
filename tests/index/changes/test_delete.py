"""Deleting rows: gone for every search on every tier, durable, and never back."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
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
    CorruptIndexError,
    DamagedListsError,
    DiskFullError,
    InvalidInputError,
    UnsupportedIndexError,
)
from hybridindex.index import open_index
from hybridindex.index.changes.write import delete
from hybridindex.index.filters.write_attributes import write_attributes
from hybridindex.index.live import store as live_store
from hybridindex.index.rewrite import write_layout
from hybridindex.processes import lock_file
from hybridindex.router import Router
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.coded import with_codes
from tests.router.code_searches import differences
from tests.router.test_filtered import check_exact
from tests.stuck import held_quantizer

WAIT_S = 300
N = 3000
KINDS = [
    *((codec, "rows") for codec in ("flat", "sq8", "pq8", "pqfs12", "faiss:SQ4")),
    ("flat", "codes"),
    ("sq8", "codes"),
]


def opened(path, kind, metric="l2"):
    codec, precision = kind
    index = small_index(path, codec=codec, metric=metric)
    return with_codes(index) if precision == "codes" else index


def check_alive(router, queries, k, deleted, nprobe=NLIST, **options):
    """The answer at all lists is that of the rows that are left."""
    result = router.search(queries, k, nprobe, **options)
    assert not np.isin(result.ids, deleted).any()
    if not router.precision.startswith("codes"):
        check_exact(router._served.index, queries, k, result, np.setdiff1d(np.arange(N), deleted))
    return result


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("n_devices", [0, 2])
def test_what_was_deleted_is_found_no_more(tmp_path, kind, metric, n_devices):
    queries = clustered(7, seed=3)
    with opened(tmp_path / "i", kind, metric) as index:
        view = index.by_codes() if kind[1] == "codes" else index
        plan = hand_made_plan(view, np.arange(NLIST) % (n_devices + 1) - 1, n_devices=n_devices) if n_devices else None
        options = {"plan": plan, "devices": ["cpu"] * n_devices, "precision": kind[1], "scrub_bytes_per_s": 0}
        with Router(index, **options) as router, router.session() as session:
            before = router.search(queries, 10, NLIST)
            assert delete(index, before.ids[:, :3].reshape(-1)) == len(np.unique(before.ids[:, :3]))
            gone = np.unique(before.ids[:, :3])
            result = check_alive(router, queries, 10, gone)
            for other in (
                router.submit(queries, 10, NLIST).result(WAIT_S),
                asyncio.run(router.asearch(queries, 10, NLIST)),
                session.search(queries, 10, NLIST),
            ):
                assert differences(other, result) == 0
            # So many around a query that an answer has too few places for what is left.
            near = router.search(queries[:1], 400, NLIST).ids[0]
            assert delete(index, near) == len(near)
            gone = np.union1d(gone, near)
            check_alive(router, queries, 10, gone)
            futures = [router.submit(queries[i : i + 1], 10, NLIST) for i in range(7)]
            assert not np.isin([future.result(WAIT_S).ids for future in futures], gone).any()
            check_alive(router, queries, 2048, gone)
            left = np.setdiff1d(np.arange(N), gone)
            filtered = router.search(queries, 10, NLIST, allow_ids=np.arange(0, N, 2))
            if kind[1] == "rows":
                check_exact(index, queries, 10, filtered, left[left % 2 == 0])
            assert not np.isin(filtered.ids, gone).any()
            assert router.stats().requests == 16
        with open_index(tmp_path / "i") as again, Router(again, precision=kind[1]) as router:
            check_alive(router, queries, 10, gone)
            assert len(again.live.current().deleted.ids) == len(gone)


def test_lists_are_chosen_by_what_is_left_in_them(tmp_path):
    """However many rows of the nearest lists were deleted, k are found while there are as many."""
    with small_index(tmp_path / "i") as index, Router(index) as router:
        queries = clustered(3, seed=3)
        near = np.unique(index.quantize(queries, 6)[0])
        delete(index, np.concatenate([index.list_ids(int(each)) for each in near]))
        for given in ({}, {"deny_ids": [0]}, {"allow_ids": np.arange(0, N, 2)}):
            result = router.search(queries, 10, 2, **given)
            assert (result.ids >= 0).all()


@pytest.mark.parametrize("share", [0.3, 0.8, 0.95])
def test_codes_keep_their_recall(tmp_path, share):
    queries = clustered(40, seed=9)
    with with_codes(small_index(tmp_path / "i"), bits=2) as index, Router(index, precision="codes") as router:
        gone = np.random.default_rng(0).permutation(N)[: int(share * N)]
        delete(index, gone)
        result = router.search(queries, 10, NLIST)
        assert not np.isin(result.ids, gone).any()
        with Router(index, precision="rows") as exact:
            right = exact.search(queries, 10, NLIST)
        found = [len(np.intersect1d(a, b)) / 10 for a, b in zip(result.ids, right.ids, strict=True)]
        assert np.mean(found) > 0.95


def test_a_request_that_falls_short_while_the_router_closes_is_answered(tmp_path, monkeypatch):
    with small_index(tmp_path / "i") as index:
        router = Router(index)
        near = router.search(clustered(1), 300, NLIST).ids[0]
        delete(index, near)
        _, resume = held_quantizer(index, monkeypatch)
        futures = [router.submit(clustered(1), 10, NLIST) for _ in range(3)]
        closing = threading.Thread(target=router.close)
        closing.start()
        while not router._served.engine._closed:
            time.sleep(0.001)
        resume.set()
        closing.join(WAIT_S)
        for future in futures:
            ids = future.result(WAIT_S).ids
            assert (ids >= 0).all()
            assert not np.isin(ids, near).any()


def test_a_short_request_says_what_devices_did_and_is_told_once(tmp_path):
    told = []
    with small_index(tmp_path / "i") as index:
        plan = hand_made_plan(index, np.zeros(NLIST, np.int64))
        with Router(index, plan=plan, devices=["cpu"]) as router:
            near = router.search(clustered(1), 300, NLIST).ids[0]
            delete(index, near)
            result = router.submit(clustered(1), 10, NLIST, on_batch=told.append).result(WAIT_S)
            assert result.hit_rate.tolist() == [1.0]
            router.submit(clustered(1), 1, 1).result(WAIT_S)
        assert len(told) == 1


def test_a_rollback_to_a_damaged_log_is_refused(tmp_path):
    with small_index(tmp_path / "i") as index:
        delete(index, [1])
        delete(index, [2])
    log = tmp_path / "i" / "gen-000001" / "changes.log"
    raw = bytearray(log.read_bytes())
    raw[64 + 64] ^= 1
    log.write_bytes(raw)
    hx.build(clustered(N), tmp_path / "i", nlist=NLIST, metric="l2", replace=True).close()
    with pytest.raises(CorruptIndexError, match=r"changes.log is damaged"):
        hx.rollback(tmp_path / "i")


def test_everything_may_be_deleted(tmp_path):
    with small_index(tmp_path / "i") as index, Router(index) as router:
        assert delete(index, np.arange(N)) == N
        result = router.search(clustered(3), 5, 8)
        assert (result.ids == -1).all()
        assert (result.distances == np.inf).all()
        assert (router.search(clustered(3), 5, 8, allow_ids=[1, 2]).ids == -1).all()


def test_deletions_are_counted_once(tmp_path):
    with hx.build(clustered(N), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        assert index.delete([5, 5, 7, N, -1]) == 2
        assert index.delete([7, 9]) == 1
        assert index.delete([]) == 0
        assert index.n_deleted == 3
        assert index.count == N
        size = (tmp_path / "i" / "gen-000001" / "changes.log").stat().st_size
        assert index.delete([5, 7, 9]) == 0
        assert (tmp_path / "i" / "gen-000001" / "changes.log").stat().st_size == size
        index.set_attributes({"year": np.arange(N) % 40})
        assert index.delete(where="year < 10") == N // 4 - 3
        assert index.delete(where="year < 10") == 0
        for given in ({}, {"ids": [1], "where": "year = 1"}, {"ids": [0.5]}, {"where": "year ="}):
            with pytest.raises(InvalidInputError):
                index.delete(**given)


def test_another_process_s_deletions_are_seen_soon(tmp_path, monkeypatch):
    index = small_index(tmp_path / "i")
    live_store._shared.clear()  # as another process, which shares nothing
    with index, open_index(tmp_path / "i") as other, Router(other) as router:
        assert other.live is not index.live
        near = router.search(clustered(1), 5, 8).ids[0]
        delete(index, near)
        monkeypatch.setattr(live_store, "LOOK_AGAIN_S", 0.01)
        ends = time.monotonic() + WAIT_S
        while np.isin(router.search(clustered(1), 5, 8).ids, near).any():
            assert time.monotonic() < ends
            time.sleep(0.01)
        # Both may delete.
        assert delete(other, [*near, 0 if 0 not in near else 1]) == 1
        assert delete(index, near) == 0
        assert len(index.live.current().deleted.ids) == 6


def test_rows_with_one_id_go_together(tmp_path):
    data = clustered(N)
    ivf = faiss.index_factory(data.shape[1], f"IVF{NLIST},Flat")
    ivf.train(data)
    ivf.add_with_ids(data, np.arange(N) // 3)
    with hx.from_faiss(ivf, tmp_path / "i") as index, index.router() as router:
        assert index.delete([7]) == 1
        found = router.search(data[21:24], 50, NLIST).ids
        assert not (found == 7).any()


def test_copies_have_them_deleted_and_exports_have_them_not(tmp_path):
    with hx.build(clustered(N), tmp_path / "i", nlist=NLIST, metric="l2") as index:
        gone = np.arange(0, N, 3)
        index.delete(gone)
        with index.save(tmp_path / "copy") as copy, copy.router() as router:
            assert copy.n_deleted == len(gone)
            assert not np.isin(router.search(clustered(5), 20, NLIST).ids, gone).any()
            copy.delete([1])
        with hx.open(tmp_path / "copy") as copy:
            assert copy.n_deleted == len(gone) + 1
        index.to_faiss(tmp_path / "x.faiss")
        exported = faiss.read_index(str(tmp_path / "x.faiss"))
        assert exported.ntotal == N - len(gone)
        with hx.from_faiss(tmp_path / "x.faiss", tmp_path / "y", nprobe=NLIST) as imported, index.router() as router:
            right = router.search(clustered(5), 20, NLIST)
            assert (imported.search(clustered(5), 20, NLIST).ids == right.ids).all()
        with pytest.raises(UnsupportedIndexError, match="a copy in layout 'blocks16' would lose these changes"):
            write_layout(index.ivf, tmp_path / "z", "blocks16")
    with small_index(tmp_path / "pq", codec="pqfs12") as index:
        delete(index, [1])
        with pytest.raises(UnsupportedIndexError, match="keeps rows in blocks"):
            hx.Index(index).to_faiss(tmp_path / "w.faiss")


def test_who_cannot_delete_is_told(tmp_path, monkeypatch):
    with small_index(tmp_path / "i") as index:
        monkeypatch.setattr("hybridindex.index.changes.write.WAIT_S", 0.01)
        with (
            lock_file(tmp_path / "i" / "writer.lock", timeout_s=1),
            pytest.raises(BuildError, match="is being written by another process"),
        ):
            delete(index, [1])
        index.integrity.quarantine([3])
        with pytest.raises(DamagedListsError):
            delete(index, [1])
        index.integrity.lift([3])
        real = filesystem.File.write_at

        def full(*_args):
            raise OSError(28, "No space left on device", "changes.log")

        delete(index, [2])
        monkeypatch.setattr(filesystem.files.os, "pwrite", full)
        with pytest.raises(DiskFullError):
            delete(index, [1])
        monkeypatch.undo()
        assert filesystem.File.write_at is real
        assert index.live.current().deleted.ids.tolist() == [2]
        assert delete(index, [1]) == 1
        hx.build(clustered(N), tmp_path / "i", nlist=NLIST, metric="l2", replace=True).close()
        with pytest.raises(BuildError, match=r"gen-000001 of .* was replaced"):
            delete(index, [3])
        # Those of the new generation are another matter.
        with open_index(tmp_path / "i") as new:
            assert new.live.current() is None
    with pytest.raises(InvalidInputError, match="was closed"):
        delete(index, [1])


def test_a_rollback_goes_back_to_what_was_deleted_there(tmp_path):
    with small_index(tmp_path / "i") as index:
        delete(index, [1, 2])
    hx.build(clustered(N), tmp_path / "i", nlist=NLIST, metric="l2", replace=True).close()
    hx.rollback(tmp_path / "i")
    with hx.open(tmp_path / "i") as index:
        assert index.n_deleted == 2


def test_filters_and_conditions_know_of_it(tmp_path):
    with small_index(tmp_path / "i") as index, Router(index) as router:
        write_attributes(index, {"year": np.arange(N) % 4})
        prepared = router.filter(where="year = 1")
        queries = clustered(4, seed=2)
        near = router.search(queries, 3, NLIST, row_filter=prepared).ids
        delete(index, near.reshape(-1))
        left = np.setdiff1d(np.arange(1, N, 4), near)
        for given in ({"row_filter": prepared}, {"where": "year = 1"}, {"allow_ids": np.arange(1, N, 4)}):
            check_exact(index, queries, 10, router.search(queries, 10, NLIST, **given), left)


def test_searches_beside_deletions_never_go_back(tmp_path):
    """Each search finds nothing that was deleted before it began."""
    queries = clustered(30, seed=4)
    rng = np.random.default_rng(0)
    order = rng.permutation(N)[:2000]
    done = 0

    with small_index(tmp_path / "i") as index:
        plan = hand_made_plan(index, np.arange(NLIST) % 3 - 1, n_devices=2)
        with Router(index, plan=plan, devices=["cpu", "cpu"]) as router, ThreadPoolExecutor(4) as pool:

            def look(seed):
                own = np.random.default_rng(seed)
                while done < len(order):
                    before = done
                    found = router.search(queries[own.integers(0, 30, 1 + own.integers(0, 4))], 20, NLIST)
                    assert not np.isin(found.ids, order[:before]).any()

            looking = [pool.submit(look, seed) for seed in range(4)]
            while done < len(order):
                n = int(rng.integers(1, 60))
                delete(index, order[done : done + n])
                done += n
            for each in looking:
                each.result(WAIT_S)


def _delete_until_killed(path, told, seed):
    """Deletes ids one batch after the other, and tells which are durable."""
    with open_index(path, verify="quick") as index:
        rng = np.random.default_rng(seed)
        while True:
            ids = rng.integers(0, N, rng.integers(1, 20))
            delete(index, ids)
            told.send_bytes(ids.tobytes())


def test_a_killed_writer_loses_nothing_that_it_told(tmp_path):
    """kill -9 of real processes, again and again, on one index."""
    small_index(tmp_path / "i").close()
    context = multiprocessing.get_context("spawn")
    rng = np.random.default_rng(0)
    acknowledged = np.empty(0, np.int64)
    for seed in range(12):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_delete_until_killed, args=(tmp_path / "i", theirs, seed))
        process.start()
        theirs.close()
        heard = [ours.recv_bytes()]  # it writes
        time.sleep(float(rng.random() * 0.05))
        os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(EOFError):
            while True:
                heard.append(ours.recv_bytes())
        process.join(WAIT_S)
        acknowledged = np.union1d(acknowledged, np.frombuffer(b"".join(heard), np.int64))
        with open_index(tmp_path / "i", verify="quick") as index:
            assert np.isin(acknowledged, index.live.current().deleted.ids).all()
