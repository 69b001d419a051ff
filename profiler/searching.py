"""How an index is searched while it is measured: by its rows, or by its codes.

A search by codes has work beside its scans: the products of queries and centroids before them, and the exact distances
of the candidates after them. Codes on a device take neither away; rows on one take the distances of their candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridindex.config import RowsName
from hybridindex.errors import InvalidInputError
from hybridindex.index.ivf import CodedIndex, IVFIndex
from hybridindex.tiers.host.faiss_scanner import HostFaissScanner
from hybridindex.tiers.host.host_scanner import HostScanner, open_host_scanner
from hybridindex.tiers.host.rabitq_scanner import HostRabitqScanner
from hybridindex.types import F32, I64

__all__ = ["Searching", "open_reference", "open_searching"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Searching:
    """An index and what scans it on the host. As thread-safe as the scanner."""

    index: IVFIndex
    scanner: HostScanner

    @property
    def by_codes(self) -> bool:
        return isinstance(self.scanner, HostRabitqScanner)

    def kept(self, k: int, nprobe: int) -> int:
        """Rows that a scan keeps of each query: k, or the candidates."""
        return self.scanner.codes.spec.candidates_for(k, nprobe) if isinstance(self.scanner, HostRabitqScanner) else k

    def quantize(self, queries: F32, nprobe: int) -> tuple[I64, F32]:
        """Probes (n, nprobe) int64, and what scans take for their coarse distances, float32."""
        probes, coarse = self.scanner.quantize(self.index, queries, nprobe)
        return probes, self.coarse_of(queries, probes, coarse) if self.by_codes else coarse

    def coarse_of(self, queries: F32, probes: I64, coarse: F32 | None = None) -> F32:
        """What scans by codes take for coarse distances of probes (n, p) int64: (n, p) float32."""
        assert isinstance(self.scanner, HostRabitqScanner)
        return self.scanner.centre_products(queries, probes, coarse)

    def finish(self, queries: F32, found: I64, k: int) -> I64:
        """(n, k) int64 ids of the answers from what a scan found, (n, kept) int64."""
        if isinstance(self.scanner, HostRabitqScanner):
            return self.scanner.reranker.rerank(queries, found, k)[1]
        return found[:, :k]

    def search(self, queries: F32, k: int, nprobe: int) -> I64:
        """(n, k) int64 ids: the answers to queries (n, scan_dim) float32, contiguous."""
        probes, coarse = self.quantize(queries, nprobe)
        found = self.scanner.scan(queries, probes, coarse, self.kept(k, nprobe))[1]
        return self.finish(queries, found, k)

    def notes(self, k: int, nprobe: int) -> dict[str, Any]:
        """What a profile says of searches by codes."""
        if not isinstance(self.scanner, HostRabitqScanner):
            return {}
        spec, rows = self.scanner.codes.spec, self.index.rows
        said = {
            "bits": spec.bits,
            "candidates": spec.candidates_for(k, nprobe),
            "recall_loss": spec.recall_loss,
            #: Whose codes they are: these may be replaced, and their profiles stay.
            "of": rows.fingerprint,
            #: Of all lists, and whether devices could hold them.
            "row_bytes": int(rows.list_bytes.sum()),
            "rows_on_devices": rows.device_codec() is not None,
        }
        return {"codes": said}

    def close(self) -> None:
        """Ends threads of the scanner."""
        self.scanner.close()


def open_reference(index: IVFIndex, *, threads: int) -> HostScanner:
    """What scans all rows that searches by codes are compared with."""
    if isinstance(index, CodedIndex) and index.codes.spec.source == "faiss":
        return HostFaissScanner(index.rows, threads=threads, rounded=False)
    return open_host_scanner(index.rows, threads=threads)


def open_searching(
    index: IVFIndex, *, threads: int | None = None, host_scanner: str = "auto", rows: RowsName = "resident"
) -> Searching:
    """By what ``index`` is a view of.

    Raises:
        InvalidInputError: no such scanner, one that scans no codes, rows on disk that are scanned, or bad ``threads``.
        UnsupportedIndexError: "native" was asked for and cannot scan this index here.
    """
    if not isinstance(index, CodedIndex):
        if rows == "mapped":
            raise InvalidInputError(
                "rows is 'mapped' with a profile of rows, which are scanned; give precision 'codes', or rows 'resident'"
            )
        return Searching(index=index, scanner=open_host_scanner(index, threads=threads, name=host_scanner))
    if host_scanner == "faiss":
        raise InvalidInputError(
            "host_scanner is 'faiss', which scans rows, with precision 'codes'; give 'auto' or 'native', or precision "
            "'rows'"
        )
    return Searching(index=index, scanner=HostRabitqScanner(index.rows, index.codes, threads=threads, rows=rows))
