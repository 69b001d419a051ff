"""Pages of rows that are read from disk: more memory never reads more, and a simulated LRU cache reads as many."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.partitioner.analysis import analyse
from hybridindex.partitioner.models.latency import fit_row_faults
from hybridindex.types import StageSample
from tests.examples import examples
from tests.partitioner.synthetic import make_profile, with_candidates, with_row_faults

#: Of a prediction against the simulated cache: a part of the pages, and pages.
TOLERANCE, PAGES = 0.1, 1.0


@cache
def profiled(seed=3, row_bytes=1024, nlist=128, skew=1.2):
    shape = {"nlist": nlist, "n": 1200, "nprobe": 16, "skew": skew, "seed": seed, "mean_size": 200, "code_size": 36}
    codes = replace(make_profile(**shape, device_per_byte_s=5e-12), codec="rabitq1", scanner="rabitq")
    return with_row_faults(with_candidates(codes, row_bytes))


@cache
def analysed(**shape):
    return analyse(profiled(**shape))


def caches(analysis, nbytes):
    return analysis.configured(page_bytes=8192, n_devices=1, row_cache_bytes=nbytes).curve


def all_bytes(analysis):
    return caches(analysis, 0).rows.cache.all_bytes


class Lru:
    def __init__(self, n_pages):
        self.n_pages, self.pages, self.read = n_pages, OrderedDict(), 0

    def touch(self, page):
        if page in self.pages:
            self.pages.move_to_end(page)
            return
        self.read += 1
        self.pages[page] = None
        if len(self.pages) > self.n_pages:
            self.pages.popitem(last=False)


def simulated(profile, row_bytes, nbytes, on_device=(), rounds=6, page_bytes=4096):
    """Pages that a query reads, of the held-back queries in random order, with rows where a build would put them; the
    first half fills the cache."""
    rng = np.random.default_rng(7)
    sizes = profile.list_sizes
    offset = np.zeros(profile.nlist, dtype=np.int64)
    offset[1:] = np.cumsum(-(-sizes * (row_bytes + 8) // 64) * 64)[:-1]
    lru, n_held, kept = Lru(nbytes // page_bytes), len(profile.access.held_probes), set(on_device)
    for number in range(rounds):
        if number == rounds // 2:
            lru.read = 0
        for query in rng.permutation(n_held).tolist():
            for list_id, n in zip(
                profile.access.held_probes[query], profile.access.held_candidates[query], strict=True
            ):
                rows = rng.choice(sizes[list_id], min(int(n), sizes[list_id]), replace=False)
                touched = {int(at) for at in (offset[list_id] + sizes[list_id] * row_bytes + 8 * rows) // page_bytes}
                if int(list_id) not in kept:
                    first = (offset[list_id] + rows * row_bytes) // page_bytes
                    last = (offset[list_id] + (rows + 1) * row_bytes - 1) // page_bytes
                    for one, other in zip(first.tolist(), last.tolist(), strict=True):
                        touched |= set(range(one, other + 1))
                for page in sorted(touched):
                    lru.touch(page)
    return lru.read / (n_held * (rounds - rounds // 2))


@pytest.mark.parametrize("row_bytes", [256, 1024, 3072])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.6, 0.9])
def test_a_simulated_cache_reads_as_many_pages(row_bytes, share):
    analysis = analysed(row_bytes=row_bytes)
    nbytes = int(share * all_bytes(analysis))
    predicted = float(caches(analysis, nbytes).at(0).row_faults.mean())
    expected = simulated(profiled(row_bytes=row_bytes), row_bytes, nbytes)
    assert abs(predicted - expected) <= TOLERANCE * expected + PAGES


def test_pages_have_the_size_of_the_machine_that_was_profiled():
    profile = profiled()
    notes = {**profile.notes, "row_faults": {"page_bytes": 16384}}
    analysis = analyse(replace(profile, notes=notes))
    nbytes = int(0.3 * all_bytes(analysis))
    predicted = float(caches(analysis, nbytes).at(0).row_faults.mean())
    expected = simulated(profile, 1024, nbytes, page_bytes=16384)
    assert abs(predicted - expected) <= TOLERANCE * expected + PAGES


@pytest.mark.parametrize("rows", [10, 60])
def test_a_simulated_cache_reads_as_many_pages_beside_rows_on_a_device(rows):
    analysis = analysed()
    nbytes = int(0.2 * all_bytes(analysis))
    curve = caches(analysis, nbytes)
    predicted = float(curve.at(0, rows).row_faults.mean())
    expected = simulated(profiled(), 1024, nbytes, on_device=curve.rows.order[:rows].tolist())
    assert abs(predicted - expected) <= TOLERANCE * expected + PAGES


@given(seed=st.integers(0, 5), shares=st.lists(st.floats(0, 1.2), min_size=2, max_size=6), rows=st.integers(0, 40))
@examples(40)
def test_more_memory_never_reads_more(seed, shares, rows):
    analysis = analysed(seed=seed, nlist=48)
    total = all_bytes(analysis)
    found = [caches(analysis, int(share * total)).at(0, rows).row_faults for share in sorted(shares)]
    for less, more in itertools.pairwise(found):
        assert (more <= less + 1e-9).all()
    for share, faults in zip(sorted(shares), found, strict=True):
        assert (faults >= 0).all()
        assert share < 1 or not faults.any()


@given(seed=st.integers(0, 5), share=st.floats(0, 1), counts=st.lists(st.integers(0, 48), min_size=2, max_size=5))
@examples(40)
def test_more_rows_on_devices_never_read_more(seed, share, counts):
    analysis = analysed(seed=seed, nlist=48)
    curve = caches(analysis, int(share * all_bytes(analysis)))
    counts = [min(count, curve.rows.n_lists) for count in sorted(counts)]
    found = [curve.at(0, count).row_faults for count in counts]
    for less, more in itertools.pairwise(found):
        assert (more <= less + 1e-9).all()


def test_memory_for_all_rows_reads_none():
    analysis = analysed()
    assert caches(analysis, all_bytes(analysis) - 4096).at(0).row_faults.any()
    assert not caches(analysis, all_bytes(analysis)).at(0).row_faults.any()
    assert caches(analysis, None).at(0).row_faults is None


def test_rows_on_devices_are_not_read_and_their_ids_are():
    curve = caches(analysed(), 0)
    every = curve.rows.n_lists
    assert 0 < curve.at(0, every).row_faults.mean() < 0.7 * curve.at(0).row_faults.mean()
    lists = curve.rows.order[[3, 9]]
    some = curve.of_lists(np.array([1, 5]), lists).row_faults
    assert (some <= curve.at(0).row_faults + 1e-9).all()
    assert some.sum() < curve.at(0).row_faults.sum()
    np.testing.assert_array_equal(curve.of_lists(np.array([1, 5])).row_faults, curve.at(0).row_faults)


def test_pages_take_what_was_measured():
    samples = [
        StageSample(stage="row_faults", batch=b, seconds=1e-4 + 2e-5 * n, probes=n)
        for b in (1, 4)
        for n in (10, 90, 400)
    ]
    model = fit_row_faults(samples)
    assert model.overhead_s == pytest.approx(1e-4, rel=1e-3)
    assert model.per_page_s == pytest.approx(2e-5, rel=1e-3)
    assert model.max_pages == 400
    np.testing.assert_allclose(model.predict(np.array([0, 0.5, 100])), [0, 6e-5, 2.1e-3], rtol=1e-3)
    assert fit_row_faults([s for s in profiled().stages if s.stage != "row_faults"]) is None
