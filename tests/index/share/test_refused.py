"""Whoever reads all lists, or changes rows, is refused by name on a share: also where it holds every list."""

from __future__ import annotations

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import UnsupportedIndexError
from hybridindex.index import compress, open_index, save, to_faiss, write_layout
from hybridindex.index.changes.snapshots import snapshot
from hybridindex.index.changes.write import add, delete, upsert
from tests.clustered import DIM, NLIST, clustered

ROWS = clustered(3, DIM, seed=8)


def files_of(path):
    return {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in (path / "gen-000001").iterdir()}


@pytest.mark.parametrize(
    "change",
    [
        lambda index, to: save(index, to),
        lambda index, to: write_layout(index, to, "blocks16"),
        lambda index, to: to_faiss(index, to),
        lambda index, to: compress(index, 2),
        lambda index, to: snapshot(index.path, to),
        lambda index, to: add(index, ROWS),
        lambda index, to: upsert(index, ROWS, [1, 2, 3]),
        lambda index, to: delete(index, [1]),
        lambda index, to: hx.Index(index).compact(),
        lambda index, to: hx.Index(index).set_attributes({"a": np.arange(index.count)}),
        lambda index, to: hx.build(clustered(300, DIM), index.path, nlist=4, replace=True),
    ],
    ids=[
        "save",
        "layout",
        "export",
        "compress",
        "snapshot",
        "add",
        "upsert",
        "delete",
        "compact",
        "attributes",
        "build",
    ],
)
@pytest.mark.parametrize("lists", [[1, 2], range(NLIST)], ids=["some", "all"])
def test_it_is_refused_by_name(make, tmp_path, lists, change):
    pair = make()
    pair.share.hold(lists, pair.source)
    before = files_of(pair.path)
    with pytest.raises(UnsupportedIndexError, match=rf"{pair.path} is a share"):
        change(pair.index, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    assert files_of(pair.path) == before
    with open_index(pair.path) as again:
        assert again.count == pair.whole.count
