"""The native scan of codes in pages: the answers of lists that lie in one piece, and what it refuses to read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hybridindex import _native
from tests.native.test_rabitq_scanner import Coded, queries_and_probes

ROWS = 32


class Paged:
    """The lists of a :class:`Coded` in pages of 32 rows, in a random order."""

    def __init__(self, coded):
        self.coded, form = coded, coded.form
        self.pages = _native.CodePages(
            coded.signs, form.bits, form.dim, form.f_scale, form.g_scale, form.metric == "l2"
        )
        counts = -(-coded.sizes // ROWS)
        self.order = np.random.default_rng(0).permutation(counts.sum() + 3).astype(np.int32)[: counts.sum()]
        self.starts = np.append(0, np.cumsum(counts))
        self.arena = np.full((counts.sum() + 3, ROWS // 16 * form.block_bytes), 0xFF, np.uint8)
        for blocks, start in zip(coded.blocks, self.starts[:-1], strict=True):
            for at in range(0, len(blocks), self.arena.shape[1]):
                part = blocks[at : at + self.arena.shape[1]]
                self.arena[self.order[start + at // self.arena.shape[1]], : len(part)] = part

    def arguments(self, queries, probes, k):
        extents = np.zeros((len(self.coded.sizes), 3), np.int64)
        extents[:, 0] = self.coded.sizes
        lists, starts, members, places = _native.group_probes(probes, extents, places=True)
        counts = np.diff(self.starts)[lists]
        return {
            "arena": self.arena,
            "rows_per_page": ROWS,
            "list_ids": lists,
            "sizes": self.coded.sizes[lists],
            "page_starts": np.append(0, np.cumsum(counts)),
            "pages": np.concatenate([self.order[self.starts[i] : self.starts[i + 1]] for i in lists]),
            "member_starts": starts,
            "members": members,
            "centre_products": self.coded.products(queries, probes).ravel()[places],
            "centre_squares": self.coded.squares[lists],
            "queries": queries,
            "estimates": np.empty((len(queries), k), np.float32),
            "positions": np.empty((len(queries), k), np.int64),
        }

    def scan(self, queries, probes, k):
        arguments = self.arguments(queries, probes, k)
        self.pages.scan(**arguments)
        return arguments["estimates"], arguments["positions"]


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [3, 100])
def test_pages_answer_what_lists_answer(metric, bits, dim):
    coded = Coded(metric, bits, dim)
    queries, probes = queries_and_probes(dim)
    for k in (1, 10, 700):
        for ours, right in zip(Paged(coded).scan(queries, probes, k), coded.scan(queries, probes, k), strict=True):
            np.testing.assert_array_equal(ours, right)


def test_more_queries_than_a_group_of_a_list():
    coded = Coded("l2", 1, 32)
    queries, probes = queries_and_probes(32, n=600)
    for ours, right in zip(Paged(coded).scan(queries, probes, 5), coded.scan(queries, probes, 5), strict=True):
        np.testing.assert_array_equal(ours, right)


def test_nothing_outside_the_arena_is_read():
    paged = Paged(Coded("l2", 1, 32))
    queries, probes = queries_and_probes(32)
    right = paged.arguments(queries, probes, 5)

    def refused(error, words, **changed):
        with pytest.raises(error, match=words):
            paged.pages.scan(**(right | changed))

    refused(IndexError, "outside the arena", pages=right["pages"] + np.int32(9999))
    refused(IndexError, "more rows than its pages hold", sizes=right["sizes"] + 64)
    refused(IndexError, "outside the batch", members=right["members"] + np.int32(7))
    refused(ValueError, "rows_per_page is 48", rows_per_page=48)
    refused(ValueError, "rows_per_page is 8", rows_per_page=8)
    refused(ValueError, "one a member", centre_products=right["centre_products"][:-1])
    refused(ValueError, "one a list", centre_squares=right["centre_squares"][:-1])
    refused(ValueError, "starts must ascend", page_starts=right["page_starts"][::-1].copy())
    starts, members = right["member_starts"], right["members"].copy()
    own = next(slice(a, b) for a, b in pairwise(starts) if len(set(members[a:b])) > 1)
    members[own] = members[own][::-1]
    refused(ValueError, "members of a list must be in order", members=members)
    refused(ValueError, r"queries must be \(n, dim\)", queries=queries[:, :-1].copy())
    refused(ValueError, "k at least 1", estimates=right["estimates"][:, :0].copy())


def test_scratch_grows_with_the_candidates():
    pages = Paged(Coded("l2", 4, 32)).pages
    fixed, few = pages.scratch_need(1)
    assert (fixed, few) < pages.scratch_need(1000)
    assert fixed == pages.scratch_need(1000)[0]
