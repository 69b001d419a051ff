"""One contract for every scanner: exact against the oracle over the probes it was given, and clear about bad input."""

from __future__ import annotations

from contextlib import ExitStack, closing

import faiss
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.errors import InvalidInputError
from hybridindex.index import from_faiss
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.host.decoded_scanner import HostDecodedScanner
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.paged import launch_shapes
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.page_scanner import PageScanner
from hybridindex.tiers.paged.pq import triton_pq_scanner
from hybridindex.tiers.paged.pq.torch_pq_scanner import TorchPqScanner
from hybridindex.tiers.paged.pq.triton_pq_scanner import TritonPqScanner
from hybridindex.tiers.paged.torch_scanner import TorchScanner
from hybridindex.tiers.paged.triton_scanner import TritonScanner
from hybridindex.tiers.serving import tier_of
from hybridindex.tiers.shard.shard_tier import ShardTier
from tests.clustered import DIM, NLIST, clustered, small_index
from tests.examples import examples
from tests.oracle import ROUNDED, candidate_distances, check_answer
from tests.tiers.triton_here import require_triton

CASES = [(codec, metric) for codec in ("flat", "fp16", "bf16", "sq8") for metric in ("ip", "l2")]
#: Product quantizers: builds of ours, and imports with residuals and without. "np": without polysemous training, which
#: takes seconds and only renumbers the centroids. faiss rounds the tables of fast scans.
PQ_CASES = [(codec, metric) for codec in ("pq8", "import:IVF32,PQ6np") for metric in ("ip", "l2")]
FAST_SCAN_CASES = [(codec, metric) for codec in ("pqfs12", "import:IVF32,PQ8x4fsr") for metric in ("ip", "l2")]
#: Codecs that only faiss scans: imports, most of them with residuals.
FAISS_CASES = [
    (codec, metric)
    for codec in ("import:IVF32,PQ6x6np", "import:IVF32,SQ4", "import:IVF32,SQfp16")
    for metric in ("ip", "l2")
]
FAISS_SCANNERS = ["faiss", "shard-cpu", pytest.param("shard-cuda", marks=pytest.mark.gpu)]
SCANNERS = [
    *FAISS_SCANNERS[:2],
    "decoded",
    "native-host",
    "native-cpu",
    "torch-cpu",
    "triton-cpu",
    pytest.param("torch-cuda", marks=pytest.mark.gpu),
    pytest.param("triton-cuda", marks=pytest.mark.gpu),
]


def pairs(cases, scanners):
    for case in cases:
        for scanner in scanners:
            name, marks = (scanner.values[0], scanner.marks) if hasattr(scanner, "values") else (scanner, ())
            yield pytest.param((case, name), marks=marks, id="-".join((*case, name)))


#: Scanners of pages, whose queries may have filters of their own.
PAGED = ("native-cpu", "torch-cpu", "triton-cpu", "torch-cuda", "triton-cuda")
PAIRS = [
    *pairs([*CASES, *PQ_CASES], SCANNERS),
    *pairs(FAST_SCAN_CASES, SCANNERS[2:]),
    *pairs(FAISS_CASES, FAISS_SCANNERS),
]


def imported(folder, factory, metric):
    index = faiss.index_factory(DIM, factory, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    data = clustered(3000, seed=1)
    index.train(data)
    index.add(data)
    faiss.write_index(index, str(folder / "made.faiss"))
    return from_faiss(folder / "made.faiss", folder / "i")


@pytest.fixture(scope="module")
def index_of(tmp_path_factory):
    """Opens the index of a case once."""
    with ExitStack() as opened:
        made = {}

        def find(case):
            if case not in made:
                folder = tmp_path_factory.mktemp("idx")
                codec, metric = case
                make = codec.removeprefix("import:")
                index = (
                    small_index(folder / "i", codec=codec, metric=metric)
                    if make == codec
                    else imported(folder, make, metric)
                )
                made[case] = opened.enter_context(index)
            return made[case]

        yield find


@pytest.fixture
def pair(request):
    return request.param


@pytest.fixture
def index(pair, index_of):
    return index_of(pair[0])


@pytest.fixture
def scanner(pair, index, monkeypatch):
    """A scanner that can scan every list, with a scratch so small that tiling happens."""
    name = pair[1]
    if name == "faiss":
        yield HostFaissScanner(index, threads=2)
        return
    if name == "decoded":
        yield HostDecodedScanner(index, threads=2)
        return
    if name == "native-host":
        with closing(HostNativeScanner(index, threads=2)) as native:
            yield native
        return
    kind, _, device = name.partition("-")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("of a real GPU, and there is none; the same runs on the stand-in")
    if kind == "triton":
        require_triton(device)
        if device == "cpu":
            # An operation of the interpreter costs the same for any number of rows.
            monkeypatch.setattr(launch_shapes, "_MAX_ROWS", 1024)
            monkeypatch.setattr(launch_shapes, "_VALUES_PER_THREAD", 1024)
            monkeypatch.setattr(triton_pq_scanner, "_ROWS", 1024)
    if kind == "shard":
        if device == "cuda" and (choice := tier_of(index, device)).tier != "shard":
            pytest.skip(choice.reason)
        tier = ShardTier(index, device, 0, budget_bytes=16 << 20, wanted_bytes=0)
    else:
        tier = DeviceTier(index, device, 0, budget_bytes=16 << 20, wanted_bytes=16 << 20)
    owner = tier.pages
    store = ResidencyStore(index.nlist, lambda _d, pages: owner.free(pages))
    tier.load(range(index.nlist), store).result()
    if kind != "shard":
        # Tables of 256 words alone take 8 KiB for each query.
        tier.scratch_bytes = 40_000 if index.codec in ("pq6", "pq8") else 20_000
    with store.lease() as residency:
        assert residency.n_resident == index.nlist
        chosen = tier.scanner(residency)
        if kind in ("torch", "triton") and chosen.name != kind:
            of_pq = tier._codec.kind == "pq"
            made = {
                "torch": TorchPqScanner if of_pq else TorchScanner,
                "triton": TritonPqScanner if of_pq else TritonScanner,
            }[kind]
            chosen = made(index, tier._codec, tier.arena, residency, 0, tier.scratch_bytes)
        expected = {"shard": "faiss" if device == "cpu" else "faiss-gpu"}.get(kind, kind)
        assert chosen.name == expected
        yield chosen
    tier.close()


over_all = pytest.mark.parametrize("pair", PAIRS, indirect=True)


def is_interpreted(scanner):
    """Whether its kernels run in an interpreter, milliseconds for each probe: such a scanner gets fewer."""
    return isinstance(scanner, (TritonScanner, TritonPqScanner)) and scanner._arena.device.type == "cpu"


def probes_of(index, queries, nprobe):
    return index.quantize(index.transform(queries), nprobe)


@over_all
@examples(12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 9), nprobe=st.integers(1, NLIST), k=st.sampled_from([1, 3, 10, 200]), seed=st.integers(0, 10_000)
)
def test_exact_over_any_probes(index, scanner, n, nprobe, k, seed):
    if is_interpreted(scanner):
        n, nprobe = min(n, 4), min(nprobe, 2)
    rng = np.random.default_rng(seed)
    queries = index.transform(clustered(n, seed=seed + 2))
    probes, coarse = index.quantize(queries, nprobe)
    probes[rng.random(probes.shape) < 0.3] = -1
    distances, ids = scanner.scan(queries, probes, coarse, k)
    order = np.lexsort((ids, -distances if index.metric == "ip" else distances, ids < 0), axis=1)
    found = np.take_along_axis(distances, order, 1), np.take_along_axis(ids, order, 1)
    # Codes of quantizers are compared by tables of their own.
    rows = isinstance(scanner, PageScanner) and index.codec in ("flat", "fp16", "bf16", "sq8")
    check_answer(index, queries, probes, k, *found, precise=ROUNDED if rows else None)


@over_all
def test_completion_reports_every_query_once_with_its_answer(index, scanner):
    n = 12 if is_interpreted(scanner) else 40
    queries = clustered(n, seed=5)
    probes, coarse = probes_of(index, queries, 6)
    probes[3] = -1
    reported = {}

    def on_done(rows, distances, ids):
        for row, d, i in zip(rows, distances, ids, strict=True):
            assert int(row) not in reported
            reported[int(row)] = (d.copy(), i.copy())

    distances, ids = scanner.scan(queries, probes, coarse, 5, on_done=on_done)
    assert sorted(reported) == list(range(n))
    for row, (d, i) in reported.items():
        np.testing.assert_array_equal(d, distances[row])
        np.testing.assert_array_equal(i, ids[row])


@over_all
def test_filter_keeps_only_named_ids(index, scanner):
    queries = index.transform(clustered(4, seed=6))
    probes, coarse = index.quantize(queries, 8)
    allowed = np.arange(0, 3000, 7)
    distances, ids = scanner.scan(queries, probes, coarse, 10, filter_ids=allowed)
    for row in range(4):
        all_ids, exact = candidate_distances(index, queries[row], probes[row])
        exact = exact[np.isin(all_ids, allowed)]
        ranked = np.sort(exact)[::-1][:10] if index.metric == "ip" else np.sort(exact)[:10]
        np.testing.assert_allclose(distances[row, : len(ranked)], ranked, rtol=2e-4, atol=2e-4)
        assert np.isin(ids[row, : len(ranked)], allowed).all()
        assert (ids[row, len(ranked) :] == -1).all()


@pytest.mark.parametrize("pair", [p for p in PAIRS if p.values[0][1] in PAGED], indirect=True)
def test_each_query_is_answered_with_rows_of_its_own_filter(index, scanner):
    queries = index.transform(clustered(6, seed=6))
    probes, coarse = index.quantize(queries, 4)
    probes[0, 1] = -1
    rng, filters = np.random.default_rng(0), RowFilters(index)
    # None, nearly none, some, nearly all, all.
    kept = [np.flatnonzero(rng.random(3000) < share) for share in (0.0, 0.02, 0.3, 0.95, 1.0)]
    masks = RowMasks(tuple(filters.make(ids, None) for ids in kept), np.array([1, 0, 2, 3, 1, 4], np.int32))
    scanner.scan(queries, probes, coarse, 10)
    before = None
    # Different scans between, and masks that were dropped: what a device keeps of them is of no other's.
    for dropped in (False, True):
        if dropped:
            masks = RowMasks(tuple(filters.make(ids.copy(), np.array([-1])) for ids in kept), masks.of_query)
        found = scanner.scan(queries, probes, coarse, 10, masks=masks)
        if before is not None:
            np.testing.assert_array_equal(found[1], before[1])
            np.testing.assert_array_equal(found[0], before[0])
        before = found
    for row, number in enumerate(masks.of_query):
        all_ids, exact = candidate_distances(index, queries[row], probes[row])
        exact = exact[np.isin(all_ids, kept[number])]
        ranked = np.sort(exact)[::-1][:10] if index.metric == "ip" else np.sort(exact)[:10]
        np.testing.assert_allclose(found[0][row, : len(ranked)], ranked, rtol=2e-4, atol=2e-4)
        assert np.isin(found[1][row, : len(ranked)], kept[number]).all()
        assert (found[1][row, len(ranked) :] == -1).all()


@over_all
def test_no_probes_and_no_queries(index, scanner):
    none = np.full((2, 3), -1, np.int64)
    distances, ids = scanner.scan(clustered(2), none, np.zeros((2, 3), np.float32), 4)
    assert (ids == -1).all()
    assert np.isinf(distances).all()
    distances, ids = scanner.scan(
        np.empty((0, DIM), np.float32), np.empty((0, 3), np.int64), np.empty((0, 3), np.float32), 4
    )
    assert distances.shape == ids.shape == (0, 4)


BAD_INPUT = [
    ({"k": 0}, "k is 0"),
    ({"k": 2049}, "k is 2049"),
    ({"probes": np.array([[NLIST]])}, f"list id {NLIST}"),
    ({"probes": np.array([[-2]])}, "list id -2"),
    ({"probes": np.array([[0]], np.int32)}, "expected int64"),
    ({"queries": np.zeros((1, DIM + 1), np.float32)}, f"(n, {DIM})"),
    ({"queries": np.zeros((1, DIM))}, "float64"),
    ({"coarse_distances": np.zeros((1, 2), np.float32)}, "coarse_distances"),
    ({"probes": np.array([[0], [1]])}, "probes"),
]


@over_all
def test_bad_input_is_named(index, scanner):
    for change, words in BAD_INPUT:
        arguments = {
            "queries": np.zeros((1, DIM), np.float32),
            "probes": np.array([[0]]),
            "coarse_distances": np.zeros((1, 1), np.float32),
            "k": 3,
            **change,
        }
        with pytest.raises(InvalidInputError) as raised:
            scanner.scan(**arguments)
        assert words in str(raised.value)


def test_l2_survives_data_far_from_the_origin(tmp_path):
    from hybridindex.index import build

    with build(clustered(2000, offset=300.0, seed=1), tmp_path / "i", nlist=16, metric="l2") as index:
        queries = clustered(5, offset=300.0, seed=2)
        probes, coarse = index.quantize(queries, 4)
        tier = DeviceTier(index, "cpu", 0, budget_bytes=16 << 20, wanted_bytes=16 << 20)
        store = ResidencyStore(index.nlist, lambda _d, pages: tier.arena.pages.free(pages))
        tier.load(range(16), store).result()
        with store.lease() as residency:
            distances, ids = tier.scanner(residency).scan(queries, probes, coarse, 10)
        tier.close()
        check_answer(index, queries, probes, 10, distances, ids)


@pytest.mark.parametrize("kind", [DeviceTier, ShardTier])
def test_probing_an_absent_list_on_a_device_is_refused(index_of, kind):
    index = index_of(("flat", "l2"))
    tier = kind(index, "cpu", 0, budget_bytes=16 << 20, wanted_bytes=16 << 20)
    owner = tier.pages
    store = ResidencyStore(index.nlist, lambda _d, pages: owner.free(pages))
    tier.load([1], store).result()
    with store.lease() as residency, pytest.raises(InvalidInputError, match="list 2"):
        tier.scanner(residency).scan(np.zeros((1, DIM), np.float32), np.array([[2]]), np.zeros((1, 1), np.float32), 1)
    tier.close()
