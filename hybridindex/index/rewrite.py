"""Copying an open index into a new generation, in the same or another layout, by streaming."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hybridindex.errors import InvalidInputError
from hybridindex.index.storage.commit import Progress, commit_generation, no_progress
from hybridindex.index.storage.generation import GenerationWriter, as_path
from hybridindex.index.storage.layout import Layout, element_bytes
from hybridindex.index.storage.lists import repack
from hybridindex.index.storage.manifest import LISTS_FILE, MODEL_FILE, Manifest

if TYPE_CHECKING:
    from hybridindex.index.ivf import IVFIndex

__all__ = ["write_copy", "write_layout"]

_COPY_BYTES = 8 << 20


def write_layout(
    index: IVFIndex, path: str | Path, layout: Layout, *, replace: bool = False, progress: Progress | None = None
) -> Manifest:
    """Write a copy of an open index to ``path`` in the layout "rows" or "blocks16", without opening it.

    Opening a ``blocks16`` copy converts it to rows, because faiss maps nothing else; this is for scanners that do.

    Raises:
        InvalidInputError: the codec has no such layout, or ``path`` exists and is not an index.
        IndexExistsError, DiskFullError, BuildError: as :func:`hybridindex.index.build.build`.
    """
    with GenerationWriter(as_path(path), replace=replace) as writer:
        return write_copy(index, writer, layout, progress or no_progress)


def write_copy(index: IVFIndex, writer: GenerationWriter, layout: Layout, progress: Progress = no_progress) -> Manifest:
    """Commit ``index`` as the writer's generation."""
    manifest = index.manifest
    element = element_bytes(manifest.codec)
    if layout != manifest.layout and (layout == "pqfs32" or manifest.layout == "pqfs32" or element is None):
        raise InvalidInputError(f"layout is {layout!r}; codec {manifest.codec!r} has only {manifest.layout!r}")
    model = writer.open_file(MODEL_FILE)
    stored = index.mapped_model()
    for start in range(0, len(stored), _COPY_BYTES):
        model.append(stored[start : start + _COPY_BYTES])
    lists = writer.open_file(LISTS_FILE)
    if layout == manifest.layout:
        table, data = index.extents(), index.mapped_lists()
        lists.reserve(data.nbytes)
        for start in range(0, len(data), _COPY_BYTES):
            lists.append(data[start : start + _COPY_BYTES])
            progress("copy", lists.position, data.nbytes)
    else:
        table = repack(
            index.extent_reader(),
            lists,
            sizes=index.list_sizes,
            code_size=index.code_size,
            layout=layout,
            element=element,
            progress=lambda done: progress("pack", done, index.nlist),
        )
    spec = dataclasses.replace(manifest, layout=layout)
    return commit_generation(writer, lists, table, spec, fingerprint=manifest.fingerprint, progress=progress)
