"""Codes of faiss's IVF…,RaBitQ, taken over: found as faiss finds them where it does not round queries."""

from __future__ import annotations

import tracemalloc
from contextlib import closing

import faiss
import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.filesystem import watched_by
from hybridindex.index import compress, from_faiss, open_index
from hybridindex.index.faiss_files import import_faiss
from hybridindex.index.rabitq import codes, spec
from hybridindex.index.rabitq.faiss_codes import FaissCodes
from hybridindex.index.storage.generation import generation_name
from hybridindex.profiler.searching import Searching, open_reference
from hybridindex.router import Router
from hybridindex.tiers.host import rabitq_scanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.host.reranker import FaissCodeReranker
from tests.clustered import clustered, hand_made_plan
from tests.faults import FaultyDisk, of

NLIST = 16
METRICS = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
#: Dimensions that fill no byte, and no block; and vectors behind a rotation.
KINDS = [("RaBitQ", 16), ("RaBitQ", 50), ("RR", 33)]


def made_by_faiss(kind, dim, metric="l2", n=1500):
    factory = f"RR{dim},IVF{NLIST},RaBitQ" if kind == "RR" else f"IVF{NLIST},{kind}"
    index = faiss.index_factory(dim, factory, METRICS[metric])
    x = clustered(n, dim, seed=1, offset=0.5)
    index.train(x)
    x[7] = faiss.extract_index_ivf(index).quantizer.reconstruct(3) if kind != "RR" else x[7]  # no residual
    index.add_with_ids(x, np.arange(n) * 2 + 1)
    return index


def queries_of(dim):
    return clustered(40, dim, seed=5, offset=0.5)


def exactly(index, k, nprobe=NLIST):
    """What faiss finds with queries that it does not round."""
    ivf = faiss.extract_index_ivf(index)
    faiss.downcast_index(ivf).qb, ivf.nprobe = 0, nprobe
    return index.search(queries_of(index.d), k)


@pytest.fixture(params=[(kind, metric) for kind in KINDS for metric in METRICS], ids=str, scope="module")
def imported(request, tmp_path_factory):
    (kind, dim), metric = request.param
    source = made_by_faiss(kind, dim, metric)
    with from_faiss(source, tmp_path_factory.mktemp("idx") / "i", nprobe=6) as index:
        yield source, index


def opened(index, **options):
    return Router(index, scrub_bytes_per_s=0, warm_bytes=0, **options)


def test_with_all_rows_for_candidates_the_answers_are_those_of_faiss(imported):
    source, index = imported
    with opened(index, candidates=65_536) as router:
        assert router.precision.startswith("codes: rabitq 1 bit, ")
        for k, nprobe in ((1, 4), (10, 8), (200, NLIST)):
            distances, ids = exactly(source, k, nprobe)
            found = router.search(queries_of(index.dim), k, nprobe)
            same = found.ids == ids
            assert same.mean() > 0.995  # ties by float32
            np.testing.assert_allclose(found.distances, distances, rtol=1e-4, atol=1e-4)


def test_the_measured_candidates_miss_little(imported):
    source, index = imported
    queries = queries_of(index.dim)
    _, ids = exactly(source, 10, 8)
    faiss.downcast_index(faiss.extract_index_ivf(source)).qb = 4
    _, rounded = source.search(queries, 10)
    with opened(index) as router:
        found = router.search(queries, 10, 8).ids
        assert router.stats().candidates < 40 * 200

    def recall(answers):
        return np.mean([np.isin(own, one).mean() for own, one in zip(ids, answers, strict=True)])

    assert recall(found) > max(0.98, recall(rounded))


def test_a_profile_compares_them_with_queries_that_are_not_rounded(imported):
    source, index = imported
    queries = queries_of(index.dim)
    distances, ids = exactly(source, 10)
    with closing(open_reference(index.by_codes(), threads=1)) as scanner:
        x = index.transform(queries)
        found = scanner.scan(x, *index.quantize(x, NLIST), 10)
        searching = Searching(index=index.by_codes(), scanner=HostRabitqScanner(index.by_codes(), index.rabitq))
        assert not searching.notes(10, 8)["codes"]["rows_on_devices"]
        searching.close()
    assert (found[1] == ids).mean() > 0.995
    np.testing.assert_allclose(found[0], distances, rtol=1e-4, atol=1e-4)


def test_no_placement_changes_a_bit(imported):
    _, index = imported
    queries, rng = queries_of(index.dim), np.random.default_rng(0)
    with opened(index) as host, opened(index, devices=["cpu"] * 2, device_budget_bytes=4 << 20) as router:
        for _ in range(5):
            view = index.by_codes()
            plan = hand_made_plan(view, rng.integers(-1, 2, size=NLIST), n_devices=2, budget=4 << 20)
            plan.request.page_bytes = 2048
            router.apply_plan(plan)
            for k, nprobe in ((1, 3), (10, 8), (40, NLIST)):
                found, right = router.search(queries, k, nprobe), host.search(queries, k, nprobe)
                assert found.ids.tobytes() == right.ids.tobytes()
                assert found.distances.tobytes() == right.distances.tobytes()
        assert router.stats().hit_rate > 0.1
        assert router.stats().device_fallbacks == 0
        router.check_invariants()


def test_devices_hold_codes_alone_which_no_look_for_damage_takes_for_rows(imported):
    _, index = imported
    plan = hand_made_plan(index.by_codes(), np.zeros(NLIST))
    with opened(index, plan=plan, devices=["cpu"], health=None) as router:
        held = router.residency.list_device.copy()
        assert (held[index.list_sizes > 0] == 0).all()
        assert router.row_residency is None
        copies = router._served.scrub._copies
        assert copies.held(0, NLIST) == []
        for list_id in range(NLIST):
            assert copies.drop_damaged(list_id, suspect=True) == []
        np.testing.assert_array_equal(router.residency.list_device, held)


def test_numpy_estimates_the_same(imported, monkeypatch):
    _, index = imported
    with opened(index) as router:
        right = router.search(queries_of(index.dim), 10, 8)
    monkeypatch.setattr(rabitq_scanner, "native", None)
    with opened(index, precision="codes") as router:
        found = router.search(queries_of(index.dim), 10, 8)
    assert found.ids.tobytes() == right.ids.tobytes()
    np.testing.assert_allclose(found.distances, right.distances, rtol=1e-6)


def test_a_row_that_is_its_centroid_is_as_far_as_that(tmp_path):
    with from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i") as index:
        [(list_id, row)] = [(i, int(at[0])) for i in range(NLIST) if len(at := np.flatnonzero(index.list_ids(i) == 15))]
        parts = FaissCodes.of(index.list_codes(list_id), 16)
        assert parts.f[row] == 0
        query, centroid = queries_of(16)[0], index.centroids[list_id]
        distances = parts.distances(query, np.broadcast_to(centroid, (len(parts.f), 16)), "l2")
        assert distances[row] == pytest.approx(((query - centroid) ** 2).sum(), rel=1e-5)


def test_many_candidates_are_compared_in_little_memory(tmp_path):
    dim = 64
    with from_faiss(made_by_faiss("RaBitQ", dim, n=12_000), tmp_path / "i") as index:
        reranker, query = FaissCodeReranker(index), queries_of(dim)[0]
        sizes = index.list_sizes
        lists = np.repeat(np.arange(NLIST), sizes)
        rows = np.arange(len(lists)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tracemalloc.start()
        try:
            exact = reranker._exact(query, lists, rows)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        whole = FaissCodes.of(np.concatenate([index.list_codes(i) for i in range(NLIST)]), dim)
        np.testing.assert_array_equal(exact, whole.distances(query, index.centroids[lists], "l2"))
    assert peak < 12_000 * dim * 8


def test_an_import_stands_whose_codes_have_no_room(tmp_path, caplog):
    disk = FaultyDisk(counts=of("truncate", path="rabitq.bin.new"), allowed=0, number=28)
    with watched_by(disk), from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i", nprobe=6) as index:
        assert disk.failed
        assert (index.count, index.rabitq) == (1500, None)
        assert f"'hybridindex compress {tmp_path / 'i'}' converts them" in caplog.text
        with opened(index) as router:
            assert router.host_scanner == "faiss"
            assert (router.search(queries_of(16), 5).ids >= 0).all()
    with open_index(tmp_path / "i") as index:
        assert compress(index).source == "faiss"


def test_an_interrupt_ends_an_import(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_faiss, "compress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i")


def test_a_copy_takes_the_same_codes_over_again(tmp_path):
    with from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i") as index:
        first = index.rabitq
        assert first is not None
        assert (first.spec.source, first.spec.rounds, first.spec.recall_loss) == ("faiss", 0, 0.001)
        again = compress(index, queries=queries_of(16))
        assert again.file_xxh3_128 == first.spec.file_xxh3_128
        assert again.measured_with == "queries"
        for bits in (2, 4):
            with pytest.raises(InvalidInputError, match=f"bits is {bits}; codec .* holds codes of 1 bit"):
                compress(index, bits=bits)
        assert index.rabitq.spec == again


@pytest.mark.parametrize(
    ("factory", "codec", "why"),
    [
        ("RaBitQ4", "faiss:IVFRaBitQ", "several bits a dimension"),
        ("RaBitQfs", "faiss:IVFRaBitQFastScan", "cannot be compressed"),
    ],
)
def test_faiss_scans_what_is_not_taken_over(tmp_path, factory, codec, why):
    source = made_by_faiss(factory, 16)
    with from_faiss(source, tmp_path / "i") as index:
        assert (index.codec, index.rabitq, index.rabitq_problem) == (codec, None, "")
        with pytest.raises(UnsupportedIndexError, match=f"codec '{codec}'.*{why}"):
            compress(index)
        with opened(index) as router:
            assert (router.precision, router.host_scanner) == ("rows", "faiss")
            assert (router.search(queries_of(16), 5).ids >= 0).all()


def test_the_vectors_of_a_refinement_are_coded_anew(tmp_path):
    source = faiss.index_factory(16, f"IVF{NLIST},RaBitQ,RFlat")
    source.train(clustered(1500, 16, seed=1))
    source.add(clustered(1500, 16, seed=1))
    with from_faiss(source, tmp_path / "i", refine="vectors") as index:
        assert (index.codec, index.rabitq) == ("flat", None)
        assert compress(index).source == "rows"
    with from_faiss(source, tmp_path / "j", refine="drop") as index:
        assert (index.codec, index.rabitq.spec.source) == ("faiss:IVFRaBitQ", "faiss")


def test_an_older_version_lets_faiss_scan(tmp_path, monkeypatch, caplog):
    from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i").close()
    monkeypatch.setattr(spec, "FORMAT_VERSION", 1)
    with open_index(tmp_path / "i") as index:
        assert index.rabitq is None
        assert "has format_version 2; this hybridindex reads up to 1: upgrade it" in index.rabitq_problem
        assert "the codes of" in caplog.text
        with opened(index) as router:
            assert router.host_scanner == "faiss"


def test_codes_of_vectors_are_written_as_before(tmp_path):
    source = faiss.index_factory(16, f"IVF{NLIST},Flat")
    source.train(clustered(800, 16))
    source.add(clustered(800, 16))
    with from_faiss(source, tmp_path / "i") as index:
        compress(index)
        raw = (tmp_path / "i" / generation_name(1) / spec.SPEC_FILE).read_text()
    assert '"format_version": 1' in raw
    assert '"source"' not in raw
    assert codes.read_spec(tmp_path / "i" / generation_name(1), index.manifest).source == "rows"


def test_it_is_profiled_and_planned_with_devices(tmp_path):
    from_faiss(made_by_faiss("RaBitQ", 16), tmp_path / "i", nprobe=6).close()
    with hx.open(tmp_path / "i") as index:
        profile = index.profile(clustered(80, 16, seed=5), 6, devices=["cpu"], max_seconds=0.1)
        assert (profile.bits, profile.notes["codes"]["rows_on_devices"]) == (1, False)
        plan = index.plan(1000, 4 << 20, profile, coverage=0.5)
        assert len(plan.resident_lists)
        assert not len(plan.resident_rows)
        assert "in place of" not in plan.explain()
