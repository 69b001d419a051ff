"""Documents of a served index that come and go as texts: chunks are embedded here, and texts and rows change together,
as :mod:`hybridindex.rag.ingest` changes them when the same sources are ingested again.

Texts are cut and embedded by another process, which has the lowest priority and ends when nothing came for a while.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridindex import filesystem
from hybridindex.api import Index
from hybridindex.errors import (
    DocumentStoreError,
    EmbeddingError,
    InvalidInputError,
    NoDocumentsError,
    NoEmbedderError,
    OverloadedError,
)
from hybridindex.index import read_manifest
from hybridindex.index.storage.beside import generation_file
from hybridindex.processes import short_switch_interval
from hybridindex.rag.collection import Collection, LiveDocuments
from hybridindex.rag.documents import DOCUMENTS_FILE, tokens_of_store
from hybridindex.rag.embedders import EmbedderOptions
from hybridindex.rag.embedders.named import EMBEDDERS, full_name
from hybridindex.rag.ingest import GivenText, Outcome, put_texts, remove_texts
from hybridindex.rag.ingest.text_process import TextProcess
from hybridindex.rag.retriever import CenteredEmbedder, Embedder
from hybridindex.rag.tokens import WORDS
from hybridindex.service.changes.rows import RowWriter
from hybridindex.service.config import DocumentConfig

__all__ = ["DocumentCounts", "DocumentWriter"]

_log = logging.getLogger(__name__)

#: The process that embeds ends when nothing came for so long.
_IDLE_S = 300.0
#: Of the vectors of one call.
_MOST_BYTES = 512 << 20


@dataclass(slots=True, kw_only=True)
class DocumentCounts:
    """What was done since the start."""

    #: Sources that are new, changed, or gone.
    added: int = 0
    changed: int = 0
    removed: int = 0
    #: Chunks that were embedded.
    embedded: int = 0


class DocumentWriter:
    """Of one service. From any thread; one call at a time."""

    def __init__(
        self,
        path: Path,
        rows: RowWriter,
        config: DocumentConfig,
        *,
        most: int,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Opens nothing: the first change does.

        Args:
            rows: who changes rows.
            most: chunks that one call may bring.
        """
        self._path = path
        self._rows = rows
        self._config = config
        self._most = most
        self._environment = environment
        self.counts = DocumentCounts()
        self._changing = threading.Lock()
        self._collection: Collection | None = None
        self._process: TextProcess | None = None
        self._own_tokens = False
        self._timer: threading.Timer | None = None
        self._stopping = False

    # Changes

    def put(self, texts: Sequence[GivenText]) -> dict[str, Any]:
        """Adds documents, or replaces those of the same sources; see :func:`hybridindex.rag.ingest.put_texts`. Durable
        when it returns, and found by every search of this process that begins then.

        Raises:
            NoDocumentsError: the index takes vectors alone. NoEmbedderError: the embedder of its documents is not here.
            EmbeddingError: it failed. DocumentStoreError: its texts cannot be read or written.
            WritesOffError, BuildError: as of :meth:`hybridindex.service.changes.rows.RowWriter.add`.
        """
        with self._documents() as collection, self._embedding(collection.store) as (process, embedder):
            most = max(1, min(self._most, _MOST_BYTES // (4 * collection.index.dim)))
            numbering = self._rows.numbering_alone()
            done = put_texts(collection, texts, embedder, read=process.read, most=most, numbering=numbering)
            self.counts.added += done.sources["added"]
            self.counts.changed += done.sources["changed"]
            self.counts.embedded += done.chunks["added"]
            return self._answer(collection.index, done, ("added", "changed", "unchanged"), ("added", "unchanged"))

    def delete(self, sources: Sequence[str]) -> dict[str, Any]:
        """Removes documents with all their chunks; names that no source has change nothing.

        Raises:
            As :meth:`put`, but for embedders.
        """
        with self._documents() as collection:
            done = remove_texts(collection, sources)
            self.counts.removed += done.sources["removed"]
            return self._answer(collection.index, done, ("removed",), ())

    def _answer(self, index: Index, done: Outcome, sources: Sequence[str], chunks: Sequence[str]) -> dict[str, Any]:
        self._rows.count(added=done.chunks["added"], deleted=done.chunks["removed"])
        return {
            "sources": {name: done.sources[name] for name in sources},
            "chunks": {name: done.chunks[name] for name in (*chunks, "removed")},
            "number": index.ivf.live.number,
        }

    # What is changed

    @contextmanager
    def _documents(self) -> Iterator[Collection]:
        """The index and its texts, for one call."""
        with self._rows.refusing():
            try:
                self._need_documents()
                with self._changing, self._rows.using() as index, short_switch_interval():
                    yield self._collection_of(index)
            except NoDocumentsError:
                raise
            except InvalidInputError as error:
                if type(error) is not InvalidInputError:
                    raise
                raise InvalidInputError(f"documents: {error}") from error
            except DocumentStoreError as error:
                _log.error("the documents of %s: %s", self._path, error)
                raise DocumentStoreError(
                    "the texts of the index cannot be read or written; the log of the daemon says why"
                ) from error

    def _need_documents(self) -> None:
        number = read_manifest(self._path).generation
        if not filesystem.is_file(generation_file(self._path, number, DOCUMENTS_FILE)):
            raise NoDocumentsError(
                "the index has no documents beside its vectors, and takes vectors (POST /v1/vectors); hybridindex "
                "ingest makes an index with documents"
            )

    def _collection_of(self, index: Index) -> Collection:
        """Another one where the index was replaced."""
        known = self._collection
        if known is not None and known.index is index:
            return known
        if known is not None:
            self._collection = None
            known.close()
        opened = Collection(self._path, index=index, target=index, token_starts=self._token_starts)
        try:
            # What a crash interrupted, and texts whose rows somebody deleted.
            opened.recover()
        except BaseException:
            opened.close()
            raise
        self._collection = opened
        return opened

    # What embeds

    @contextmanager
    def _embedding(self, store: LiveDocuments) -> Iterator[tuple[TextProcess, Embedder]]:
        try:
            process = self._process_of(store)
            mean = store.info.mean
            yield process, process if mean is None else CenteredEmbedder(process, mean)
        except (EmbeddingError, NoEmbedderError) as error:
            if self._stopping:
                raise OverloadedError("the daemon is about to stop; nothing was changed", retry_after_s=1) from error
            if isinstance(error, NoEmbedderError):
                raise
            # Its address is nobody's business.
            _log.error("texts cannot be embedded: %s", error)
            if self._process is not None and self._process.is_late:
                raise EmbeddingError(
                    f"the texts were not embedded within {self._config.embedder_timeout_s:g} s, so nothing was "
                    "changed; send fewer at a time, or give the daemon a larger embedder_timeout_s"
                ) from error
            raise EmbeddingError(
                f"the embedder {store.info.embedder!r} gives no vectors, so nothing was changed; see the log of the "
                "daemon",
                status=error.status,
                retry_after_s=error.retry_after_s,
            ) from error
        finally:
            self._end_later()

    def _process_of(self, store: LiveDocuments) -> TextProcess:
        name, until_s = store.info.embedder, time.monotonic() + self._config.embedder_timeout_s
        process = self._process
        if process is not None and process.name == name and process.is_alive:
            process.until_s = until_s
            return process
        if process is not None:
            self._process = None
            process.close()
        try:
            full_name(name)
        except InvalidInputError:
            raise NoEmbedderError(
                f"the documents were embedded by {name or 'an embedder without a name'!r}, and the daemon has "
                f"{EMBEDDERS}; embed here and send vectors, or change them from Python: hybridindex.rag.Collection"
            ) from None
        config, said = self._config, self._environment
        options = EmbedderOptions(
            url=config.embedder_url or said.get("HYBRIDINDEX_EMBEDDER_URL"),
            key=said.get("HYBRIDINDEX_EMBEDDER_KEY"),
            wheel_folder=config.embedder_cache / "downloads" / "wheels",
        )
        self._process = process = TextProcess(name, options, threads=config.embedder_threads, until_s=until_s)
        if self._stopping:
            process.close()
        self._check(process, store)
        return process

    def _check(self, process: TextProcess, store: LiveDocuments) -> None:
        """Whether it is what the documents were embedded with.

        Raises:
            NoEmbedderError: it is another one of the same name.
        """
        dim = int(process.embed_passages(["text"]).shape[1])
        if dim != store.info.dim:
            problem = f"gives {dim} dimensions, and the documents have {store.info.dim}"
        else:
            own = process.token_starts if process.has_tokens and store.info.tokenizer != WORDS else None
            tried = (process.word_starts,) if own is None else (own, process.word_starts)
            try:
                self._own_tokens = tokens_of_store(store, tried) == own
                return
            except InvalidInputError as error:
                problem = f"has other tokens: {error}"
        self._process = None
        process.close()
        raise NoEmbedderError(
            f"the embedder {process.name!r} {problem}; expected the one that the documents were embedded with"
        )

    def _token_starts(self, texts: Sequence[str]) -> Sequence[npt.NDArray[np.uint32]]:
        """Of the tokenizer that the passages have."""
        process = self._process
        assert process is not None, "texts are written by who embeds them"
        return process.token_starts(texts) if self._own_tokens else process.word_starts(texts)

    def _end_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stopping:
            return
        self._timer = threading.Timer(_IDLE_S, self._end_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_idle(self) -> None:
        if self._changing.acquire(blocking=False):
            try:
                process, self._process = self._process, None
            finally:
                self._changing.release()
            if process is not None:
                process.close()

    # The end

    def stop(self) -> None:
        """Ends what is being embedded: nothing of it is written. Returns at once."""
        self._stopping = True
        if (process := self._process) is not None:
            process.close()

    def close(self) -> None:
        """Closing twice is harmless. For when the rows are closed."""
        self.stop()
        if self._timer is not None:
            self._timer.cancel()
        collection, self._collection = self._collection, None
        if collection is not None:
            collection.close()
