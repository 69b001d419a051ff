"""``manifest.json``: what a generation is and what its files must hash to. Parsing and writing; no other I/O.

The file is JSON with a digest of itself, see :mod:`hybridindex.index.storage.signed_json`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from hybridindex.errors import CorruptIndexError
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.index.storage.layout import Layout
from hybridindex.index.storage.signed_json import canonical, parse_signed, render_signed
from hybridindex.types import Metric

__all__ = [
    "CHANGE_LOG",
    "DIGESTS_FILE",
    "FORMAT_VERSION",
    "IDS_FILE",
    "LISTS_FILE",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "SHARE_FILE",
    "TABLE_FILE",
    "FileEntry",
    "GenerationSpec",
    "Manifest",
    "content_fingerprint",
    "parse_manifest",
    "render_manifest",
    "versions",
]

FORMAT = "hybridindex"
FORMAT_VERSION = 1
_DIGEST = re.compile(r"[0-9a-f]{32}")
MANIFEST_FILE = "manifest.json"
MODEL_FILE = "model.faiss"
TABLE_FILE = "lists.idx.npy"
LISTS_FILE = "lists.bin"
#: What was deleted and added since; in no manifest.
CHANGE_LOG = "changes.log"
#: Beside them, and in no manifest: readers of the first version 1 know nothing of it.
DIGESTS_FILE = "lists.xxh3.npy"
#: Of a share of an index: which lists it holds (:mod:`hybridindex.index.share.record`); in no manifest.
SHARE_FILE = "share.json"
#: And the ids of all rows, also of lists that it does not hold (:mod:`hybridindex.index.share.beside`).
IDS_FILE = "lists.ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and digest that a file of the generation must have."""

    size: int
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What a writer says of its generation; the rest of the manifest follows from the files."""

    metric: Metric
    #: "flat", "fp16", "bf16", "sq8", "pq<M>", "pqfs<M>", or "faiss:<what>" for imported kinds we have no name for.
    codec: str
    #: Dimensions of vectors and queries as users give them.
    dim: int
    #: Dimensions after the pre-transforms; what lists and centroids have.
    scan_dim: int
    #: Default number of probes of a search.
    nprobe: int
    layout: Layout
    by_residual: bool
    #: Vectors and queries are scaled to length 1: inner product is then cosine similarity.
    normalized: bool
    #: Bytes of one vector's code.
    code_size: int
    #: Facts worth keeping: source, training rows, seed, duplicate ids of an import.
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(GenerationSpec):
    """One generation of an index."""

    generation: int
    #: ISO 8601, UTC.
    created_at: str
    nlist: int
    count: int
    #: Names what is searched: equal for copies and for other layouts of the same content.
    fingerprint: str
    files: Mapping[str, FileEntry]
    #: Package name -> version that wrote this.
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def lineage(self) -> str:
        """The same for all generations that were compacted from one that was built."""
        return str(self.notes.get("lineage", self.fingerprint))

    def lists_in(self, other: Manifest) -> npt.NDArray[np.int64] | None:
        """(nlist,) int64 for each list here that of ``other`` whose place it takes: from which most of its rows are;
        None: neither was compacted into the other."""
        same = self.nlist == other.nlist and (self.fingerprint, other.fingerprint)
        if self.notes.get("compacted") == other.fingerprint:
            parents = self.notes.get("parents")
            if parents is not None:
                found = np.asarray(parents, dtype=np.int64)
                return found if found.shape == (self.nlist,) and (found < other.nlist).all() else None
        elif other.notes.get("compacted") != self.fingerprint or other.notes.get("parents") is not None:
            return None
        return np.arange(self.nlist, dtype=np.int64) if same else None


def content_fingerprint(manifest_values: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
    """Digest of what decides search results, creation time and place left out."""
    keys = ("metric", "codec", "dim", "scan_dim", "nlist", "count", "by_residual", "normalized", "code_size")
    values = {key: manifest_values[key] for key in keys}
    digests = {name: entry.xxh3_128 for name, entry in files.items()}
    return digest_bytes(canonical({"values": values, "files": digests}))


def render_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes of ``manifest.json``."""
    return render_signed(FORMAT, FORMAT_VERSION, dataclasses.asdict(manifest))


def parse_manifest(raw: bytes, where: str) -> Manifest:
    """Read and check ``manifest.json``; ``where`` names it in errors.

    Raises:
        CorruptIndexError: not the bytes that were written.
        UnsupportedIndexError: not ours, or of a newer format version.
    """
    content = parse_signed(raw, where, FORMAT, FORMAT_VERSION, cure="upgrade it")
    try:
        return _from_content(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptIndexError(f"{where} lacks or misstates a field: {error}") from error


def _from_content(content: dict[str, Any]) -> Manifest:
    values = {key: content[key] for key in (f.name for f in dataclasses.fields(Manifest))}
    values["files"] = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    manifest = Manifest(**values)
    counts = (manifest.generation, manifest.dim, manifest.scan_dim, manifest.nlist, manifest.nprobe, manifest.code_size)
    if not all(type(value) is int and value >= 1 for value in counts) or type(manifest.count) is not int:
        raise ValueError("a number is missing or below 1")
    if manifest.count < 0 or manifest.nprobe > manifest.nlist:
        raise ValueError("count is negative or nprobe exceeds nlist")
    if manifest.metric not in get_args(Metric) or manifest.layout not in get_args(Layout):
        raise ValueError(f"metric {manifest.metric!r} or layout {manifest.layout!r} is unknown")
    if set(manifest.files) != {MODEL_FILE, TABLE_FILE, LISTS_FILE}:
        raise ValueError(f"files are {sorted(manifest.files)}")
    if not all(_DIGEST.fullmatch(entry.xxh3_128) for entry in manifest.files.values()):
        raise ValueError("a digest is not 32 hexadecimal digits")
    if not isinstance(manifest.codec, str) or not isinstance(manifest.notes, dict):
        raise ValueError("codec is not text, or notes are not an object")
    return manifest


def versions() -> Mapping[str, str]:
    """Versions of the libraries that shape the files."""
    from importlib import metadata

    found = {}
    for package in ("hybridindex", "numpy", "faiss-cpu", "faiss-gpu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
