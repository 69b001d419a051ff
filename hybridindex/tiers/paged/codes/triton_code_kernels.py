"""The Triton kernels of the scan of codes: estimates of a page's rows for the queries that probe it.

Importing this module imports triton. Tables, scratch and the selection are those of
:mod:`hybridindex.tiers.paged.triton_kernels`; a page holds blocks of 16 rows as :mod:`hybridindex.index.rabitq.encode`
writes them. A program has one item of :mod:`hybridindex.tiers.paged.tables.scan_tables` and ``ROWS`` rows of its page.

Sums are of whole numbers, so that their order is free. With b, a level's bits as a number from 0, V = 2b - (2^B - 1):
<V, q> = 2 <b, q> - (2^B - 1) * sum(q). What follows in float32 has the order of
:func:`hybridindex.index.rabitq.estimate.estimates` and must be launched with ``enable_fp_fusion=False``: a fused
multiply-add rounds once where the other tiers round twice, and estimates would depend on where a row is scanned.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from hybridindex.index.rabitq.estimate import LARGEST_ESTIMATE
from hybridindex.tiers.paged.triton_kernels import work_item

__all__ = ["estimate_heavy", "estimate_light"]

LARGEST = tl.constexpr(float(LARGEST_ESTIMATE))


@triton.jit
def _place(
    page, row, live, halves, singles,
    PAGE_ROWS: tl.constexpr, PLANE_WORDS: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """Of rows of a page: where each one's first word lies, and its factors f, g and h."""
    BLOCK_WORDS: tl.constexpr = PLANE_WORDS + (32 if L2 else 16)
    block = (page.to(tl.int64) * (PAGE_ROWS // 16) + row // 16) * BLOCK_WORDS
    lane = row % 16
    factors = block + PLANE_WORDS
    f = tl.load(halves + factors * 2 + lane, mask=live, other=0.0).to(tl.float32)
    g = tl.load(halves + factors * 2 + 16 + lane, mask=live, other=0.0).to(tl.float32)
    h = tl.zeros_like(f)
    if L2:
        h = tl.load(singles + factors + 16 + lane, mask=live, other=0.0)
    return block + lane, f, g, h


@triton.jit
def _estimate(product, whole_sum, f, g, h, u, w, centre, BITS: tl.constexpr, L2: tl.constexpr):
    """Estimates from ``product``, <b, q>; infinite where that makes no candidate, as in the host's scan."""
    s = (2 * product - ((1 << BITS) - 1) * whole_sum).to(tl.float32)
    x = (f * s) * u + g * w + centre
    if L2:
        x = h - 2.0 * x
    else:
        x = -x
    # False for what is not a number, too.
    return tl.where(x <= LARGEST, x, float("inf"))


@triton.jit
def _ones(x, COMPILED: tl.constexpr):
    """Bits of int32 that are set. The interpreter knows no instruction for it."""
    if COMPILED:
        return libdevice.popc(x)
    else:  # noqa: RET505 - triton compiles what stands behind the if, too
        x = x.to(tl.uint32, bitcast=True)
        x -= (x >> 1) & 0x55555555
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def estimate_light(
    words, halves, singles, ints, floats,
    at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, at_query, at_slot,
    at_slices, at_sum, at_u, at_w, at_centre, at_out,
    BITS: tl.constexpr, CHUNKS: tl.constexpr, L2: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    SLICES: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Query by query, by counting bits: a query lies in bit slices of its whole numbers, two's complement, and each
    takes a logical and and a count with 32 dimensions of a plane. A thread has its own rows, and sums nothing with
    others. What a program reads again for its next query is in the near cache.
    """
    page, _, first_row, n_rows, member, end = work_item(
        ints, tl.program_id(0), at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, PAGE_ROWS, GROUP
    )
    start = tl.program_id(1) * ROWS
    if start < n_rows:
        row = start + tl.arange(0, ROWS)
        live = row < n_rows
        at, f, g, h = _place(page, row, live, halves, singles, PAGE_ROWS, BITS * CHUNKS * 16, L2)
        m = member
        while m < end:
            query, slot = tl.load(ints + at_query + m), tl.load(ints + at_slot + m)
            product = tl.zeros((ROWS,), tl.int32)
            for plane in tl.static_range(BITS):
                product = 2 * product
                for first_chunk in range(0, CHUNKS, AT_ONCE):
                    for i in tl.static_range(AT_ONCE):
                        chunk = first_chunk + i
                        bits = tl.load(words + at + (plane * CHUNKS + chunk) * 16, mask=live, other=0)
                        slices = ints + at_slices + (query * CHUNKS + chunk) * SLICES
                        for j in tl.static_range(SLICES):
                            count = _ones(bits & tl.load(slices + j), COMPILED)
                            # The highest slice is that of the sign.
                            if j == SLICES - 1:
                                product -= count << j
                            else:
                                product += count << j
            estimate = _estimate(
                product, tl.load(ints + at_sum + query), f, g, h, tl.load(floats + at_u + query),
                tl.load(floats + at_w + m), tl.load(floats + at_centre + m), BITS, L2,
            )  # fmt: skip
            tl.store(floats + at_out + slot + first_row + row, estimate, mask=live)
            m += 1


@triton.jit(do_not_specialize=["first_item"])
def estimate_heavy(
    words, halves, singles, ints, floats, bytes_, first_item,
    at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, at_query, at_slot,
    at_whole, at_sum, at_u, at_w, at_centre, at_out,
    BITS: tl.constexpr, CHUNKS: tl.constexpr, L2: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """All queries of an item at once, for lists that many probe: the matrix units multiply levels and whole numbers as
    int8 and add in int32. ``at_whole`` is in bytes.
    """
    page, _, first_row, n_rows, member, end = work_item(
        ints, first_item + tl.program_id(0), at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end,
        PAGE_ROWS, GROUP,
    )  # fmt: skip
    start = tl.program_id(1) * ROWS
    if start < n_rows:
        row = start + tl.arange(0, ROWS)
        live = row < n_rows
        at, f, g, h = _place(page, row, live, halves, singles, PAGE_ROWS, BITS * CHUNKS * 16, L2)
        m = member + tl.arange(0, GROUP)
        inside = m < end
        query = tl.load(ints + at_query + m, mask=inside, other=0)
        slot = tl.load(ints + at_slot + m, mask=inside, other=0)
        lane = tl.arange(0, 32)
        product = tl.zeros((ROWS, GROUP), tl.int32)
        for first_chunk in range(0, CHUNKS, AT_ONCE):
            chunk = first_chunk + tl.arange(0, AT_ONCE)
            mask = live[:, None] & (chunk < CHUNKS)[None, :]
            levels = tl.zeros((ROWS, AT_ONCE, 32), tl.int32)
            for plane in tl.static_range(BITS):
                bits = tl.load(words + at[:, None] + (plane * CHUNKS + chunk)[None, :] * 16, mask=mask, other=0)
                levels = 2 * levels + ((bits[:, :, None] >> lane[None, None, :]) & 1)
            dim = first_chunk * 32 + tl.arange(0, AT_ONCE * 32)
            q = tl.load(
                bytes_ + at_whole + query[None, :] * (CHUNKS * 32) + dim[:, None],
                mask=(dim < CHUNKS * 32)[:, None], other=0,
            )  # fmt: skip
            x = tl.reshape(levels.to(tl.int8), (ROWS, AT_ONCE * 32))
            product = tl.dot(x, q, product, out_dtype=tl.int32)
        estimate = _estimate(
            product, tl.load(ints + at_sum + query)[None, :], f[:, None], g[:, None], h[:, None],
            tl.load(floats + at_u + query)[None, :], tl.load(floats + at_w + m, mask=inside, other=0.0)[None, :],
            tl.load(floats + at_centre + m, mask=inside, other=0.0)[None, :], BITS, L2,
        )  # fmt: skip
        tl.store(
            floats + at_out + slot[None, :] + (first_row + row)[:, None], estimate,
            mask=live[:, None] & inside[None, :],
        )  # fmt: skip
