"""Scan of resident codes with torch: list by list, each list's rows against all queries that probe it.

Runs on any torch device. Sums of whole numbers are exact in float32, in whatever order; what follows is computed in
the order of :mod:`hybridindex.index.rabitq.estimate`, each step by itself. Temporary buffers stay inside the scratch
budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE, prepare_queries
from hybridindex.index.rabitq.spec import BLOCK_ROWS
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.paged.codes.code_scanner import CodePageScanner
from hybridindex.tiers.paged.torch_scanner import queries_by_list
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["TorchCodeScanner"]

#: A key that is no candidate.
_NONE = np.iinfo(np.int64).max


class TorchCodeScanner(CodePageScanner):
    """Scans on any torch device.

    A candidate is one number, its key: the estimate as a whole number of the same order above, below it the row's
    number among all rows of the lists that are scanned. Positions have the same order.
    """

    name = "torch"

    def _scan_codes(self, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64) -> None:
        step = self._queries_per_tile(estimates.shape[1])
        for start in range(0, len(queries), step):
            at = slice(start, start + step)
            self._scan_tile(queries[at], probes[at], products[at], estimates[at], positions[at])

    def _queries_per_tile(self, k: int) -> int:
        # Half of the scratch for what lives as long as the tile: queries (twice, while gathered) and their best keys
        # (the running ones, the gathered ones, the next ones).
        per_query = 2 * 4 * self._form.padded_dim + 3 * 8 * k
        return self._at_least_one(self._scratch_bytes // 2 // per_query, per_query, k)

    def _blocks_per_tile(self, n_queries: int, k: int) -> int:
        # The other half for rows (as stored; a plane, its bits and what they sum up to) and for what (queries, k +
        # rows) numbers become on their way to keys.
        per_row = self._index.code_size + 12 * self._form.padded_dim + n_queries * 36
        left = self._scratch_bytes // 2 - n_queries * k * 8
        return self._at_least_one(left // (per_row * BLOCK_ROWS), per_row * BLOCK_ROWS, k)

    def _at_least_one(self, n: int, needed: int, k: int) -> int:
        if n < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for {k} candidates: a tile needs {2 * needed:,}"
            )
        return n

    def _scan_tile(self, queries: F32, probes: I64, products: F32, estimates: F32, positions: I64) -> None:
        import torch

        device, form, k = self._arena.device, self._form, estimates.shape[1]
        coded = prepare_queries(queries, self._codes.signs, form)
        whole = torch.from_numpy(coded.whole.astype(np.float32)).to(device)
        best = torch.full((len(queries), k), _NONE, dtype=torch.int64, device=device)
        lists, members, columns, starts = queries_by_list(probes)
        sizes = self._index.list_sizes[lists]
        #: The number of each list's first row.
        numbers = np.cumsum(sizes) - sizes
        for at, list_id in enumerate(lists.tolist()):
            if not sizes[at]:
                continue
            own = slice(starts[at], starts[at + 1])
            group = torch.from_numpy(members[own]).to(device)
            held = best.index_select(0, group)
            pages = self._residency.list_pages[list_id]
            assert pages is not None  # checked for all probes
            product = products[members[own], columns[own]]
            square = self._codes.centroid_sq[list_id]
            t = product / square if square != 0 else np.zeros_like(product)
            terms = np.stack((coded.u[members[own]], t * np.float32(form.g_scale), product))
            u, w, centre = (term[:, None] for term in torch.from_numpy(terms).to(device))
            step = self._blocks_per_tile(len(product), k) * BLOCK_ROWS
            for start in range(0, int(sizes[at]), step):
                n_rows = min(step, int(sizes[at]) - start)
                codes = self._arena.rows(pages, start, -(-n_rows // BLOCK_ROWS) * BLOCK_ROWS)
                levels, f, g, h = self._decode(codes)
                x = whole.index_select(0, group) @ levels.T
                x.mul_(f).mul_(u).add_(g * w).add_(centre)
                estimated = x.neg_() if form.metric == "ip" else h - x.mul_(2)
                keys = _keys(estimated[:, :n_rows], int(numbers[at]) + start)
                both = torch.cat((held, keys), dim=1)
                held = torch.topk(both, k, dim=1, largest=False, sorted=False).values
            best.index_copy_(0, group, held)
        found = np.sort(best.cpu().numpy(), axis=1)
        there = found != _NONE
        estimates[there] = _estimates_of(found[there])
        row = found[there] & 0xFFFFFFFF
        which = np.searchsorted(numbers, row, side="right") - 1
        positions[there] = (lists[which] << POSITION_BITS) + row - numbers[which]

    def _decode(self, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What whole blocks (rows, code_size) say: levels (rows, D) float32, f, g and h (rows,) float32 each; without
        h under inner products."""
        import torch

        form = self._form
        blocks = codes.reshape(-1, form.block_bytes)
        plane_bytes = form.block_bytes - form.factor_bytes
        planes = blocks[:, :plane_bytes].view(len(blocks), form.bits, -1, BLOCK_ROWS, 4).permute(1, 0, 3, 2, 4)
        bit = torch.arange(8, dtype=torch.uint8, device=codes.device)
        levels = torch.zeros((len(codes), form.padded_dim), dtype=torch.float32, device=codes.device)
        for plane in planes:
            bits = (plane.reshape(len(codes), -1, 1) >> bit) & 1
            levels.mul_(2).add_(bits.view(len(codes), -1), alpha=2).sub_(1)
        factors = blocks[:, plane_bytes:].contiguous()
        halves = factors[:, :64].contiguous().view(torch.float16).float().view(len(blocks), 2, BLOCK_ROWS)
        h = factors[:, 64:].contiguous().view(torch.float32).reshape(-1)
        return levels, halves[:, 0].reshape(-1), halves[:, 1].reshape(-1), h


def _keys(estimated: torch.Tensor, first: int) -> torch.Tensor:
    """(n, rows) float32 of rows numbered from ``first`` -> (n, rows) int64."""
    import torch

    # Adding zero makes one of the two zeros.
    bits = (estimated + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    numbers = torch.arange(first, first + estimated.shape[1], device=estimated.device)
    keys = (ordered.to(torch.int64) << 32) | numbers
    return keys.masked_fill_(~(estimated <= float(LARGEST_ESTIMATE)), _NONE)


def _estimates_of(keys: I64) -> F32:
    """(m,) int64 -> (m,) float32."""
    ordered = (keys >> 32).astype(np.int32)
    bits = ordered ^ ((ordered >> 31) & np.int32(0x7FFFFFFF))
    return bits.view(np.float32)
