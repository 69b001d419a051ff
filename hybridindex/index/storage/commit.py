"""The last step of every writer: the table of extents, digests, fingerprint and manifest, then the commit."""

from __future__ import annotations

import dataclasses
import datetime
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.generation import GenerationWriter, OutFile, versions
from hybridindex.index.storage.manifest import (
    LISTS_FILE,
    MODEL_FILE,
    TABLE_FILE,
    FileEntry,
    GenerationSpec,
    Manifest,
    content_fingerprint,
)
from hybridindex.types import I64

__all__ = ["Progress", "commit_generation", "no_progress"]

#: ``progress(stage, done, total)``; total is None while it is unknown. An exception raised by it stops the build.
Progress = Callable[[str, int, int | None], None]


def no_progress(stage: str, done: int, total: int | None) -> None:
    """The progress callback of callers that want none."""


def commit_generation(
    writer: GenerationWriter,
    lists: OutFile,
    table: I64,
    spec: GenerationSpec,
    *,
    fingerprint: str | None = None,
    progress: Progress = no_progress,
) -> Manifest:
    """Commit a generation whose ``lists.bin`` and ``model.faiss`` are written.

    ``fingerprint``: kept when the content is that of another generation; ``None`` computes it.
    """
    assert lists.path.name == LISTS_FILE, lists.path
    header = io.BytesIO()
    np.save(header, np.ascontiguousarray(table, dtype=np.int64), allow_pickle=False)
    writer.open_file(TABLE_FILE).append(header.getvalue())
    files = {}
    for name in (MODEL_FILE, TABLE_FILE, LISTS_FILE):
        path = writer.directory / name
        size = path.stat().st_size

        def report(done: int, size: int = size, name: str = name) -> None:
            if name == LISTS_FILE:
                progress("checksum", done, size)

        files[name] = FileEntry(size=size, xxh3_128=digest_file(path, progress=report))
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(GenerationSpec)}
    values |= {"nlist": len(table), "count": int(table[:, 0].sum())}
    manifest = Manifest(
        generation=writer.number,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint or content_fingerprint(values, files),
        files=files,
        versions=versions(),
        **values,
    )
    writer.commit(manifest)
    return manifest
