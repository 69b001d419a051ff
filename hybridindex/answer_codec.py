"""The binary form of a search answer, which the daemon sends and its clients read.

Little-endian, no padding: a header of 16 bytes (magic ``HIXA``, then version, n, k as uint32), ids (n, k) int64,
distances (n, k) float32, nprobe_used (n,) int32, hit_rate (n,) float32. The header determines the length; a body of any
other length is refused.
"""

from __future__ import annotations

import struct

import numpy as np

from hybridindex.errors import InvalidInputError
from hybridindex.types import SearchResult

__all__ = ["ANSWER_TYPE", "answer_bytes", "decode_answer", "encode_answer"]

#: Media type of the layout above.
ANSWER_TYPE = "application/vnd.hybridindex.answer"
_MAGIC = b"HIXA"
_VERSION = 1
_HEADER = struct.Struct("<4sIII")


def answer_bytes(n: int, k: int) -> int:
    """Length of an answer to ``n`` queries of ``k`` neighbours."""
    return _HEADER.size + n * k * 12 + n * 8


def encode_answer(result: SearchResult) -> bytes:
    n, k = result.ids.shape
    return b"".join(
        (
            _HEADER.pack(_MAGIC, _VERSION, n, k),
            result.ids.astype("<i8", copy=False).tobytes(),
            result.distances.astype("<f4", copy=False).tobytes(),
            result.nprobe_used.astype("<i4", copy=False).tobytes(),
            result.hit_rate.astype("<f4", copy=False).tobytes(),
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
    if magic != _MAGIC or version != _VERSION:
        raise InvalidInputError(
            f"answer starts with {magic!r} version {version}; expected {_MAGIC!r} version {_VERSION}"
        )
    if len(body) != answer_bytes(n, k):
        raise InvalidInputError(f"answer has {len(body)} bytes; n {n} and k {k} make {answer_bytes(n, k)}")
    at = _HEADER.size
    ids = np.frombuffer(body, "<i8", n * k, at).reshape(n, k)
    at += ids.nbytes
    distances = np.frombuffer(body, "<f4", n * k, at).reshape(n, k)
    at += distances.nbytes
    nprobe_used = np.frombuffer(body, "<i4", n, at)
    return SearchResult(
        ids=ids,
        distances=distances,
        nprobe_used=nprobe_used,
        hit_rate=np.frombuffer(body, "<f4", n, at + nprobe_used.nbytes),
    )
