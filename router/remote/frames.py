"""Frames of a channel between two nodes: a head of 12 bytes, then a payload.

Head, little-endian: length of the payload (uint32), number of the scan (uint32), kind (uint16), extra (uint16). Of an
:data:`ASK` the payload is the scan's options as a query string, of ``extra`` bytes, and its arrays; of an
:data:`ANSWER` the arrays found; of a :data:`REFUSAL` a problem document, and ``extra`` its status. A :data:`CANCEL` has
none. Numbers are the asking node's.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

__all__ = [
    "ANSWER",
    "ASK",
    "CANCEL",
    "CHANNEL_PATH",
    "HEAD_BYTES",
    "REFUSAL",
    "UPGRADE",
    "FrameReader",
    "frame",
]

#: Where a channel begins, and the protocol that it is, as of ``Upgrade`` of HTTP/1.1.
CHANNEL_PATH: Final = "/v1/cluster/channel"
UPGRADE: Final = "hybridindex-scans"
ASK: Final = 1
CANCEL: Final = 2
ANSWER: Final = 3
REFUSAL: Final = 4
_HEAD = Struct("<IIHH")
HEAD_BYTES: Final = _HEAD.size


def frame(kind: int, number: int, *payload: bytes, extra: int = 0) -> bytes:
    """One whole frame; ``payload``: its parts."""
    return b"".join((_HEAD.pack(sum(map(len, payload)), number, kind, extra), *payload))


class FrameReader:
    """Cuts what comes into frames."""

    __slots__ = ("_body", "_head", "_kept", "_left", "_on_frame", "_on_head", "_skipped")

    def __init__(
        self, on_head: Callable[[int, int, int], bool], on_frame: Callable[[int, int, int, bytes], None]
    ) -> None:
        """
        Args:
            on_head: given kind, number and length before the payload comes; False: it is skipped, and is no frame.
            on_frame: given kind, number, extra and payload.
        """
        self._on_head, self._on_frame = on_head, on_frame
        #: Of a head that came in parts.
        self._head = b""
        #: Kind, number and extra of a payload that comes in parts; None: a head comes next.
        self._kept: tuple[int, int, int] | None = None
        self._body = bytearray()
        self._left, self._skipped = 0, False

    @property
    def within(self) -> bool:
        """Whether a frame has begun to come."""
        return bool(self._head) or self._kept is not None

    def feed(self, data: bytes) -> None:
        """Whatever the two callables raise goes to the caller, and nothing is to be fed after that."""
        at, end = 0, len(data)
        while True:
            if self._kept is None:
                if self._head or end - at < HEAD_BYTES:
                    taken = data[at : at + HEAD_BYTES - len(self._head)]
                    self._head, at = self._head + taken, at + len(taken)
                    if len(self._head) < HEAD_BYTES:
                        return
                    length, number, kind, extra = _HEAD.unpack(self._head)
                    self._head = b""
                else:
                    length, number, kind, extra = _HEAD.unpack_from(data, at)
                    at += HEAD_BYTES
                keep = self._on_head(kind, number, length)
                if end - at >= length:
                    if keep:
                        self._on_frame(kind, number, extra, data[at : at + length])
                    at += length
                    continue
                self._kept, self._left, self._skipped = (kind, number, extra), length, not keep
            taken = data[at : at + self._left]
            at, self._left = at + len(taken), self._left - len(taken)
            if not self._skipped:
                self._body += taken
            if self._left:
                return
            kept, body, self._kept, self._body = self._kept, self._body, None, bytearray()
            if not self._skipped:
                self._on_frame(*kept, bytes(body))
