"""Codes are put beside the rows of an index, whole or not at all; an index whose codes are damaged serves its rows."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading

import faiss
import numpy as np
import pytest

from hybridindex.errors import BuildError, DiskFullError, InvalidInputError, UnsupportedIndexError
from hybridindex.filesystem import watched_by
from hybridindex.index import (
    build,
    compress,
    from_faiss,
    open_index,
    remove_codes,
    rollback,
    save,
    verify,
    write_layout,
)
from hybridindex.index.rabitq import candidates, codes
from hybridindex.index.rabitq.encode import encode_reference
from hybridindex.index.rabitq.estimate import estimates, prepare_queries
from hybridindex.index.rabitq.spec import SPEC_FILE
from hybridindex.index.storage.generation import writers_lock
from hybridindex.index.storage.signed_json import render_signed
from tests.clustered import clustered
from tests.faults import FaultyDisk, of


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory with codes."""
    path = tmp_path_factory.mktemp("compress") / "i"
    with build(clustered(2000, 20, seed=1), path, nlist=16, metric="l2", codec="fp16") as index:
        compress(index, 1, queries=clustered(120, 20, seed=2))
    return path


@pytest.fixture
def copied(built, tmp_path):
    return shutil.copytree(built, tmp_path / "i")


def generation(path):
    return next(path.glob("gen-*"))


def codes_of(path):
    return next(generation(path).glob("rabitq-*.bin"))


def held(path):
    return sorted(file.name for file in generation(path).glob("rabitq*"))


@pytest.mark.parametrize("codec", ["flat", "fp16", "bf16", "sq8"])
@pytest.mark.parametrize(("metric", "bits", "dim"), [("ip", 1, 20), ("l2", 2, 33), ("ip", 4, 3), ("l2", 1, 1)])
def test_codes_are_those_of_the_decoded_rows(make_index, codec, metric, bits, dim):
    with make_index(codec, metric, dim=dim) as index:
        spec = compress(index, bits)
        codes = index.rabitq
        assert codes is not None
        assert codes.spec == spec
        assert (spec.bits, spec.dim, spec.metric, spec.count, spec.nlist) == (bits, dim, metric, 600, 12)
        assert codes.data.nbytes == spec.file_bytes == max(64, int(codes.list_bytes.sum()))
        np.testing.assert_allclose(codes.centroid_sq, (index.centroids**2).sum(axis=1), rtol=1e-5)
        for list_id in range(index.nlist):
            centroid = index.centroids[list_id]
            rows = index.device_codec().decode(index.list_codes(list_id), centroid)
            np.testing.assert_allclose(rows, index.decode_list(list_id), rtol=1e-5, atol=1e-5)
            assert np.array_equal(codes.list_blocks(list_id), encode_reference(rows, centroid, codes.signs, spec))
        with open_index(index.path) as again:
            assert again.rabitq.spec == spec
            assert np.array_equal(again.rabitq.data, codes.data)


def test_rows_that_are_residuals_are_coded_as_what_they_stand_for(tmp_path):
    x = clustered(1500, 12, seed=3)
    quantizer = faiss.IndexFlatL2(12)
    given = faiss.IndexIVFScalarQuantizer(quantizer, 12, 9, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_L2, True)
    given.train(x)
    given.add(x)
    with from_faiss(given, tmp_path / "i") as index:
        assert index.manifest.by_residual
        compress(index, 4)
        rows = index.device_codec().decode(index.list_codes(3), index.centroids[3])
        np.testing.assert_allclose(rows, index.decode_list(3), rtol=1e-5, atol=1e-5)
        wanted = encode_reference(rows, index.centroids[3], index.rabitq.signs, index.rabitq.spec)
        assert np.array_equal(index.rabitq.list_blocks(3), wanted)


def test_empty_lists_and_rows_that_are_their_centroids(tmp_path):
    x = np.repeat(np.eye(8, dtype=np.float32), 20, axis=0)
    with build(x, tmp_path / "i", nlist=12, metric="l2") as index:
        assert (index.list_sizes == 0).any()
        spec = compress(index, 2)
        codes = index.rabitq
        queries = x[::20].copy()
        coded = prepare_queries(queries, codes.signs, spec)
        for list_id in np.flatnonzero(index.list_sizes).tolist():
            c = index.centroids[list_id]
            found = estimates(coded, codes.decode_list(list_id), queries @ c, codes.centroid_sq[list_id], spec)
            true = 1 - 2 * queries @ index.decode_list(list_id).T
            np.testing.assert_allclose(found, true, atol=1e-3)  # faiss moves centroids apart that it split


def test_an_index_of_nothing_but_one_row(tmp_path):
    with build(np.ones((1, 5), np.float32), tmp_path / "i", nlist=1) as index:
        spec = compress(index)
        assert (spec.count, spec.file_bytes) == (1, 128)
        assert spec.candidates_for(10, 1) == 10


# Candidates


def recall(index, queries, k, nprobe, spec):
    """Of the best candidates by estimate against all rows of the same probes."""
    probes = index.quantize(queries, nprobe)[0]
    coded = prepare_queries(queries, index.rabitq.signs, spec)
    hits = 0.0
    for i, lists in enumerate(probes.tolist()):
        found, exact = [], []
        for list_id in lists:
            c, rows = index.centroids[list_id], index.decode_list(list_id)
            blocks, square = index.rabitq.decode_list(list_id), index.rabitq.centroid_sq[list_id]
            found.append(estimates(coded.of(np.array([i])), blocks, queries[i : i + 1] @ c, square, spec)[0])
            exact.append(((rows - queries[i]) ** 2).sum(axis=1) if spec.metric == "l2" else -rows @ queries[i])
        found, exact = np.concatenate(found), np.concatenate(exact)
        kept = np.argsort(found, kind="stable")[: spec.candidates_for(k, nprobe)]
        hits += len(set(np.argsort(exact, kind="stable")[:k]) & set(kept.tolist())) / min(k, len(exact))
    return hits / len(queries)


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("bits", [1, 4])
def test_candidates_keep_the_recall_that_was_asked_for(make_index, metric, bits):
    queries = clustered(200, 24, seed=8)
    with build_clustered(make_index, metric) as index:
        for loss in (0.1, 0.01):
            spec = compress(index, bits, loss, queries)
            assert spec.measured_with == "queries"
            assert (spec.candidates.k, spec.candidates.nprobe) == ((1, 10, 100), (1, 2, 4, 8, 16))
            assert spec.recall_loss == loss
            for k, nprobe in [(1, 4), (10, 1), (10, 8), (100, 16)]:
                assert recall(index, queries, k, nprobe, spec) >= 1 - loss - 1e-6
            table = np.array(spec.candidates.r)
            assert (np.diff(table, axis=0) >= 0).all()
            assert (np.diff(table, axis=1) >= 0).all()
            assert (table[:, 0] >= [1, 10, 100]).all()


def build_clustered(make_index, metric):
    return make_index("flat", metric, n=3000, dim=24, nlist=16)


def test_a_smaller_loss_and_fewer_bits_need_more_candidates(make_index):
    with build_clustered(make_index, "l2") as index:
        needed = {
            (bits, loss): compress(index, bits, loss).candidates_for(10, 8) for bits in (1, 4) for loss in (0.1, 0)
        }
    assert needed[4, 0.1] < needed[1, 0.1] < needed[1, 0]
    assert needed[4, 0.1] < needed[4, 0] < needed[1, 0]


def test_without_queries_rows_stand_for_them_and_do_not_find_themselves(make_index):
    with build_clustered(make_index, "l2") as index:
        spec = compress(index, 1)
        assert spec.measured_with == "sampled rows"
        # A row finds itself first, whatever the estimates: it would need one candidate.
        assert spec.candidates.candidates_for(1, 8) > 3
        assert compress(index, 1).candidates == spec.candidates


def test_what_does_not_fit_the_measurement_is_extrapolated(make_index, monkeypatch):
    monkeypatch.setattr("hybridindex.index.rabitq.candidates.MOST_PAIRS", 256 * 900)
    with build_clustered(make_index, "l2") as index:
        spec = compress(index, 1)
        last = spec.candidates.nprobe[-1]
        assert 1 <= last < 16
        assert spec.candidates_for(10, 2 * last) >= 2 * spec.candidates_for(10, last) - 1


def test_few_long_lists_are_measured_with_fewer_queries(make_index, monkeypatch):
    """Each query keeps a pair for every row of a list: 512 of them took gigabytes for a list of a million rows."""
    most, kept = 700 * 3, []
    monkeypatch.setattr(candidates, "MOST_PAIRS", most)
    real = candidates.CandidateMeter.table

    def table(meter, *args):
        kept.append(sum(map(len, meter._estimates)))
        return real(meter, *args)

    monkeypatch.setattr(candidates.CandidateMeter, "table", table)
    with make_index(n=700, nlist=1) as index:
        spec = compress(index, 2)
        assert kept == [most]
        assert 10 <= spec.candidates_for(10, 1) < 700
        monkeypatch.setattr(candidates, "MOST_PAIRS", 10)  # less than one query has
        compress(index, 2)
        assert kept == [most, 700]


def test_a_limit_of_candidates_that_binds_is_said(make_index, monkeypatch, caplog):
    for module in (candidates, sys.modules["hybridindex.index.compress"]):
        monkeypatch.setattr(module, "MAX_CANDIDATES", 150)
    with build_clustered(make_index, "l2") as index:
        spec = compress(index, 1, 0)
    assert spec.candidates.r[-1][-1] == 150
    assert "150 candidates, the maximum, lose more than 0 of recall" in caplog.text


def test_codes_that_hardly_pay_are_said_to(tmp_path, caplog):
    """Of vectors far from the origin under l2, rounding hides the differences of distances."""
    for offset in (0, 50):
        rows, queries = (clustered(n, 20, seed=n, offset=offset) for n in (8000, 150))
        with build(rows, tmp_path / f"{offset}", nlist=16, nprobe=4, metric="l2") as index:
            spec = compress(index, 1, queries=queries)
            number = spec.candidates_for(10, 4)
            assert (number > 500) == (offset > 0)
    said = f"scans rows: searches by them compare {number:,} candidates for k 10 at nprobe 4, of some 2,000 rows"
    assert caplog.text.count("hardly pay") == caplog.text.count(said) == 1
    assert "more bits need fewer candidates, and so do vectors and queries whose mean was taken off" in caplog.text


def test_few_queries_are_said_to_be_few(make_index, caplog):
    with make_index() as index:
        compress(index, 1, queries=clustered(3, 16))
    assert "measured with 3 queries" in caplog.text


# Refused


@pytest.mark.parametrize("bits", [0, 3, 8, True, 1.0, "1", None, np.float32(1)])
def test_other_bits_are_refused(make_index, bits):
    with make_index() as index, pytest.raises(InvalidInputError, match=r"bits is .*expected one of 1, 2, 4"):
        compress(index, bits)


@pytest.mark.parametrize("loss", [-0.1, 1, 1.5, float("nan"), "0.1", None, True])
def test_another_loss_is_refused(make_index, loss):
    with make_index() as index, pytest.raises(InvalidInputError, match="recall_loss is"):
        compress(index, 1, loss)


@pytest.mark.parametrize("seed", [-1, 2**31, 0.5, True])
def test_another_seed_is_refused(make_index, seed):
    with make_index() as index, pytest.raises(InvalidInputError, match="seed is"):
        compress(index, seed=seed)


def test_numpy_s_numbers_are_as_good_as_others(make_index):
    with make_index() as index:
        spec = compress(index, np.int64(2), np.float32(0.25), seed=np.int32(3))
        assert (spec.bits, spec.recall_loss, spec.seed) == (2, 0.25, 3)


def test_queries_of_another_shape_are_refused(make_index):
    with make_index() as index:
        with pytest.raises(InvalidInputError, match=r"queries has shape \(5, 9\); expected \(n, 16\)"):
            compress(index, queries=np.zeros((5, 9), np.float32))
        with pytest.raises(InvalidInputError, match="queries is empty"):
            compress(index, queries=np.zeros((0, 16), np.float32))
        assert index.rabitq is None


@pytest.mark.parametrize("codec", ["pq4", "pqfs8"])
def test_a_codec_without_rows_is_named_with_those_that_have_some(make_index, codec):
    with make_index(codec) as index, pytest.raises(UnsupportedIndexError) as caught:
        compress(index)
    assert f"codec '{codec}' cannot be compressed" in str(caught.value)
    assert "expected flat, fp16, bf16, sq8" in str(caught.value)


def test_a_closed_index_is_refused(make_index):
    index = make_index()
    index.close()
    for use in (compress, remove_codes):
        with pytest.raises(InvalidInputError, match="was closed"):
            use(index)


def test_while_another_writes(copied):
    with open_index(copied) as index, writers_lock(copied), pytest.raises(BuildError, match="another process"):
        compress(index)


def test_a_generation_that_was_removed_is_said(copied):
    with open_index(copied) as index:
        shutil.rmtree(generation(copied))
        with pytest.raises(BuildError, match=r"gen-000001 of .* was replaced and removed; open the index again"):
            compress(index)


# With a build


@pytest.mark.parametrize(
    ("options", "codec", "bits"),
    [
        ({"codec": "sq8", "bits": 2}, "sq8", 2),
        ({"codec": "rabitq"}, "flat", 1),
        ({"codec": "rabitq", "bits": 4, "rerank": "bf16"}, "bf16", 4),
    ],
)
def test_a_build_is_compressed(tmp_path, options, codec, bits):
    stages = []
    with build(
        clustered(400, 8), tmp_path / "i", nlist=4, progress=lambda stage, *_: stages.append(stage), **options
    ) as index:
        assert (index.codec, index.rabitq.spec.bits) == (codec, bits)
    assert {"compress", "candidates", "checksum of codes"} <= set(stages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "bits is 3; expected one of 1, 2, 4"),
        ({"bits": 1, "codec": "pq2"}, "codec 'pq2' cannot be compressed"),
        ({"codec": "rabitq", "rerank": "pq"}, "rerank is 'pq'; expected one of flat, fp16, bf16, sq8"),
        ({"codec": "flat", "rerank": "sq8"}, "rerank is 'sq8' and codec 'flat'; expected codec 'rabitq' with it"),
    ],
)
def test_a_build_that_cannot_be_compressed_is_refused_before_it_begins(tmp_path, options, message):
    with pytest.raises((InvalidInputError, UnsupportedIndexError), match=message):
        build(clustered(400, 8), tmp_path / "i", nlist=4, **options)
    assert not (tmp_path / "i").exists()


def test_a_build_whose_codes_have_no_room_stands_without_them(tmp_path):
    disk = FaultyDisk(counts=of("truncate", path="rabitq.bin.new"), allowed=0, number=28)
    with watched_by(disk), pytest.raises(DiskFullError):
        build(clustered(400, 8), tmp_path / "i", nlist=4, bits=1)
    with open_index(tmp_path / "i") as index:
        assert (index.count, index.rabitq, index.rabitq_problem) == (400, None, "")


# Files


def test_new_codes_replace_the_old_and_leave_nothing(copied):
    with open_index(copied) as index:
        before, kept = index.rabitq, codes_of(copied).read_bytes()
        compress(index, 4)
        assert index.rabitq.spec.bits == 4
        assert held(copied) == sorted([SPEC_FILE, index.rabitq.spec.file])
        assert before.data.tobytes() == kept, "who has the old ones open keeps them"


def test_the_same_call_makes_the_same_codes(copied):
    first = codes_of(copied).read_bytes()
    with open_index(copied) as index:
        compress(index, 1, queries=clustered(120, 20, seed=2))
        compress(index, 1, queries=clustered(120, 20, seed=2))
        assert codes_of(copied).read_bytes() == first
        compress(index, 1, seed=5)
        assert codes_of(copied).read_bytes() != first


def test_codes_are_removed(copied):
    with open_index(copied) as index:
        size = index.rabitq.spec.file_bytes
        assert remove_codes(index) > size
        assert index.rabitq is None
        assert held(copied) == []
        assert remove_codes(index) == 0
    with open_index(copied) as index:
        assert (index.rabitq, index.rabitq_problem) == (None, "")


def test_a_full_disk_leaves_the_old_codes_and_nothing_else(copied):
    before = held(copied)
    with open_index(copied) as index:
        for call in ("truncate", "write", "sync", "replace"):
            disk = FaultyDisk(counts=of(call), allowed=0, number=28, sticks=False)
            with watched_by(disk), pytest.raises(DiskFullError, match=r"make room there; the index is whole"):
                compress(index, 2)
            assert held(copied) == before
            assert index.rabitq.spec.bits == 1


def test_what_a_crash_left_is_removed(copied):
    for name in ("rabitq.bin.new", "rabitq-00000000.bin", "rabitq.json.new"):
        (generation(copied) / name).write_bytes(b"left")
    with open_index(copied) as index:
        assert index.rabitq is not None
        compress(index, 1)
        assert held(copied) == sorted([SPEC_FILE, index.rabitq.spec.file])


def test_a_call_that_fails_leaves_what_a_newer_version_has(copied, monkeypatch):
    _newer(copied)
    before = held(copied)
    assert len(before) == 2
    monkeypatch.setattr(sys.modules["hybridindex.index.compress"], "_encode", interrupted)
    with open_index(copied) as index, pytest.raises(KeyboardInterrupt):
        compress(index, 2)
    assert held(copied) == before


def interrupted(*_args):
    raise KeyboardInterrupt


@pytest.mark.parametrize("copy", ["save", "rows"])
def test_copies_have_no_codes(copied, tmp_path, copy):
    with open_index(copied) as index:
        if copy == "save":
            other = save(index, tmp_path / "copy")
        else:
            write_layout(index, tmp_path / "copy", "rows")
            other = open_index(tmp_path / "copy")
        with other:
            assert (other.rabitq, other.rabitq_problem) == (None, "")


def test_codes_come_back_with_their_generation(copied):
    build(clustered(500, 20), copied, nlist=4, replace=True).close()
    with open_index(copied) as index:
        assert index.rabitq is None
    rollback(copied)
    with open_index(copied) as index:
        assert index.rabitq.spec.bits == 1


# Damage


def _newer(path):
    file = generation(path) / SPEC_FILE
    content = json.loads(file.read_bytes())
    del content["xxh3_128_of_content"], content["format_version"]
    file.write_bytes(render_signed(content.pop("format"), 7, content))


def _other_rows(path):
    other = path.parent / "other"
    with build(clustered(2000, 20, seed=9), other, nlist=16, metric="l2", codec="fp16") as index:
        compress(index)
    shutil.copy(generation(other) / SPEC_FILE, generation(path))
    shutil.copy(codes_of(other), generation(path))


def _flip(path):
    raw = bytearray(codes_of(path).read_bytes())
    raw[1000] ^= 4
    codes_of(path).write_bytes(raw)


DAMAGE = {
    "missing": (lambda path: codes_of(path).unlink(), "cannot be read: No such file"),
    "short": (lambda path: codes_of(path).write_bytes(codes_of(path).read_bytes()[:-64]), "bytes; expected"),
    "empty": (lambda path: codes_of(path).write_bytes(b""), "has 0 bytes"),
    "a changed byte": (_flip, "differs from its checksum"),
    "no JSON": (lambda path: (generation(path) / SPEC_FILE).write_bytes(b"{"), "is not valid JSON"),
    "foreign": (lambda path: (generation(path) / SPEC_FILE).write_bytes(b"{}\n"), "is not a hybridindex rabitq"),
    "a newer version": (_newer, "format_version 7; this hybridindex reads up to 2: upgrade it"),
    "other rows": (_other_rows, "belongs to other rows"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_an_index_with_damaged_codes_serves_its_rows_and_says_so(copied, kind, caplog):
    damage, words = DAMAGE[kind]
    damage(copied)
    with caplog.at_level(logging.WARNING), open_index(copied) as index:
        assert index.rabitq is None
        assert words in index.rabitq_problem
        assert f"hybridindex compress {copied}" in index.rabitq_problem
        assert [words in record.message for record in caplog.records] == [True]
        assert len(index.decode_list(0)) == index.list_sizes[0]
        verify(copied)
        compress(index, 2)
        assert index.rabitq.spec.bits == 2
        assert index.rabitq_problem == ""
        assert held(copied) == sorted([SPEC_FILE, index.rabitq.spec.file])
    caplog.clear()
    with open_index(copied) as index:
        assert index.rabitq.spec.bits == 2
    assert not caplog.records


def test_a_quick_look_finds_damage_when_the_codes_are_read(copied, caplog):
    _flip(copied)
    with open_index(copied, verify="quick") as index:
        assert index.rabitq is not None
        for _ in range(2):
            assert index.load_codes() is None
        assert "differs from its checksum" in index.rabitq_problem
        assert caplog.text.count("differs from its checksum") == 1


@pytest.mark.parametrize("end", ["cut", "removed", "replaced"])
def test_what_becomes_of_the_file_changes_no_codes_that_were_read(copied, end):
    raw = codes_of(copied).read_bytes()
    with open_index(copied) as index, open_index(copied, verify="quick") as other:
        read, later = index.load_codes(), other.rabitq
        if end == "cut":
            codes_of(copied).write_bytes(b"")
        elif end == "removed":
            codes_of(copied).unlink()
        else:
            compress(index, 4)
        assert read.data.tobytes() == raw
        assert read.data.ctypes.data % 64 == 0
        # Found but not read yet: a file of the same name, or none, is no matter while it is the same file.
        if end == "cut":
            assert other.load_codes() is None
        else:
            assert other.load_codes() is later
            assert later.data.tobytes() == raw


@pytest.mark.parametrize("become", ["others", "none"])
def test_codes_that_are_replaced_while_they_are_proven_are_not_damaged(copied, monkeypatch, caplog, become):
    real, left = codes.digest_file, [1]

    def digest_file(file, **options):
        found = real(file, **options)
        if left and left.pop():
            with open_index(copied, verify="quick") as other:
                compress(other, 2) if become == "others" else remove_codes(other)
        return found

    monkeypatch.setattr(codes, "digest_file", digest_file)
    with open_index(copied) as index:
        assert index.rabitq_problem == ""
        assert (None if index.rabitq is None else index.rabitq.spec.bits) == (2 if become == "others" else None)
    assert not caplog.records


def test_codes_are_read_once_whichever_thread_asks_first(copied, monkeypatch):
    real, calls, start = codes.digest_bytes, [], threading.Barrier(6)

    def digest_bytes(data):
        calls.append(1)
        return real(data)

    monkeypatch.setattr(codes, "digest_bytes", digest_bytes)
    with open_index(copied, verify="quick") as index:
        found = []

        def read() -> None:
            start.wait()
            found.append(index.rabitq.data)

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        assert all(data is found[0] for data in found)
    assert len(calls) == 1
