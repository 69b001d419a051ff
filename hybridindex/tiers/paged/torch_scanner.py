"""Scan of resident lists with torch: list by list, each list's rows against all queries that probe it.

Runs on any torch device. Temporary buffers stay inside the scratch budget: queries and rows are cut into tiles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.tiers.contract.positions import POSITION_BITS, ids_of_positions
from hybridindex.tiers.paged.page_scanner import Candidates, PageScanner
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["TorchScanner", "queries_by_list"]


class TorchScanner(PageScanner):
    """Scans on any torch device; the one page scanner that takes filters of ids."""

    name = "torch"

    def _scan(self, queries: F32, probes: I64, coarse_distances: F32, k: int, wanted: Candidates) -> tuple[F32, I64]:
        distances = np.empty((len(queries), k), dtype=np.float32)
        ids = np.empty((len(queries), k), dtype=np.int64)
        step = self._queries_per_tile(k)
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            self._scan_tile(queries[rows], probes[rows], k, wanted, distances[rows], ids[rows])
        return distances, ids

    def _queries_per_tile(self, k: int) -> int:
        # Half of the scratch for what lives as long as the tile: queries (twice, while gathered) and their top-k (the
        # running one, the gathered one, the next one), 12 bytes a place.
        per_query = 2 * self._index.scan_dim * 4 + 3 * k * 12
        return self._at_least_one(self._scratch_bytes // 2 // per_query, per_query, k)

    def _rows_per_tile(self, n_queries: int, k: int) -> int:
        # The other half for rows (as stored, decoded, once more while computed in double precision) and for the
        # (queries, k + rows) block that top-k reads: value and position.
        per_row = self._index.code_size + self._index.scan_dim * (4 + 4 + 8) + n_queries * 2 * 12
        left = self._scratch_bytes // 2 - n_queries * k * 12
        return self._at_least_one(left // per_row, per_row, k)

    def _at_least_one(self, n: int, needed: int, k: int) -> int:
        if n < 1:
            raise OutOfBudgetError(
                f"scratch of {self._scratch_bytes:,} bytes is too small for k {k}: a tile needs {2 * needed:,}"
            )
        return n

    def _scan_tile(self, queries: F32, probes: I64, k: int, wanted: Candidates, distances: F32, ids: I64) -> None:
        import torch

        device = self._arena.device
        keep_max = self._index.metric == "ip"
        x = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
        worst = -torch.inf if keep_max else torch.inf
        # The dtype is said everywhere: the process may have another default.
        best = torch.full((len(queries), k), worst, dtype=torch.float32, device=device)
        best_at = torch.full((len(queries), k), -1, dtype=torch.int64, device=device)
        lists, rows, _, starts = queries_by_list(probes)
        for number, list_id in enumerate(lists.tolist()):
            members = rows[starts[number] : starts[number + 1]]
            size = int(self._index.list_sizes[list_id])
            if size == 0:
                continue
            group = torch.from_numpy(members).to(device)
            xg = x.index_select(0, group)
            pages = self._residency.list_pages[list_id]
            assert pages is not None  # checked for all probes
            allowed = None
            if wanted is not None:
                allowed = torch.from_numpy(self._allowed(list_id, wanted)).to(device)
            held, held_at = best.index_select(0, group), best_at.index_select(0, group)
            step = self._rows_per_tile(len(members), k)
            for start in range(0, size, step):
                codes = self._arena.rows(pages, start, min(step, size - start))
                decoded = self._decode(codes, list_id)
                block = _distances(xg, decoded, keep_max=keep_max)
                # As in faiss: what is not a number, or as far as can be, is no candidate.
                block.masked_fill_(torch.isnan(block), worst)
                if allowed is not None:
                    block.masked_fill_(~allowed[start : start + step], worst)
                at = (list_id << POSITION_BITS) + torch.arange(start, start + len(decoded), device=device)
                top, where = torch.topk(torch.cat((held, block), dim=1), k, dim=1, largest=keep_max, sorted=False)
                held_at = torch.cat((held_at, at.expand(len(members), -1)), dim=1).gather(1, where)
                held = top
            best.index_copy_(0, group, held)
            best_at.index_copy_(0, group, held_at)
        order = torch.argsort(best, dim=1, descending=keep_max)
        distances[:] = best.gather(1, order).cpu().numpy()
        positions = best_at.gather(1, order).cpu().numpy()
        # A filtered-out row keeps its position at the worst distance.
        ids[:] = ids_of_positions(self._index, np.where(distances == worst, -1, positions))

    def _decode(self, codes: torch.Tensor, list_id: int) -> torch.Tensor:
        import torch

        codec, dim = self._codec, self._index.scan_dim
        if codec.kind == "f32":
            decoded = codes.view(torch.float32)
        elif codec.kind == "f16":
            decoded = codes.view(torch.float16).float()
        elif codec.kind == "bf16":
            decoded = codes.view(torch.bfloat16).float()
        else:
            assert codec.kind == "sq8"
            scale = torch.from_numpy(codec.scale).to(codes.device)
            offset = torch.from_numpy(codec.offset).to(codes.device)
            decoded = codes.float().mul_(scale).add_(offset)
        assert decoded.shape[1] == dim
        if codec.by_residual:
            decoded = decoded + torch.from_numpy(self._index.centroids[list_id]).to(codes.device)
        return decoded


def queries_by_list(probes: I64) -> tuple[I64, I64, I64, I64]:
    """Turns (n, p) probes around: which rows probe each list.

    Returns:
        lists (m,) int64 ascending, each once; rows and columns (t,) int64 of its probes, grouped by list; starts
        (m + 1,) int64 into them.
    """
    rows, columns = np.nonzero(probes >= 0)
    lists = probes[rows, columns]
    order = np.argsort(lists, kind="stable")
    lists, rows, columns = lists[order], rows[order], columns[order]
    starts = np.flatnonzero(np.diff(lists, prepend=-1))
    return lists[starts], rows, columns, np.append(starts, len(rows))


def _shortened_products() -> bool:
    """Whether the process lets CUDA multiply float32 with fewer bits; newer torch refuses to read the older switch."""
    import torch

    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return precision not in ("none", "ieee") or torch.get_float32_matmul_precision() != "highest"


def _distances(x: torch.Tensor, rows: torch.Tensor, *, keep_max: bool) -> torch.Tensor:
    """(g, d) x (s, d) -> (g, s): inner products, or squared l2 by direct differences.

    The expansion |x|^2 - 2xy + |y|^2 would be faster and loses all digits on data far from the origin.
    """
    import torch

    if keep_max:
        if x.is_cuda and _shortened_products():
            # The process allows shortened products for its own sake; ours must stay exact.
            return (x.double() @ rows.double().T).float()
        return x @ rows.T
    return torch.cdist(x, rows, compute_mode="donot_use_mm_for_euclid_dist").square_()
