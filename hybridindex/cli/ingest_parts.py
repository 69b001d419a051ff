"""What the command ingest does: texts to passages, passages to vectors, vectors to an index, texts beside it; and again
what changed since."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.api import Progress
from hybridindex.cli.chat_parts import EmbedderChoice, open_embedder
from hybridindex.cli.console import err
from hybridindex.cli.row_parts import RowTarget, open_target
from hybridindex.config import parse_bytes
from hybridindex.errors import DocumentStoreError, FileError, InvalidInputError
from hybridindex.index import read_manifest
from hybridindex.index.filters.write_attributes import write_attributes
from hybridindex.index.opening import open_generation
from hybridindex.index.storage.beside import generation_file, lead_to, share
from hybridindex.index.storage.generation import CURRENT_FILE, generation_name, other_generations
from hybridindex.index.storage.manifest import MANIFEST_FILE, parse_manifest
from hybridindex.rag.collection import Collection, LiveDocuments, Noted
from hybridindex.rag.collection.make import alone_with, at_once, is_taken
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore, tokens_of_store, write_documents
from hybridindex.rag.ingest import Reading, Spool, embedded, find_sources, mean_of, update
from hybridindex.rag.ingest.columns import attribute_table, find_columns, parse_columns
from hybridindex.rag.retriever import CenteredEmbedder, Embedder
from hybridindex.rag.tokens import TokenStarts, word_starts

__all__ = ["PassageOptions", "VectorLayout", "ingest_texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageOptions:
    """How texts become passages, and their vectors."""

    words: Annotated[
        int | None,
        typer.Option(help="Most words per passage; default: 200 for long texts; a line is one passage.", min=1),
    ] = None
    lines: Annotated[
        bool | None,
        typer.Option(
            "--lines/--whole",
            help="A .txt file has one passage per line, or is one text; default: --lines, in folders --whole.",
        ),
    ] = None
    center: Annotated[
        bool | None,
        typer.Option(
            "--center/--no-center",
            help="Subtract the passages' mean from all vectors; default: only for the embedder demo.",
        ),
    ] = None
    cache: Annotated[Path, typer.Option("--cache", help="Folder for the demo's embedder.")] = Path("build/cache")
    attributes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=KIND,…",
            help="Metadata that searches can filter by (int, float, string, bool, timestamp, list), or 'all'.",
        ),
    ] = None
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Read all files, even if size and modification time are unchanged.")
    ] = False

    @property
    def reading(self) -> Reading:
        return Reading(words=self.words, lines=self.lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorLayout:
    """How the vectors of a new index, which have length 1, are kept and searched."""

    nlist: Annotated[int | None, typer.Option(help="Number of lists; default: about 4*sqrt(n).", min=1)] = None
    codec: Annotated[str, typer.Option(help="flat, fp16, bf16, sq8, pq[M] or pqfs[M].")] = "flat"
    nprobe: Annotated[int | None, typer.Option(help="Default lists per query.", min=1)] = None
    memory: Annotated[str, typer.Option(help="Anonymous memory that the build may use.")] = "1GiB"
    replace: Annotated[
        bool,
        typer.Option("--rebuild", "--replace", help="Build the index anew, replacing the existing one."),
    ] = False


def ingest_texts(
    texts: Sequence[Path],
    index: Path,
    embedding: EmbedderChoice,
    passages: PassageOptions,
    layout: VectorLayout,
    progress: Progress,
    key: str | None = None,
) -> dict[str, Any]:
    """Builds the index and its document store, or brings them up to date; what the command answers.

    Everything is read before anything is embedded, where an index is built.

    Args:
        key: of the daemon that serves the index.

    Raises:
        InvalidInputError, DuplicateIdError: a file, or an option. EmbeddingError, MissingDependencyError, FetchError:
        the embedder. What :func:`hybridindex.build`, ``write_documents`` and the collection raise.
    """
    if filesystem.exists(index / CURRENT_FILE) and not layout.replace:
        return _update(texts, index, embedding, passages, layout, progress, key)
    return _build(texts, index, embedding, passages, layout, progress)


def _build(
    texts: Sequence[Path],
    index: Path,
    embedding: EmbedderChoice,
    passages: PassageOptions,
    layout: VectorLayout,
    progress: Progress,
) -> dict[str, Any]:
    from hybridindex.rag.embed import EMBEDDER, TOKENIZER
    from hybridindex.rag.embedders import named

    if embedding.embedder is None:
        raise InvalidInputError(f"--embedder is missing; expected {named.EMBEDDERS}")
    name = named.full_name(embedding.embedder)
    wanted = {} if passages.attributes is None else parse_columns(passages.attributes)
    sources = find_sources(texts)
    with contextlib.ExitStack() as owned:
        scratch = Path(owned.enter_context(filesystem.scratch_folder("hybridindex-ingest-")))
        read, facts, failed = Spool.write(scratch / "chunks.jsonl", sources, passages.reading)
        _say_unread(failed)
        if layout.nlist is not None and layout.nlist > read.count:
            raise InvalidInputError(
                f"--nlist is {layout.nlist} but there are {read.count} passages; expected at most {read.count}"
            )
        columns = _all_columns(read) if wanted is None else wanted
        table, ids = attribute_table(read, columns) if columns else (None, None)
        embedder = named.open_embedder(owned, name, embedding.options(passages.cache))
        centered = name == EMBEDDER if passages.center is None else passages.center
        mean = mean_of(read, read.count, embedder) if centered else None

        def told(stage: str, done: int, total: int | None) -> None:
            # A build spools chunks as they come; here they come from the embedder.
            progress(*(("embed", done, read.count) if stage == "spool" else (stage, done, total)))

        place = owned.enter_context(_place(index))

        def furnish(folder: Path) -> None:
            """Before the generation is the current one: texts and attributes come with it, or not at all."""
            new = open_generation(place, folder)
            try:
                if table is not None:
                    write_attributes(new, table, ids)
                token_starts = getattr(embedder, "token_starts", word_starts)
                write_documents(
                    folder / DOCUMENTS_FILE,
                    read,
                    index_fingerprint=new.manifest.lineage,
                    embedder=name,
                    dim=new.dim,
                    mean=mean,
                    token_starts=token_starts,
                    tokenizer=TOKENIZER if name == EMBEDDER else "",
                )
            finally:
                new.close()
            _keep_older_documents(place, new.generation)
            with LiveDocuments(share(place, new.generation, DOCUMENTS_FILE), token_starts=token_starts) as store:
                store.describe((document.id, *about) for document, about in read.chunks())
                store.note(Noted(sources=facts))

        built = owned.enter_context(
            hx.build(
                embedded(read, embedder if mean is None else CenteredEmbedder(embedder, mean)),
                place,
                nlist=layout.nlist,
                codec=layout.codec,
                nprobe=layout.nprobe,
                # The vectors have length 1: it scales queries alone, and says that scores are cosines.
                normalize=True,
                memory_budget_bytes=parse_bytes(layout.memory),
                replace=layout.replace,
                prepare=furnish,
                progress=told,
            )
        )
        lead_to(place, built.ivf.generation, DOCUMENTS_FILE)
        return {
            "path": index,
            "fingerprint": built.fingerprint,
            "count": built.count,
            "dim": built.dim,
            "nlist": built.nlist,
            "nprobe": built.nprobe,
            "codec": built.codec,
            "embedder": name,
            "centered": centered,
            "attributes": columns or None,
            "sources": {"added": len(facts), "changed": 0, "removed": 0, "unchanged": 0, "failed": len(failed)},
            "chunks": {"added": read.count, "removed": 0, "unchanged": 0},
        }


def _say_unread(failed: Mapping[str, str]) -> None:
    for name, why in failed.items():
        err.print(f"not read: {name}: {why}", highlight=False, markup=False)


def _all_columns(read: Spool) -> dict[str, str]:
    columns, refused = find_columns(read)
    for name, why in refused.items():
        err.print(f"no attribute: {name!r} {why}", highlight=False, markup=False)
    return columns


def _check_columns(said: str | None, there: Mapping[str, str]) -> None:
    """An index that is there keeps its attributes."""
    for name, kind in ({} if said is None else parse_columns(said) or {}).items():
        if there.get(name) != kind:
            known = ", ".join(f"{each}={of}" for each, of in there.items()) or "none"
            raise InvalidInputError(
                f"--attributes names {name}={kind}, but the index has {known}; omit it, or use --rebuild"
            )


@contextlib.contextmanager
def _place(index: Path) -> Iterator[Path]:
    """Where to build: beside a new place, under whose name everything appears when the block ends well; or in the place
    itself, where something is."""
    with contextlib.ExitStack() as held:
        if not is_taken(index):
            held.enter_context(alone_with(index))
        # Another one may have made it meanwhile.
        yield index if is_taken(index) else held.enter_context(at_once(index))


def _update(
    texts: Sequence[Path],
    index: Path,
    embedding: EmbedderChoice,
    passages: PassageOptions,
    layout: VectorLayout,
    progress: Progress,
    key: str | None,
) -> dict[str, Any]:
    if layout.nlist is not None or layout.codec != VectorLayout().codec:
        raise InvalidInputError(
            f"{index} exists, and --nlist and --codec are only for a new index; omit them, or use --rebuild"
        )
    with contextlib.ExitStack() as owned:
        with DocumentStore(_documents_of(index)) as documents:
            info = documents.info
            if not documents.is_live:
                raise DocumentStoreError(f"{index} has no record of its source files; rebuild it (--rebuild)")
            if passages.center is not None and passages.center != (info.mean is not None):
                raise InvalidInputError("--center is only for a new index; omit it, or use --rebuild")
            embedder = open_embedder(owned, info, embedding, passages.cache)
            token_starts = _token_starts(documents, embedder)
        target = owned.enter_context(open_target(index, key, again="the next ingest continues from there"))
        collection = owned.enter_context(Collection(index, target=_Rows(target), token_starts=token_starts))
        _check_columns(passages.attributes, collection.index.attributes)
        sources = find_sources(texts, known=collection.store.sources())
        done = update(
            collection, sources, texts, embedder, passages.reading, checksum=passages.checksum, progress=progress
        )
        _say_unread(done.failed)
        for each in texts:
            if not filesystem.exists(each.expanduser()):
                err.print(
                    f"{each} no longer exists; its texts are removed from the index", highlight=False, markup=False
                )
        opened = collection.index
        return {
            "path": index,
            "fingerprint": opened.fingerprint,
            "count": collection.count(),
            "dim": opened.dim,
            "nlist": opened.nlist,
            "nprobe": opened.nprobe,
            "codec": opened.codec,
            "embedder": info.embedder,
            "centered": info.mean is not None,
            "attributes": opened.attributes or None,
            "sources": {name: done.sources[name] for name in ("added", "changed", "removed", "unchanged", "failed")},
            "chunks": {name: done.chunks[name] for name in ("added", "removed", "unchanged")},
        }


class _Rows:
    """What changes rows, an index or its daemon, as a collection takes it."""

    def __init__(self, target: RowTarget) -> None:
        self._target = target

    def upsert(self, vectors: Any, ids: Any, attributes: Any = None) -> int:
        most = self._target.most_rows
        return sum(
            self._target.add(
                vectors[at : at + most],
                ids[at : at + most],
                None if attributes is None else attributes.slice(at, most),
                replace=True,
            )
            for at in range(0, len(vectors), most)
        )

    def delete(self, ids: Any = None) -> int:
        return self._target.delete(np.asarray(ids, dtype=np.int64), None)


def _documents_of(index: Path) -> Path:
    return generation_file(index, read_manifest(index).generation, DOCUMENTS_FILE)


def _token_starts(documents: DocumentStore, embedder: Embedder) -> TokenStarts:
    own = getattr(embedder, "token_starts", None)
    return tokens_of_store(documents, (word_starts,) if own is None else (own, word_starts))


def _keep_older_documents(index: Path, newest: int) -> None:
    """Gives a document store that lies beside the generations (and is no link) to the one that it was written for."""
    file = index / DOCUMENTS_FILE
    if filesystem.is_link(file) or not filesystem.is_file(file):
        return
    try:
        with DocumentStore(file) as store:
            fingerprint = store.info.index_fingerprint
    except DocumentStoreError as error:
        code = getattr(error.__cause__, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
        if isinstance(error.__cause__, FileError) or code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise  # it may be of one of them
        return  # of no index
    for generation in other_generations(index, {generation_name(newest)}):
        own = generation / DOCUMENTS_FILE
        found = parse_manifest(filesystem.read_bytes(generation / MANIFEST_FILE), MANIFEST_FILE)
        if found.fingerprint == fingerprint and not filesystem.exists(own):
            filesystem.link(file, own)
            filesystem.sync_folder(generation)
