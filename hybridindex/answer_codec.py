"""The binary forms of what a daemon and its clients exchange. Little-endian, no padding.

A search answer: a header of 16 bytes (magic ``HIXA``, then version, n, k as uint32), ids (n, k) int64, distances (n, k)
float32, nprobe_used (n,) int32, hit_rate (n,) float32; in version 2, which answers from a part of the lists have,
coverage (n,) float32 besides. The header determines the length; a body of any other length is refused.

Rows that are added: a header of 24 bytes (magic ``HIXR``, then version, n, d, whether there are ids (0 or 1), and the
length of the JSON part as uint32), vectors (n, d) float32, ids (n,) int64 where there are some, and a JSON object in
UTF-8 with the options and attributes; no bytes are an empty one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import F32, I64, SearchResult

__all__ = [
    "ANSWER_TYPE",
    "ROWS_TYPE",
    "EncodedRows",
    "answer_bytes",
    "decode_answer",
    "decode_rows",
    "encode_answer",
    "encode_rows",
]

#: Media type of the layout above.
ANSWER_TYPE = "application/vnd.hybridindex.answer"
_MAGIC = b"HIXA"
_VERSION = 1
#: With coverage.
_PARTIAL_VERSION = 2
_HEADER = struct.Struct("<4sIII")

#: Media type of rows.
ROWS_TYPE = "application/vnd.hybridindex.rows"
_ROWS_MAGIC = b"HIXR"
_ROWS_VERSION = 1
_ROWS_HEADER = struct.Struct("<4sIIIII")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """Rows as a body has them."""

    #: (n, d).
    vectors: F32
    #: (n,); None: to be numbered.
    ids: I64 | None
    #: A JSON object.
    more: bytes


def answer_bytes(n: int, k: int) -> int:
    """Length of an answer to ``n`` queries of ``k`` neighbours."""
    return _HEADER.size + n * k * 12 + n * 8


def encode_answer(result: SearchResult) -> bytes:
    n, k = result.ids.shape
    coverage = result.coverage
    return b"".join(
        (
            _HEADER.pack(_MAGIC, _VERSION if coverage is None else _PARTIAL_VERSION, n, k),
            result.ids.astype("<i8", copy=False).tobytes(),
            result.distances.astype("<f4", copy=False).tobytes(),
            result.nprobe_used.astype("<i4", copy=False).tobytes(),
            result.hit_rate.astype("<f4", copy=False).tobytes(),
            b"" if coverage is None else coverage.astype("<f4", copy=False).tobytes(),
        )
    )


def decode_answer(body: bytes) -> SearchResult:
    """An answer whose arrays view ``body`` without a copy.

    Raises:
        InvalidInputError: ``body`` is no such answer, of another version, or of a wrong length.
    """
    if len(body) < _HEADER.size:
        raise InvalidInputError(f"answer has {len(body)} bytes; expected a header of {_HEADER.size} at least")
    magic, version, n, k = _HEADER.unpack_from(body)
    if magic != _MAGIC or version not in (_VERSION, _PARTIAL_VERSION):
        raise InvalidInputError(
            f"answer starts with {magic!r} version {version}; expected {_MAGIC!r} version {_VERSION} or "
            f"{_PARTIAL_VERSION}"
        )
    partial = version == _PARTIAL_VERSION
    expected = answer_bytes(n, k) + 4 * n * partial
    if len(body) != expected:
        raise InvalidInputError(f"answer has {len(body)} bytes; n {n} and k {k} make {expected}")
    at = _HEADER.size
    ids = np.frombuffer(body, "<i8", n * k, at).reshape(n, k)
    at += ids.nbytes
    distances = np.frombuffer(body, "<f4", n * k, at).reshape(n, k)
    at += distances.nbytes
    nprobe_used = np.frombuffer(body, "<i4", n, at)
    at += nprobe_used.nbytes
    return SearchResult(
        ids=ids,
        distances=distances,
        nprobe_used=nprobe_used,
        hit_rate=np.frombuffer(body, "<f4", n, at),
        coverage=np.frombuffer(body, "<f4", n, at + 4 * n) if partial else None,
    )


def encode_rows(vectors: F32, ids: I64 | None, more: bytes = b"") -> bytes:
    """
    Args:
        vectors: (n, d).
        ids: (n,).
        more: a JSON object; empty: nothing.
    """
    n, d = vectors.shape
    return b"".join(
        (
            _ROWS_HEADER.pack(_ROWS_MAGIC, _ROWS_VERSION, n, d, ids is not None, len(more)),
            vectors.astype("<f4", copy=False).tobytes(),
            b"" if ids is None else ids.astype("<i8", copy=False).tobytes(),
            more,
        )
    )


def decode_rows(body: bytes) -> EncodedRows:
    """Rows whose vectors view ``body`` without a copy.

    Raises:
        InvalidInputError: ``body`` is none of these, of another version, or of a wrong length.
    """
    if len(body) < _ROWS_HEADER.size:
        raise InvalidInputError(f"body has {len(body)} bytes; expected a header of {_ROWS_HEADER.size} at least")
    magic, version, n, d, has_ids, n_more = _ROWS_HEADER.unpack_from(body)
    if magic != _ROWS_MAGIC or version != _ROWS_VERSION:
        raise InvalidInputError(
            f"body starts with {magic!r} version {version}; expected {_ROWS_MAGIC!r} version {_ROWS_VERSION}"
        )
    if has_ids not in (0, 1):
        raise InvalidInputError(f"body says {has_ids} of its ids; expected 0 or 1")
    expected = _ROWS_HEADER.size + 4 * n * d + 8 * n * has_ids + n_more
    if len(body) != expected:
        raise InvalidInputError(f"body has {len(body)} bytes; its header makes {expected}")
    at = _ROWS_HEADER.size
    vectors = np.frombuffer(body, "<f4", n * d, at).reshape(n, d)
    at += vectors.nbytes
    ids = np.frombuffer(body, "<i8", n, at).astype(np.int64) if has_ids else None
    return EncodedRows(vectors=vectors.astype(np.float32, copy=False), ids=ids, more=body[at + 8 * n * has_ids :])
