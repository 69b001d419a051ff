"""A build holds every vector once, in the list of its nearest centroid, and refuses bad input by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridindex.errors import DuplicateIdError, InvalidInputError
from hybridindex.index import IVFIndex, build, open_index, remove_replaced
from hybridindex.index.build import default_nlist, default_nprobe
from tests.conftest import clustered_vectors
from tests.examples import examples

CODECS = ["flat", "fp16", "bf16", "sq8", "pq", "pqfs", "pq4", "pqfs16"]
METRICS = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
X = clustered_vectors(600, 16)


def all_ids(index: IVFIndex) -> np.ndarray:
    return np.concatenate([index.list_ids(list_id) for list_id in range(index.nlist)])


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("codec", CODECS)
def test_search_equals_faiss_with_the_same_model(make_index: Callable[..., IVFIndex], codec: str, metric: str) -> None:
    index = make_index(codec, metric)
    plain = faiss.deserialize_index(np.array(index.mapped_model()))
    if codec.startswith("pq") and not codec.startswith("pqfs"):
        plain.use_precomputed_table = -1  # as in an open index of our own
        plain.precompute_table()
    plain.add_with_ids(X, np.arange(600) * 3 + 7)
    plain.nprobe = index.open_faiss().nprobe = 5
    queries = X[::20] + np.float32(0.05)
    want_distances, want_ids = plain.search(queries, 9)
    probes, coarse = index.quantize(index.transform(queries), 5)
    distances, ids = index.open_faiss().search_preassigned(queries, 9, probes, coarse)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(distances, want_distances)
    np.testing.assert_array_equal(np.sort(all_ids(index)), np.arange(600) * 3 + 7)


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 120),
    dim=st.integers(1, 9),
    chunk=st.integers(1, 50),
    codec=st.sampled_from(["flat", "fp16", "sq8", "pq1", "pqfs"]),
    metric=st.sampled_from(["ip", "l2"]),
    data=st.data(),
)
def test_any_shape_and_any_chunking_gives_the_same_index(
    tmp_path_factory: pytest.TempPathFactory, n: int, dim: int, chunk: int, codec: str, metric: Any, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any")
    nlist = data.draw(st.integers(1, min(n, 9)))
    x = clustered_vectors(n, dim, seed=n)
    ids = np.random.default_rng(n).permutation(5 * n)[:n]
    chunks = [(x[i : i + chunk], ids[i : i + chunk]) for i in range(0, n, chunk)]
    options: dict[str, Any] = {"nlist": nlist, "metric": metric, "codec": codec}
    with build(x, path / "a", ids=ids, **options) as whole, build(iter(chunks), path / "b", **options) as parts:
        assert whole.fingerprint == parts.fingerprint
        assert whole.count == n == int(whole.list_sizes.sum())
        np.testing.assert_array_equal(np.sort(all_ids(whole)), np.sort(ids))
        if codec == "flat":
            row = {int(i): r for r, i in enumerate(ids)}
            for list_id in range(nlist):
                rows = [row[int(i)] for i in whole.list_ids(list_id)]
                np.testing.assert_array_equal(whole.decode_list(list_id), x[rows])
                assert rows == sorted(rows), "a list keeps the order of the input"


def test_sources_are_equivalent(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(X))
    sources: list[Any] = [
        X,
        np.load(tmp_path / "x.npy", mmap_mode="r"),
        tmp_path / "x.npy",
        str(tmp_path / "fortran.npy"),
        np.repeat(X, 2, axis=0)[::2],
        [X[:100], X[100:100], X[100:]],
        (X[i : i + 7] for i in range(0, 600, 7)),
    ]
    prints = set()
    for number, source in enumerate(sources):
        with build(source, tmp_path / str(number), nlist=8) as index:
            prints.add(index.fingerprint)
            np.testing.assert_array_equal(np.sort(all_ids(index)), np.arange(600))
    assert len(prints) == 1


def test_seed_decides(tmp_path: Path) -> None:
    prints = [
        build(X, tmp_path / str(number), nlist=8, seed=seed, train_size=100).fingerprint
        for number, seed in enumerate((1, 1, 2))
    ]
    assert prints[0] == prints[1] != prints[2]


def test_small_budget_gives_the_same_lists_as_a_large_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"nlist": 8, "train_size": 200, "codec": "sq8"}
    x = clustered_vectors(5000, 64)
    small = build(x, tmp_path / "s", memory_budget_bytes=50 << 20, **options)
    large = build(x, tmp_path / "l", memory_budget_bytes=1 << 30, **options)
    assert small.fingerprint == large.fingerprint


def test_normalize_makes_cosine_and_is_kept(make_index: Callable[..., IVFIndex]) -> None:
    index = make_index(normalize=True)
    assert index.manifest.normalized
    decoded = np.concatenate([index.decode_list(list_id) for list_id in range(index.nlist)])
    np.testing.assert_allclose(np.linalg.norm(decoded, axis=1), 1, rtol=1e-5)
    queries = 50 * X[:5]
    np.testing.assert_allclose(np.linalg.norm(index.transform(queries), axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(queries, 50 * X[:5])


def test_inner_product_centroids_have_length_one_as_in_faiss(make_index: Callable[..., IVFIndex]) -> None:
    np.testing.assert_allclose(np.linalg.norm(make_index("flat", "ip").centroids, axis=1), 1, rtol=1e-4)
    assert not np.allclose(np.linalg.norm(make_index("flat", "l2").centroids, axis=1), 1, rtol=1e-4)


def test_rebuild_replaces_and_open_readers_keep_theirs(make_index: Callable[..., IVFIndex], tmp_path: Path) -> None:
    old = make_index(path=tmp_path / "i")
    before = old.decode_list(0)
    new = make_index("sq8", path=tmp_path / "i", n=500, replace=True)
    assert (old.generation, new.generation, new.count) == (1, 2, 500)
    kept = [".lock", ".log.lock", "CURRENT", "PREVIOUS", "gen-000001", "gen-000002"]
    assert sorted(p.name for p in (tmp_path / "i").iterdir()) == kept
    assert remove_replaced(tmp_path / "i") == [1]
    np.testing.assert_array_equal(old.decode_list(0), before)
    assert old.mapped_model().nbytes == old.manifest.files["model.faiss"].size


def test_defaults() -> None:
    assert default_nlist(1) == 1
    assert default_nlist(1_000_000) == 4000
    assert default_nlist(10**10) == 65_536
    assert all(default_nlist(n) <= n for n in range(1, 2000))
    assert (default_nprobe(1), default_nprobe(16), default_nprobe(1024)) == (1, 1, 64)


def test_progress_tells_every_stage_to_its_end(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int | None]] = {}

    def progress(stage: str, done: int, total: int | None) -> None:
        seen[stage] = (done, total)

    build(iter([X[:300], X[300:]]), tmp_path / "i", nlist=8, codec="pqfs", progress=progress)
    assert list(seen) == ["spool", "train", "assign", "encode", "pack", "checksum"]
    assert seen["spool"] == (600, None)
    assert all(done == total for stage, (done, total) in seen.items() if stage != "spool")


def _broken(value: float, row: int) -> np.ndarray:
    x = X.copy()
    x[row, 3] = value
    return x


def _chunks(*chunks: Any) -> Iterator[Any]:
    yield from chunks


BAD_VECTORS: list[tuple[Any, str]] = [
    (X.astype(">f4"), "dtype >f4; expected float32, float16, bfloat16"),
    (X.astype(bool), "dtype bool"),
    (X.astype(np.int32), "dtype int32"),
    (X[0], "two dimensions"),
    (X[None], "two dimensions"),
    (X[:, :0], "dim 0"),
    (np.zeros((2, 4097), np.float32), "dim 4097; expected 1 to 4096"),
    (_broken(np.nan, 77), r"vectors\[77\] holds NaN"),
    (_broken(np.inf, 599), r"vectors\[599\] holds NaN"),
    (_broken(-np.inf, 0), r"vectors\[0\] holds NaN"),
    (X[:5], "nlist is 8 but there are 5 vectors"),
    (X[:0], "vectors hold no rows; expected 1 at least"),
    (42, "vectors is a int"),
    (None, "vectors is a NoneType"),
    ("/nowhere/x.npy", "cannot be read"),
    (X.tolist(), "chunk 0 is a list"),
    (_chunks(), "no rows"),
    (_chunks(X, X[:, :4]), "chunk 1 has dim 4; expected 16"),
    (_chunks(X, _broken(np.nan, 1)), r"vectors\[601\]"),
    (_chunks(X, (X, np.arange(600))), "chunk 1: ids must come with every chunk or with none"),
    (_chunks((X, np.arange(600), 3)), "tuple of 3"),
    (_chunks((X, np.arange(599))), "shape"),
    (_chunks((X, None)), "chunk 0: its ids are None"),
    (_broken(1e25, 77), r"vectors\[77\] has length 1e\+25; expected at most 1.58e\+18"),
    (_broken(-1e25, 77), r"vectors\[77\] has length"),
    (_chunks(X, _broken(1.6e18, 1)), r"vectors\[601\] has length"),
    (X * np.float32(1e19), r"vectors\[0\] has length"),
    ("a\0b.npy", "holds a null character"),
    ("a\udce9.npy", r"'a\\udce9.npy' is not UTF-8"),
]


@pytest.mark.parametrize(("vectors", "message"), BAD_VECTORS, ids=[str(i) for i in range(len(BAD_VECTORS))])
def test_bad_vectors_are_refused_and_leave_nothing(tmp_path: Path, vectors: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(vectors, tmp_path / "i", nlist=8)
    assert list(tmp_path.iterdir()) == []


BAD_IDS: list[tuple[Any, str]] = [
    (np.arange(600) - 1, r"ids\[0\] is -1"),
    (np.arange(599), "shape"),
    (np.arange(600.0), "dtype float64"),
    (np.arange(600).astype(np.uint64), "dtype uint64"),
    (np.zeros((600, 1), np.int64), "shape"),
    ([[1], [1, 2]], "ids is not an array of integers"),
]


@pytest.mark.parametrize(("ids", "message"), BAD_IDS, ids=[str(i) for i in range(len(BAD_IDS))])
def test_bad_ids_are_refused(tmp_path: Path, ids: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(X, tmp_path / "i", nlist=8, ids=ids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_duplicate_id_is_named(tmp_path: Path, order: str) -> None:
    ids = np.arange(600) + 1000
    ids[300] = 1299
    if order == "shuffled":
        np.random.default_rng(0).shuffle(ids)
    with pytest.raises(DuplicateIdError, match=r"1299 more than once \(1 of 600"):
        build(X, tmp_path / "i", nlist=8, ids=ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nlist": 0}, "nlist is 0"),
        ({"nlist": -3}, "nlist is -3"),
        ({"nlist": 2.5}, "nlist is 2.5"),
        ({"nlist": True}, "nlist is True"),
        ({"nprobe": 0}, "nprobe is 0; expected 1..8"),
        ({"nprobe": 9}, "nprobe is 9; expected 1..8"),
        ({"metric": "cosine"}, "metric is 'cosine'"),
        ({"metric": "l2", "normalize": True}, "normalize=True with metric 'l2'"),
        ({"codec": "pq5"}, "codec is 'pq5'; M must divide dim 16"),
        ({"codec": "zip"}, "codec is 'zip'"),
        ({"codec": ["flat"]}, r"codec is \['flat'\]"),
        ({"seed": None}, "seed is None; expected an integer"),
        ({"memory_budget_bytes": None}, "memory_budget_bytes is None; expected an integer"),
        ({"seed": np.float64(1)}, "seed is"),
        ({"memory_budget_bytes": 1000}, "memory_budget_bytes is 1000; nlist 8 of dim 16 needs"),
        ({"train_size": 0}, "train_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31}, "seed is 2147483648; expected at most"),
    ],
)
def test_bad_options_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build(X, tmp_path / "i", **{"nlist": 8, **options})
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInputError, match="is a file"):
        build(X, tmp_path / "file", nlist=8)
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "thesis.tex").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"thesis\.tex"):
        build(X, tmp_path / "dir", nlist=8)
    assert (tmp_path / "dir" / "thesis.tex").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert build(X, tmp_path / "empty", nlist=8).generation == 1
    assert open_index(tmp_path / "empty").count == 600


@pytest.mark.parametrize("name", ["x.npy", "objects.npy", "empty.npy"])
def test_a_file_that_is_no_matrix_of_floats_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.npy").write_bytes(b"not numpy")
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match=name):
        build(tmp_path / name, tmp_path / "i", nlist=8)


def test_numpy_integers_are_options_as_good_as_others(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"nlist": 8, "nprobe": 3, "train_size": 200, "seed": 5, "memory_budget_bytes": 1 << 28}
    with build(X, tmp_path / "a", **plain) as index:
        same = build(X, tmp_path / "b", **{name: np.int64(value) for name, value in plain.items()})
        assert (same.fingerprint, same.nprobe) == (index.fingerprint, 3)
        assert same.manifest.notes == index.manifest.notes


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("codec", ["flat", "bf16", "sq8", "pq", "pqfs"])
def test_the_longest_allowed_vectors_are_built_and_searched(
    make_index: Callable[..., IVFIndex], codec: str, metric: str
) -> None:
    # Longer ones would end the process inside faiss.
    x = X * (np.float32(1.57e18) / np.linalg.norm(X, axis=1, keepdims=True))
    index = make_index(codec, metric, vectors=x)
    probes, coarse = index.quantize(index.transform(index.check_queries(-x[:5])), 12)
    index.open_faiss().nprobe = 12
    distances, ids = index.open_faiss().search_preassigned(-x[:5], 600, probes, coarse)
    assert np.isfinite(distances).all()
    assert (ids >= 0).all()


def test_fp16_refuses_what_it_cannot_hold(make_index: Callable[..., IVFIndex]) -> None:
    for value in (65505.0, -65505.0):
        with pytest.raises(InvalidInputError, match=r"vectors\[599\] holds 6\.55e\+04; the codec holds up to 65504"):
            make_index("fp16", vectors=_broken(value, 599))
    assert make_index("fp16", vectors=_broken(65504.0, 599)).count == 600
    assert make_index("fp16", vectors=_broken(1e6, 599), normalize=True).count == 600
    assert make_index("bf16", vectors=_broken(1e6, 599)).count == 600


def test_pq_keeps_its_digits_far_from_the_origin(make_index: Callable[..., IVFIndex]) -> None:
    rng = np.random.default_rng(0)
    x, queries = (rng.normal(1000, 1, (n, 8)).astype(np.float32) for n in (2000, 20))
    index = make_index("pq", "l2", vectors=x, nlist=16, ids=np.arange(2000))
    decoded = np.empty((2000, 8))
    for list_id in range(16):
        decoded[index.list_ids(list_id)] = index.decode_list(list_id)
    probes, coarse = index.quantize(queries, 16)
    index.open_faiss().nprobe = 16
    distances, ids = index.open_faiss().search_preassigned(queries, 10, probes, coarse)
    exact = ((decoded[ids] - queries[:, None]) ** 2).sum(2)
    assert (np.abs(distances - exact) <= 1e-4 * (1 + exact)).all()
