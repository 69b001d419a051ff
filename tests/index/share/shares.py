"""A whole index and a share of it, for the tests here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hybridindex.index import open_index
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.share.share import Share, create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from tests.clustered import clustered, small_index

__all__ = ["NPROBE", "QUERIES", "K", "Pair", "Wrong", "bytes_of", "share_of"]

K, NPROBE = 5, 3
QUERIES = clustered(60, seed=5)


def share_of(index: IVFIndex) -> Share:
    assert index.share is not None
    return index.share


class Pair:
    """A whole index in a folder, and a share of it that holds no list yet."""

    def __init__(self, folder: Path, **options) -> None:
        self.whole = small_index(folder / "whole", **options)
        self.source = FolderSource(folder / "whole")
        self.path = folder / "share"
        create_share(self.path, self.source)
        self.index = open_index(self.path)
        self.share = share_of(self.index)
        self.file = self.index.integrity.file
        self.probes, _ = self.whole.quantize(self.whole.transform(QUERIES), NPROBE)
        with Router(self.whole) as router:
            #: What the whole index answers to each query alone.
            self.answers = [router.search(query, K, NPROBE) for query in QUERIES]

    def hottest(self) -> list[int]:
        """Lists, those first that most queries probe."""
        counts = np.bincount(self.probes.reshape(-1), minlength=self.whole.nlist)
        return [int(list_id) for list_id in np.argsort(-counts, kind="stable")]

    def lacking(self, row: int) -> list[int]:
        """Lists that a query probes and that are not held."""
        return [list_id for list_id in sorted(self.probes[row].tolist()) if not self.share.held[list_id]]

    def is_whole_answer(self, row: int, found) -> bool:
        """Whether a query's answer is that of the whole index."""
        expected = self.answers[row]
        return np.array_equal(found.ids, expected.ids) and np.array_equal(found.distances, expected.distances)

    def close(self) -> None:
        self.index.close()
        self.whole.close()


class Wrong:
    """A source that changes what another one gives."""

    def __init__(self, source: FolderSource, change) -> None:
        """``change``: of (list id, codes, ids)."""
        self._source, self._change = source, change

    def files(self) -> dict[str, bytes]:
        return self._source.files()

    def read(self, lists: Sequence[int]) -> Iterator[tuple[int, bytes, bytes]]:
        return map(self._change, self._source.read(lists))


def bytes_of(index: IVFIndex, lists: Iterable[int]) -> int:
    """Of the codes and ids of lists."""
    spans = index.integrity.spans
    return int((spans[:, :, 1] - spans[:, :, 0]).sum(axis=1)[list(lists)].sum())
