"""Scan of resident product-quantized rows with torch: list by list, each list's rows against all queries that probe it.

Runs on any torch device. Tables come from the host; their entries are added in the order of
:mod:`hybridindex.index.pq.distances`, each step by itself. Temporary buffers stay inside the scratch budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.index.pq.distances import LARGEST, bases_of, tables_of
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.paged.page_scanner import Candidates
from hybridindex.tiers.paged.pq.pq_page_scanner import PqPageScanner
from hybridindex.tiers.paged.torch_scanner import queries_by_list
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["TorchPqScanner"]

_LANES = 8
#: Of a query and a row: lanes, half of them added up, entries; distance and position.
_PAIR_BYTES = 4 * (_LANES + _LANES // 2 + 1) + 12
#: A row of four-bit codes within its 32: in the low half of these bytes come rows 0 to 15, in the high half the others.
_ROW_BYTES = np.array([(row & 7) << 1 | (row >> 3 & 1) for row in range(16)])


class TorchPqScanner(PqPageScanner):
    """Scans on any torch device; the one scanner of such rows that takes filters of ids."""

    name = "torch"

    def _nearest(self, queries: F32, probes: I64, k: int, wanted: Candidates | RowMasks) -> tuple[F32, I64]:
        assert not isinstance(wanted, RowMasks), "one filter at a time"
        distances = np.full((len(queries), k), np.inf, dtype=np.float32)
        positions = np.full((len(queries), k), -1, dtype=np.int64)
        step = self._queries_per_tile(k)
        for start in range(0, len(queries), step):
            at = slice(start, start + step)
            self._scan_tile(queries[at], probes[at], wanted, distances[at], positions[at])
        return distances, positions

    def _queries_per_tile(self, k: int) -> int:
        # Half of the scratch for what lives as long as the tile: tables, and the best (12 bytes a place: the running
        # ones, the gathered ones, the next ones). A group of rows must fit the other half with as many queries.
        form, half = self._form, self._scratch_bytes // 2
        living = 4 * form.parts * form.codewords.shape[1] + 3 * 12 * k
        of_pairs = form.group_rows * _PAIR_BYTES + 12 * k
        most = min(half // living, (half - form.group_rows * self._row_bytes) // of_pairs)
        return self._at_least_one(most, max(living, of_pairs + form.group_rows * self._row_bytes), k)

    @property
    def _row_bytes(self) -> int:
        # As stored, numbers of one byte and of eight, and the position.
        return self._form.row_bytes + 9 * self._form.parts + 12

    def _rows_per_tile(self, n_queries: int, k: int) -> int:
        form = self._form
        per_group = form.group_rows * (self._row_bytes + n_queries * _PAIR_BYTES)
        left = self._scratch_bytes // 2 - n_queries * k * 12
        return self._at_least_one(left // per_group, per_group, k) * form.group_rows

    def _at_least_one(self, n: int, needed: int, k: int) -> int:
        if n < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for k {k}: a tile needs {2 * needed:,}"
            )
        return n

    def _scan_tile(self, queries: F32, probes: I64, wanted: Candidates, distances: F32, positions: I64) -> None:
        import torch

        device, form, k = self._arena.device, self._form, distances.shape[1]
        tables = torch.from_numpy(tables_of(queries, form)).to(device)
        bases = np.zeros(probes.shape, dtype=np.float32)
        if form.residual:
            bases = bases_of(queries, self._index.centroids, probes, form)
        best = torch.full((len(queries), k), torch.inf, dtype=torch.float32, device=device)
        best_at = torch.full((len(queries), k), -1, dtype=torch.int64, device=device)
        lists, rows, columns, starts = queries_by_list(probes)
        for number, list_id in enumerate(lists.tolist()):
            own = slice(starts[number], starts[number + 1])
            size = int(self._index.list_sizes[list_id])
            if size == 0:
                continue
            group = torch.from_numpy(rows[own]).to(device)
            base = torch.from_numpy(bases[rows[own], columns[own]]).to(device)[:, None]
            pages = self._residency.list_pages[list_id]
            assert pages is not None  # checked for all probes
            allowed = None
            if wanted is not None:
                allowed = torch.from_numpy(self._allowed(list_id, wanted)).to(device)
            held, held_at = best.index_select(0, group), best_at.index_select(0, group)
            step = self._rows_per_tile(len(group), k)
            for start in range(0, size, step):
                n_rows = min(step, size - start)
                whole = -(-n_rows // form.group_rows) * form.group_rows
                numbers, terms = self._unpack(self._arena.rows(pages, start, whole), n_rows)
                block = self._distances(tables, group, numbers, base if terms is None else base + terms)
                # As in faiss: what is not a number, or as far as can be, is no candidate.
                block.masked_fill_(~(block <= float(LARGEST)), torch.inf)
                if allowed is not None:
                    block.masked_fill_(~allowed[start : start + n_rows], torch.inf)
                at = (list_id << POSITION_BITS) + torch.arange(start, start + n_rows, device=device)
                top, where = torch.topk(torch.cat((held, block), dim=1), k, dim=1, largest=False, sorted=False)
                held_at = torch.cat((held_at, at.expand(len(group), -1)), dim=1).gather(1, where)
                held = top
            best.index_copy_(0, group, held)
            best_at.index_copy_(0, group, held_at)
        order = torch.argsort(best, dim=1)
        distances[:] = best.gather(1, order).cpu().numpy()
        found = best_at.gather(1, order).cpu().numpy()
        # A filtered-out row keeps its position at the worst distance.
        positions[:] = np.where(distances == np.inf, -1, found)

    def _unpack(self, stored: torch.Tensor, n_rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers (n_rows, parts) int64 of whole groups of rows as they lie in pages, and their terms (n_rows,)."""
        import torch

        form = self._form
        groups = stored.reshape(-1, form.group_rows * form.row_bytes)
        codes = groups[:, : form.group_rows * form.code_size]
        terms = None
        if form.has_terms:
            behind = groups[:, form.group_rows * form.code_size :].reshape(-1)
            terms = behind.clone().view(torch.float32)[:n_rows]  # where no number is parted
        if form.bits == 8:
            return codes[:n_rows].long(), terms
        bytes_of_rows = torch.from_numpy(_ROW_BYTES).to(codes.device)
        numbers = codes.reshape(len(groups), -1, 16).index_select(2, bytes_of_rows)
        numbers = torch.cat((numbers & 15, numbers >> 4), dim=2).transpose(1, 2)
        return numbers.reshape(-1, numbers.shape[2])[:n_rows, : form.parts].long(), terms

    def _distances(
        self, tables: torch.Tensor, group: torch.Tensor, numbers: torch.Tensor, bases: torch.Tensor
    ) -> torch.Tensor:
        """(g, rows) float32, smaller is better."""
        import torch

        lanes = torch.zeros((_LANES, len(group), len(numbers)), dtype=torch.float32, device=tables.device)
        for part in range(self._form.parts):
            of_part = tables[:, part].index_select(0, group)
            lanes[part % _LANES].add_(of_part.index_select(1, numbers[:, part]))
        half = _LANES // 2
        while half:
            lanes = lanes[:half] + lanes[half : 2 * half]
            half //= 2
        found = bases + lanes[0]
        return found.masked_fill_(found < 0, 0.0) if self._form.metric == "l2" else found
