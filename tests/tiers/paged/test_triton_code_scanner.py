"""The Triton scan of codes answers what the host's scan of codes does, to the bit: the same estimates and positions."""

from __future__ import annotations

import itertools
from contextlib import closing

import numpy as np
import pytest

from hybridindex.config import MAX_K
from hybridindex.errors import InvalidInputError, OutOfBudgetError
from hybridindex.index import build
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.paged.codes import triton_code_scanner
from hybridindex.tiers.paged.codes.native_code_scanner import NativeCodeScanner
from hybridindex.tiers.paged.codes.torch_code_scanner import TorchCodeScanner
from hybridindex.tiers.paged.codes.triton_code_scanner import CodeWorkspace, TritonCodeScanner
from hybridindex.tiers.paged.device_tier import DeviceTier
from hybridindex.tiers.paged.tables.scan_tables import GROUP, Selection
from hybridindex.tiers.paged.triton_scanner import TritonScanner
from tests.clustered import clustered
from tests.coded import with_codes
from tests.tiers.paged.scanning import scanning
from tests.tiers.triton_here import require_triton

METRICS = ("ip", "l2")


@pytest.fixture
def coded(tmp_path):
    """``coded(bits, metric, **options)``: codes of 100 vectors of 20 dimensions in 3 lists, and the host's scanner."""
    made = []

    def factory(bits=1, metric="ip", *, n=100, dim=20, nlist=3, vectors=None):
        vectors = clustered(n, dim, n_centers=8, seed=1) if vectors is None else vectors
        index = with_codes(
            build(vectors, tmp_path / str(len(made)), nlist=nlist, metric=metric, codec="flat"), bits=bits
        )
        host = HostRabitqScanner(index, index.rabitq, threads=1)
        made.append((host, index))
        return index.by_codes(), host

    yield factory
    for host, index in made:
        host.close()
        index.close()


def everything(index, n, *, seed=3):
    """n queries that probe every list in an order of their own, but for a few."""
    rng = np.random.default_rng(seed)
    probes = np.stack([rng.permutation(index.nlist) for _ in range(n)])
    probes[rng.random(probes.shape) < 0.15] = -1
    return clustered(n, index.scan_dim, n_centers=8, seed=seed), probes


def compare(scanner, host, queries, probes, k):
    products = host.centre_products(queries, probes)
    found = scanner.scan(queries, probes, products, k)
    expected = host.scan(queries, probes, products, k)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])
    return found


def scanning_codes(index, device, **options):
    """On pages of 32 rows."""
    return scanning(index, device, kind=TritonCodeScanner, page_bytes=32 * index.code_size, **options)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("heavy", [False, True])
def test_equal_to_the_host(coded, device, bits, metric, heavy, monkeypatch):
    monkeypatch.setitem(triton_code_scanner._HEAVY_FROM, bits, 1 if heavy else 99)
    index, host = coded(bits, metric)
    with scanning_codes(index, device) as scanner:
        compare(scanner, host, *everything(index, 2), 25)


@pytest.mark.parametrize(("dim", "bits"), [(1, 1), (17, 2), (64, 4), (100, 1), (256, 2), (384, 1)])
@pytest.mark.parametrize("heavy", [False, True])
def test_any_number_of_dimensions(coded, device, dim, bits, heavy, monkeypatch):
    monkeypatch.setitem(triton_code_scanner._HEAVY_FROM, bits, 1 if heavy else 99)
    index, host = coded(bits, "l2" if dim % 2 else "ip", n=70, dim=dim, nlist=2)
    with scanning_codes(index, device) as scanner:
        compare(scanner, host, *everything(index, 2), 40)


@pytest.mark.parametrize("n", [1, 17, 70])
def test_batches_of_lists_with_few_and_many_queries(coded, device, n):
    index, host = coded(1, "ip")
    queries, probes = everything(index, n)
    # One list has few queries.
    probes[2:][probes[2:] == 0] = -1
    with scanning(index, device, kind=TritonCodeScanner, page_bytes=256 * index.code_size, scatter=False) as scanner:
        together = compare(scanner, host, queries, probes, 30)
        alone = compare(scanner, host, queries[-1:], probes[-1:], 30)
    np.testing.assert_array_equal(alone[1][0], together[1][-1])


@pytest.mark.parametrize("k", [1, 16, 17, 400])
def test_k_up_to_more_than_there_is(coded, device, k):
    index, host = coded(2, "l2")
    with scanning_codes(index, device) as scanner:
        estimates, positions = compare(scanner, host, *everything(index, 2), k)
    assert (positions[:, -1] == -1).all() == np.isinf(estimates[:, -1]).all() == (k > 100)


def test_many_levels_of_selection(coded, device):
    index, host = coded(1, "ip", n=9000, dim=2, nlist=2)
    with scanning(index, device, kind=TritonCodeScanner, page_bytes=16384) as scanner:
        compare(scanner, host, clustered(1, 2, seed=4), np.array([[1, 0]]), 400)


@pytest.mark.parametrize("k", [1, 75])
def test_equal_estimates_are_taken_by_position_whatever_the_order_of_the_probes(coded, device, k):
    index, host = coded(n=160, nlist=4)
    probes = np.array([[3, 2, 1, 0], [1, 3, 0, 2], [0, 1, 2, 3]])
    with scanning_codes(index, device) as scanner:
        estimates, positions = compare(scanner, host, np.zeros((3, 20), np.float32), probes, k)
    assert (estimates == 0).all()
    assert positions[0, 0] == 0


def test_empty_lists_and_queries_without_probes(coded, device):
    index, host = coded(1, "ip", vectors=np.repeat(clustered(4, 20, seed=1), 30, axis=0), nlist=6)
    assert (index.list_sizes == 0).any()
    probes = np.array([[-1, -1, -1], [2, 1, 0], [-1, -1, -1], [5, -1, 3], [-1, 4, -1], [-1, -1, -1]])
    with scanning(index, device, kind=TritonCodeScanner, page_bytes=256 * index.code_size, scatter=False) as scanner:
        compare(scanner, host, clustered(6, 20, seed=2), probes, 4)
        compare(scanner, host, clustered(2, 20, seed=2), np.full((2, 2), -1), 4)
        compare(scanner, host, np.empty((0, 20), np.float32), np.empty((0, 2), np.int64), 4)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("heavy", [False, True])
def test_what_is_no_number_is_no_candidate(coded, device, heavy, monkeypatch):
    monkeypatch.setitem(triton_code_scanner._HEAVY_FROM, 1, 1 if heavy else 99)
    index, host = coded(n=60, nlist=1)
    queries, probes = clustered(1, 20, seed=2), np.zeros((1, 1), np.int64)
    with scanning_codes(index, device) as scanner:
        before = compare(scanner, host, queries, probes, 60)
        first = int(scanner._residency.list_pages[0][0])
        # f of the first block: 16 halves behind its only plane.
        scanner._arena.data[first, 64:96] = 0xFF
        estimates, positions = scanner.scan(queries, probes, host.centre_products(queries, probes), 60)
    left = before[1][0] >= 16
    assert positions[0].tolist() == [*before[1][0][left], *[-1] * 16]
    np.testing.assert_array_equal(estimates[0, :44], before[0][0][left])


@pytest.mark.parametrize(("scratch", "k"), [(5_000, 3), (9_100, 200)])
def test_a_tiny_scratch_is_scanned_in_tiles_with_the_same_answer(coded, device, scratch, k, monkeypatch):
    index, host = coded(1, "ip", n=150)
    tiles = []
    scan = CodeWorkspace.scan
    monkeypatch.setattr(CodeWorkspace, "scan", lambda self, *a: tiles.append(a[1]) or scan(self, *a))
    with scanning_codes(index, device, scratch=scratch) as scanner:
        compare(scanner, host, *everything(index, 5), k)
    assert len(tiles) > 2
    assert any(one.first_query + one.n_queries > other.first_query for one, other in itertools.pairwise(tiles)), (
        "no query was cut in two"
    )


def test_a_list_longer_than_the_scratch(coded, device):
    index, host = coded(1, "ip", n=600, dim=2, nlist=1)
    with scanning_codes(index, device, scratch=5_000) as scanner:
        compare(scanner, host, clustered(1, 2, seed=4), np.zeros((1, 1), np.int64), 40)


def test_a_list_of_several_groups_of_queries(coded, device):
    index, host = coded(4, "l2", n=60, nlist=2)
    with scanning_codes(index, device) as scanner:
        compare(scanner, host, *everything(index, 2 * GROUP + 3), 3)


def test_what_a_scan_of_codes_refuses(coded, device):
    index, _ = coded()
    queries, probes = everything(index, 1)
    products = np.zeros(probes.shape, np.float32)
    with scanning_codes(index, device, scratch=30_000) as scanner:
        with pytest.raises(OutOfBudgetError, match="too small for k 2048"):
            scanner.scan(queries, probes, products, 2048)
        with pytest.raises(InvalidInputError, match="filters need a scan of rows"):
            scanner.scan(queries, probes, products, 4, filter_ids=np.arange(3))


def test_more_candidates_than_a_program_holds_are_torch_s(coded, device, monkeypatch):
    monkeypatch.setattr(triton_code_scanner, "MAX_K", 20)
    index, host = coded()
    with scanning_codes(index, device) as scanner:
        monkeypatch.setattr(CodeWorkspace, "best", None)
        scan, waiting = TorchCodeScanner._scan_codes, []
        monkeypatch.setattr(
            TorchCodeScanner,
            "_scan_codes",
            lambda self, *a: waiting.append(scanner.workspace._lock.locked()) or scan(self, *a),
        )
        compare(scanner, host, *everything(index, 2), 21)
    assert waiting == [True]


def test_every_kernel_runs_before_the_first_query(coded, monkeypatch):
    require_triton("cpu")
    monkeypatch.setattr(TritonScanner, "unsupported", staticmethod(lambda _arena: ""))
    monkeypatch.setattr(NativeCodeScanner, "supports", staticmethod(lambda _arena: False))
    launched, launch, select = [], CodeWorkspace.launch, CodeWorkspace.select
    monkeypatch.setattr(
        CodeWorkspace,
        "launch",
        lambda self, *a: launched.append("light" if a[1].n_light else "heavy") or launch(self, *a),
    )
    monkeypatch.setattr(CodeWorkspace, "select", lambda self, *a: launched.append(a[2].kept) or select(self, *a))
    index, _ = coded()
    with closing(DeviceTier(index, "cpu", 0, budget_bytes=4 << 20, wanted_bytes=1 << 20)) as tier:
        assert launched[:4] == ["light", 16, "heavy", 16]
        assert set(launched[1::2]) == {Selection.of(k).kept for k in range(1, MAX_K + 1)}
        scanner = tier.scanner(ResidencyStore(index.nlist, lambda *_: None).current)
        assert (scanner.kernel, type(scanner)) == ("triton", TritonCodeScanner)
