from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.profiler.work import keep_probes, resident_counts, work_of
from hybridindex.router.batch.split import split_probes_reference

LIST_BYTES = np.array([10, 20, 40, 0, 80], dtype=np.int64)


def test_work_counts_pairs_bytes_slowest_query_and_union():
    probes = np.array([[0, 1, -1], [1, 4, 3]], dtype=np.int64)
    work = work_of(probes, LIST_BYTES)
    assert (work.probes, work.work_bytes, work.max_work_bytes, work.unique_bytes) == (5, 130, 100, 110)


def test_work_of_nothing_is_nothing():
    work = work_of(np.full((2, 3), -1, dtype=np.int64), LIST_BYTES)
    assert (work.probes, work.work_bytes, work.max_work_bytes, work.unique_bytes) == (0, 0, 0, 0)


@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 12),
    p=st.integers(1, 8),
    nlist=st.integers(8, 20),
    n_resident=st.integers(0, 20),
)
def test_masking_is_what_the_router_splits_off_for_the_host(seed, n, p, nlist, n_resident):
    rng = np.random.default_rng(seed)
    probes = np.stack([rng.permutation(nlist)[:p] for _ in range(n)]).astype(np.int64)
    probes[rng.random(probes.shape) < 0.2] = -1
    coarse = rng.random((n, p), dtype=np.float32)
    list_bytes = rng.integers(1, 100, nlist)
    list_device = np.full(nlist, -1, dtype=np.int16)
    list_device[rng.permutation(nlist)[:n_resident]] = 0
    kept = keep_probes(probes, coarse, list_device < 0, list_bytes)
    split = split_probes_reference(probes, coarse, list_device, list_bytes, 1)
    host = [part for part in split.parts if part.device < 0]
    assert bool(host) == (kept.work.probes > 0)
    if host:
        np.testing.assert_array_equal(kept.rows, host[0].rows)
        np.testing.assert_array_equal(kept.probes, host[0].probes)
        np.testing.assert_array_equal(kept.coarse_distances, host[0].coarse_distances)
        assert kept.work.work_bytes == host[0].total_bytes
        per_query = [list_bytes[lists[lists >= 0]].sum() for lists in host[0].probes]
        assert kept.work.max_work_bytes == max(per_query)
    busy = (probes >= 0).any(axis=1)
    if busy.any():
        assert np.isclose(kept.min_taken, split.hit_rate[busy].min(), atol=1e-6)


def test_resident_counts_leave_out_none_and_all():
    assert resident_counts((0.0, 0.01, 0.25, 0.26, 0.5, 1.0), 16) == [4, 8]
