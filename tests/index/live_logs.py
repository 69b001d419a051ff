"""Changes and stores for tests of the log, without an index."""

from __future__ import annotations

import numpy as np

from hybridindex.index.live.store import LiveStore
from hybridindex.index.log.change import Change
from hybridindex.index.log.change_log import LogFile
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE, TABLE_FILE, FileEntry, Manifest

ROWS = "0123456789abcdef" * 2
CODE_SIZE = 12
NLIST = 4


def change(gone=(), ids=(), seed=0, attributes=b""):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (len(ids), CODE_SIZE), dtype=np.uint8)
    lists = rng.integers(0, NLIST, len(ids))
    gone, ids = np.array(gone, dtype=np.int64), np.array(ids, dtype=np.int64)
    return Change(gone=gone, ids=ids, lists=lists, codes=codes, attributes=attributes)


def same(a, b):
    return a.attributes == b.attributes and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("gone", "ids", "lists", "codes")
    )


def log_at(path, first=0, rows=ROWS):
    return LogFile(path, rows_xxh3_128=rows, code_size=CODE_SIZE, nlist=NLIST, first=first)


def store_at(path):
    """That of a generation in a folder of an index, which is made."""
    folder = path / "gen-000001"
    if not folder.exists():
        folder.mkdir(parents=True)
        (path / "CURRENT").write_text("gen-000001\n")
    entry = FileEntry(size=0, xxh3_128=ROWS)
    return LiveStore(
        folder,
        Manifest(
            metric="l2", codec="flat", dim=3, scan_dim=3, nprobe=1, layout="rows", by_residual=False, normalized=False,
            code_size=CODE_SIZE, generation=1, created_at="", nlist=NLIST, count=0, fingerprint="f",
            files=dict.fromkeys((LISTS_FILE, MODEL_FILE, TABLE_FILE), entry),
        ),
    )  # fmt: skip


def apply(store, made):
    return store.commit(lambda _state: (made, None))
