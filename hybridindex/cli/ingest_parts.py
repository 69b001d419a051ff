"""What the command ingest does: texts to passages, passages to vectors, vectors to an index, texts beside it."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.api import Progress
from hybridindex.cli.chat_parts import EmbedderChoice
from hybridindex.config import parse_bytes
from hybridindex.errors import DocumentStoreError, DuplicateIdError, FileError, InvalidInputError
from hybridindex.index.storage.beside import lead_to
from hybridindex.index.storage.generation import generation_name, other_generations
from hybridindex.index.storage.manifest import MANIFEST_FILE, parse_manifest
from hybridindex.rag.documents import DOCUMENTS_FILE, DocumentStore, write_documents
from hybridindex.rag.ingest import TextFile, embedded, mean_of
from hybridindex.rag.retriever import CenteredEmbedder
from hybridindex.rag.tokens import word_starts

__all__ = ["PassageOptions", "VectorLayout", "ingest_texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageOptions:
    """How texts become passages, and their vectors."""

    words: Annotated[int | None, typer.Option(help="Most words of a passage; default a text is one.", min=1)] = None
    center: Annotated[
        bool | None,
        typer.Option(
            "--center/--no-center", help="Subtract the passages' mean from all vectors; default for demo alone."
        ),
    ] = None
    cache: Annotated[Path, typer.Option("--cache", help="Where the demo's embedder is kept.")] = Path("build/cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorLayout:
    """How the vectors, which have length 1, are kept and searched."""

    nlist: Annotated[int | None, typer.Option(help="Number of lists; default about 4*sqrt(n).", min=1)] = None
    codec: Annotated[str, typer.Option(help="flat, fp16, bf16, sq8, pq[M] or pqfs[M].")] = "flat"
    nprobe: Annotated[int | None, typer.Option(help="Default lists per query.", min=1)] = None
    memory: Annotated[str, typer.Option(help="Budget of anonymous memory of the build.")] = "1GiB"
    replace: Annotated[bool, typer.Option("--replace", help="Put it in the place of the index that is there.")] = False


def ingest_texts(
    texts: Path,
    index: Path,
    embedding: EmbedderChoice,
    passages: PassageOptions,
    layout: VectorLayout,
    progress: Progress,
) -> dict[str, Any]:
    """Builds the index and its document store; what the command answers.

    Everything in the file is checked before anything is embedded.

    Raises:
        InvalidInputError, DuplicateIdError: the file, or an option. EmbeddingError, MissingDependencyError, FetchError:
        the embedder. What :func:`hybridindex.build` and ``write_documents`` raise.
    """
    from hybridindex.rag.embed import EMBEDDER, TOKENIZER
    from hybridindex.rag.embedders import named

    if embedding.embedder is None:
        raise InvalidInputError(f"--embedder is missing; expected {named.EMBEDDERS}")
    name = named.full_name(embedding.embedder)
    read = TextFile(path=texts, words=passages.words)
    count = _checked(read, layout.nlist)
    with contextlib.ExitStack() as owned:
        embedder = named.open_embedder(owned, name, embedding.options(passages.cache))
        centered = name == EMBEDDER if passages.center is None else passages.center
        mean = mean_of(read, count, embedder) if centered else None

        def told(stage: str, done: int, total: int | None) -> None:
            # A build spools chunks as they come; here they come from the embedder.
            progress(*(("embed", done, count) if stage == "spool" else (stage, done, total)))

        built = owned.enter_context(
            hx.build(
                embedded(read, embedder if mean is None else CenteredEmbedder(embedder, mean)),
                index,
                nlist=layout.nlist,
                codec=layout.codec,
                nprobe=layout.nprobe,
                memory_budget_bytes=parse_bytes(layout.memory),
                replace=layout.replace,
                progress=told,
            )
        )
        number = built.ivf.generation
        _keep_older_documents(built.path, number)
        write_documents(
            built.path / generation_name(number) / DOCUMENTS_FILE,
            read,
            index_fingerprint=built.fingerprint,
            embedder=name,
            dim=built.dim,
            mean=mean,
            token_starts=getattr(embedder, "token_starts", word_starts),
            tokenizer=TOKENIZER if name == EMBEDDER else "",
        )
        lead_to(built.path, number, DOCUMENTS_FILE)
        return {
            "path": built.path,
            "fingerprint": built.fingerprint,
            "count": built.count,
            "dim": built.dim,
            "nlist": built.nlist,
            "nprobe": built.nprobe,
            "codec": built.codec,
            "embedder": name,
            "centered": centered,
        }


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


def _checked(passages: TextFile, nlist: int | None) -> int:
    """The number of passages; their ids differ, and there are enough for ``nlist``."""
    ids = np.fromiter((passage.id for passage in passages), dtype=np.int64)
    if not len(ids):
        raise InvalidInputError(f"{passages.path} holds no text; expected one or more")
    if nlist is not None and nlist > len(ids):
        raise InvalidInputError(f"--nlist is {nlist} but there are {len(ids)} passages; expected {len(ids)} at most")
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        repeated = values[counts > 1][0]
        rows = np.flatnonzero(ids == repeated)[:2].tolist()
        raise DuplicateIdError(
            f"{passages.path} has id {repeated} in texts {rows[0]} and {rows[1]} (from 0); expected once"
        )
    return len(ids)
