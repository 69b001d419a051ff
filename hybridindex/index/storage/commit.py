"""The last step of every writer: the table of extents, digests, fingerprint and manifest, then the commit."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import numpy as np

from hybridindex import filesystem
from hybridindex.errors import FileError, IndexFormatError
from hybridindex.index.storage.checksums import digest_bytes, digest_file
from hybridindex.index.storage.generation import GenerationWriter, OutFile, other_generations
from hybridindex.index.storage.list_digests import digest_lists, list_spans, render_digests
from hybridindex.index.storage.manifest import (
    DIGESTS_FILE,
    LISTS_FILE,
    MANIFEST_FILE,
    MODEL_FILE,
    TABLE_FILE,
    FileEntry,
    GenerationSpec,
    Manifest,
    content_fingerprint,
    parse_manifest,
    versions,
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
    content = filesystem.array_bytes(np.ascontiguousarray(table, dtype=np.int64))
    writer.open_file(TABLE_FILE).append(content)
    size = filesystem.stat(lists.path).st_size
    spans = list_spans(table, spec.code_size, spec.layout)
    whole, digests = digest_lists(lists.path, spans, progress=lambda done: progress("checksum", done, size))
    writer.open_file(DIGESTS_FILE).append(render_digests(whole, digests))
    files = {}
    for name in (MODEL_FILE, TABLE_FILE):
        path = writer.directory / name
        files[name] = FileEntry(size=filesystem.stat(path).st_size, xxh3_128=digest_file(path))
    files[LISTS_FILE] = FileEntry(size=size, xxh3_128=whole)
    values: dict[str, Any] = {field.name: getattr(spec, field.name) for field in dataclasses.fields(GenerationSpec)}
    values |= {"nlist": len(table), "count": int(table[:, 0].sum())}
    found = fingerprint or content_fingerprint(values, files)
    if fingerprint is None and "lineage" not in spec.notes and _is_taken(writer, found):
        values["notes"] = {**spec.notes, "lineage": digest_bytes(f"{found} {writer.number}".encode())}
    manifest = Manifest(
        generation=writer.number,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        fingerprint=found,
        files=files,
        versions=versions(),
        **values,
    )
    writer.commit(manifest)
    return manifest


def _is_taken(writer: GenerationWriter, lineage: str) -> bool:
    """Whether another generation is of this lineage: one that was built of the same has changes of its own."""
    for folder in other_generations(writer.path, set()):
        try:
            manifest = parse_manifest(filesystem.read_bytes(folder / MANIFEST_FILE), MANIFEST_FILE)
        except (FileError, IndexFormatError):
            continue
        if manifest.lineage == lineage:
            return True
    return False
