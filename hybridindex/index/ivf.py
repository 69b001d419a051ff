"""An opened index: one generation, read-only, mapped, thread-safe. Knows nothing of plans, tiers or queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hybridindex.config import check_count
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index.codec import DEVICE_KINDS, DeviceCodec
from hybridindex.index.faiss_model import (
    LoadedModel,
    apply_transforms,
    centroids_of,
    decode,
    faiss_message,
    quantize,
    require_faiss,
)
from hybridindex.index.source import find_unusable
from hybridindex.index.storage.layout import element_bytes, id_slots
from hybridindex.index.storage.lists import ExtentReader
from hybridindex.index.storage.manifest import Manifest
from hybridindex.types import F32, I64, U8, Metric

__all__ = ["IVFIndex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What an open index holds on to, and lets go of together."""

    model: LoadedModel
    #: model.faiss, mapped.
    model_bytes: U8
    #: lists.bin, mapped; and the same seen as int64.
    data: U8
    ids64: I64
    reader: ExtentReader


class IVFIndex:
    """One generation of an index.

    Threading: every method may be called from several threads at once. Arrays it hands out are shared and read-only.
    A rebuild of the directory does not disturb an open index: it keeps what it mapped. After :meth:`close`, methods
    raise; views and the faiss index that were handed out stay valid as long as they are held.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        model: LoadedModel,
        table: I64,
        data: U8,
        model_bytes: U8,
    ) -> None:
        """Made by :func:`hybridindex.index.opening.open_index`, which has checked all parts."""
        #: The index directory.
        self.path = path
        self.manifest = manifest
        self.list_sizes: I64 = table[:, 0].copy()
        #: (nlist,) int64: bytes of codes that a scan of each list reads.
        self.list_bytes: I64 = self.list_sizes * manifest.code_size
        self._table = table
        self._id_slots = id_slots(table, manifest.code_size)
        self._parts: _Parts | None = _Parts(
            model=model,
            model_bytes=model_bytes,
            data=data,
            ids64=data.view(np.int64),
            reader=ExtentReader(
                data,
                table,
                code_size=manifest.code_size,
                layout=manifest.layout,
                element=element_bytes(manifest.codec),
            ),
        )
        self._on_close: Callable[[], None] | None = None
        for array in (self.list_sizes, self.list_bytes, table):
            array.setflags(write=False)

    # -- what the manifest says ---------------------------------------------------------------------------------

    @property
    def metric(self) -> Metric:
        return self.manifest.metric

    @property
    def codec(self) -> str:
        return self.manifest.codec

    @property
    def dim(self) -> int:
        """Dimensions of queries as users give them."""
        return self.manifest.dim

    @property
    def scan_dim(self) -> int:
        """Dimensions after the pre-transforms: of centroids and stored vectors."""
        return self.manifest.scan_dim

    @property
    def nlist(self) -> int:
        return self.manifest.nlist

    @property
    def count(self) -> int:
        """Number of vectors."""
        return self.manifest.count

    @property
    def nprobe(self) -> int:
        """Default number of probes."""
        return self.manifest.nprobe

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def generation(self) -> int:
        return self.manifest.generation

    @property
    def code_size(self) -> int:
        """Bytes of one vector's code."""
        return self.manifest.code_size

    @cached_property
    def centroids(self) -> F32:
        """(nlist, scan_dim) float32.

        Raises:
            UnsupportedIndexError: the coarse quantizer of an imported index cannot give its centroids.
        """
        try:
            centroids = centroids_of(self._open().model.ivf)
        except RuntimeError as error:
            raise UnsupportedIndexError(f"{self.path}: the coarse quantizer cannot give its centroids") from error
        centroids.setflags(write=False)
        return centroids

    # -- lists --------------------------------------------------------------------------------------------------

    def list_codes(self, list_id: int) -> U8:
        """Codes of one list as stored: (size, code_size) uint8, a read-only view of the mapped file.

        Raises:
            InvalidInputError: no such list.
            UnsupportedIndexError: the layout has no rows (pqfs32).
        """
        reader = self._list_reader(list_id)
        if self.manifest.layout != "rows":
            raise UnsupportedIndexError(
                f"codes of codec {self.codec!r} lie in blocks ({self.manifest.layout}), not rows"
            )
        return reader.rows(list_id, 0, reader.size(list_id))

    def stored_codes(self, list_id: int) -> U8:
        """The code bytes of one list as they lie in the file, padding of the last block included: (nbytes,) uint8."""
        reader = self._list_reader(list_id)
        return reader.stored(list_id)

    def list_ids(self, list_id: int) -> I64:
        """Ids of one list: (size,) int64, a read-only view of the mapped file."""
        reader = self._list_reader(list_id)
        return reader.ids(list_id)

    def ids_at(self, lists: I64, positions: I64) -> I64:
        """Ids at (list, position) pairs: lists (m,) int64, positions (m,) int64 within their lists -> (m,) int64.

        Not checked against list sizes: a position beyond its list reads whatever lies there.
        """
        ids: I64 = self._open().ids64[self._id_slots[lists] + positions]
        return ids

    def decode_list(self, list_id: int) -> F32:
        """Reference decode of one list through faiss: (size, scan_dim) float32; what its scan compares with.

        Raises:
            InvalidInputError: no such list.
            UnsupportedIndexError: faiss cannot decode this imported codec.
        """
        reader = self._list_reader(list_id)
        if self.manifest.layout == "pqfs32" and not self.codec.startswith("pqfs"):
            raise UnsupportedIndexError(f"codec {self.codec!r} packs its codes in a way that cannot be decoded here")
        size = reader.size(list_id)
        codes = reader.rows(list_id, 0, size)
        try:
            return decode(self._open().model.ivf, codes, np.full(size, list_id, dtype=np.int64))
        except RuntimeError as error:
            raise UnsupportedIndexError(f"faiss cannot decode codec {self.codec!r}: {faiss_message(error)}") from error

    def device_codec(self) -> DeviceCodec | None:
        """How a device decodes the rows of :meth:`list_codes`; ``None`` where only faiss can scan them."""
        kind = DEVICE_KINDS.get(self.codec)
        if kind is None:
            return None
        vmin = vdiff = np.empty(0, dtype=np.float32)
        if kind == "sq8":
            trained = require_faiss().vector_to_array(self._open().model.ivf.sq.trained).astype(np.float32)
            vmin, vdiff = trained[: self.scan_dim].copy(), trained[self.scan_dim :].copy()
        return DeviceCodec(
            kind=kind,
            dim=self.scan_dim,
            code_size=self.code_size,
            by_residual=self.manifest.by_residual,
            vmin=vmin,
            vdiff=vdiff,
        )

    # -- queries ------------------------------------------------------------------------------------------------

    def check_queries(self, queries: Any) -> F32:
        """Queries as (n, dim) float32, C-contiguous; (dim,) becomes (1, dim).

        Raises:
            InvalidInputError: not a float32 array of that shape, NaN or infinity in it, or too long a vector.
        """
        if not isinstance(queries, np.ndarray):
            raise InvalidInputError(f"queries is a {type(queries).__name__}; expected a float32 numpy array")
        if queries.dtype != np.float32:
            raise InvalidInputError(
                f"queries has dtype {queries.dtype}; expected float32 (convert with .astype(np.float32))"
            )
        x = queries[None] if queries.ndim == 1 else queries
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise InvalidInputError(f"queries has shape {queries.shape}; expected (n, {self.dim}) or ({self.dim},)")
        if (found := find_unusable(x)) is not None:
            raise InvalidInputError(f"queries[{found[0]}] {found[1]}")
        return np.ascontiguousarray(x)

    def transform(self, queries: F32) -> F32:
        """Pre-transforms (normalisation included): (n, dim) float32 -> (n, scan_dim) float32."""
        return apply_transforms(self._open().model.transforms, queries)

    def quantize(self, transformed: F32, nprobe: int) -> tuple[I64, F32]:
        """Coarse quantization of (n, scan_dim): probes (n, nprobe) int64, nearest first, and distances f32.

        A graph quantizer (HNSW) may find fewer: the rest is -1.

        Raises:
            InvalidInputError: nprobe is not in 1..nlist.
        """
        nprobe = check_count("nprobe", nprobe, self.nlist)
        return quantize(self._open().model.ivf, np.ascontiguousarray(transformed, dtype=np.float32), nprobe)

    def open_faiss(self) -> Any:
        """The faiss IVF index whose lists are mapped from this directory. Owned by this object; do not change it."""
        return self._open().model.ivf

    def open_faiss_with_transforms(self) -> Any:
        """The same behind its pre-transforms: the index that faiss users would search."""
        return self._open().model.outer

    # -- life ---------------------------------------------------------------------------------------------------

    def call_on_close(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once by :meth:`close`: for what lives only as long as this object."""
        self._on_close = callback

    def close(self) -> None:
        """Let go of the mapping; a second call does nothing."""
        self._parts = None
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __enter__(self) -> IVFIndex:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<IVFIndex {str(self.path)!r} {self.codec} {self.metric} dim={self.dim} nlist={self.nlist} "
            f"count={self.count} generation={self.generation}>"
        )

    def extents(self) -> I64:
        """(nlist, 3) int64: size, capacity, byte offset of each list in ``lists.bin``; read-only."""
        return self._table

    def extent_reader(self) -> ExtentReader:
        """Reads rows and ids of the mapped lists, whatever their layout."""
        return self._open().reader

    def mapped_lists(self) -> U8:
        """All of ``lists.bin``: (nbytes,) uint8, read-only view of the map."""
        return self._open().data

    def mapped_model(self) -> U8:
        """The bytes of ``model.faiss``: (nbytes,) uint8, read-only view of the map."""
        return self._open().model_bytes

    def _open(self) -> _Parts:
        if self._parts is None:
            raise InvalidInputError(f"the index {str(self.path)!r} was closed")
        return self._parts

    def _list_reader(self, list_id: int) -> ExtentReader:
        if not 0 <= list_id < self.nlist:
            raise InvalidInputError(f"list is {list_id}; expected 0 to {self.nlist - 1}")
        return self._open().reader
