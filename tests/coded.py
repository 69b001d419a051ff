"""Indexes with codes for the tests of tiers, router and daemon, and the oracle of searches by codes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridindex.index import open_index
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.rabitq.encode import encode_reference
from hybridindex.index.rabitq.estimate import estimates, prepare_queries
from hybridindex.index.rabitq.rotation import signs
from hybridindex.index.rabitq.spec import (
    MIN_FILE_BYTES,
    ROUNDS,
    SPEC_FILE,
    CandidateTable,
    RabitqSpec,
    bin_name,
    pad_dim,
    render_spec,
)
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.index.storage.generation import generation_name
from hybridindex.index.storage.manifest import LISTS_FILE
from hybridindex.types import F32, I64

__all__ = ["TABLE", "best_of", "with_codes"]

#: Candidates that tests count on.
TABLE = CandidateTable(k=(1, 10, 100), nprobe=(1, 8, 32), r=((4, 8, 12), (20, 40, 60), (150, 200, 300)))


def with_codes(index: IVFIndex, *, bits: int = 1, table: CandidateTable = TABLE, seed: int = 3) -> IVFIndex:
    """Writes codes beside the rows of an index, closes it, and opens it again: compression without its measurements."""
    manifest, padded = index.manifest, pad_dim(index.scan_dim)
    spec = RabitqSpec(
        bits=bits,
        dim=index.scan_dim,
        padded_dim=padded,
        metric=index.metric,
        seed=seed,
        rounds=ROUNDS,
        f_scale=2.0**-8,
        g_scale=2.0**-6,
        generation=manifest.generation,
        count=manifest.count,
        nlist=manifest.nlist,
        rows_xxh3_128=manifest.files[LISTS_FILE].xxh3_128,
        file=bin_name("0" * 32),
        file_bytes=0,
        file_xxh3_128="0" * 32,
        recall_loss=0.005,
        candidates=table,
        measured_with="sampled rows",
        created_at="2026-01-05T10:00:00+00:00",
        versions={},
    )
    rotation = signs(padded, seed)
    content = b"".join(
        encode_reference(index.decode_list(i), index.centroids[i], rotation, spec).tobytes() for i in range(index.nlist)
    )
    content = content.ljust(MIN_FILE_BYTES, b"\0")
    digest = digest_bytes(content)
    said = {name: getattr(spec, name) for name in RabitqSpec.__dataclass_fields__}
    spec = RabitqSpec(**(said | {"file": bin_name(digest), "file_bytes": len(content), "file_xxh3_128": digest}))
    folder = Path(index.path) / generation_name(manifest.generation)
    (folder / spec.file).write_bytes(content)
    (folder / SPEC_FILE).write_bytes(render_spec(spec))
    index.close()
    found = open_index(index.path)
    assert found.rabitq is not None, found.rabitq_problem
    return found


def best_of(index: IVFIndex, query: F32, lists: I64, products: F32, candidates: int, k: int) -> tuple[I64, np.ndarray]:
    """Ids and float64 distances that a search by codes of one transformed query answers, best first.

    Args:
        products: (p,) float32 of the query and each list's centroid.
    """
    codes = index.rabitq
    assert codes is not None
    coded = prepare_queries(query[None], codes.signs, codes.spec)
    ids, rows, said, places = [], [], [], []
    for list_id, product in zip(lists.tolist(), products, strict=True):
        if list_id < 0:
            continue
        square = float(codes.centroid_sq[list_id])
        said.append(estimates(coded, codes.decode_list(list_id), np.array([product]), square, codes.spec)[0])
        places.append((list_id << 32) + np.arange(len(said[-1])))
        ids.append(index.list_ids(list_id))
        rows.append(index.decode_list(list_id))
    if not ids:
        return np.empty(0, np.int64), np.empty(0)
    kept = np.lexsort((np.concatenate(places), np.concatenate(said)))[:candidates]
    own = np.concatenate(ids)[kept]
    decoded = np.concatenate(rows)[kept].astype(np.float64)
    if index.metric == "ip":
        exact = decoded @ query.astype(np.float64)
        order = np.lexsort((own, -exact.astype(np.float32)))[:k]
    else:
        exact = ((decoded - query) ** 2).sum(axis=1)
        order = np.lexsort((own, exact.astype(np.float32)))[:k]
    return own[order], exact[order]
