"""A collection's first items: an index with its documents appears at once, under its name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import Timeout

from hybridindex import filesystem
from hybridindex.api import build
from hybridindex.errors import BuildError, InvalidInputError
from hybridindex.index.storage.beside import lead_to, share
from hybridindex.index.storage.generation import generation_name
from hybridindex.processes import KeptLock
from hybridindex.rag.collection.items import Item, column_values
from hybridindex.rag.collection.store import LiveDocuments, make_live
from hybridindex.rag.documents import DOCUMENTS_FILE, write_documents
from hybridindex.rag.tokens import TokenStarts
from hybridindex.types import F32

__all__ = ["alone_with", "at_once", "is_taken", "make_collection"]

#: How long another one may make what shall appear at a path before it is refused.
_WAIT_S = 30.0


def is_taken(path: Path) -> bool:
    """Whether something is there, and not only an empty folder."""
    return filesystem.exists(path) and (not filesystem.is_dir(path) or bool(filesystem.list_folder(path)))


@contextlib.contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Nobody else, of this process or another, makes what shall appear at ``path`` within.

    Raises:
        BuildError: another one does, for half a minute already. FileError.
    """
    place = path.absolute()
    filesystem.make_folder(place.parent, parents=True, exist_ok=True)
    file = place.with_name(f".{place.name}.new.lock")
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(KeptLock(file, timeout_s=_WAIT_S))
        except Timeout as error:
            raise BuildError(f"another process is creating {path}; try again when it is done") from error
        # Who waits for the lock sees that its file is gone, and makes another one.
        held.callback(filesystem.discard, file)
        yield


@contextlib.contextmanager
def at_once(path: Path) -> Iterator[Path]:
    """Where to build what appears at ``path`` when the block ends well. For who is :func:`alone_with` it."""
    place = path.absolute()
    draft = place.with_name(f".{place.name}.new")
    filesystem.discard_tree(draft)  # of one that died
    try:
        yield draft
        filesystem.rename(draft, place)
        filesystem.sync_folder(place.parent)
    except BaseException:
        filesystem.discard_tree(draft)
        raise


def make_collection(
    path: Path,
    items: Sequence[Item],
    vectors: F32,
    *,
    columns: Mapping[str, str],
    embedder: str,
    token_starts: TokenStarts,
    keep: bool,
    **options: Any,
) -> list[int]:
    """The rows of the items.

    Args:
        path: where nothing is, or an empty folder; the caller is :func:`alone_with` it.
        columns: name and kind of the metadata that become attributes.
        keep: False: the items go again, and an empty index stays.
        options: of the build.

    Raises:
        InvalidInputError: ``path`` holds something else, or metadata do not fit the columns. Whatever a build raises.
        In each case nothing is left.
    """
    if is_taken(path):
        raise InvalidInputError(f"path {str(path)!r} holds something that is not an index; expected a new path")
    fresh = itertools.count(max((item.id for item in items if item.id is not None), default=-1) + 1)
    rows = [next(fresh) if item.id is None else item.id for item in items]
    ids = np.array(rows, dtype=np.int64)
    table = column_values(columns, [item.metadata for item in items])
    with at_once(path) as draft:
        with build(vectors, draft, ids=ids, attributes=table, **options) as made:
            file = draft / generation_name(made.ivf.generation) / DOCUMENTS_FILE
            write_documents(
                file,
                [item.document(row) for item, row in zip(items, rows, strict=True)],
                index_fingerprint=made.fingerprint,
                embedder=embedder,
                dim=made.dim,
                token_starts=token_starts,
            )
            lead_to(draft, made.ivf.generation, DOCUMENTS_FILE)
            shared = share(draft, made.ivf.generation, DOCUMENTS_FILE)
            if not keep:
                made.delete(rows)
        make_live(shared)
        with LiveDocuments(shared, token_starts=token_starts) as store, store.changing():
            # The rows are there: their texts get keys and metadata.
            if keep:
                store.end(store.begin_put(items, ids, vectors))
            else:
                store.remove(rows)
        filesystem.discard(shared.with_name(f"{shared.name}.lock"))
    return rows
