"""Scans of product-quantized rows in pages, of which many are equal, within their scratch."""

from __future__ import annotations

import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from hybridindex.errors import OutOfBudgetError
from hybridindex.index import build
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from hybridindex.tiers.paged.pq import triton_pq_scanner
from hybridindex.tiers.paged.pq.native_pq_scanner import NativePqScanner
from hybridindex.tiers.paged.pq.torch_pq_scanner import TorchPqScanner
from hybridindex.tiers.paged.pq.triton_pq_scanner import TritonPqScanner
from tests.clustered import DIM, clustered
from tests.tiers.paged.scanning import scanning
from tests.tiers.triton_here import require_triton

K = 10
#: Equal rows: so many that a scan looks again and finds them all, and so many that it does not.
FEW, MANY = 40, 2000
EQUAL = clustered(1, seed=4)[0]


@pytest.fixture(params=[NativePqScanner, TorchPqScanner, TritonPqScanner], ids=lambda kind: kind.name)
def kind(request, monkeypatch):
    if request.param is TritonPqScanner:
        require_triton("cpu")
        # An operation of the interpreter costs the same for any number of rows.
        monkeypatch.setattr(triton_pq_scanner, "_ROWS", 1024)
    return request.param


def with_ties(path, codec, n_equal):
    """Four lists; the first rows are the same, with ids in no order."""
    rows = clustered(max(1000, n_equal + 600), seed=1)
    rows[:n_equal] = EQUAL
    ids = np.random.default_rng(2).permutation(len(rows))
    return build(rows, path, ids=ids, nlist=4, metric="l2", codec=codec, nprobe=4)


def asked(index, n):
    """Queries beside the equal rows, which are nearer than all others, and the probes of all lists."""
    queries = (EQUAL + 0.001 * np.random.default_rng(5).standard_normal((n, DIM))).astype(np.float32)
    return queries, *index.quantize(queries, 4)


def on_host(index, *arguments):
    with closing(HostNativeScanner(index, threads=1)) as host:
        return host.scan(*arguments)


@pytest.mark.parametrize("codec", ["pq8", "pqfs12"])
def test_equal_rows_are_ordered_by_id_as_on_the_host(tmp_path, codec, kind):
    with with_ties(tmp_path / "i", codec, FEW) as index:
        arguments = (*asked(index, 3), K)
        with scanning(index, "cpu", kind=kind, page_bytes=1024) as scanner:
            found = scanner.scan(*arguments)
        for own, expected in zip(found, on_host(index, *arguments), strict=True):
            np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize("codec", ["pq8", "pqfs12"])
def test_thousands_of_equal_rows_take_no_memory_on_the_stand_in(tmp_path, codec):
    with with_ties(tmp_path / "i", codec, MANY) as index:
        arguments = (*asked(index, 64), K)
        with scanning(index, "cpu", kind=NativePqScanner, page_bytes=1024) as scanner:
            scanner.scan(*arguments)  # what is made once
            tracemalloc.start()
            try:
                found = scanner.scan(*arguments)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        for own, expected in zip(found, on_host(index, *arguments), strict=True):
            np.testing.assert_array_equal(own, expected)
        assert peak < 256 << 10


@pytest.mark.parametrize("device_kind", [TorchPqScanner, TritonPqScanner], ids=lambda kind: kind.name)
def test_thousands_of_equal_rows_are_left_to_the_host(tmp_path, device_kind, monkeypatch):
    if device_kind is TritonPqScanner:
        require_triton("cpu")
        monkeypatch.setattr(triton_pq_scanner, "_ROWS", 1024)
    wanted, nearest = [], device_kind._nearest
    monkeypatch.setattr(device_kind, "_nearest", lambda self, *given: wanted.append(given[2]) or nearest(self, *given))
    with (
        with_ties(tmp_path / "i", "pqfs12", MANY) as index,
        scanning(index, "cpu", kind=device_kind, page_bytes=1024) as scanner,
    ):
        with pytest.raises(OutOfBudgetError, match=r"for k 10: 1 queries have more than 134 rows"):
            scanner.scan(*asked(index, 1), K)
        assert wanted == [18, 36, 72, 144]


def test_a_second_look_keeps_within_the_scratch(tmp_path):
    with (
        with_ties(tmp_path / "i", "pq8", FEW) as index,
        scanning(index, "cpu", kind=TorchPqScanner, page_bytes=1024, scratch=50_000) as scanner,
    ):
        scanner.scan(*asked(index, 20), K)
        with pytest.raises(OutOfBudgetError, match=r"scratch of 50,000 bytes .* 60 queries have more than 8 rows"):
            scanner.scan(*asked(index, 60), K)


def test_triton_has_tables_of_one_tile_at_a_time(tmp_path, monkeypatch):
    require_triton("cpu")
    monkeypatch.setattr(triton_pq_scanner, "_ROWS", 1024)
    made, tables_of = [], triton_pq_scanner.tables_of
    monkeypatch.setattr(
        triton_pq_scanner, "tables_of", lambda queries, form: made.append(len(queries)) or tables_of(queries, form)
    )
    with with_ties(tmp_path / "i", "pq8", 1) as index:
        queries = clustered(24, seed=7)
        arguments = (queries, *index.quantize(queries, 2), K)
        with scanning(index, "cpu", kind=TritonPqScanner, page_bytes=1024, scratch=120_000) as scanner:
            found = scanner.scan(*arguments)
        assert max(made) < 24
        assert sum(made) >= 24
        for own, expected in zip(found, on_host(index, *arguments), strict=True):
            np.testing.assert_array_equal(own, expected)
