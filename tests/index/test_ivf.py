"""The opened index: views, ids, queries, threads, closing."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
import pytest

from hybridindex.errors import InvalidInputError, MissingDependencyError, UnsupportedIndexError
from hybridindex.index import IVFIndex, require_faiss
from tests.conftest import clustered_vectors

X = clustered_vectors(600, 16)


def test_what_the_index_says_about_itself(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index("fp16", "l2", nprobe=3)
    assert (index.metric, index.codec, index.dim, index.scan_dim) == ("l2", "fp16", 16, 16)
    assert (index.nlist, index.count, index.nprobe, index.code_size, index.generation) == (12, 600, 3, 32, 1)
    assert index.list_sizes.sum() == 600
    np.testing.assert_array_equal(index.list_bytes, index.list_sizes * 32)
    assert index.centroids.shape == (12, 16)
    assert index.centroids is index.centroids
    assert index.open_faiss().nprobe == 3
    assert "fp16 l2 dim=16 nlist=12 count=600" in repr(index)


def test_views_are_read_only(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index()
    arrays = (
        index.list_codes(0),
        index.list_ids(0),
        index.centroids,
        index.list_sizes,
        index.list_bytes,
        index.extents(),
        index.mapped_lists(),
    )
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0


@pytest.mark.parametrize("codec", ["flat", "sq8", "pq", "pqfs", "pq1", "pqfs2"])
def test_ids_at_reads_many_lists_at_once(make_index: Callable[..., IVFIndex], codec: str) -> None:
    index = make_index(codec)
    lists = np.repeat(np.arange(12), index.list_sizes)
    positions = np.concatenate([np.arange(size) for size in index.list_sizes])
    want = np.concatenate([index.list_ids(list_id) for list_id in range(12)])
    shuffled = np.random.default_rng(0).permutation(600)
    np.testing.assert_array_equal(index.ids_at(lists[shuffled], positions[shuffled]), want[shuffled])
    assert index.ids_at(lists[:0], positions[:0]).shape == (0,)


def test_list_codes_are_where_the_extents_say(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index("sq8", dim=13)
    for list_id, (size, _, offset) in enumerate(index.extents().tolist()):
        raw = index.mapped_lists()[offset : offset + size * 13].reshape(size, 13)
        np.testing.assert_array_equal(index.list_codes(list_id), raw)
        assert index.list_codes(list_id).base is not None


def test_fast_scan_has_no_rows(make_index: Callable[..., IVFIndex]) -> None:
    with pytest.raises(UnsupportedIndexError, match="pqfs32"):
        make_index("pqfs").list_codes(0)


@pytest.mark.parametrize("list_id", [-1, 12])
def test_unknown_list_is_refused(make_index: Callable[..., IVFIndex], list_id: int) -> None:
    index = make_index()
    for read in (index.list_codes, index.list_ids, index.decode_list, index.stored_codes):
        with pytest.raises(InvalidInputError, match=f"list is {list_id}; expected 0 to 11"):
            read(list_id)


def test_queries_of_right_shape_pass_unchanged(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index()
    assert index.check_queries(X[:3]) is not None
    assert index.check_queries(X[0]).shape == (1, 16)
    assert index.check_queries(X[:0]).shape == (0, 16)
    strided = index.check_queries(X[::2])
    assert strided.flags.c_contiguous
    np.testing.assert_array_equal(strided, X[::2])
    assert index.transform(strided) is strided


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (X[:2].astype(np.float64), "dtype float64"),
        (X[:2].astype(np.int64), "dtype int64"),
        (X[:2, :15], r"shape \(2, 15\); expected \(n, 16\)"),
        (X[0, :3], r"shape \(3,\)"),
        (X[None, :2], "shape"),
        (np.float32(1), "expected a float32 numpy array"),
        (X[:2].tolist(), "queries is a list"),
        (None, "NoneType"),
        (np.where(np.arange(32).reshape(2, 16) == 20, np.nan, X[:2]).astype(np.float32), r"queries\[1\] holds NaN"),
        (np.full((1, 16), np.inf, np.float32), r"queries\[0\] holds NaN or infinity"),
        (np.full((1, 16), 1e19, np.float32), r"queries\[0\] has length 4e\+19; expected at most 1.58e\+18"),
        (X[:2] * np.float32([[1], [1e30]]), r"queries\[1\] has length"),
    ],
)
def test_bad_queries_are_refused(make_index: Callable[..., IVFIndex], queries: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make_index().check_queries(queries)


@pytest.mark.parametrize("nprobe", [0, -1, 13, True, 2.0, None])
def test_bad_nprobe_is_refused(make_index: Callable[..., IVFIndex], nprobe: Any) -> None:
    with pytest.raises(InvalidInputError, match="nprobe is"):
        make_index().quantize(X[:1], nprobe)


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_quantize_finds_the_nearest_centroids(make_index: Callable[..., IVFIndex], metric: str) -> None:
    index = make_index("flat", metric)
    probes, coarse = index.quantize(X[:40], 12)
    centroids, queries = index.centroids.astype(np.float64), X[:40].astype(np.float64)
    exact = queries @ centroids.T if metric == "ip" else ((queries[:, None] - centroids) ** 2).sum(2)
    np.testing.assert_allclose(coarse, np.take_along_axis(exact, probes, 1), rtol=1e-4, atol=1e-3)
    assert (np.diff(coarse, axis=1) * (-1 if metric == "ip" else 1) >= 0).all()
    assert (np.sort(probes, axis=1) == np.arange(12)).all()


def test_many_threads_read_one_index(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index("sq8")

    def work(seed: int) -> bool:
        queries = X[seed * 10 : seed * 10 + 10]
        probes = index.quantize(index.transform(queries), 1)[0]
        nearest = index.quantize(queries, 12)[0][:, 0]
        return bool(
            (probes[:, 0] == nearest).all() and len(index.decode_list(seed % 12)) == index.list_sizes[seed % 12]
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


def test_closed_index_says_so_and_what_it_gave_stays_valid(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index(normalize=True)
    scanner, codes = index.open_faiss(), index.list_codes(0)
    probes, coarse = index.quantize(index.transform(X[:4]), 12)
    index.close()
    index.close()
    uses: list[Callable[[], Any]] = [
        lambda: index.quantize(X[:1], 1),
        lambda: index.transform(X[:1]),
        lambda: index.list_ids(0),
        lambda: index.ids_at(np.zeros(1, np.int64), np.zeros(1, np.int64)),
        index.open_faiss,
        index.mapped_lists,
    ]
    for use in uses:
        with pytest.raises(InvalidInputError, match="was closed"):
            use()
    scanner.nprobe = 12
    _, ids = scanner.search_preassigned(X[:4], 1, probes, coarse)
    assert (ids >= 0).all()
    assert codes.sum() > 0


def test_empty_lists_are_searched_and_read(make_index: Callable[..., IVFIndex]) -> None:
    x = np.repeat(X[:3], 4, axis=0)
    for codec in ("flat", "pqfs", "sq8"):
        index = make_index(codec, vectors=x, nlist=12)
        assert (index.list_sizes == 0).any()
        empty = int(np.argmin(index.list_sizes))
        assert index.decode_list(empty).shape == (0, 16)
        assert index.list_ids(empty).shape == (0,)
        probes, coarse = index.quantize(x, 12)
        index.open_faiss().nprobe = 12
        _, ids = index.open_faiss().search_preassigned(x, 12, probes, coarse)
        assert (np.sort(ids, axis=1) == np.arange(12) * 3 + 7).all()


def test_importing_the_room_does_not_import_faiss() -> None:
    code = "import sys, hybridindex.index; assert 'faiss' not in sys.modules; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_faiss_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependencyError, match="pip install 'faiss-cpu"):
        require_faiss()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libgomp.so.1: cannot open shared object file", name="faiss._swigfaiss"),
        ImportError("cannot import name 'swigfaiss' from 'faiss'", name="faiss"),
        ModuleNotFoundError("No module named 'numpy'", name="numpy"),
        OSError("libcudart.so.12: cannot open shared object file"),
    ],
    ids=repr,
)
def test_a_faiss_that_does_not_load_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    theirs = builtins.__import__

    def imported(name: str, *rest: Any, **named: Any) -> Any:
        if name == "faiss":
            raise error
        return theirs(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", imported)
    with pytest.raises(MissingDependencyError) as caught:
        require_faiss()
    assert str(caught.value).startswith(f"faiss is installed, but does not load: {error}")
    assert "pip install" not in str(caught.value)


def test_faiss_index_with_transforms_is_the_whole(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index(normalize=True)
    whole = index.open_faiss_with_transforms()
    assert isinstance(whole, faiss.IndexPreTransform)
    assert whole.ntotal == 600
    distances, _ = whole.search(5 * X[:3], 1)
    assert (np.abs(distances) <= 1.0001).all()
