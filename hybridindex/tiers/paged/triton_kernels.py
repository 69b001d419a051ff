"""The Triton kernels of the device scan: distances of a page to the queries that probe it, and the best of each query.

Importing this module imports triton, and triton decides then whether to compile or to interpret (``TRITON_INTERPRET``).
:mod:`hybridindex.tiers.paged.tables.scan_tables` explains the tables, and
:mod:`hybridindex.tiers.paged.triton_scanner` launches.

All tables, queries, distances and keys lie in one scratch block, seen as int32 (``ints``), float32 (``floats``) and
int64 (``keys``). Arguments that start with ``at_`` are element offsets into these, multiples of 16, so that one
compilation serves every batch.

Loops over loaded bounds are written with ``while``: the interpreter of triton 3.6 fails on ``range`` of a loaded number
with numpy 2.4 (triton-lang/triton#9171).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["scan_heavy", "scan_light", "select_best", "split_queries"]


@triton.jit
def _decoded(
    data, at, live, floats, at_scale, at_offset, at_centroid, cols, inside,
    KIND: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Elements at (rows, cols) as float32: the formulas of ``DeviceCodec``."""
    # Read once, and first to go: the near cache is for queries and tables, which programs read again and again.
    raw = tl.load(data + at, mask=live, other=0, eviction_policy="evict_first")
    if KIND == "bf16":
        # The upper half of a float32; exact, and no conversion instruction.
        x = (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    if KIND == "sq8":
        scale = tl.load(floats + at_scale + cols, mask=inside, other=0.0)
        offset = tl.load(floats + at_offset + cols, mask=inside, other=0.0)
        x = x * scale[None, :] + offset[None, :]
    if RESIDUAL:
        x += tl.load(floats + at_centroid + cols, mask=inside, other=0.0)[None, :]
    return x


@triton.jit
def work_item(
    ints, number, at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end,
    PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What a work item is: page, stretch, first row within the stretch, rows, first member, end of its members."""
    page = tl.load(ints + at_page + number)
    stretch = tl.load(ints + at_stretch + number)
    groups = tl.load(ints + at_groups + stretch)
    inner = number - tl.load(ints + at_first + stretch)
    row = inner // groups * PAGE_ROWS
    n_rows = tl.minimum(tl.load(ints + at_rows + stretch) - row, PAGE_ROWS)
    member = tl.load(ints + at_member + stretch) + inner % groups * GROUP
    end = tl.minimum(tl.load(ints + at_end + stretch), member + GROUP)
    return page, stretch, row, n_rows, member, end


@triton.jit
def scan_light(
    data, ints, floats,
    at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, at_query, at_slot,
    at_x, at_scale, at_offset, at_centroids, at_out,
    D: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, RESIDUAL: tl.constexpr, KEEP_MAX: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One item with fused multiply-adds: a block of rows stays in registers while its queries pass by.

    No query is padded, so one query a page costs what it must. l2 sums squared differences (ADR 0007). A block has
    ``PIECES`` times ``COLS`` columns at most: of longer rows the queries pass by the next columns then, and what these
    make is added to what lies in the scratch.
    """
    page, stretch, first_row, n_rows, member, end = work_item(
        ints, tl.program_id(0), at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, PAGE_ROWS, GROUP
    )
    cols = tl.arange(0, COLS)
    base = page.to(tl.int64) * (PAGE_ROWS * D)
    first_query, first_slot = tl.load(ints + at_query + member), tl.load(ints + at_slot + member)
    start = 0
    while start < n_rows:
        row = start + tl.arange(0, ROWS)
        live = row < n_rows
        for first_col in range(0, D, PIECES * COLS):
            if first_col > 0:
                # What the program's other threads have written is read below.
                tl.debug_barrier()
            x = ()
            for c in tl.static_range(PIECES):
                col = first_col + c * COLS + cols
                inside = col < D
                part = _decoded(
                    data, base + row[:, None] * D + col[None, :], live[:, None] & inside[None, :], floats,
                    at_scale, at_offset, at_centroids + stretch * D, col, inside, KIND, RESIDUAL,
                )  # fmt: skip
                # Triton knows no unpacking.
                x = x + (part,)  # noqa: RUF005
            m, query, slot = member, first_query, first_slot
            while m < end:
                # Asked for while this one is computed: its own query's address waits for it.
                following = tl.minimum(m + 1, end - 1)
                next_query, next_slot = tl.load(ints + at_query + following), tl.load(ints + at_slot + following)
                total = tl.zeros((ROWS, COLS), tl.float32)
                for c in tl.static_range(PIECES):
                    col = first_col + c * COLS + cols
                    q = tl.load(floats + at_x + query * D + col, mask=col < D, other=0.0)[None, :]
                    if KEEP_MAX:
                        total += x[c] * q
                    else:
                        total += (x[c] - q) * (x[c] - q)
                out = floats + at_out + slot + first_row + row
                distance = tl.sum(total, axis=1)
                if first_col > 0:
                    distance += tl.load(out, mask=live, other=0.0)
                tl.store(out, distance, mask=live)
                m, query, slot = m + 1, next_query, next_slot
        start += ROWS


@triton.jit
def split_queries(
    floats, halves, at_x, at_scale, at_offset, at_parts,
    D: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes one query as the heavy kernel reads it: WORDS words from ``at_parts``, in which its three bfloat16 parts
    lie one behind the other, SPLIT numbers each, and then, as float32, what sq8's offset adds to every distance. sq8's
    scale goes into the query.
    """
    query = tl.program_id(0)
    own = at_parts + query * WORDS
    offsets = tl.zeros((COLS,), tl.float32)
    for first_col in range(0, SPLIT, COLS):
        col = first_col + tl.arange(0, COLS)
        q = tl.load(floats + at_x + query * D + col, mask=col < D, other=0.0)
        if KIND == "sq8":
            offsets += q * tl.load(floats + at_offset + col, mask=col < D, other=0.0)
            q = q * tl.load(floats + at_scale + col, mask=col < D, other=0.0)
        part = halves + 2 * own + col
        for number in tl.static_range(3):
            cut = q.to(tl.bfloat16)
            tl.store(part + number * SPLIT, cut.to(tl.int16, bitcast=True), mask=col < SPLIT)
            q -= cut.to(tl.float32)
    tl.store(floats + own + SPLIT * 3 // 2, tl.sum(offsets, axis=0))


@triton.jit
def _add_product(total, q, x, WIDE: tl.constexpr):
    if WIDE:
        q, x = q.to(tl.float32), x.to(tl.float32)
    return tl.dot(q, x, total, input_precision="ieee")


@triton.jit(do_not_specialize=["first_item"])
def scan_heavy(
    data, ints, floats, halves, first_item,
    at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end, at_query, at_slot,
    at_x, at_centroids, at_parts, at_out,
    D: tl.constexpr, PAGE_ROWS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, RESIDUAL: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, SPLIT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """One item of inner products as a matrix product, for lists that many queries of the batch probe.

    The matrix units multiply bfloat16 exactly and add in float32, so operands are cut into bfloat16 parts: a query
    (:func:`split_queries`) and a float32 into three (24 bits), a half into two, a byte or a bfloat16 is one. What is
    left out is below 2^-24 of a product. All parts of all queries are one operand, of 64 rows with a place that stays
    empty: units for 64 are no faster for less. Rows are the other operand, as few as a page has, but 16.

    Matrix units add by cutting bits off, always towards zero, which many columns would add up. So each COLS of them
    have a sum of their own, small parts first, and these sums are added with rounding, those of a query's parts last.
    ``WIDE`` multiplies the parts as float32: the interpreter of triton 3.6 would multiply the bits of bfloat16 as whole
    numbers.
    """
    page, stretch, first_row, n_rows, member, end = work_item(
        ints, first_item + tl.program_id(0), at_page, at_stretch, at_first, at_groups, at_rows, at_member, at_end,
        PAGE_ROWS, GROUP,
    )  # fmt: skip
    m = member + tl.arange(0, GROUP)
    query = tl.load(ints + at_query + m, mask=m < end, other=0)
    slot = tl.load(ints + at_slot + m, mask=m < end, other=0)
    constant = tl.load(floats + at_parts + query * WORDS + SPLIT * 3 // 2)
    base = page.to(tl.int64) * (PAGE_ROWS * D)
    cols = tl.arange(0, COLS)
    if RESIDUAL:
        for first_col in range(0, D, COLS):
            col = first_col + cols
            q = tl.load(floats + at_x + query[:, None] * D + col[None, :], mask=(col < D)[None, :], other=0.0)
            centroid = tl.load(floats + at_centroids + stretch * D + col, mask=col < D, other=0.0)
            constant += tl.sum(q * centroid[None, :], axis=1)
    line = tl.arange(0, 4 * GROUP)
    owner = member + line % GROUP
    there = (owner < end) & (line < 3 * GROUP)
    own = at_parts + tl.load(ints + at_query + owner, mask=there, other=0) * WORDS
    part_of_line = halves + 2 * own + line // GROUP * SPLIT
    start = 0
    while start < n_rows:
        row = start + tl.arange(0, ROWS)
        live = row < n_rows
        total = tl.zeros((4 * GROUP, ROWS), tl.float32)
        for first_col in range(0, D, COLS):
            col = first_col + cols
            raw = tl.load(
                data + base + row[None, :] * D + col[:, None], mask=live[None, :] & (col < D)[:, None], other=0
            )
            q = tl.load(part_of_line[:, None] + col[None, :], mask=there[:, None], other=0)
            q = q.to(tl.bfloat16, bitcast=True)
            added = tl.zeros((4 * GROUP, ROWS), tl.float32)
            if KIND == "bf16":
                x = raw.to(tl.bfloat16, bitcast=True)
            else:
                whole = raw.to(tl.float32)
                x = whole.to(tl.bfloat16)
                if KIND != "sq8":
                    rest = whole - x.to(tl.float32)
                    x2 = rest.to(tl.bfloat16)
                    if KIND == "f32":
                        x3 = (rest - x2.to(tl.float32)).to(tl.bfloat16)
                        added = _add_product(added, q, x3, WIDE)
                    added = _add_product(added, q, x2, WIDE)
            total += _add_product(added, q, x, WIDE)
        distance = tl.sum(tl.reshape(total, (4, GROUP, ROWS)), axis=0) + constant[:, None]
        tl.store(
            floats + at_out + slot[:, None] + (first_row + row)[None, :], distance,
            mask=(m < end)[:, None] & live[None, :],
        )  # fmt: skip
        start += ROWS


@triton.jit
def select_best(
    ints, floats, keys, at_in, at_starts, at_next_starts, at_best,
    FROM_DISTANCES: tl.constexpr, KEEP_MAX: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The KEPT smallest keys of one chunk of one query's candidates, in the chunk's order; then the largest int64.

    A key is (distance in an order of whole numbers) << 32 | slot: distances first, ties by slot, no two alike, so what
    is kept depends on nothing else. The largest key to keep is found by bisection, which ends as soon as a bound has
    KEPT keys below it: a dozen counts as a rule, 64 at most. Sorting networks take more.
    """
    query, chunk = tl.program_id(0), tl.program_id(1)
    start = tl.load(ints + at_starts + query) + chunk * CHUNK
    end = tl.load(ints + at_starts + query + 1)
    # The first chunk runs even when it is empty: it writes the empty places.
    if (start < end) | (chunk == 0):
        at = start + tl.arange(0, CHUNK)
        live = at < end
        empty = tl.full((CHUNK,), 0x7FFFFFFFFFFFFFFF, tl.int64)
        if FROM_DISTANCES:
            value = tl.load(floats + at_in + at, mask=live, other=float("nan"))
            if KEEP_MAX:
                value = -value
            # False for what is not a number, too: as in faiss, that is no candidate.
            live = value < float("inf")
            bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
            ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            key = tl.where(live, (ordered.to(tl.int64) << 32) | at.to(tl.int64), empty)
        else:
            key = tl.load(keys + at_in + at, mask=live, other=0x7FFFFFFFFFFFFFFF)
            live = key < empty
        # Fewer than KEPT keys are <= low, ``below`` keys are <= high.
        low = tl.min(key, axis=0) - 1
        high = tl.max(tl.where(live, key, ~empty), axis=0)
        below = tl.sum(live.to(tl.int32), axis=0)
        while below > KEPT:
            # Their mean rounded down, without the overflow of a sum.
            middle = (low & high) + ((low ^ high) >> 1)
            count = tl.sum((key <= middle).to(tl.int32), axis=0)
            enough = count >= KEPT
            low = tl.where(enough, low, middle)
            high = tl.where(enough, middle, high)
            below = tl.where(enough, count, below)
        chosen = live & (key <= high)
        target = keys + at_best + tl.load(ints + at_next_starts + query) + chunk * KEPT
        tl.store(target + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, key, mask=chosen)
        place = tl.arange(0, KEPT)
        tl.store(target + place, tl.full((KEPT,), 0x7FFFFFFFFFFFFFFF, tl.int64), mask=place >= below)
