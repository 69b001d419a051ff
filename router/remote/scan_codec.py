"""What nodes exchange for one scan with the options ``of``, ``n``, ``d``, ``w``, ``k`` and maybe ``f``, or for one
comparison of candidates with ``r`` in the place of ``w``: its arrays, and those found.

Little-endian, no padding. Asked: queries (n, d) float32 after the index's transforms; of a scan lists (n, w) int32,
-1 = skip, coarse distances (n, w) float32, and with ``f`` filters behind them
(:mod:`hybridindex.router.remote.filter_codec`); of a comparison lists (n, r) int32, -1 = skip, and the number of the
row in each (n, r) uint32. Answered: distances (n, k) float32, ids (n, k) int64. The numbers determine both lengths; a
body of any other length is refused, so that a node which knows nothing of filters never leaves one out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.index.ivf import IVFIndex
from hybridindex.router.batch.request import GivenProbes
from hybridindex.router.remote.filter_codec import ReceivedFilters
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.types import F32, I64

__all__ = [
    "AskedScan",
    "decode_asked",
    "decode_comparison",
    "decode_found",
    "decode_scan",
    "encode_comparison",
    "encode_found",
    "encode_scan",
    "found_bytes",
    "scan_bytes",
]


_NOT_FINITE = "the body holds numbers that are not finite"


def scan_bytes(n: int, d: int, w: int) -> int:
    """Length of a question, with ``w`` lists of a scan or rows of a comparison."""
    return 4 * n * (d + 2 * w)


def found_bytes(n: int, k: int) -> int:
    """Length of an answer."""
    return 12 * n * k


def encode_scan(queries: F32, probes: I64, coarse_distances: F32) -> bytes:
    """Of queries (n, d), lists (n, w) and coarse distances (n, w)."""
    return b"".join(
        (
            np.ascontiguousarray(queries, dtype="<f4").tobytes(),
            probes.astype("<i4").tobytes(),
            np.ascontiguousarray(coarse_distances, dtype="<f4").tobytes(),
        )
    )


def encode_comparison(queries: F32, lists: I64, rows: I64) -> bytes:
    """Of queries (n, d), and the lists (n, r) of candidates with their numbers in these, (n, r)."""
    return b"".join(
        (
            np.ascontiguousarray(queries, dtype="<f4").tobytes(),
            lists.astype("<i4").tobytes(),
            rows.astype("<u4").tobytes(),
        )
    )


class AskedScan(NamedTuple):
    """A question, whose filters are still to be unpacked."""

    #: (n, d) float32.
    queries: F32
    #: (n, w) int64 and float32.
    probes: I64
    coarse_distances: F32
    #: None: all rows may be answered.
    filters: ReceivedFilters | None

    def given(self) -> GivenProbes:
        """What is to be scanned.

        Raises:
            InvalidInputError: a filter leaves rows that are none.
        """
        masks = None if self.filters is None else self.filters.masks()
        return GivenProbes(self.probes, self.coarse_distances, masks)


def decode_asked(body: bytes | memoryview, *, n: int, d: int, w: int, n_filters: int, index: IVFIndex) -> AskedScan:
    """The whole question; ``n_filters``: 0: it has none.

    Raises:
        InvalidInputError: as :func:`decode_scan`, or :class:`hybridindex.router.remote.filter_codec.ReceivedFilters`.
    """
    whole, nbytes = memoryview(body), scan_bytes(n, d, w) if n_filters else len(body)
    arrays = decode_scan(whole[:nbytes], n=n, d=d, w=w, nlist=index.nlist)
    filters = ReceivedFilters(whole[nbytes:], n_filters, arrays[1], index) if n_filters else None
    return AskedScan(*arrays, filters)


def decode_scan(body: bytes | memoryview, *, n: int, d: int, w: int, nlist: int) -> tuple[F32, I64, F32]:
    """Queries (n, d), lists (n, w) int64 and coarse distances (n, w), the first and last as views.

    Raises:
        InvalidInputError: another length, numbers that are not finite, or lists that are none.
    """
    queries, probes = _queries_and_lists(body, n, d, w, nlist)
    coarse = np.frombuffer(body, dtype="<f4", count=n * w, offset=4 * n * (d + w)).reshape(n, w)
    if not np.isfinite(coarse).all():
        raise InvalidInputError(_NOT_FINITE)
    return queries, probes, coarse


def decode_comparison(body: bytes | memoryview, *, n: int, d: int, r: int, list_sizes: I64) -> tuple[F32, I64]:
    """Queries (n, d), a view, and positions (n, r) int64 of candidates, -1 = skip.

    Raises:
        InvalidInputError: another length, numbers that are not finite, lists that are none, or rows that they have not.
    """
    queries, lists = _queries_and_lists(body, n, d, r, len(list_sizes))
    rows = np.frombuffer(body, dtype="<u4", count=n * r, offset=4 * n * (d + r)).reshape(n, r).astype(np.int64)
    there = lists >= 0
    if (rows[there] >= list_sizes[lists[there]]).any():
        raise InvalidInputError("the body names rows that their lists have not")
    return queries, np.where(there, (lists << POSITION_BITS) | rows, -1)


def _queries_and_lists(body: bytes | memoryview, n: int, d: int, w: int, nlist: int) -> tuple[F32, I64]:
    if len(body) != scan_bytes(n, d, w):
        raise InvalidInputError(
            f"the body has {len(body)} bytes; expected {scan_bytes(n, d, w)} for n={n}, d={d}, and {w} lists each"
        )
    queries = np.frombuffer(body, dtype="<f4", count=n * d).reshape(n, d)
    lists = np.frombuffer(body, dtype="<i4", count=n * w, offset=4 * n * d).reshape(n, w).astype(np.int64)
    if lists.size and (lists.min() < -1 or lists.max() >= nlist):
        raise InvalidInputError(f"the body names lists outside -1..{nlist - 1}")
    if not np.isfinite(queries).all():
        raise InvalidInputError(_NOT_FINITE)
    return queries, lists


def encode_found(distances: F32, ids: I64) -> bytes:
    """Of distances and ids (n, k)."""
    return distances.astype("<f4", copy=False).tobytes() + ids.astype("<i8", copy=False).tobytes()


def decode_found(body: bytes, *, n: int, k: int) -> tuple[F32, I64]:
    """Distances and ids (n, k), which may be changed.

    Raises:
        InvalidInputError: another length.
    """
    if len(body) != found_bytes(n, k):
        raise InvalidInputError(f"a node's answer has {len(body)} bytes; expected {found_bytes(n, k)}")
    distances = np.frombuffer(body, dtype="<f4", count=n * k).reshape(n, k)
    ids = np.frombuffer(body, dtype="<i8", count=n * k, offset=4 * n * k).reshape(n, k)
    return distances.copy(), ids.copy()
