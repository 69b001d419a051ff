"""Searches with filters where devices hold lists: the same answers as on the host alone, by batches that are shared."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import DamagedListsError
from hybridindex.router import Router
from hybridindex.tiers.paged.native_scanner import NativePageScanner
from tests.clustered import NLIST, clustered, hand_made_plan, share_of_ids, small_index
from tests.coded import with_codes
from tests.router.code_searches import differences

WAIT_S = 300
N = 3000
CASES = [(codec, metric) for codec in ("flat", "fp16", "bf16", "sq8", "pq8") for metric in ("ip", "l2")]
#: Where lists lie: all on a device, half of them on two.
PLACEMENTS = {"device": np.zeros(NLIST), "mixed": np.tile([0, 1, -1, -1], NLIST // 4)}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, tmp_path_factory):
    codec, metric = request.param
    with small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric) as index:
        yield index


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("idx") / "i") as index:
        yield index


def placed(index, name="mixed", **options):
    plan = hand_made_plan(index, PLACEMENTS[name], n_devices=2)
    return Router(index, plan=plan, devices=["cpu", "cpu"], scrub_bytes_per_s=0, **options)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_answers_are_those_of_the_host_alone(case, placement):
    with Router(case) as alone, placed(case, placement) as router:
        for share in (0.03, 0.1, 0.5, 1.0):
            allowed = share_of_ids(share)
            for n, k, nprobe in ((1, 10, 4), (5, 100, 2), (40, 3, 6), (2, 2048, 3)):
                queries = clustered(n, seed=n)
                right = alone.search(queries, k, nprobe, allow_ids=allowed)
                found = router.search(queries, k, nprobe, allow_ids=allowed)
                assert differences(found, right) == 0
                np.testing.assert_array_equal(found.nprobe_used, right.nprobe_used)
        assert router.stats().device_work_bytes > 0
        assert (router.search(clustered(3), 5, 2, allow_ids=share_of_ids(0.5)).hit_rate > 0).all()


def test_few_rows_are_the_hosts(index):
    with placed(index, "device") as router:
        result = router.search(clustered(3), 5, 8, allow_ids=share_of_ids(0.005))
        assert (result.hit_rate == 0).all()
        assert router.stats().device_work_bytes == 0


def test_codes_that_nobody_searches_keep_no_device_from_it(tmp_path):
    with (
        with_codes(small_index(tmp_path / "i")) as index,
        placed(index, "device", precision="rows") as router,
        Router(index, precision="rows") as alone,
    ):
        found = router.search(clustered(3), 5, 4, allow_ids=share_of_ids(0.5))
        assert (found.hit_rate > 0).all()
        assert differences(found, alone.search(clustered(3), 5, 4, allow_ids=share_of_ids(0.5))) == 0


def waiting(router, calls):
    """Answers of calls that all waited while the engine was busy."""
    with router._served.engine._turn.of_engine():
        futures = [router.submit(*call, **given) for call, given in calls]
    return [future.result(WAIT_S) for future in futures]


@pytest.mark.parametrize("devices", [True, False])
def test_requests_that_wait_share_batches_whatever_their_filters_are(index, devices):
    rng = np.random.default_rng(0)
    calls = []
    for i in range(24):
        given = {"allow_ids": share_of_ids((0.4, 0.6, 0.9)[i % 3], i % 6)} if i % 4 else {}
        calls.append(((clustered(1 + i % 3, seed=i), int(rng.choice([1, 10, 50])), int(rng.choice([3, 8]))), given))
    with Router(index) as alone:
        right = [alone.search(*call, **given) for call, given in calls]
    with placed(index) if devices else Router(index, threads=1) as router:
        # One that is ahead of the others, so that these gather.
        waiting(router, calls[:1])
        before = router.stats()
        found = waiting(router, calls)
        after = router.stats()
    assert [differences(one, other) for one, other in zip(found, right, strict=True)] == [0] * len(calls)
    assert after.requests - before.requests == len(calls)
    assert after.filtered_requests - before.filtered_requests == 18
    n_batches = after.batches - before.batches
    # On the host, one for those that have filter, k and nprobe in common, and what came before the others gathered.
    in_common = {(i % 6, call[1], call[2]) for i, (call, given) in enumerate(calls) if given}
    assert len(in_common) < 18
    assert n_batches <= (4 if devices else len(in_common) + 2)
    assert after.largest_batch > 20 or not devices


def test_requests_with_the_same_filter_are_compared_together_on_the_host(index):
    allowed = share_of_ids(0.3)
    with Router(index) as router:
        prepared = router.filter(allow_ids=allowed)
        calls = [((clustered(2, seed=i), 10, 4), {"row_filter": prepared}) for i in range(10)]
        right = [router.search(*call, **given) for call, given in calls]
        before = router.stats().batches
        found = waiting(router, calls)
        assert router.stats().batches - before <= 2
    assert [differences(one, other) for one, other in zip(found, right, strict=True)] == [0] * len(calls)


def test_what_was_deleted_or_added_is_seen_on_all_tiers(tmp_path):
    rng = np.random.default_rng(0)
    data = clustered(N, seed=1)
    small_index(tmp_path / "i").close()
    with hx.open(tmp_path / "i", write=True) as index, Router(index.ivf) as alone, placed(index.ivf) as router:
        index.delete(rng.choice(N, 600, replace=False))
        index.add(data[:300] + 0.01, np.arange(N, N + 300))
        index.upsert(data[300:400] + 0.5, np.arange(300, 400))
        queries = data[rng.choice(N, 20)]
        for share in (0.1, 0.5, 1.0):
            allowed = np.flatnonzero(rng.random(N + 300) < share)
            right = alone.search(queries, 20, 6, allow_ids=allowed)
            found = router.search(queries, 20, 6, allow_ids=allowed)
            assert differences(found, right) == 0
            assert np.isin(found.ids[found.ids >= 0], allowed).all()
        # So many that a batch has too few places, and what is left is compared: on devices, too.
        index.delete(np.flatnonzero(rng.random(N) < 0.8))
        before = router.stats().device_work_bytes
        assert differences(router.search(queries, 400, 6), alone.search(queries, 400, 6)) == 0
        assert router.stats().device_work_bytes > before
        assert differences(router.search(queries, 10, NLIST), alone.search(queries, 10, NLIST)) == 0


def test_the_host_answers_for_a_device_that_fails(index, monkeypatch):
    allowed, queries = share_of_ids(0.4), clustered(6)
    with Router(index) as alone, placed(index, "device") as router:
        right = alone.search(queries, 10, 5, allow_ids=allowed)
        with monkeypatch.context() as patch:
            patch.setattr(NativePageScanner, "_scan", lambda *_given: 1 / 0)
            assert differences(router.search(queries, 10, 5, allow_ids=allowed), right) == 0
        assert router.stats().device_fallbacks == 1
        assert differences(router.search(queries, 10, 5, allow_ids=allowed), right) == 0


def test_damage_that_comes_meanwhile_is_noticed(tmp_path, monkeypatch):
    queries, allowed = clustered(1, seed=3), share_of_ids(0.5)
    with small_index(tmp_path / "i") as index, placed(index, "device") as router:
        right = router.search(queries, 5, 4, allow_ids=allowed)
        near = int(index.quantize(queries, 1)[0][0, 0])
        scan = NativePageScanner._scan

        def found_meanwhile(*given):
            monkeypatch.setattr(NativePageScanner, "_scan", scan)
            index.integrity.quarantine([near])
            return scan(*given)

        monkeypatch.setattr(NativePageScanner, "_scan", found_meanwhile)
        with pytest.raises(DamagedListsError, match=f"list {near}"):
            router.search(queries, 5, 4, allow_ids=allowed)
        index.integrity.lift([near])
        assert differences(router.search(queries, 5, 4, allow_ids=allowed), right) == 0


def test_large_calls_are_searched_in_pieces(index, monkeypatch):
    from hybridindex.router import filtered

    queries, allowed = clustered(50, seed=7), share_of_ids(0.4)
    with placed(index) as router:
        whole = router.search(queries, 5, 4, allow_ids=allowed)
        monkeypatch.setattr(filtered, "_MOST_CELLS", 7 * NLIST)
        assert differences(router.search(queries, 5, 4, allow_ids=allowed), whole) == 0
        with Router(index) as alone:
            assert differences(alone.search(queries, 5, 4, allow_ids=allowed), whole) == 0


def test_a_deadline_counts_what_the_host_compares(index):
    queries, allowed = clustered(3, seed=5), share_of_ids(0.5)
    with placed(index, "device") as router:
        for _ in range(60):
            router._served.engine._filtered._pace.observe(1000, 3600.0)
        # All of it is the device's.
        assert (
            router.search(queries, 5, 16, allow_ids=allowed, deadline_ms=60_000, min_nprobe=3).nprobe_used > 16
        ).all()
    with placed(index) as router:
        for _ in range(60):
            router._served.engine._filtered._pace.observe(1000, 3600.0)
        hasty = router.search(queries, 5, 16, allow_ids=allowed, deadline_ms=50, min_nprobe=3)
        assert (hasty.nprobe_used == 3).all()


@pytest.mark.parametrize("kind", ["codes", "shards"])
def test_a_deadline_counts_what_devices_hold_and_do_not_filter(tmp_path, kind):
    made = small_index(tmp_path / "i", codec="flat" if kind == "codes" else "faiss:PQ6x6np")
    with with_codes(made) if kind == "codes" else made as opened:
        index = opened.by_codes() if kind == "codes" else opened
        with placed(index, "device") as router:
            assert (router.residency.list_device >= 0).all()
            for _ in range(60):
                router._served.engine._filtered._pace.observe(1000, 3600.0)
            hasty = router.search(clustered(3), 5, 16, allow_ids=share_of_ids(0.5), deadline_ms=50, min_nprobe=3)
            assert (hasty.nprobe_used == 3).all()
