"""A collection's first items: an index with its documents appears at once, under its name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.api import build
from hybridindex.errors import InvalidInputError
from hybridindex.index.storage.beside import lead_to, share
from hybridindex.index.storage.generation import generation_name
from hybridindex.rag.collection.items import Item, column_values
from hybridindex.rag.collection.store import LiveDocuments, make_live
from hybridindex.rag.documents import DOCUMENTS_FILE, write_documents
from hybridindex.rag.tokens import TokenStarts
from hybridindex.types import F32

__all__ = ["make_collection"]


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
        path: where nothing is, or an empty folder.
        columns: name and kind of the metadata that become attributes.
        keep: False: the items go again, and an empty index stays.
        options: of the build.

    Raises:
        InvalidInputError: ``path`` holds something else, or metadata do not fit the columns. Whatever a build raises.
        In each case nothing is left.
    """
    if filesystem.exists(path) and (not filesystem.is_dir(path) or filesystem.list_folder(path)):
        raise InvalidInputError(f"path {str(path)!r} holds something that is no index; expected a new path")
    fresh = itertools.count(max((item.id for item in items if item.id is not None), default=-1) + 1)
    rows = [next(fresh) if item.id is None else item.id for item in items]
    ids = np.array(rows, dtype=np.int64)
    table = column_values(columns, [item.metadata for item in items])
    draft = path.with_name(f".{path.name}.new-{os.getpid()}")
    filesystem.discard_tree(draft)
    try:
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
        filesystem.rename(draft, path)
        filesystem.sync_folder(path.absolute().parent)
    except BaseException:
        filesystem.discard_tree(draft)
        raise
    return rows
