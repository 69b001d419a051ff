"""Data at rest: build, import, open, verify, save and export an index directory. Knows nothing of plans."""

from __future__ import annotations

from hybridindex.index.build import build
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.compress import compress, remove_codes
from hybridindex.index.faiss_files.export_faiss import to_faiss
from hybridindex.index.faiss_files.import_faiss import from_faiss
from hybridindex.index.faiss_model import require_faiss
from hybridindex.index.ivf import IVFIndex
from hybridindex.index.opening import open_index, read_manifest, remove_replaced, rollback, save, verify
from hybridindex.index.rewrite import write_layout
from hybridindex.index.storage.going_back import previous_generation
from hybridindex.index.storage.manifest import Manifest

__all__ = [
    "DeviceCodec",
    "IVFIndex",
    "Manifest",
    "build",
    "compress",
    "from_faiss",
    "open_index",
    "previous_generation",
    "read_manifest",
    "remove_codes",
    "remove_replaced",
    "require_faiss",
    "rollback",
    "save",
    "to_faiss",
    "verify",
    "write_layout",
]
