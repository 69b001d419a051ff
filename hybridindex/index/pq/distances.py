"""Distances of product-quantized rows, the same to the bit wherever they are computed: the parts of the extension
(``native/pq``) where it is there, and references in numpy that equal them.

The distance of a row, smaller is better, is base + term + sum over the parts of table[part][number], in float32:

====================  ==========================  ============  ==============================
distance              table                       base          term
====================  ==========================  ============  ==============================
inner product         -<q, y>                     -<q, c>       none
l2, whole vectors     \\|q - y\\|^2                 0             none
l2, residuals         -2 <q - middle, y>          \\|q - c\\|^2   \\|y\\|^2 + 2 <c - middle, y>
====================  ==========================  ============  ==============================

y is the codeword of a part, c the list's centroid; the base is 0 where rows are whole vectors. Base and term are added
first. Entries of tables are sums over the dimensions of their part, in order. Sums over parts, and those of the base,
are added in eight lanes, number i to lane i % 8, and halves of the lanes then: 4 to 4, 2 to 2, 1 to 1. A negative l2
distance is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridindex.extension import native
from hybridindex.index.pq.form import PqForm
from hybridindex.index.storage.pqfs import unpack_pqfs
from hybridindex.types import F32, I64, U8

__all__ = [
    "LARGEST",
    "bases_of",
    "distances",
    "in_lanes",
    "native_form",
    "numbers_of",
    "page_rows",
    "tables_of",
    "terms_of",
]

_LANES = 8
#: Larger distances, and what is no number, are no answers.
LARGEST = np.nextafter(np.finfo(np.float32).max, np.float32(0))


def native_form(form: PqForm, kernels: str = "") -> Any:
    """The form as the extension takes it, which must be there.

    Args:
        kernels: "amx", "avx512", "avx2", "neon" or "portable"; empty: the best that this CPU runs.
    """
    assert native is not None
    return native.PqForm(form.codewords, form.middle, form.parts, form.metric == "l2", form.residual, kernels)


def tables_of(queries: F32, form: PqForm) -> F32:
    """(n, dim) float32 -> (n, parts, words) float32."""
    n, words = len(queries), form.codewords.shape[1]
    if native is not None:
        out = np.empty((n, form.parts * words), dtype=np.float32)
        native_form(form).tables(np.ascontiguousarray(queries), out)
        return out.reshape(n, form.parts, words)
    return tables_reference(queries, form)


def tables_reference(queries: F32, form: PqForm) -> F32:
    """:func:`tables_of` without the extension."""
    if form.metric == "ip":
        return _entries(-queries, form, np.multiply)
    if form.has_terms:
        return _entries(np.float32(-2) * (queries - form.middle), form, np.multiply)
    return _entries(queries, form, lambda x, y: (x - y) * (x - y))


def _entries(x: F32, form: PqForm, add: Any) -> F32:
    words = form.codewords.shape[1]
    of_part = x.reshape(len(x), form.parts, form.part_dims, 1)
    coordinates = form.codewords.reshape(form.parts, form.part_dims, words)
    out = np.zeros((len(x), form.parts, words), dtype=np.float32)
    for i in range(form.part_dims):
        out += add(of_part[:, :, i], coordinates[:, i])
    return out


def in_lanes(values: F32) -> F32:
    """Sums over the last axis: (..., m) float32 -> (...) float32."""
    sums = np.zeros((*values.shape[:-1], _LANES), dtype=np.float32)
    for start in range(0, values.shape[-1], _LANES):
        part = values[..., start : start + _LANES]
        sums[..., : part.shape[-1]] += part
    half = _LANES // 2
    while half:
        sums = sums[..., :half] + sums[..., half : 2 * half]
        half //= 2
    found: F32 = sums[..., 0]
    return found


def bases_of(queries: F32, centroids: F32, probes: I64, form: PqForm) -> F32:
    """What of the distances is the same for all rows of each probe: (n, p) float32, 0 where there is none."""
    if not form.residual:
        return np.zeros(probes.shape, dtype=np.float32)
    if native is None:
        return bases_reference(queries, centroids, probes, form)
    out = np.empty(probes.shape, dtype=np.float32)
    native_form(form).bases(np.ascontiguousarray(queries), centroids, np.ascontiguousarray(probes), out)
    return out


def bases_reference(queries: F32, centroids: F32, probes: I64, form: PqForm) -> F32:
    """:func:`bases_of` without the extension, of residual rows."""
    out = np.zeros(probes.shape, dtype=np.float32)
    for row, (query, lists) in enumerate(zip(queries, probes, strict=True)):
        own = centroids[lists]
        out[row] = -in_lanes(query * own) if form.metric == "ip" else in_lanes((query - own) * (query - own))
    out[probes < 0] = 0
    return out


def terms_of(codes: U8, size: int, centroid: F32, form: PqForm) -> F32:
    """The terms of the rows of one list: codes as they lie in ``lists.bin`` (nbytes,) uint8 -> (size,) float32."""
    out = np.empty(size, dtype=np.float32)
    if native is not None:
        native_form(form).terms(np.ascontiguousarray(codes), np.ascontiguousarray(centroid), out)
        return out
    return terms_reference(codes, size, centroid, form)


def terms_reference(codes: U8, size: int, centroid: F32, form: PqForm) -> F32:
    """:func:`terms_of` without the extension."""
    table = _entries((np.float32(2) * (centroid - form.middle))[None], form, lambda x, y: (x + y) * y)[0]
    return in_lanes(table[np.arange(form.parts), numbers_of(codes, size, form)])


def numbers_of(codes: U8, size: int, form: PqForm) -> I64:
    """The codewords' numbers of rows: codes as they lie in ``lists.bin`` (nbytes,) -> (size, parts) int64."""
    if form.bits == 8:
        return codes.reshape(-1, form.parts)[:size].astype(np.int64)
    rows = unpack_pqfs(codes.reshape(-1, form.group_rows * form.code_size), size)
    numbers = np.stack((rows & 15, rows >> 4), axis=2).reshape(size, 2 * form.code_size)
    return numbers[:, : form.parts].astype(np.int64)


def page_rows(codes: U8, size: int, centroid: F32 | None, form: PqForm) -> U8:
    """A list as it lies in pages: (rows, row_bytes) uint8, whole groups of rows.

    A view of ``codes`` (nbytes,) where rows have no terms.
    """
    group = form.group_rows
    if not form.has_terms:
        return codes.reshape(-1, form.row_bytes)
    assert centroid is not None
    groups = -(-size // group)
    out = np.zeros((groups, group * form.row_bytes), dtype=np.uint8)
    out[:, : group * form.code_size] = codes.reshape(groups, group * form.code_size)
    terms = np.zeros(groups * group, dtype=np.float32)
    terms[:size] = terms_of(codes, size, centroid, form)
    out[:, group * form.code_size :] = terms.view(np.uint8).reshape(groups, group * terms.itemsize)
    return out.reshape(-1, form.row_bytes)


def distances(tables: F32, bases: F32, terms: F32 | None, numbers: I64, form: PqForm) -> F32:
    """Of rows of one list to queries that probe it: tables (g, parts, words), bases (g,), numbers (m, parts) ->
    (g, m) float32, smaller is better."""
    found = in_lanes(tables[:, np.arange(form.parts), numbers])
    all_rows = bases[:, None] + terms if terms is not None else bases[:, None]
    found = all_rows + found
    return np.where(found < 0, np.float32(0), found) if form.metric == "l2" else found
