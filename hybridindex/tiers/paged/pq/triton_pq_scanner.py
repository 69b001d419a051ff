"""Scan of resident product-quantized rows on a GPU with our Triton kernel: the tables, the scratch and the selection of
:mod:`hybridindex.tiers.paged.triton_scanner` around :mod:`hybridindex.tiers.paged.pq.triton_pq_kernels`.

Tables of queries come from the host, which computes them for its own part in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hybridindex.config import MAX_K
from hybridindex.index.codec import DeviceCodec
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.pq.distances import bases_of, tables_of
from hybridindex.tiers.paged.launch_shapes import Shape
from hybridindex.tiers.paged.page_scanner import Candidates
from hybridindex.tiers.paged.pq.pq_page_scanner import PqPageScanner
from hybridindex.tiers.paged.pq.torch_pq_scanner import TorchPqScanner
from hybridindex.tiers.paged.tables.scan_tables import GROUP, Tile
from hybridindex.tiers.paged.triton_scanner import NEVER, TABLES, TritonScanner, Work, Workspace
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["PqWorkspace", "TritonPqScanner", "shape_of"]

#: Rows of a program.
_ROWS = 128
#: Each operation is rounded by itself.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class TritonPqScanner(PqPageScanner):
    """Scans on a GPU. Scans of one arena take turns at its scratch. Scans that are filtered by ids, and those of more
    than :data:`MAX_K` rows, are torch's."""

    name = "triton"

    unsupported = staticmethod(TritonScanner.unsupported)

    def _prepare(self) -> None:
        #: Where the scan runs.
        self.workspace: Workspace = PqWorkspace.of(self._arena, self._codec, self._scratch_bytes)

    def _scan_masked(
        self, queries: F32, probes: I64, coarse_distances: F32, k: int, masks: RowMasks
    ) -> tuple[F32, I64]:
        return self._best(queries, probes, k, masks)

    def _nearest(self, queries: F32, probes: I64, k: int, wanted: Candidates | RowMasks) -> tuple[F32, I64]:
        if not isinstance(wanted, RowMasks):
            return self._nearest_of(queries, probes, k, wanted)
        distances = np.empty((len(queries), k), dtype=np.float32)
        positions = np.empty((len(queries), k), dtype=np.int64)
        parts = wanted.groups() if k > MAX_K else self.workspace.in_turn(wanted)
        for rows, own in parts:
            distances[rows], positions[rows] = self._nearest_of(queries[rows], probes[rows], k, own)
        return distances, positions

    def _nearest_of(self, queries: F32, probes: I64, k: int, wanted: Candidates | RowMasks) -> tuple[F32, I64]:
        """``wanted``: masks that the device can hold at once."""
        if k > MAX_K or not (wanted is None or isinstance(wanted, RowMasks)):
            return TorchPqScanner.beside(self)._nearest(queries, probes, k, wanted)
        distances = np.full((len(queries), k), np.inf, dtype=np.float32)
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        bases = np.zeros(probes.shape, dtype=np.float32)
        if self._form.residual:
            bases = bases_of(queries, self._index.centroids, probes, self._form)
        flat = bases.reshape(-1)

        def operands(tile: Tile, tables: Any) -> dict[str, npt.NDArray[Any]]:
            rows = slice(tile.first_query, tile.first_query + tile.n_queries)
            return {"table": tables_of(queries[rows], self._form), "base": flat[tables.member_probes()]}

        work = Work(
            elements=(self._arena.data.view(-1),),
            keep_max=False,
            heavy_from=NEVER,
            query_bytes=4 * self._form.parts * self._form.codewords.shape[1],
            pair_bytes=4,
            operands=operands,
            masks=wanted,
        )
        self.workspace.best(self._residency, self._index.list_sizes, probes, work, distances, positions)
        return distances, positions


class PqWorkspace(Workspace):
    """A workspace that launches the kernel of product-quantized rows."""

    def launch(self, elements: tuple[torch.Tensor, ...], tile: Tile, at: dict[str, int], keep_max: bool) -> None:
        """Queues the distances of an uploaded tile."""
        shape = self._shape("rows", shape_of, self._codec, self._rows_per_page)
        where = [at[name] for name in (*TABLES, "table", "base", "out")]
        most = min(self._rows_per_page, tile.most_rows)
        grid = (tile.n_items, -(-most // shape.constants["ROWS"]), 1)
        self._run(shape, grid, (*elements, self._ints, self._floats, *where))


def shape_of(codec: DeviceCodec, page_rows: int) -> Shape:
    """Distances of product-quantized rows."""
    from hybridindex.tiers.paged.pq import triton_pq_kernels

    form = codec.pq
    assert form is not None
    constants = {
        "PARTS": form.parts,
        "WORDS": form.codewords.shape[1],
        "CODE": form.code_size,
        "ROW_BYTES": form.row_bytes,
        "TERMS": form.has_terms,
        "L2": form.metric == "l2",
        "PAGE_ROWS": page_rows,
        "GROUP": GROUP,
        "ROWS": min(_ROWS, 1 << (page_rows - 1).bit_length()),
    }
    return Shape.of(triton_pq_kernels.add_up_entries, constants, **_OPTIONS)
