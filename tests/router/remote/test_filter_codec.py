"""Filters on their way to another node: what arrives leaves the same rows, and what cannot be right is refused."""

from __future__ import annotations

import numpy as np
import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.index.filters.row_filter import RowFilters
from hybridindex.index.filters.row_masks import RowMasks
from hybridindex.router.remote import filter_codec
from hybridindex.router.remote.filter_codec import ReceivedFilters, encode_filters
from hybridindex.router.remote.scan_codec import decode_asked, decode_scan, encode_scan
from tests.clustered import DIM, NLIST, share_of_ids, small_index

N_QUERIES, WIDTH = 6, 5


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("codec") / "idx") as index:
        yield index


@pytest.fixture(scope="module")
def filters(index):
    return RowFilters(index)


def asked(index, filters, shares=(0.0, 0.004, 0.5, 1.0), seed=0):
    """Masks and lists of queries, at random."""
    rng = np.random.default_rng(seed)
    made = tuple(filters.make(share_of_ids(share, seed), None) for share in shares)
    of_query = np.concatenate([np.arange(len(made)), rng.integers(0, len(made), N_QUERIES)])[-N_QUERIES:]
    probes = np.stack([rng.choice(NLIST, WIDTH, replace=False) for _ in range(N_QUERIES)]).astype(np.int64)
    probes[1, 3:] = -1
    return RowMasks(made, of_query.astype(np.int32)), probes


def bits(wanted, list_id):
    return np.unpackbits(wanted.mask, bitorder="little")[wanted.first[list_id] : wanted.first[list_id + 1]]


def received(index, sent, probes, rows=None):
    rows = np.arange(len(probes)) if rows is None else rows
    n_filters, raw = sent.of(rows)
    assert n_filters <= len(rows)
    found = ReceivedFilters(memoryview(raw), n_filters, probes[rows], index)
    assert found.nbytes > 0
    return found.masks()


@pytest.mark.parametrize("chunk", [filter_codec._CHUNK, 8])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_rows_of_the_lists_that_are_asked_for(index, filters, monkeypatch, seed, chunk):
    monkeypatch.setattr(filter_codec, "_CHUNK", chunk)
    masks, probes = asked(index, filters, seed=seed)
    sent = encode_filters(masks, probes)
    # Some of the queries with some of their lists, as those get who are asked in a node's place.
    for rows, own in ((np.arange(N_QUERIES), probes), (np.array([1, 4]), np.where(probes % 2, probes, -1))):
        found = received(index, sent, own, rows)
        for query, row in enumerate(rows):
            wanted, got = masks.filters[masks.of_query[row]], found.filters[found.of_query[query]]
            assert got.total == wanted.total
            assert len(got.mask) == len(wanted.mask)
            for each in own[row][own[row] >= 0]:
                np.testing.assert_array_equal(bits(got, each), bits(wanted, each))
                assert got.counts[each] == wanted.counts[each]


def test_few_rows_take_few_bytes(index, filters):
    masks, probes = asked(index, filters, (0.004,))
    few = encode_filters(masks, probes).nbytes
    masks, _ = asked(index, filters, (0.5,))
    many = encode_filters(masks, probes).nbytes
    n_rows = int(index.list_sizes[np.unique(probes[probes >= 0])].sum())
    assert few < many <= n_rows // 8 + 1 + 4 * NLIST


def patched(at, value, dtype):
    def change(raw):
        raw = bytearray(raw)
        new = np.array([value], dtype=dtype).tobytes()
        raw[at : at + len(new)] = new
        return bytes(raw)

    return change


HEADS = 4 * N_QUERIES


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:-1], "bytes of filters; expected"),
        (lambda raw: raw + b"\0", "bytes of filters; expected"),
        (lambda raw: raw[: HEADS + 10], "bytes of filters: not 1 for 6 queries"),
        (lambda raw: raw[: HEADS + 25], "which it does not name"),
        (patched(0, 1, "<i4"), r"filters outside 0\.\.0"),
        (patched(0, -1, "<i4"), r"filters outside 0\.\.0"),
        (patched(HEADS, 3001, "<i8"), "leaves 3001 rows"),
        (patched(HEADS, -1, "<i8"), "leaves -1 rows"),
        (patched(HEADS + 8, 1 << 40, "<i8"), "which it does not name"),
        (patched(HEADS + 8, -1, "<i8"), "which it does not name"),
        (patched(HEADS + 16, -2, "<i8"), "-2 of"),
        (patched(HEADS + 16, 1 << 40, "<i8"), "1099511627776 of"),
        (patched(HEADS + 24, NLIST, "<i4"), "not ascending, or outside"),
        (patched(HEADS + 24, -1, "<i4"), "not ascending, or outside"),
        (patched(HEADS + 28, 0, "<i4"), "not ascending, or outside"),
    ],
)
@pytest.mark.parametrize("share", [0.004, 0.5])
def test_bodies_that_cannot_be_right(index, filters, change, words, share):
    masks, probes = asked(index, filters, (share,))
    raw = change(encode_filters(masks, probes).of(np.arange(N_QUERIES))[1])
    with pytest.raises(InvalidInputError, match=words):
        ReceivedFilters(memoryview(raw), 1, probes, index)


def test_rows_that_lists_have_not(index, filters):
    masks, probes = asked(index, filters, (0.004,))
    raw = bytearray(encode_filters(masks, probes).of(np.arange(N_QUERIES))[1])
    first = HEADS + 24 + 4 * len(np.unique(probes[probes >= 0]))
    rows = np.frombuffer(raw, "<u4", offset=first).copy()
    assert len(rows) >= 2
    n_rows = int(index.list_sizes[np.unique(probes[probes >= 0])].sum())
    for wrong in (np.r_[rows[:-1], n_rows], rows[::-1], np.r_[rows[:-1], rows[-2]]):
        raw[first:] = wrong.astype("<u4").tobytes()
        found = ReceivedFilters(memoryview(bytes(raw)), 1, probes, index)
        with pytest.raises(InvalidInputError, match="rows that its lists have not"):
            found.masks()
    masks, _ = asked(index, filters, (0.5,))
    raw = bytearray(encode_filters(masks, probes).of(np.arange(N_QUERIES))[1])
    assert n_rows % 8, "there are bits behind the last row"
    raw[-1] |= 0x80
    with pytest.raises(InvalidInputError, match="rows that its lists have not"):
        ReceivedFilters(memoryview(bytes(raw)), 1, probes, index).masks()


def test_lists_of_which_a_filter_says_nothing(index, filters):
    masks, probes = asked(index, filters, (0.5,))
    raw = encode_filters(masks, probes).of(np.arange(N_QUERIES))[1]
    other = np.setdiff1d(np.arange(NLIST), probes)[0]
    asked_for = probes.copy()
    asked_for[2, 0] = other
    with pytest.raises(InvalidInputError, match="of which its filters say nothing"):
        ReceivedFilters(memoryview(raw), 1, asked_for, index)


@pytest.mark.parametrize("n_filters", [0, 2, 7])
def test_another_number_of_filters(index, filters, n_filters):
    masks, probes = asked(index, filters, (0.5,))
    queries = np.zeros((N_QUERIES, DIM), np.float32)
    body = encode_scan(queries, probes, np.zeros(probes.shape, np.float32))
    body += encode_filters(masks, probes).of(np.arange(N_QUERIES))[1]
    shape = {"n": N_QUERIES, "d": DIM, "w": WIDTH}
    assert decode_asked(body, **shape, n_filters=1, index=index).given().masks is not None
    with pytest.raises(InvalidInputError):
        decode_asked(body, **shape, n_filters=n_filters, index=index)
    with pytest.raises(InvalidInputError, match="the body has"):  # as a node that knows no filters reads it
        decode_scan(body, **shape, nlist=NLIST)
