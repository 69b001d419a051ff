"""The process that reads and embeds texts: takes calls from standard input, answers on standard output.

:mod:`hybridindex.rag.ingest.text_process` starts it as ``python -m hybridindex.rag.ingest.text_worker NICE``. A frame
has the lengths of its two parts as uint64, a JSON object, and bytes. It ends at once when the other process is gone.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridindex.processes import take_pipes

if TYPE_CHECKING:
    from hybridindex.rag.retriever import Embedder

__all__ = ["main", "read_frame", "write_frame"]

_HEADER = struct.Struct("<QQ")
_CHUNK_BYTES = 1 << 20
#: Of a frame's two parts. Who sends more is not who it should be.
_MOST_BYTES = 4 << 30


def write_frame(stream: RawIOBase, message: dict[str, Any], more: bytes = b"") -> None:
    """Raises OSError: nobody reads any more."""
    said = json.dumps(message).encode()
    for part in (_HEADER.pack(len(said), len(more)), said, more):
        for start in range(0, len(part), _CHUNK_BYTES):
            left = memoryview(part)[start : start + _CHUNK_BYTES]
            while left:
                left = left[stream.write(left) or 0 :]


def read_frame(stream: RawIOBase) -> tuple[dict[str, Any], bytes] | None:
    """None: it ended. Raises ValueError: what came is no frame."""
    header = _read(stream, _HEADER.size)
    if header is None:
        return None
    sizes = _HEADER.unpack(header)
    if sum(sizes) > _MOST_BYTES:
        raise ValueError(f"a frame of {sum(sizes)} bytes")
    said, more = (_read(stream, size) for size in sizes)
    if said is None or more is None:
        return None
    message = json.loads(said)
    if not isinstance(message, dict):
        raise ValueError("a frame without an object")
    return message, more


def _read(stream: RawIOBase, size: int) -> bytes | None:
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        n = stream.readinto(view[done : done + _CHUNK_BYTES])
        if not n:
            return None
        done += n
    return bytes(found)


class _Calls:
    def __init__(self) -> None:
        self._owned = contextlib.ExitStack()
        self._embedder: Embedder | None = None

    def answer(self, call: str, **asked: Any) -> tuple[dict[str, Any], bytes]:
        """Carries out one call."""
        if call == "open":
            return self._open(**asked)
        if call == "read":
            return self._read(**asked)
        if call == "embed":
            return self._embed(**asked)
        if call == "starts":
            return self._starts(**asked)
        raise ValueError(f"no such call: {call}")

    def _open(self, name: str, url: str | None, key: str | None, folder: str) -> tuple[dict[str, Any], bytes]:
        from hybridindex.rag.embedders import EmbedderOptions, open_embedder

        options = EmbedderOptions(url=url, key=key, wheel_folder=Path(folder), fetch=False)
        self._embedder = open_embedder(self._owned, name, options)
        return {"tokens": hasattr(self._embedder, "token_starts")}, b""

    def _read(self, source: dict[str, Any], words: int | None) -> tuple[dict[str, Any], bytes]:
        from hybridindex.rag.ingest.readers import Reading, read_chunks
        from hybridindex.rag.ingest.sources import GivenText

        chunks = list(read_chunks(GivenText(**source), Reading(words=words)))
        return {"texts": [chunk.text for chunk in chunks], "continues": [chunk.continues for chunk in chunks]}, b""

    def _embed(self, texts: list[str], passages: bool) -> tuple[dict[str, Any], bytes]:
        import numpy as np

        assert self._embedder is not None, "nothing was opened"
        embed = self._embedder.embed
        if passages:
            embed = getattr(self._embedder, "embed_passages", embed)
        vectors = np.ascontiguousarray(embed(texts), dtype="<f4")
        return {"shape": vectors.shape}, vectors.tobytes()

    def _starts(self, texts: list[str], own: bool) -> tuple[dict[str, Any], bytes]:
        import numpy as np

        from hybridindex.rag.tokens import TokenStarts, word_starts

        token_starts: TokenStarts = self._embedder.token_starts if own else word_starts  # type: ignore[union-attr]
        found: Sequence[Any] = token_starts(texts)
        flat = np.concatenate(found) if found else np.empty(0, dtype=np.uint32)
        return {"counts": [len(each) for each in found]}, flat.astype("<u4").tobytes()


def _said(error: Exception) -> dict[str, Any]:
    """What the other side raises again."""
    from hybridindex.errors import EmbeddingError, HybridIndexError, InvalidInputError

    if isinstance(error, EmbeddingError):
        kept = {"status": error.status, "retry_after_s": error.retry_after_s}
        return {"error": "embedding", "text": str(error), **kept}
    if isinstance(error, InvalidInputError):
        return {"error": "input", "text": str(error)}
    if isinstance(error, HybridIndexError):
        return {"error": "expected", "text": str(error)}
    return {"error": "failed", "text": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Serves calls until standard input ends."""
    calls_in, answers_out = take_pipes(int(sys.argv[1]))
    calls = _Calls()
    while (frame := read_frame(calls_in)) is not None:
        more = b""
        try:
            message, more = calls.answer(**frame[0])
        except Exception as error:  # noqa: BLE001 - raised again on the other side
            message = _said(error)
        write_frame(answers_out, message, more)


if __name__ == "__main__":
    main()
