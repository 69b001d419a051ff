"""An opened index: one generation, read-only, mapped, thread-safe. Knows nothing of plans, tiers or queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hybridindex.config import check_count
from hybridindex.errors import IndexFormatError, InvalidInputError, UnsupportedIndexError
from hybridindex.index.attributes.stored import StoredAttributes
from hybridindex.index.coarse import CoarseQuantizer
from hybridindex.index.codec import DEVICE_KINDS, DeviceCodec, pq_shape
from hybridindex.index.faiss_model import (
    LoadedModel,
    apply_transforms,
    centroids_of,
    decode,
    encode,
    faiss_message,
    pq_codewords,
    require_faiss,
)
from hybridindex.index.integrity import Integrity
from hybridindex.index.live.store import LiveStore
from hybridindex.index.pq.distances import page_rows
from hybridindex.index.pq.form import BLOCK_ROWS, PqForm
from hybridindex.index.rabitq.codes import RabitqCodes, say_unusable
from hybridindex.index.rabitq.spec import BLOCK_ROWS as CODED_ROWS
from hybridindex.index.share.share import Share
from hybridindex.index.source import find_unusable
from hybridindex.index.storage.checksums import digest_bytes
from hybridindex.index.storage.layout import element_bytes, id_slots
from hybridindex.index.storage.lists import ExtentReader
from hybridindex.index.storage.manifest import Manifest
from hybridindex.index.storage.signed_json import canonical
from hybridindex.types import F32, I64, U8, Metric

__all__ = ["CodedIndex", "IVFIndex"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What an open index holds on to, and lets go of together."""

    model: LoadedModel
    coarse: CoarseQuantizer
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
        integrity: Integrity,
        live: LiveStore,
    ) -> None:
        """Made by :func:`hybridindex.index.opening.open_index`, which has checked all parts."""
        #: Which lists are damaged now.
        self.integrity = integrity
        #: What was deleted and added since the generation was written.
        self.live = live
        #: Codes beside the rows; None where there are none, and why although their files are there.
        self.rabitq: RabitqCodes | None = None
        self.rabitq_problem = ""
        #: What of the index is held, and may come and go; None: this is no share, and holds all.
        self.share: Share | None = None
        #: Attributes of the rows; None where there are none, and why although there should be.
        self.attributes: StoredAttributes | None = None
        self.attributes_problem = ""
        #: The index directory.
        self.path = path
        self.manifest = manifest
        self.list_sizes: I64 = table[:, 0].copy()
        #: (nlist,) int64: bytes that a scan of each list reads.
        self.list_bytes: I64 = -(-self.list_sizes // self.group_rows) * self.group_rows * self.page_row_bytes
        self._table = table
        self._id_slots = id_slots(table, manifest.code_size)
        self._parts: _Parts | None = _Parts(
            model=model,
            coarse=CoarseQuantizer(model.ivf),
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
        live.bind(self)
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

    @property
    def group_rows(self) -> int:
        """Rows whose codes lie together, so that no page may part them."""
        shape = pq_shape(self.codec)
        return 1 if shape is None or shape[1] == 8 else BLOCK_ROWS

    @property
    def page_row_bytes(self) -> int:
        """Bytes that a row takes in a page of a device: its code and, of residual product quantizers under l2, a
        float32."""
        has_terms = pq_shape(self.codec) is not None and self.manifest.by_residual and self.metric == "l2"
        return self.code_size + 4 * has_terms

    @property
    def rows(self) -> IVFIndex:
        """The index whose lists hold the rows: this one, unless it is a view."""
        return self

    @property
    def n_pieces(self) -> int:
        """What a device may hold of the lists: pieces 0 .. nlist - 1 are what is scanned of each. Where that is codes,
        piece nlist + l is the rows of list l."""
        return self.nlist

    @cached_property
    def piece_bytes(self) -> I64:
        """(n_pieces,) int64: bytes of each piece, read-only."""
        return _frozen(self._scanned_bytes())

    def _scanned_bytes(self) -> I64:
        return -(-self.list_sizes // self.group_rows) * self.group_rows * self.page_row_bytes

    def pieces_of(self, lists: I64) -> I64:
        """All pieces of ``lists`` (m,) int64."""
        return lists

    def piece_codes(self, piece: int) -> U8:
        """The bytes of a piece as in pages: (n, bytes of one) uint8, rows or whole blocks.

        A read-only view of the mapped file where that is all.
        """
        if (form := self.pq_form) is None:
            return self.list_codes(piece)
        centroid = self.centroids[piece] if form.has_terms else None
        return page_rows(self.stored_codes(piece), int(self.list_sizes[piece]), centroid, form)

    def by_codes(self) -> CodedIndex:
        """This index as what scans its codes sees it.

        Raises:
            UnsupportedIndexError: it has none that can be used.
        """
        if self.rabitq is None:
            why = self.rabitq_problem or f"hybridindex compress {self.path} makes some"
            raise UnsupportedIndexError(
                f"{self.path} has no codes that can be used: {why}; precision 'auto' or 'rows' does without"
            )
        return CodedIndex(self, self.rabitq)

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

    def codes_of_pages(self, list_id: int, content: U8) -> U8:
        """The code bytes of one list as in the file, of what its pages hold: (nbytes,) uint8.

        None of them where what lies beside the codes does not follow from these.
        """
        group, size = self.group_rows, int(self.list_sizes[list_id])
        rows = -(-size // group) * group
        held = content[: rows * self.page_row_bytes]
        if (form := self.pq_form) is None or not form.has_terms:
            return held
        codes = held.reshape(-1, group * self.page_row_bytes)[:, : group * self.code_size].reshape(-1)
        expected = page_rows(codes, size, self.centroids[list_id], form)
        return codes if np.array_equal(expected.reshape(-1), held) else codes[:0]

    def stored_codes(self, list_id: int) -> U8:
        """The code bytes of one list as they lie in the file, padding of the last block included: (nbytes,) uint8."""
        reader = self._list_reader(list_id)
        return reader.stored(list_id)

    def list_ids(self, list_id: int) -> I64:
        """Ids of one list: (size,) int64, a read-only view of the mapped file."""
        reader = self._list_reader(list_id)
        return reader.ids(list_id)

    def ids_of_lists(self, lists: I64) -> tuple[I64, I64]:
        """The mapped file as ids, int64, and where in it those of ``lists``, (m,) int64, begin: (m,) int64."""
        return self._open().ids64, self._id_slots[lists]

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

    def encode_rows(self, transformed: F32, lists: I64) -> U8:
        """Rows (n, scan_dim) f32 of ``lists`` (n,) as these store them: (n, code_size) uint8. On one thread."""
        return encode(self._open().model.ivf, np.ascontiguousarray(transformed), np.ascontiguousarray(lists))

    def device_codec(self) -> DeviceCodec | None:
        """How a device decodes the rows of :meth:`list_codes`; ``None`` where only faiss can scan them."""
        return self._device_codec

    @cached_property
    def _device_codec(self) -> DeviceCodec | None:
        kind = DEVICE_KINDS.get(self.codec) if self.pq_form is None else "pq"
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
            pq=self.pq_form,
        )

    @cached_property
    def pq_form(self) -> PqForm | None:
        """How product-quantized rows are scanned; None for other codecs, and where faiss alone knows how."""
        shape = pq_shape(self.codec)
        if shape is None:
            return None
        ivf = self._open().model.ivf
        if getattr(ivf, "polysemous_ht", 0):
            return None  # faiss leaves rows out by the bits of their codes
        middle = np.zeros(self.scan_dim, dtype=np.float32)
        if self.manifest.by_residual:
            try:
                middle = self.centroids.mean(axis=0, dtype=np.float64).astype(np.float32)
            except UnsupportedIndexError:
                return None
        return PqForm(
            dim=self.scan_dim,
            parts=shape[0],
            metric=self.metric,
            residual=self.manifest.by_residual,
            codewords=pq_codewords(ivf),
            middle=middle,
        )

    def load_codes(self) -> RabitqCodes | None:
        """The codes beside the rows, read into memory and proven; None where there are none that are whole, which is
        said once."""
        codes = self.rabitq
        try:
            if codes is not None:
                codes.data  # noqa: B018
        except IndexFormatError as error:
            self.rabitq, self.rabitq_problem = None, say_unusable(self.path, error)
        return self.rabitq

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

    def quantize(self, transformed: F32, nprobe: int, pool: Any = None) -> tuple[I64, F32]:
        """Coarse quantization of (n, scan_dim): probes (n, nprobe) int64, nearest first, and distances f32.

        With a flat quantizer a query gets the same whatever queries are beside it; equal distances are ordered by list.
        A graph quantizer (HNSW) may find fewer: the rest is -1.

        Args:
            pool: a ``native.ThreadPool`` whose threads help, as far as :attr:`quantizes_itself`.

        Raises:
            InvalidInputError: nprobe is not in 1..nlist.
        """
        nprobe = check_count("nprobe", nprobe, self.nlist)
        return self._open().coarse.quantize(np.ascontiguousarray(transformed, dtype=np.float32), nprobe, pool)

    @property
    def quantizes_itself(self) -> bool:
        """Whether the extension does the coarse quantization, and not faiss."""
        return self._open().coarse.is_ours

    @property
    def coarse(self) -> CoarseQuantizer:
        """What :meth:`quantize` asks."""
        return self._open().coarse

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
        self._parts = self.rabitq = None
        self.integrity.close()
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

    @property
    def is_closed(self) -> bool:
        return self._parts is None

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


def _frozen(array: I64) -> I64:
    array.setflags(write=False)
    return array


class CodedIndex(IVFIndex):
    """An index whose lists are scanned by their codes: what a tier moves and scans of a list are blocks of codes.

    A view: it is made by :meth:`IVFIndex.by_codes`, shares all else with that index, :attr:`rows`, and ends with it.
    """

    def __init__(self, rows: IVFIndex, codes: RabitqCodes) -> None:
        self._rows = rows
        self.codes = codes
        self.integrity = rows.integrity
        self.live, self.share = rows.live, rows.share
        self.rabitq, self.rabitq_problem = codes, ""
        self.path = rows.path
        self.manifest = rows.manifest
        self.list_sizes = rows.list_sizes
        self.list_bytes = codes.list_bytes
        self._table = rows._table
        self._id_slots = rows._id_slots

    @property
    def rows(self) -> IVFIndex:
        return self._rows

    def by_codes(self) -> CodedIndex:
        return self

    @property
    def codec(self) -> str:
        return f"rabitq{self.codes.spec.bits}"

    @property
    def code_size(self) -> int:
        return self.codes.spec.block_bytes // CODED_ROWS

    @property
    def group_rows(self) -> int:
        return CODED_ROWS

    @property
    def page_row_bytes(self) -> int:
        return self.code_size

    @cached_property
    def _fingerprint(self) -> str:
        spec = self.codes.spec
        said = {"rows": self._rows.fingerprint, "codes": spec.file_xxh3_128, "candidates": asdict(spec.candidates)}
        return digest_bytes(canonical(said))

    @property
    def fingerprint(self) -> str:
        """Tells profiles and plans of codes from those of rows, of other codes, and of other candidates."""
        return self._fingerprint

    @property
    def centroids(self) -> F32:
        return self._rows.centroids

    def list_codes(self, list_id: int) -> U8:
        """Whole blocks of one list: (blocks * 16, code_size) uint8, a read-only view of what was read and proven."""
        return self.stored_codes(list_id).reshape(-1, self.code_size)

    @property
    def n_pieces(self) -> int:
        return 2 * self.nlist if self._rows_can_lie_beside else self.nlist

    @cached_property
    def _rows_can_lie_beside(self) -> bool:
        return self._rows.device_codec() is not None

    @cached_property
    def piece_bytes(self) -> I64:
        scanned = self._scanned_bytes()
        return _frozen(np.concatenate([scanned, self._rows.piece_bytes]) if self._rows_can_lie_beside else scanned)

    def pieces_of(self, lists: I64) -> I64:
        return np.concatenate([lists, self.nlist + lists]) if self._rows_can_lie_beside else lists

    def piece_codes(self, piece: int) -> U8:
        if piece < self.nlist:
            return self.list_codes(piece)
        codes = self._rows.list_codes(piece - self.nlist)
        start = int(self._table[piece - self.nlist, 2])
        self.integrity.mapped.ask_for(start, start + codes.nbytes)
        return codes

    def stored_codes(self, list_id: int) -> U8:
        """The blocks of one list: (nbytes,) uint8."""
        self._list_reader(list_id)  # refuses a list that is not there, and an index that was closed
        return self.codes.list_blocks(list_id)

    def device_codec(self) -> DeviceCodec:
        spec = self.codes.spec
        return DeviceCodec(kind="rabitq", dim=self.scan_dim, code_size=self.code_size, by_residual=False, form=spec)

    def load_codes(self) -> RabitqCodes | None:
        return self._rows.load_codes()

    def call_on_close(self, callback: Callable[[], None]) -> None:
        self._rows.call_on_close(callback)

    def close(self) -> None:
        """Does nothing: the index that this is a view of is closed."""

    def _open(self) -> _Parts:
        return self._rows._open()
