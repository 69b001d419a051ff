"""Which coarse quantizers are ours, that a query gets the same in every batch there, and that a model alone agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest

from hybridindex.index import IVFIndex, coarse, from_faiss
from hybridindex.index.coarse import CoarseModel, CoarseQuantizer
from tests.conftest import clustered_vectors

X = clustered_vectors(3000, 24)
QUERIES = clustered_vectors(300, 24, seed=1)


def imported(tmp_path: Path, factory: str, metric: str = "ip") -> IVFIndex:
    index = faiss.index_factory(24, factory, faiss.METRIC_INNER_PRODUCT if metric == "ip" else faiss.METRIC_L2)
    index.train(X)
    index.add(X)
    faiss.write_index(index, str(tmp_path / "a.faiss"))
    return from_faiss(tmp_path / "a.faiss", tmp_path / "imported")


def ours(ivf: object) -> bool:
    return CoarseQuantizer(ivf)._own is not None


def check_every_batch(index: IVFIndex, nprobe: int) -> None:
    assert ours(index.open_faiss())
    x = index.transform(QUERIES)
    lists, distances = index.quantize(x, nprobe)
    assert (lists.dtype, distances.dtype, lists.shape) == (np.int64, np.float32, (300, nprobe))
    centroids = index.centroids.astype(np.float64)
    want = (
        -x.astype(np.float64) @ centroids.T
        if index.metric == "ip"
        else ((x[:, None].astype(np.float64) - centroids) ** 2).sum(axis=2)
    )
    nearest = np.sort(want, axis=1)[:, :nprobe]
    scale = np.abs(want).max()
    np.testing.assert_allclose(np.take_along_axis(want, lists, axis=1), nearest, atol=1e-6 * scale)
    np.testing.assert_allclose(-distances if index.metric == "ip" else distances, nearest, atol=1e-6 * scale)
    order = np.random.default_rng(0).permutation(300)
    for size in (1, 2, 19, 20, 21, 64, 150):
        for rows in np.array_split(order, range(size, 300, size)):
            found = index.quantize(x[rows], nprobe)
            np.testing.assert_array_equal(found[0], lists[rows])
            np.testing.assert_array_equal(found[1].view(np.int32), distances[rows].view(np.int32))
    many = index.quantize(np.tile(x, (20, 1)), nprobe)
    np.testing.assert_array_equal(many[0], np.tile(lists, (20, 1)))
    np.testing.assert_array_equal(many[1], np.tile(distances, (20, 1)))
    spread = index.quantize(np.repeat(x, 2, axis=1)[:, ::2], nprobe)  # not contiguous
    np.testing.assert_array_equal(spread[0], lists)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("nprobe", [1, 7, 60])
def test_a_query_probes_the_same_lists_in_every_batch(
    make_index: Callable[..., IVFIndex], metric: str, nprobe: int
) -> None:
    check_every_batch(make_index("sq8", metric, vectors=X, nlist=60), nprobe)


@pytest.mark.parametrize("factory", ["IVF60,PQ8", "PCA20,IVF60,Flat", "OPQ8,IVF60,PQ8x4fs"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_imported_flat_quantizers_are_ours(tmp_path: Path, factory: str, metric: str) -> None:
    with imported(tmp_path, factory, metric) as index:
        check_every_batch(index, 9)


def test_other_quantizers_stay_with_faiss(tmp_path: Path) -> None:
    with imported(tmp_path, "IVF60_HNSW8,Flat") as index:
        assert not ours(index.open_faiss())
        lists, distances = index.quantize(QUERIES, 8)
        want = index.open_faiss().quantizer.search(QUERIES, 8)
        np.testing.assert_array_equal(lists, want[1])
        np.testing.assert_array_equal(distances, want[0])
    for quantizer, own in [
        (faiss.IndexFlatL2(4), True),
        (faiss.IndexFlatIP(4), True),
        (faiss.IndexFlat(4, faiss.METRIC_L2), True),
        (faiss.IndexFlat(4, faiss.METRIC_L1), False),
        (faiss.IndexScalarQuantizer(4, faiss.ScalarQuantizer.QT_fp16), False),
        (faiss.IndexHNSWFlat(4, 8), False),
        (faiss.IndexRefineFlat(faiss.IndexFlatL2(4)), False),
    ]:
        quantizer.add(np.eye(4, dtype=np.float32))
        assert ours(faiss.IndexIVFFlat(quantizer, 4, 4)) is own
        assert not ours(faiss.IndexIVFFlat(quantizer, 4, 5))  # one centroid is missing


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_faiss_does_it_without_the_extension(
    make_index: Callable[..., IVFIndex], monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    index = make_index("flat", metric, vectors=np.round(X), nlist=60)
    monkeypatch.setattr(coarse, "native", None)
    alone = CoarseQuantizer(index.open_faiss())
    assert not ours(index.open_faiss())
    for n in (1, 30):
        lists, distances = alone.quantize(QUERIES[:n], 6)
        expected = index.quantize(QUERIES[:n], 6)
        np.testing.assert_array_equal(lists, expected[0])
        np.testing.assert_allclose(distances, expected[1], rtol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_model_alone_chooses_the_same_lists(make_index: Callable[..., IVFIndex], normalize: bool) -> None:
    index = make_index("flat", "ip", vectors=X, nlist=60, normalize=normalize)
    model = CoarseModel.from_bytes(index.mapped_model(), fingerprint=index.fingerprint)
    for n in (1, 40):
        x = model.transform(QUERIES[:n])
        np.testing.assert_array_equal(x, index.transform(QUERIES[:n]))
        for found, expected in zip(model.quantize(x, 6), index.quantize(x, 6), strict=True):
            np.testing.assert_array_equal(found, expected)
