"""Exact distances from rows on a device with torch, to the bit what the host's kernels compute.

Those add products up in as many partial sums as a register of this machine's CPU has floats, and where the CPU can,
round a product and its sum together (:func:`sum_order`). Here the same is done in double precision: a product is exact
there, and a sum that is rounded to odd keeps what the rounding to single precision needs to be right (Boldo and
Melquiond, Emulation of FMA and correctly rounded sums, 2008).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from hybridindex.errors import OutOfBudgetError
from hybridindex.extension import native
from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE
from hybridindex.tiers.contract.positions import POSITION_BITS
from hybridindex.tiers.paged.arena import PageArena
from hybridindex.tiers.paged.codes.row_pages import RowPages
from hybridindex.types import F32, I64

if TYPE_CHECKING:
    import torch

__all__ = ["TorchRowPages", "sum_order"]

#: Dimensions are padded with zeros to a multiple of this, as the host's kernels do.
_DIM_STEP = 16
_ROW_MASK = (1 << POSITION_BITS) - 1


@cache
def sum_order(kernels: str = "") -> tuple[int, bool] | None:
    """How many partial sums the host's kernels have, and whether they round a product together with its sum; None
    where there are no kernels, or they do neither. Found out with products that tell one from the other.

    ``kernels``: a set of this CPU; "": that which the host uses.
    """
    if native is None:
        return None
    for lanes in (4, 8, 16):
        large = 2.0**24  # to which one adds nothing
        # The third lies in the first sum of all of them.
        if _product({0: (1, large), lanes: (1, 1), 32: (1, -large)}, kernels) == 0:
            break
    else:
        return None
    a = 1 + 2.0**-12  # whose square has a bit too many
    left = _product({0: (-1, 1 + 2.0**-11), lanes: (a, a)}, kernels)
    return (lanes, left != 0) if left in (0, 2**-24) else None


def _product(factors: dict[int, tuple[float, float]], kernels: str) -> float:
    """The scalar product of two vectors that are zero but for these elements."""
    assert native is not None
    query, centroid = np.zeros((1, 48), dtype=np.float32), np.zeros((1, 48), dtype=np.float32)
    for at, (a, b) in factors.items():
        query[0, at], centroid[0, at] = a, b
    out = np.empty((1, 1), dtype=np.float32)
    native.pair_products(query, centroid, np.zeros((1, 1), dtype=np.int64), out, kernels)
    return float(out[0, 0])


class TorchRowPages(RowPages):
    """Compares on any torch device."""

    name = "torch"

    @staticmethod
    def supports(arena: PageArena) -> bool:
        return sum_order() is not None

    def _compare(self, queries: F32, positions: I64, distances: F32) -> None:
        import torch

        flat = distances.reshape(-1)
        [places] = np.nonzero(positions.reshape(-1) >= 0)
        found = positions.reshape(-1)[places]
        of_query = places // positions.shape[1]
        lists, which = np.unique(found >> POSITION_BITS, return_inverse=True)
        counts = self._residency.page_counts[lists]
        starts = np.cumsum(counts) - counts
        device = self._arena.device
        table = torch.from_numpy(self._residency.pages_of(lists).astype(np.int64)).to(device)
        step = self._rows_per_tile()
        for start in range(0, len(found), step):
            at = slice(start, start + step)
            rows = torch.from_numpy(np.stack((starts[which[at]], found[at] & _ROW_MASK))).to(device)
            decoded = self._decode(self._bytes(table, rows[0], rows[1]), lists[which[at]])
            x = torch.from_numpy(np.ascontiguousarray(queries[of_query[at]])).to(device)
            flat[places[at]] = self._distances(x, decoded).cpu().numpy()

    def _rows_per_tile(self) -> int:
        # Where its bytes are, 8 bytes each, some times over; what is decoded, in double precision, and the query; and
        # partial sums.
        dims = -(-self._codec.dim // _DIM_STEP) * _DIM_STEP
        per_row = 41 * self._codec.code_size + 100 * dims + 100 * _DIM_STEP
        step = self._scratch_bytes // per_row
        if step < 1:
            raise OutOfBudgetError(f"scratch of {self._scratch_bytes:,} bytes is too small: a row needs {per_row:,}")
        return step

    def _bytes(self, table: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """(m, code_size) uint8 of rows (m,) of lists whose pages begin at ``starts`` (m,) of ``table``."""
        import torch

        size, page_bytes = self._codec.code_size, self._arena.geometry.page_bytes
        at = rows[:, None] * size + torch.arange(size, device=rows.device)
        pages = table[starts[:, None] + torch.div(at, page_bytes, rounding_mode="floor")]
        return self._arena.data.reshape(-1)[pages * page_bytes + at % page_bytes]

    def _decode(self, codes: torch.Tensor, lists: I64) -> torch.Tensor:
        """(m, code_size) uint8 -> (m, dim) float32."""
        import torch

        codec = self._codec
        if codec.kind == "f32":
            decoded = codes.view(torch.float32)
        elif codec.kind == "f16":
            decoded = codes.view(torch.float16).float()
        elif codec.kind == "bf16":
            decoded = codes.view(torch.bfloat16).float()
        else:
            assert codec.kind == "sq8"
            scale, offset = (torch.from_numpy(part).to(codes.device) for part in (codec.scale, codec.offset))
            decoded = _multiply_add(codes.float(), scale, offset)
        if codec.by_residual:
            decoded = decoded + torch.from_numpy(self._index.centroids[lists]).to(codes.device)
        return decoded

    def _distances(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """(m, dim) float32 of queries and of rows -> (m,) float32."""
        import torch

        order = sum_order()
        assert order is not None  # asked by supports()
        lanes, keep_max = order[0], self._index.metric == "ip"
        if keep_max:
            x = -x
        missing = -x.shape[1] % _DIM_STEP
        x, rows = torch.nn.functional.pad(x, (0, missing)), torch.nn.functional.pad(rows, (0, missing))
        if not keep_max:
            x = rows = x - rows
        sums = torch.zeros((len(x), lanes), dtype=torch.float32, device=x.device)
        for at in range(0, x.shape[1], lanes):
            sums = _multiply_add(x[:, at : at + lanes], rows[:, at : at + lanes], sums)
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
        found = sums[:, 0]
        found = found.masked_fill(~(found <= float(LARGEST_ESTIMATE)), torch.nan)
        return -found if keep_max else found


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, all float32, rounded once or twice, as the host's kernels do it."""
    import torch

    order = sum_order()
    assert order is not None
    if not order[1]:
        return a * b + c
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # What the sum lost (Knuth's two-sum), and the neighbour on that side where the last bit is even: it is odd.
    kept = total - product
    lost = (product - (total - kept)) + (addend - kept)
    bits = total.contiguous().view(torch.int64)
    away = torch.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost < 0) | (lost > 0)
    return torch.where(inexact & ((bits & 1) == 0), bits + away, bits).view(torch.float64).float()
