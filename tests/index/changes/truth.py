"""What an index holds after its changes, kept beside it: the oracle is brute force over that."""

from __future__ import annotations

import numpy as np

from hybridindex.index.faiss_model import decode
from tests.oracle import TOLERANCE

__all__ = ["Truth"]


class Truth:
    """Decoded rows by id. Ids of the index are all different."""

    def __init__(self, index):
        """``index``: without changes; only its encoder is asked later."""
        self._index = index
        self.rows = {}
        for list_id in range(index.nlist):
            self._put(index.list_ids(list_id), index.decode_list(list_id))

    def _put(self, ids, rows):
        self.rows.update(zip(ids.tolist(), rows, strict=True))

    def add(self, vectors, ids):
        index = self._index
        transformed = index.transform(np.ascontiguousarray(vectors))
        lists = index.quantize(transformed, 1)[0][:, 0]
        self._put(np.asarray(ids), decode(index.open_faiss(), index.encode_rows(transformed, lists), lists))

    def delete(self, ids):
        for each in np.asarray(ids).tolist():
            self.rows.pop(each, None)

    def check(self, queries, k, result, wanted=None):
        """The answer, at all lists, is that of all rows, or of those with ``wanted`` ids."""
        index, keep_max = self._index, self._index.metric == "ip"
        ids = np.array(sorted(self.rows if wanted is None else set(self.rows) & set(np.asarray(wanted).tolist())))
        rows = np.array([self.rows[each] for each in ids.tolist()], dtype=np.float64).reshape(-1, index.scan_dim)
        for query, distances, found in zip(index.transform(queries), result.distances, result.ids, strict=True):
            products = rows @ query.astype(np.float64)
            exact = products if keep_max else ((rows - query.astype(np.float64)) ** 2).sum(axis=1)
            n = min(k, len(ids))
            assert (found[n:] == -1).all()
            assert len(np.unique(found[:n])) == n
            assert np.isin(found[:n], ids).all(), "found what is not there"
            own = exact[np.searchsorted(ids, found[:n])]
            margin = TOLERANCE * (1 + np.abs(own))
            assert (np.abs(distances[:n] - own) <= margin).all()
            if n:
                kth = np.sort(exact)[::-1][n - 1] if keep_max else np.sort(exact)[n - 1]
                assert ((kth - own if keep_max else own - kth) <= margin).all()
