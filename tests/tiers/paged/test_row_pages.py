"""Rows in pages beside codes: their exact distances are the host's, to the bit."""

from __future__ import annotations

from contextlib import closing, contextmanager
from functools import partial

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, OutOfBudgetError
from hybridindex.index import from_faiss
from hybridindex.tiers.contract.residency import ResidencyStore
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.tiers.paged.codes import native_row_pages, torch_row_pages
from hybridindex.tiers.paged.codes.native_row_pages import NativeRowPages
from hybridindex.tiers.paged.codes.torch_row_pages import TorchRowPages
from hybridindex.tiers.paged.device_tier import DeviceTier, PagedMemory
from tests.clustered import clustered, small_index
from tests.coded import with_codes

#: Codec, metric and dimensions; rows of one, of less and of more than a page of 512 bytes.
CASES = [
    ("flat", "ip", 128),
    ("flat", "l2", 24),
    ("flat", "ip", 3),
    ("flat", "l2", 200),
    ("fp16", "l2", 40),
    ("fp16", "ip", 17),
    ("bf16", "ip", 33),
    ("sq8", "l2", 24),
    ("sq8", "ip", 17),
    ("sq8", "ip", 1),
]
KINDS = pytest.mark.parametrize("kind", [NativeRowPages, TorchRowPages])
N = 700


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def view(request, tmp_path_factory):
    codec, metric, dim = request.param
    made = small_index(tmp_path_factory.mktemp("idx") / "i", codec=codec, metric=metric, dim=dim, n=N, nlist=12)
    with with_codes(made) as index:
        yield index.by_codes()


@contextmanager
def resident(view, lists, *, scratch_bytes=1 << 20):
    """(kind -> the rows of ``lists``), in pages of one block of codes that lie anywhere, behind all codes."""
    tier = DeviceTier(view, "cpu", 0, budget_bytes=8 << 20, wanted_bytes=4 << 20, memory=PagedMemory(page_bytes=512))
    with closing(tier):
        held = [tier.arena.pages.allocate(1) for _ in range(tier.arena.pages.n_pages)]
        for page in held[::2]:
            tier.arena.pages.free(page)
        store = ResidencyStore(view.n_pieces, lambda _d, pages: tier.arena.pages.free(pages))
        report = tier.load([*range(view.nlist), *(view.nlist + np.array(lists))], store).result()
        assert not report.skipped
        with store.lease() as residency:
            assert any((np.diff(p) != 1).any() for p in residency.list_pages if p is not None)
            yield lambda kind: kind(view, tier.arena, residency, 0, scratch_bytes)
        store.check_invariants()
        tier.check_invariants()


def positions_of(view, lists, n, r, seed=0):
    """(n, r) rows of ``lists``, some of them -1."""
    rng = np.random.default_rng(seed)
    every = np.concatenate([(li << 32) + np.arange(view.list_sizes[li]) for li in lists])
    positions = every[rng.integers(len(every), size=(n, r))]
    positions[rng.random((n, r)) < 0.2] = -1
    return positions


def alone(host, queries, positions):
    """(n, r) distances that the host computes, one candidate of a query at a time."""
    return np.hstack([host.reranker.rerank(queries, column[:, None], 1)[0] for column in positions.T])


@KINDS
@pytest.mark.parametrize("scratch_bytes", [60_000, 1 << 20])
def test_a_device_computes_what_the_host_computes(view, kind, scratch_bytes):
    lists, queries = np.flatnonzero(view.list_sizes)[::2], view.transform(clustered(20, view.dim, seed=3))
    queries[4] = 0
    positions = positions_of(view, lists, len(queries), 50)
    positions[7] = -1
    with (
        resident(view, lists, scratch_bytes=scratch_bytes) as rows,
        closing(HostRabitqScanner(view, view.codes, threads=1)) as host,
    ):
        ours = rows(kind).distances(queries, positions)
        right = alone(host, queries, positions)
    assert (np.isnan(ours) == (positions < 0)).all()
    assert (ours.view(np.int32) == right.view(np.int32))[positions >= 0].all()


@pytest.mark.parametrize("kernels", native_row_pages.native.kernels_here())
def test_torch_adds_in_the_order_of_every_set_of_kernels(view, kernels, monkeypatch):
    """Of this CPU: a host may have any of them."""
    native, order = native_row_pages.native, torch_row_pages.sum_order(kernels)
    monkeypatch.setattr(torch_row_pages, "sum_order", lambda: order)
    monkeypatch.setattr(native, "distances_in_pages", partial(native.distances_in_pages, kernels=kernels))
    queries = view.transform(clustered(20, view.dim, seed=3))
    positions = positions_of(view, range(0, 12, 2), 20, 30)
    with resident(view, range(0, 12, 2)) as rows:
        theirs, ours = (rows(kind).distances(queries, positions) for kind in (NativeRowPages, TorchRowPages))
    assert (ours.view(np.int32) == theirs.view(np.int32))[positions >= 0].all()


@KINDS
def test_residual_rows_are_compared_with_their_centroid(tmp_path, kind):
    import faiss

    data = clustered(N, 20, seed=1)
    ivf = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatL2(20), 20, 8, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2, True
    )
    ivf.train(data)
    ivf.add(data)
    with with_codes(from_faiss(ivf, tmp_path / "i")) as index:
        view, queries = index.by_codes(), clustered(9, 20, seed=2)
        assert index.device_codec().by_residual
        positions = positions_of(view, range(8), 9, 30)
        with resident(view, range(8)) as rows, closing(HostRabitqScanner(view, view.codes, threads=1)) as host:
            ours = rows(kind).distances(queries, positions)
            right = alone(host, queries, positions)
        assert (ours.view(np.int32) == right.view(np.int32))[positions >= 0].all()


@KINDS
def test_what_is_no_number_or_too_far_is_no_candidate(tmp_path, kind):
    with with_codes(small_index(tmp_path / "i", metric="l2", n=N, nlist=8)) as index:
        view = index.by_codes()
        queries = np.full((1, index.dim), 2e19, np.float32)
        with resident(view, range(8)) as rows:
            assert np.isnan(rows(kind).distances(queries, positions_of(view, range(8), 1, 20))).all()


@KINDS
def test_rows_that_are_not_there_are_refused(view, kind):
    queries = view.transform(clustered(1, view.dim))
    there = int(np.argmax(view.list_sizes))
    other = (there + 1) % view.nlist
    with resident(view, [there]) as rows:
        for position in (other << 32, (there << 32) + int(view.list_sizes[there]), view.nlist << 32):
            with pytest.raises(InvalidInputError, match="positions hold rows that device 0 does not have"):
                rows(kind).distances(queries, np.array([[position]]))
    with (
        resident(view, [there], scratch_bytes=16) as rows,
        pytest.raises(OutOfBudgetError, match="scratch of 16 bytes"),
    ):
        rows(kind).distances(queries, np.array([[there << 32]]))


def test_the_extension_refuses_what_lies_outside_the_arena(view):
    native = native_row_pages.native
    codec = view.rows.device_codec()
    one = np.array([1], np.int64)
    queries, out = np.zeros((1, codec.dim), np.float32), np.empty((1, 1), np.float32)
    none = np.empty((0, codec.dim), np.float32)

    def compare(position, *, pages=(0,), first=0, count=1):
        native.distances_in_pages(
            np.zeros((1, 4096), np.uint8), codec.kind, codec.scale, codec.offset, none, one,
            np.array([first], np.int64), np.array([count], np.int32), np.array(pages, np.int32), queries,
            np.array([[position]], np.int64), True, out,
        )  # fmt: skip

    compare(0)
    compare(-1)
    assert np.isnan(out).all()
    for position, wrong in ((1, {}), (1 << 32, {}), (-2, {}), (0, {"pages": (1,)}), (0, {"pages": (-1,)}),
                            (0, {"first": 1}), (0, {"first": -1}), (0, {"count": 0})):  # fmt: skip
        with pytest.raises(IndexError, match="is no row in these pages"):
            compare(position, **wrong)


def test_what_the_host_does_not_show_is_left_to_it(monkeypatch):
    assert torch_row_pages.sum_order() is not None
    torch_row_pages.sum_order.cache_clear()
    try:
        monkeypatch.setattr(torch_row_pages, "native", None)
        assert not TorchRowPages.supports(None)
    finally:
        monkeypatch.undo()
        torch_row_pages.sum_order.cache_clear()
