"""Copying an open index into a new generation, in the same or another layout, by streaming."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from hybridindex.errors import CorruptIndexError, InvalidInputError, UnsupportedIndexError
from hybridindex.index.log.change_log import render_log
from hybridindex.index.storage.commit import Progress, commit_generation, no_progress
from hybridindex.index.storage.generation import GenerationWriter, OutFile, as_path
from hybridindex.index.storage.layout import Layout, element_bytes
from hybridindex.index.storage.lists import repack
from hybridindex.index.storage.manifest import CHANGE_LOG, LISTS_FILE, MODEL_FILE, Manifest
from hybridindex.types import U8

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
        CorruptIndexError: lists of ``index`` are damaged, or turned out to be meanwhile.
    """
    with GenerationWriter(as_path(path), replace=replace) as writer:
        return write_copy(index, writer, layout, progress or no_progress)


def write_copy(index: IVFIndex, writer: GenerationWriter, layout: Layout, progress: Progress = no_progress) -> Manifest:
    """Commit ``index`` as the writer's generation."""
    manifest = index.manifest
    element = element_bytes(manifest.codec)
    if layout != manifest.layout and (layout == "pqfs32" or manifest.layout == "pqfs32" or element is None):
        raise InvalidInputError(f"layout is {layout!r}; codec {manifest.codec!r} has only {manifest.layout!r}")
    _copy(index, MODEL_FILE, index.mapped_model(), writer.open_file(MODEL_FILE), no_progress)
    lists = writer.open_file(LISTS_FILE)
    if layout == manifest.layout:
        table, data = index.extents(), index.mapped_lists()
        lists.reserve(data.nbytes)
        _copy(index, LISTS_FILE, data, lists, progress)
    else:
        with index.integrity.all_whole():
            table = repack(
                index.extent_reader(),
                lists,
                sizes=index.list_sizes,
                code_size=index.code_size,
                layout=layout,
                element=element,
                progress=lambda done: progress("pack", done, index.nlist),
            )
    if index.live.read_now() is not None:
        if layout != manifest.layout:
            raise UnsupportedIndexError(
                f"rows of {index.path} were added or deleted, and a copy in layout {layout!r} would lose these "
                "changes; compact it first"
            )
        state, number = index.live.state()
        log = render_log(
            [],
            rows_xxh3_128=manifest.files[LISTS_FILE].xxh3_128,
            code_size=manifest.code_size,
            number=number,
            state=state,
        )
        writer.open_file(CHANGE_LOG).append(log)
    spec = dataclasses.replace(manifest, layout=layout)
    return commit_generation(writer, lists, table, spec, fingerprint=manifest.fingerprint, progress=progress)


def _copy(index: IVFIndex, name: str, data: U8, out: OutFile, progress: Progress) -> None:
    """Raises CorruptIndexError: ``data`` is not what was written, and its copy would pass for whole."""
    digest = xxhash.xxh3_128()
    for start in range(0, len(data), _COPY_BYTES):
        part = data[start : start + _COPY_BYTES]
        digest.update(part.data)
        out.append(part)
        progress("copy", out.position, data.nbytes)
    if digest.hexdigest() != index.manifest.files[name].xxh3_128:
        raise CorruptIndexError(f"{index.path}: {name} was damaged since it was opened; its copy would be, too")
