"""The last step of every writer: table and model into the generation, digests, fingerprint, manifest, commit."""

from __future__ import annotations

import datetime
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridindex.index.codec import Layout
from hybridindex.index.faiss_model import empty_lists, write_model
from hybridindex.index.source import Progress
from hybridindex.index.storage.checksums import digest_file
from hybridindex.index.storage.generation import GenerationWriter, OutFile, versions
from hybridindex.index.storage.manifest import (
    LISTS_FILE,
    MODEL_FILE,
    TABLE_FILE,
    FileEntry,
    Manifest,
    content_fingerprint,
)
from hybridindex.types import I64, Metric

__all__ = ["commit_generation", "no_progress", "write_empty_model"]


def no_progress(stage: str, done: int, total: int | None) -> None:
    """The progress callback of callers that want none."""


def write_empty_model(writer: GenerationWriter, outer: Any, ivf: Any) -> None:
    """Store the trained index without vectors as ``model.faiss``; its lists are released."""
    empty_lists(ivf)
    ivf.ntotal = 0
    outer.ntotal = 0
    write_model(outer, writer.open_file(MODEL_FILE).append)


def commit_generation(
    writer: GenerationWriter,
    *,
    lists: OutFile,
    table: I64,
    metric: Metric,
    codec: str,
    dim: int,
    scan_dim: int,
    nprobe: int,
    layout: Layout,
    by_residual: bool,
    normalized: bool,
    code_size: int,
    notes: Mapping[str, Any],
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
    values: dict[str, Any] = {
        "metric": metric,
        "codec": codec,
        "dim": dim,
        "scan_dim": scan_dim,
        "nlist": len(table),
        "count": int(table[:, 0].sum()),
        "by_residual": by_residual,
        "normalized": normalized,
        "code_size": code_size,
    }
    manifest = Manifest(
        generation=writer.number,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        nprobe=nprobe,
        layout=layout,
        fingerprint=fingerprint or content_fingerprint(values, files),
        files=files,
        versions=versions(),
        notes=notes,
        **values,
    )
    writer.commit(manifest)
    return manifest
