"""Scan of resident lists with torch: list by list, each list's rows against all queries that probe it.

Runs on any torch device. It reads pages through one leased snapshot and keeps its temporary buffers inside the scratch
budget by cutting queries and rows into tiles. Moving lists is :mod:`hybridindex.tiers.paged.device_tier`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import InvalidInputError, OutOfBudgetError
from hybridindex.tiers.contract.protocol import IdFilter, OnDone
from hybridindex.tiers.contract.residency import Residency
from hybridindex.tiers.contract.validate import allowed_ids, check_filter, check_scan
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

    from hybridindex.index.codec import DeviceCodec
    from hybridindex.index.ivf import IVFIndex

__all__ = ["TorchScanner", "ids_of_positions", "queries_by_list"]

_POSITION_BITS = 32
_POSITION_MASK = (1 << _POSITION_BITS) - 1


class TorchScanner:
    """Scans the lists of one device that one snapshot holds. Made per batch; thread-safe as long as the lease lives."""

    name = "torch"

    def __init__(
        self,
        index: IVFIndex,
        codec: DeviceCodec,
        arena: PageArena,
        residency: Residency,
        ordinal: int,
        scratch_bytes: int,
    ) -> None:
        self._index = index
        self._codec = codec
        self._arena = arena
        self._residency = residency
        self._ordinal = ordinal
        self._scratch_bytes = scratch_bytes
        #: Why this kernel scans and not a faster one; empty where none is faster. Set by who chose it.
        self.passed_over = ""

    @property
    def kernel(self) -> str:
        """Which kernel scans, and why: "triton", or "torch: triton is not installed; ..."."""
        return f"{self.name}: {self.passed_over}" if self.passed_over else self.name

    def scan(
        self,
        queries: F32,
        probes: I64,
        coarse_distances: F32,
        k: int,
        *,
        filter_ids: IdFilter | None = None,
        on_done: OnDone | None = None,
    ) -> tuple[F32, I64]:
        """See :meth:`hybridindex.tiers.contract.protocol.Scanner.scan`.

        Raises:
            InvalidInputError: also when a probed list is not resident on this device in this snapshot.
            OutOfBudgetError: the scratch is too small for one query at this k.
        """
        self._check(queries, probes, coarse_distances, k)
        check_filter(filter_ids)
        worst = -np.inf if self._index.metric == "ip" else np.inf
        distances = np.full((len(queries), k), worst, dtype=np.float32)
        ids = np.full((len(queries), k), -1, dtype=np.int64)
        step = self._queries_per_tile(k)
        for start in range(0, len(queries), step):
            rows = slice(start, start + step)
            self._scan_tile(queries[rows], probes[rows], k, filter_ids, distances[rows], ids[rows])
        if on_done is not None and len(queries):
            on_done(np.arange(len(queries), dtype=np.int32), distances, ids)
        return distances, ids

    def _check(self, queries: F32, probes: I64, coarse_distances: F32, k: int) -> None:
        check_scan(queries, probes, coarse_distances, k, dim=self._index.scan_dim, nlist=self._index.nlist)
        probed = probes[probes >= 0]
        # An empty list holds nothing anywhere; scanning it is no error.
        absent = probed[(self._residency.list_device[probed] != self._ordinal) & (self._index.list_sizes[probed] > 0)]
        if len(absent):
            raise InvalidInputError(f"list {int(absent[0])} is probed on device {self._ordinal} but not resident there")

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

    def _scan_tile(
        self, queries: F32, probes: I64, k: int, filter_ids: IdFilter | None, distances: F32, ids: I64
    ) -> None:
        import torch

        device = self._arena.device
        keep_max = self._index.metric == "ip"
        x = torch.from_numpy(np.ascontiguousarray(queries)).to(device)
        worst = -torch.inf if keep_max else torch.inf
        # The dtype is said everywhere: the process may have another default.
        best = torch.full((len(queries), k), worst, dtype=torch.float32, device=device)
        best_at = torch.full((len(queries), k), -1, dtype=torch.int64, device=device)
        lists, rows, starts = queries_by_list(probes)
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
            if filter_ids is not None:
                allowed = torch.from_numpy(np.isin(self._index.list_ids(list_id), allowed_ids(filter_ids))).to(device)
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
                at = (list_id << _POSITION_BITS) + torch.arange(start, start + len(decoded), device=device)
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
            scale = torch.from_numpy(codec.vdiff / np.float32(255.0)).to(codes.device)
            offset = torch.from_numpy(codec.vmin + codec.vdiff * np.float32(0.5 / 255.0)).to(codes.device)
            decoded = codes.float().mul_(scale).add_(offset)
        assert decoded.shape[1] == dim
        if codec.by_residual:
            decoded = decoded + torch.from_numpy(self._index.centroids[list_id]).to(codes.device)
        return decoded


def ids_of_positions(index: IVFIndex, positions: I64) -> I64:
    """Ids of packed positions (list id << 32 | row in list), same shape; -1 stays -1."""
    ids = np.full(positions.shape, -1, dtype=np.int64)
    found = positions >= 0
    ids[found] = index.ids_at(positions[found] >> _POSITION_BITS, positions[found] & _POSITION_MASK)
    return ids


def queries_by_list(probes: I64) -> tuple[I64, I64, I64]:
    """Turns (n, p) probes around: which rows probe each list.

    Returns:
        lists (m,) int64 ascending, each once; rows (t,) int64 grouped by list; starts (m + 1,) int64 into rows.
    """
    rows, columns = np.nonzero(probes >= 0)
    lists = probes[rows, columns]
    order = np.argsort(lists, kind="stable")
    lists, rows = lists[order], rows[order]
    starts = np.flatnonzero(np.diff(lists, prepend=-1))
    return lists[starts], rows, np.append(starts, len(rows))


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
