"""Any faiss IVF file imports, answers as faiss does, and goes back to an equal faiss file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridindex as hx
from hybridindex.errors import CorruptIndexError, HybridIndexError, InvalidInputError, UnsupportedIndexError
from hybridindex.index import IVFIndex, from_faiss, open_index, to_faiss
from hybridindex.index.faiss_model import load_model
from tests.conftest import clustered_vectors
from tests.examples import examples

X = clustered_vectors(700, 16)
QUERIES = X[::50] + np.float32(0.1)
METRICS = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
#: factory string -> codec name.
KINDS = {
    "IVF12,Flat": "flat",
    "IVF12,SQfp16": "fp16",
    "IVF12,SQbf16": "bf16",
    "IVF12,SQ8": "sq8",
    "IVF12,SQ4": "faiss:SQ(qtype=1)",
    "IVF12,PQ4x4": "faiss:IVFPQ",
    "IVF12,PQ4np": "pq4",
    "IVF12,PQ8x4fs": "pqfs8",
    "IVF12,PQ8x4fsr": "pqfs8",
    "IVF12,RaBitQ": "faiss:IVFRaBitQ",
    "IVF12,RaBitQfs": "faiss:IVFRaBitQFastScan",
    "IVF12,RQ2x4": "faiss:IVFResidualQuantizer",
    "IVF12,ITQ16,SH": "faiss:IVFSpectralHash",
    "IVF12_HNSW8,Flat": "flat",
    "IVF12_HNSW8,PQ8x4fs": "pqfs8",
    "OPQ4,IVF12,PQ4x4": "faiss:IVFPQ",
    "PCA8,IVF12,SQ8": "sq8",
    "RR16,L2norm,IVF12,Flat": "flat",
    "IDMap,IVF12,Flat": "flat",
    "IDMap,PCA8,IVF12,Flat": "flat",
    "PCA8,IDMap,IVF12,PQ8x4fs": "pqfs8",
}


def make_faiss(factory: str, metric: str = "l2", ids: Any = None, x: np.ndarray = X) -> Any:
    index = faiss.index_factory(16, factory, METRICS[metric])
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None:
        ivf.cp.min_points_per_centroid = 1
        pq = getattr(faiss.downcast_index(ivf), "pq", None)
        if pq is not None:
            pq.cp.min_points_per_centroid = 1
        ivf.nprobe = 5
    index.train(X)
    if len(x):
        index.add_with_ids(x, np.arange(len(x)) * 2 + 1 if ids is None else ids)
    return index


def search(index: IVFIndex, k: int = 10) -> tuple[np.ndarray, np.ndarray]:
    transformed = index.transform(index.check_queries(QUERIES))
    ivf = index.open_faiss()
    # Coarse distances are part of those of residual codecs: faiss's own, as ours may be rounded otherwise.
    coarse, probes = ivf.quantizer.search(transformed, index.nprobe)
    for found, expected in zip(index.quantize(transformed, index.nprobe), (probes, coarse), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    distances, ids = ivf.search_preassigned(transformed, k, probes, coarse)
    return distances, ids


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", KINDS)
def test_import_and_export_answer_as_faiss_does(tmp_path: Path, factory: str, metric: str) -> None:
    source = make_faiss(factory, metric)
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    want_distances, want_ids = source.search(QUERIES, 10)
    from_faiss(tmp_path / "a.faiss", tmp_path / "i").close()
    with open_index(tmp_path / "i") as index:
        assert (index.codec, index.count, index.nprobe) == (KINDS[factory], 700, 5)
        assert METRICS[index.metric] == source.metric_type
        assert index.manifest.normalized == ("L2norm" in factory and metric == "ip")
        assert index.manifest.by_residual == faiss.downcast_index(faiss.extract_index_ivf(source)).by_residual
        assert index.centroids.shape == (12, index.scan_dim)
        distances, ids = search(index)
        np.testing.assert_array_equal(ids, want_ids)
        np.testing.assert_array_equal(distances, want_distances)
        to_faiss(index, tmp_path / "b.faiss")
    back = faiss.read_index(str(tmp_path / "b.faiss"))
    assert back.ntotal == 700
    distances, ids = back.search(QUERIES, 10)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_array_equal(distances, want_distances)


@pytest.mark.parametrize("factory", [kind for kind in KINDS if not kind.endswith(("SH", "RaBitQfs"))])
def test_lists_decode_to_what_faiss_reconstructs(tmp_path: Path, factory: str) -> None:
    source = make_faiss(factory)
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    ivf = faiss.downcast_index(faiss.extract_index_ivf(source))
    with from_faiss(tmp_path / "a.faiss", tmp_path / "i") as index:
        row = np.empty(index.scan_dim, np.float32)
        for list_id in (0, 7):
            decoded = index.decode_list(list_id)
            assert len(decoded) == index.list_sizes[list_id]
            for position in range(len(decoded)):
                ivf.reconstruct_from_offset(list_id, position, faiss.swig_ptr(row))
                np.testing.assert_allclose(decoded[position], row, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factory", ["IVF12,RaBitQfs", "IVF12,ITQ16,SH"])
def test_lists_that_cannot_be_decoded_say_so(tmp_path: Path, factory: str) -> None:
    faiss.write_index(make_faiss(factory), str(tmp_path / "a.faiss"))
    with from_faiss(tmp_path / "a.faiss", tmp_path / "i") as index, pytest.raises(UnsupportedIndexError):
        index.decode_list(0)


def test_normalized_index_exports_its_normalisation(tmp_path: Path) -> None:
    faiss.write_index(make_faiss("L2norm,IVF12,Flat", "ip"), str(tmp_path / "a.faiss"))
    to_faiss(from_faiss(tmp_path / "a.faiss", tmp_path / "i"), tmp_path / "b.faiss")
    distances, _ = faiss.read_index(str(tmp_path / "b.faiss")).search(10 * QUERIES, 1)
    assert (distances <= 1.0001).all()


def test_duplicate_ids_are_kept_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = np.arange(700)
    ids[[3, 4, 9]] = [2, 2, 8]
    faiss.write_index(make_faiss("IVF12,Flat", ids=ids), str(tmp_path / "a.faiss"))
    index = from_faiss(tmp_path / "a.faiss", tmp_path / "i")
    assert index.manifest.notes["duplicate_ids"] == 3
    assert index.manifest.notes["duplicate_id_examples"] == [2, 8]
    assert "3 vectors repeat an id (for example 2)" in caplog.text
    kept = np.concatenate([index.list_ids(list_id) for list_id in range(12)])
    np.testing.assert_array_equal(np.sort(kept), np.sort(ids))


def test_fewer_vectors_than_lists_and_none_at_all(tmp_path: Path) -> None:
    for n in (0, 3):
        faiss.write_index(make_faiss("IVF12,Flat", x=X[:n]), str(tmp_path / "a.faiss"))
        with from_faiss(tmp_path / "a.faiss", tmp_path / str(n)) as index:
            assert index.count == n
            _, ids = search(index)
            assert (np.sort(ids, axis=1)[:, : 10 - n] == -1).all()
            to_faiss(index, tmp_path / "b.faiss")
            assert faiss.read_index(str(tmp_path / "b.faiss")).ntotal == n


def test_direct_map_is_dropped(tmp_path: Path) -> None:
    source = make_faiss("IVF12,Flat")
    faiss.extract_index_ivf(source).set_direct_map_type(faiss.DirectMap.Hashtable)
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    with from_faiss(tmp_path / "a.faiss", tmp_path / "i") as index:
        assert index.open_faiss().direct_map.type == faiss.DirectMap.NoMap
        np.testing.assert_array_equal(search(index)[1], source.search(QUERIES, 10)[1])


def on_disk(folder: Path, named: Path | str, factory: str = "IVF12,Flat") -> tuple[Path, Any]:
    """A faiss file in ``folder`` whose lists lie in the file ``named``, and what a search in it finds."""
    source = make_faiss(factory, x=X[:0])
    source.add(X)
    want = source.search(QUERIES, 10)[1]
    ivf = faiss.extract_index_ivf(source)
    lists = faiss.OnDiskInvertedLists(12, ivf.code_size, str(folder / named))
    vector = faiss.InvertedListsPtrVector()
    vector.push_back(ivf.invlists)
    lists.merge_from_multiple(vector.data(), vector.size(), False)
    lists.filename = str(named)
    ivf.replace_invlists(lists)
    folder.mkdir(exist_ok=True)
    faiss.write_index(source, str(folder / "a.faiss"))
    return folder / "a.faiss", want


def test_on_disk_lists_import(tmp_path: Path) -> None:
    file, want = on_disk(tmp_path, tmp_path / "lists.ivfdata")
    with from_faiss(file, tmp_path / "i", allow_on_disk=True) as index:
        np.testing.assert_array_equal(search(index)[1], want)
    with (tmp_path / "lists.ivfdata").open("r+b") as opened:
        opened.truncate(1000)
    with pytest.raises(CorruptIndexError, match="truncated"):
        from_faiss(file, tmp_path / "j", allow_on_disk=True)
    (tmp_path / "lists.ivfdata").unlink()
    with pytest.raises(CorruptIndexError, match="not there"):
        from_faiss(file, tmp_path / "j", allow_on_disk=True)


def test_both_files_may_have_been_moved(tmp_path: Path) -> None:
    file, want = on_disk(tmp_path / "given", tmp_path / "lists.ivfdata")
    (tmp_path / "lists.ivfdata").rename(tmp_path / "given" / "lists.ivfdata")
    (tmp_path / "given").rename(tmp_path / "taken")
    with from_faiss(tmp_path / "taken" / file.name, tmp_path / "i", allow_on_disk=True) as index:
        np.testing.assert_array_equal(search(index)[1], want)


def test_on_disk_lists_of_a_refinement_and_of_an_index_in_memory_import(tmp_path: Path) -> None:
    file, want = on_disk(tmp_path, "lists.ivfdata", "IVF12,Flat,RFlat")
    with from_faiss(file, tmp_path / "i", refine="vectors", allow_on_disk=True) as index:
        np.testing.assert_array_equal(search(index)[1], want)
    file, want = on_disk(tmp_path, tmp_path / "lists.ivfdata")
    # Its caller opened the other file, wherever it lies.
    with from_faiss(faiss.read_index(str(file)), tmp_path / "elsewhere" / "j") as index:
        np.testing.assert_array_equal(search(index)[1], want)


@pytest.mark.parametrize("factory", ["IVF12,Flat", "IVF12,Flat,RFlat", "PCA8,IVF12,Flat"])
def test_a_file_that_names_another_is_refused_before_that_is_opened(tmp_path: Path, factory: str) -> None:
    file, _ = on_disk(tmp_path / "given", tmp_path / "secret", factory)
    # Nobody opens a pipe that nobody writes to, and comes back.
    (tmp_path / "secret").unlink()
    os.mkfifo(tmp_path / "secret")
    for refine in ("vectors", "drop", None):
        with pytest.raises(UnsupportedIndexError, match=r"another file, '.*secret'.*allow_on_disk=True"):
            from_faiss(file, tmp_path / "i", refine=refine)
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("way", ["absolute", "dots", "link", "linked folder"])
def test_an_allowed_file_lies_below_the_folder_of_the_one_that_names_it(tmp_path: Path, way: str) -> None:
    names = {"absolute": tmp_path / "secret", "dots": "../secret", "link": "link", "linked folder": "sub/secret"}
    file, _ = on_disk(tmp_path / "given", tmp_path / "secret")
    if way == "link":
        (tmp_path / "given" / "link").symlink_to(tmp_path / "secret")
    elif way == "linked folder":
        (tmp_path / "given" / "sub").symlink_to(tmp_path)
    said = faiss.read_index(str(file))
    faiss.downcast_InvertedLists(said.invlists).filename = str(names[way])
    faiss.write_index(said, str(file))
    with pytest.raises(UnsupportedIndexError, match=r"is not below .*given"):
        from_faiss(file, tmp_path / "i", allow_on_disk=True)


def test_a_model_that_names_a_file_is_not_opened(tmp_path: Path) -> None:
    file, _ = on_disk(tmp_path / "given", tmp_path / "secret")
    with pytest.raises(UnsupportedIndexError, match=r"names another file, '.*secret'"):
        load_model(file)


@pytest.mark.parametrize("factory", ["IVF100,PQ16x4fsr", "IMI2x4,PQ16x4fsr"])
def test_a_table_that_faiss_makes_may_be_larger_than_the_file(tmp_path: Path, factory: str) -> None:
    source = make_faiss(factory)
    source.nprobe = 5
    want = source.search(QUERIES, 10)[1]
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    assert source.nlist * 16 * 16 * 4 > (tmp_path / "a.faiss").stat().st_size
    with from_faiss(tmp_path / "a.faiss", tmp_path / "i") as index:
        np.testing.assert_array_equal(search(index)[1], want)


def test_lists_of_a_coarse_quantizer_are_part_of_the_model(tmp_path: Path) -> None:
    source = make_faiss("IVF12(IVF3,Flat),Flat")
    want = source.search(QUERIES, 10)[1]
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    with from_faiss(tmp_path / "a.faiss", tmp_path / "i"):
        pass
    (tmp_path / "a.faiss").unlink()
    with open_index(tmp_path / "i") as index:
        np.testing.assert_array_equal(search(index)[1], want)


@pytest.mark.parametrize("quantizer", ["PCA8,Flat", "SQ8,RFlat", "residual"])
def test_coarse_quantizers_of_other_kinds_import(tmp_path: Path, quantizer: str) -> None:
    if quantizer == "residual":
        source = faiss.IndexIVFFlat(faiss.ResidualCoarseQuantizer(16, 2, 3), 16, 64)
        source.quantizer_trains_alone = 1
        source.train(X)
    else:
        source = make_faiss(f"IVF12({quantizer}),Flat", x=X[:0])
    source.nprobe = 5
    source.add(X)
    want = source.search(QUERIES, 10)[1]
    with from_faiss(source, tmp_path / "i") as index:
        np.testing.assert_array_equal(search(index)[1], want)


@pytest.mark.parametrize(
    ("dim", "n_centroids"), [(8, 12), (32, 12), (16, 0), (16, 3), (16, 13), (0, 0)], ids=lambda number: str(number)
)
def test_a_quantizer_that_does_not_fit_its_lists_is_refused(tmp_path: Path, dim: int, n_centroids: int) -> None:
    source = make_faiss("IVF12,Flat")
    with from_faiss(source, tmp_path / "i") as index:
        before = index.fingerprint
    quantizer = faiss.IndexFlatL2(dim) if dim else None
    if n_centroids:
        quantizer.add(np.tile(X, (1, 2))[:n_centroids, :dim].copy())
    own, source.quantizer = source.quantizer, quantizer
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    source.quantizer = own
    with pytest.raises(CorruptIndexError, match=rf"{n_centroids} centroids with {dim} dim.*expected one of 12 with 16"):
        from_faiss(tmp_path / "a.faiss", tmp_path / "i", replace=True)
    with open_index(tmp_path / "i") as index:
        assert index.fingerprint == before


@pytest.mark.parametrize("factory", ["IVF12,Flat", "IDMap,IVF12,PQ8x4fs", "IVF12,PQ4x4,RFlat"])
def test_vectors_that_faiss_left_out_of_the_lists_are_said(
    tmp_path: Path, factory: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = X.copy()
    x[3, 5], x[650] = np.inf, np.nan
    source = make_faiss(factory, x=X[:0])
    source.add_with_ids(x, np.arange(700)) if factory.startswith("IDMap") else source.add(x)
    refine = "vectors" if factory.endswith("RFlat") else None
    with from_faiss(source, tmp_path / "i", refine=refine) as index:
        assert "2 of 700 vectors are in no list" in caplog.text
        assert index.count == 698
        kept = np.concatenate([index.list_ids(list_id) for list_id in range(12)])
        np.testing.assert_array_equal(np.sort(kept), np.delete(np.arange(700), [3, 650]))
        if refine:
            np.testing.assert_array_equal(np.concatenate([index.decode_list(i) for i in range(12)]), x[kept])
        else:
            np.testing.assert_array_equal(search(index)[1], source.search(QUERIES, 10)[1])


def test_a_list_that_lost_finite_rows_is_not_put_down_to_nan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads that vectors of NaN are missing looks for some, and not for the rows that a damaged file lost."""
    source = make_faiss("IVF12,Flat")
    lost = source.invlists.list_size(3)
    source.invlists.resize(3, 0)
    with from_faiss(source, tmp_path / "i") as index:
        assert index.count == 700 - lost
    assert f"{lost} of 700 vectors are in no list" in caplog.text
    assert "or the lists lost rows after faiss counted them" in caplog.text


@pytest.mark.parametrize("said", [699, 701])
def test_lists_of_more_vectors_than_were_counted_or_of_none_are_refused(tmp_path: Path, said: int) -> None:
    source = make_faiss("IVF12,Flat")
    source.ntotal = said
    if said > 700:
        for list_id in range(12):
            source.invlists.resize(list_id, 0)
    with pytest.raises(CorruptIndexError, match=rf"lists hold (700|0) vectors, the header says {said}"):
        from_faiss(source, tmp_path / "i")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize(
    ("factory", "found"),
    [
        ("Flat", "IndexFlat"),
        ("HNSW8", "IndexHNSW"),
        ("PCA8,Flat", "IndexPreTransform of IndexFlat"),
        ("IVF12,Flat,RFlat", "IndexRefine"),
        ("IVF12,FlatDedup", "IndexIVFFlatDedup"),
        ("IVF12,FlatPanorama4", "Panorama"),
        ("IVF12,PQ4x4fs,RFlat", "IndexRefine"),
    ],
)
def test_what_is_not_a_plain_ivf_index_is_named(tmp_path: Path, factory: str, found: str) -> None:
    index = make_faiss(factory, x=X[:0])
    index.add(X)
    faiss.write_index(index, str(tmp_path / "a.faiss"))
    with pytest.raises(UnsupportedIndexError, match=found):
        from_faiss(tmp_path / "a.faiss", tmp_path / "i")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("factory", ["IVF12,PQ4x4,RFlat", "IDMap,IVF12,PQ4x4np,RFlat", "OPQ4,IVF12,PQ4x4,RFlat"])
@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_a_refinement_gives_its_vectors_to_the_lists_or_is_dropped(tmp_path: Path, factory: str, metric: str) -> None:
    source = make_faiss(factory, metric, x=X[:0])
    ids = np.arange(700) * (3 if factory.startswith("IDMap") else 1)
    source.add_with_ids(X, ids) if factory.startswith("IDMap") else source.add(X)
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    with pytest.raises(UnsupportedIndexError, match=r"IndexRefineFlat.*44800 bytes.*refine='drop'"):
        from_faiss(tmp_path / "a.faiss", tmp_path / "i")
    assert not (tmp_path / "i").exists()

    refine = faiss.downcast_index(source.index if factory.startswith("IDMap") else source)
    base = faiss.downcast_index(refine.base_index)
    with from_faiss(tmp_path / "a.faiss", tmp_path / "drop", refine="drop") as dropped:
        assert dropped.codec.startswith(("faiss:IVFPQ", "pq4"))
        distances, found = search(dropped)
        want_distances, want = base.search(QUERIES, 10)
        np.testing.assert_array_equal(found, np.where(want < 0, -1, ids[want]))
        np.testing.assert_array_equal(distances, want_distances)
    with from_faiss(source, tmp_path / "vectors", refine="vectors") as exact:
        assert (exact.codec, exact.count, exact.nprobe) == ("flat", 700, 5)
        assert exact.manifest.notes["refinement"] == "vectors"
        # With every candidate of the probed lists reranked, faiss's refinement is this.
        refine.k_factor = 70.0
        distances, found = search(exact)
        want_distances, want = source.search(QUERIES, 10)
        np.testing.assert_allclose(distances, want_distances, rtol=1e-4, atol=1e-3)
        assert (found == want).mean() > 0.99
    assert source.ntotal == 700


def test_a_refinement_behind_fewer_dimensions_can_only_be_dropped(tmp_path: Path) -> None:
    source = make_faiss("PCA8,IVF12,Flat,RFlat", x=X[:0])
    source.add(X)
    with pytest.raises(UnsupportedIndexError, match="transform that changes distances"):
        from_faiss(source, tmp_path / "i", refine="vectors")
    assert from_faiss(source, tmp_path / "i", refine="drop").scan_dim == 8


def test_refine_is_for_refinements(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="refine is 'drop', but the IndexIVFFlat holds no refinement"):
        from_faiss(make_faiss("IVF12,Flat"), tmp_path / "i", refine="drop")
    with pytest.raises(InvalidInputError, match="refine is 'both'; expected 'vectors', 'drop' or none"):
        from_faiss(make_faiss("IVF12,Flat"), tmp_path / "i", refine="both")  # type: ignore[arg-type]
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("factory", ["IVF12,Flat", "PCA8,IVF12_HNSW8,SQ8", "IDMap,IVF12,PQ8x4fs"])
def test_an_index_in_memory_imports_as_its_file_does_and_stays_what_it_is(tmp_path: Path, factory: str) -> None:
    source = make_faiss(factory)
    before = faiss.serialize_index(source)
    faiss.write_index(source, str(tmp_path / "a.faiss"))
    with from_faiss(source, tmp_path / "i") as index, from_faiss(tmp_path / "a.faiss", tmp_path / "j") as same:
        assert index.fingerprint == same.fingerprint
        assert sorted(p.name for p in (tmp_path / "i" / "gen-000001").iterdir()) == [
            "lists.bin", "lists.idx.npy", "lists.xxh3.npy", "manifest.json", "model.faiss",
        ]  # fmt: skip
    np.testing.assert_array_equal(faiss.serialize_index(source), before)


def test_what_is_no_ivf_index_in_memory_is_refused(tmp_path: Path) -> None:
    for what, error, message in (
        ([1], InvalidInputError, "file is a list; expected a string or a pathlib.Path, or a faiss index"),
        (faiss.IndexBinaryFlat(16), InvalidInputError, "file is a IndexBinaryFlat"),
        (faiss.IndexFlat(16), UnsupportedIndexError, "the faiss index is IndexFlat"),
    ):
        with pytest.raises(error, match=message):
            from_faiss(what, tmp_path / "i")
    assert not (tmp_path / "i").exists()


def test_nprobe_1_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = make_faiss("IVF12,Flat")
    assert from_faiss(source, tmp_path / "i").nprobe == 5
    source.nprobe = 1
    assert from_faiss(source, tmp_path / "i", nprobe=7, replace=True).nprobe == 7
    assert caplog.text == ""
    assert from_faiss(source, tmp_path / "i", replace=True).nprobe == 1
    assert "the IndexIVFFlat has nprobe 1, faiss's default" in caplog.text
    assert "1 of 12 lists" in caplog.text


def test_other_metrics_untrained_and_negative_ids_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.faiss"
    faiss.write_index(faiss.index_factory(16, "IVF12,Flat", faiss.METRIC_L1), str(file))
    with pytest.raises(UnsupportedIndexError, match="untrained"):
        from_faiss(file, tmp_path / "i")
    other = make_faiss("IVF12,Flat")
    other.metric_type = faiss.METRIC_L1
    faiss.write_index(other, str(file))
    with pytest.raises(UnsupportedIndexError, match="faiss metric 2"):
        from_faiss(file, tmp_path / "i")
    faiss.write_index(make_faiss("IVF12,Flat", ids=np.arange(700) - 1), str(file))
    with pytest.raises(UnsupportedIndexError, match="holds id -1"):
        from_faiss(file, tmp_path / "i")
    assert not (tmp_path / "i").exists()


@pytest.mark.parametrize("nprobe", [0, -1, 13, True, 2.0])
def test_nprobe_is_checked(tmp_path: Path, nprobe: Any) -> None:
    faiss.write_index(make_faiss("IVF12,Flat"), str(tmp_path / "a.faiss"))
    with pytest.raises(InvalidInputError, match="nprobe"):
        from_faiss(tmp_path / "a.faiss", tmp_path / "i", nprobe=nprobe)


def test_missing_file_and_foreign_bytes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is not a file"):
        from_faiss(tmp_path / "none.faiss", tmp_path / "i")
    for content in (b"", b"abc", b"\x00" * 100, b"PK\x03\x04 a zip perhaps" * 10):
        (tmp_path / "a.faiss").write_bytes(content)
        with pytest.raises((CorruptIndexError, UnsupportedIndexError), match=r"a\.faiss"):
            from_faiss(tmp_path / "a.faiss", tmp_path / "i")
    assert not (tmp_path / "i").exists()


@pytest.fixture(scope="module")
def serialized() -> dict[str, bytes]:
    return {
        name: faiss.serialize_index(make_faiss(name)).tobytes()
        for name in ("IVF12,Flat", "PCA8,IVF12_HNSW8,SQ8", "IDMap,IVF12,PQ8x4fs")
    }


@examples(60, derandomize=True)
@given(st.data())
def test_truncated_files_are_errors_not_crashes(
    tmp_path_factory: pytest.TempPathFactory, serialized: dict[str, bytes], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(serialized)))
    raw = serialized[name]
    path = tmp_path_factory.mktemp("short")
    (path / "a.faiss").write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises((CorruptIndexError, UnsupportedIndexError)):
        from_faiss(path / "a.faiss", path / "i")
    assert not (path / "i").exists()


@examples(60, derandomize=True)
@given(st.data())
def test_damaged_files_import_or_are_errors(
    tmp_path_factory: pytest.TempPathFactory, serialized: dict[str, bytes], data: st.DataObject
) -> None:
    """faiss files carry no checksum: flipped codes cannot be noticed, but nothing else may happen."""
    name = data.draw(st.sampled_from(sorted(serialized)))
    raw = bytearray(serialized[name])
    raw[data.draw(st.integers(0, min(len(raw) - 1, 600)))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("flip")
    (path / "a.faiss").write_bytes(raw)
    try:
        from_faiss(path / "a.faiss", path / "i").close()
    except HybridIndexError:
        assert not (path / "i").exists()


def test_a_small_fast_scan_index_comes_back(tmp_path):
    """faiss counts a table of 24 KiB that the file of 15 KiB does not hold."""
    vectors = np.random.default_rng(5).standard_normal((600, 24)).astype(np.float32)
    with hx.build(vectors, tmp_path / "built", nlist=32, metric="ip", codec="pqfs12", nprobe=4) as built:
        built.to_faiss(tmp_path / "small.faiss")
    with hx.from_faiss(tmp_path / "small.faiss", tmp_path / "imported") as imported:
        assert (imported.codec, imported.count) == ("pqfs12", 600)
