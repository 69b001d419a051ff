"""What a router does before its first search reads the lists that are in memory, and no other."""

from __future__ import annotations

from contextlib import closing

import faiss
import numpy as np
import pytest

from hybridindex.tiers.host.host_scanner import open_host_scanner
from hybridindex.tiers.host.rehearsal import rehearse
from tests.clustered import small_index


@pytest.mark.parametrize("codec", ["flat", "sq8", "pq8", "pqfs8"])
@pytest.mark.parametrize("lists", [[], [3], [5, 1, 7, 2, 9, 11, 30, 31, 0, 4]])
def test_only_lists_in_memory_are_scanned(tmp_path, monkeypatch, codec, lists):
    with (
        small_index(tmp_path / "i", codec=codec, n=600) as index,
        closing(open_host_scanner(index, threads=2)) as scanner,
    ):
        seen, prepared, threads = [], [], faiss.omp_get_max_threads()
        scan = scanner.scan
        monkeypatch.setattr(scanner, "prepare", lambda some: prepared.append(some.tolist()))
        monkeypatch.setattr(scanner, "scan", lambda q, probes, *rest: seen.append(probes) or scan(q, probes, *rest))
        rehearse(index, scanner, np.array(lists, dtype=np.int64))
        assert prepared == [lists]
        # A query alone, and so many that faiss multiplies matrices.
        assert [probes.shape for probes in seen] == [(n, min(len(lists), index.nprobe)) for n in (1, 20)]
        assert all(set(probes.ravel().tolist()) <= set(lists) for probes in seen)
        assert faiss.omp_get_max_threads() == threads
