"""Reading and embedding texts in a process of the lowest priority: beside searches, and with their GIL, it would be in
their way. Models take memory there, which ends with it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from io import RawIOBase
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hybridindex.errors import EmbeddingError, HybridIndexError, InvalidInputError, NoEmbedderError
from hybridindex.processes import ONE_THREAD, OfOneProcess, usual_switch_interval
from hybridindex.rag.embedders import EmbedderOptions
from hybridindex.rag.ingest.readers import Chunk, Reading
from hybridindex.rag.ingest.sources import GivenText
from hybridindex.rag.ingest.text_worker import read_frame, write_frame
from hybridindex.types import F32

__all__ = ["TextProcess"]

_log = logging.getLogger(__name__)

#: Gives way to everything.
_NICE = 19
#: Further libraries that would take all cores; and those that would download what is not there.
_RAYON = ("RAYON_NUM_THREADS",)
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
_EXIT_TIMEOUT_S = 5.0


class TextProcess(OfOneProcess):
    """An embedder, and a reader of texts. Calls of several threads wait for each other; :meth:`close` from any."""

    def __init__(self, name: str, options: EmbedderOptions, *, threads: int = 1, until_s: float | None = None) -> None:
        """Starts the process and opens the embedder there, which downloads nothing.

        Args:
            name: of the embedder, as document stores have it.
            threads: that it may use.
            until_s: see :attr:`until_s`.

        Raises:
            NoEmbedderError: it cannot be opened; why, and what would help.
        """
        self.name = name
        self._calling = threading.Lock()
        self._closed = False
        #: When a call ends at the latest, in seconds of the monotonic clock: the process is killed then. None: never.
        self.until_s = until_s
        self._late = False
        self._has_tokens = False
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        counts = dict.fromkeys((*ONE_THREAD, *_RAYON), str(threads))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no input of users
                # -P: the working directory is no place to import from unless it was one here.
                [sys.executable, "-P", "-m", "hybridindex.rag.ingest.text_worker", str(_NICE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C goes to the process that serves, which ends this one.
                process_group=0,
                env={**_OFFLINE, **os.environ, **counts, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path},
            )
        except (OSError, ValueError) as error:
            raise NoEmbedderError(f"no process could be started to embed in ({error})") from error
        try:
            said, _ = self._call(
                "open", name=name, url=options.url, key=options.key, folder=str(options.wheel_folder.absolute())
            )
        except BaseException as error:
            self.close()
            if isinstance(error, HybridIndexError):
                raise NoEmbedderError(f"the embedder {name!r} cannot be opened here: {error}") from error
            raise
        self._has_tokens = bool(said["tokens"])

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether calls can be made."""
        return not self._closed and not self._late and self._process.poll() is None

    @property
    def is_late(self) -> bool:
        """Whether it was killed because a call took longer than until :attr:`until_s`."""
        return self._late

    @property
    def has_tokens(self) -> bool:
        """Whether the embedder has a tokenizer of its own."""
        return self._has_tokens

    def read(self, source: GivenText, reading: Reading) -> Iterator[Chunk]:
        """As :func:`hybridindex.rag.ingest.readers.read_chunks`."""
        given = {**asdict(source), "metadata": {}}
        said, _ = self._call("read", source=given, words=reading.words)
        metadata = dict(source.metadata)
        for text, continues in zip(said["texts"], said["continues"], strict=True):
            yield Chunk(text=text, source=source.label, continues=continues, metadata=metadata)

    def embed(self, texts: Sequence[str], /) -> F32:
        """(n, d) float32 of queries.

        Raises:
            InvalidInputError: a text that the embedder refuses. EmbeddingError: it fails, or its process ended.
        """
        return self._embedded(texts, passages=False)

    def embed_passages(self, texts: Sequence[str], /) -> F32:
        """The same of passages."""
        return self._embedded(texts, passages=True)

    def token_starts(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Of the embedder's tokenizer. Raises EmbeddingError."""
        return self._starts(texts, own=True)

    def word_starts(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """As :func:`hybridindex.rag.tokens.word_starts`. Raises EmbeddingError."""
        return self._starts(texts, own=False)

    def close(self) -> None:
        """Ends the process, in the middle of a call too, which then raises. Closing twice is harmless."""
        self._closed = True
        self._process.kill()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # the kernel keeps it
            _log.warning("the process that embeds (%d) does not end", self._process.pid)
        with self._calling:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()

    def _embedded(self, texts: Sequence[str], *, passages: bool) -> F32:
        said, more = self._call("embed", texts=list(texts), passages=passages)
        return np.frombuffer(more, dtype="<f4").reshape(said["shape"]).astype(np.float32)

    def _starts(self, texts: Sequence[str], *, own: bool) -> list[npt.NDArray[np.uint32]]:
        said, more = self._call("starts", texts=list(texts), own=own)
        flat = np.frombuffer(more, dtype="<u4").astype(np.uint32)
        return np.split(flat, np.cumsum(said["counts"])[:-1]) if said["counts"] else []

    def _call(self, call: str, **asked: Any) -> tuple[dict[str, Any], bytes]:
        with self._calling, self._in_time(), usual_switch_interval():
            try:
                if self._closed:
                    raise BrokenPipeError
                write_frame(cast("RawIOBase", self._process.stdin), {"call": call, **asked})
                frame = read_frame(cast("RawIOBase", self._process.stdout))
            except (OSError, ValueError):
                frame = None
        if frame is None:
            code = None if self._closed or self._late else self._process.wait()
            why = "was ended" if code is None else f"ended with {code}; the log may say why"
            why = "took longer than it may, and was ended" if self._late else why
            raise EmbeddingError(f"the process that embeds {why}", status=0)
        if "error" in frame[0]:
            raise _raised(frame[0])
        return frame

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        if self.until_s is None:
            yield
            return
        timer = threading.Timer(max(0.0, self.until_s - time.monotonic()), self._end_late)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()

    def __enter__(self) -> TextProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raised(said: dict[str, Any]) -> HybridIndexError:
    text = said["text"]
    if said["error"] == "input":
        return InvalidInputError(text)
    if said["error"] == "embedding":
        return EmbeddingError(text, status=said["status"], retry_after_s=said["retry_after_s"])
    return EmbeddingError(text if said["error"] == "expected" else f"the process that embeds failed: {text}")
