"""The Triton kernel of the device scan of product-quantized rows: their distances to the queries that probe them.

As :mod:`hybridindex.tiers.paged.triton_kernels`, with its tables and its scratch. Each operation is rounded by itself:
distances are those of :mod:`hybridindex.index.pq.distances`, to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybridindex.tiers.paged.triton_kernels import work_item

__all__ = ["add_up_entries"]

#: The largest float is as far as can be.
LARGEST = tl.constexpr(3.4028232635611926e38)


@triton.jit
def _byte(data, at, live):
    return tl.load(data + at, mask=live, other=0).to(tl.int32)


@triton.jit
def add_up_entries(
    data, ints, floats,
    at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, at_query, at_slot,
    at_table, at_base, at_out,
    PARTS: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr, ROW_BYTES: tl.constexpr, TERMS: tl.constexpr,
    L2: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Query by query; a thread has its own rows, and sums nothing with others. Tables are in the near cache."""
    page, _, first_row, n_rows, member, end = work_item(
        ints, tl.program_id(0), at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, PAGE_ROWS, GROUP
    )
    start = tl.program_id(1) * ROWS
    if start < n_rows:
        row = start + tl.arange(0, ROWS)
        live = row < n_rows
        at = page.to(tl.int64) * (PAGE_ROWS * ROW_BYTES)
        if WORDS == 256:
            code = at + row * ROW_BYTES
            own_term = code + CODE
            shift = row * 0
            STEP: tl.constexpr = 1
        else:
            # Blocks of 32 rows: 16 bytes for each part, of rows r and r + 16 in halves.
            block = at + row // 32 * (32 * ROW_BYTES)
            inner = row % 32
            code = block + ((inner & 7) << 1) + ((inner >> 3) & 1)
            own_term = block + 32 * CODE + 4 * inner
            shift = (inner >> 4) * 4
            STEP: tl.constexpr = 16
        term = tl.zeros((ROWS,), tl.float32)
        if TERMS:
            bits = (
                _byte(data, own_term, live) | (_byte(data, own_term + 1, live) << 8)
                | (_byte(data, own_term + 2, live) << 16) | (_byte(data, own_term + 3, live) << 24)
            )  # fmt: skip
            term = bits.to(tl.float32, bitcast=True)
        m = member
        while m < end:
            query, slot = tl.load(ints + at_query + m), tl.load(ints + at_slot + m)
            entries = floats + at_table + query.to(tl.int64) * (PARTS * WORDS)
            a = tl.zeros((ROWS,), tl.float32)
            b, c, d, e, f, g, h = a, a, a, a, a, a, a
            for chunk in range(0, PARTS, 8):
                for i in tl.static_range(8):
                    part = chunk + i
                    there = live & (part < PARTS)
                    number = _byte(data, code + part * STEP, there)
                    if WORDS == 16:
                        number = (number >> shift) & 15
                    entry = tl.load(entries + part * WORDS + number, mask=there, other=0.0)
                    if i == 0:
                        a += entry
                    elif i == 1:
                        b += entry
                    elif i == 2:
                        c += entry
                    elif i == 3:
                        d += entry
                    elif i == 4:
                        e += entry
                    elif i == 5:
                        f += entry
                    elif i == 6:
                        g += entry
                    else:
                        h += entry
            total = ((a + e) + (c + g)) + ((b + f) + (d + h))
            distance = tl.load(floats + at_base + m) + term + total
            if L2:
                distance = tl.where(distance < 0.0, 0.0, distance)
            # False for what is not a number, too.
            distance = tl.where(distance <= LARGEST, distance, float("inf"))
            tl.store(floats + at_out + slot + first_row + row, distance, mask=live)
            m += 1
