"""Lists in page-locked host memory: packed as pages, within a limit, and exchanged while copies read them. On the
stand-in in plain memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridindex.paging import PageGeometry
from hybridindex.tiers.paged.pinned import PinnedMemory

#: Pages of 64 bytes, blocks of four.
GEOMETRY = PageGeometry(code_size=8, rows_per_page=8)
PAGE = 64


def codes(list_id, n_pages):
    """All rows but one of so many pages."""
    return np.full((8 * n_pages - 1, 8), list_id, dtype=np.uint8)


def make(limit_pages=None, *, page_locked=False):
    limit = None if limit_pages is None else limit_pages * PAGE
    return PinnedMemory(GEOMETRY, page_locked=page_locked, block_bytes=4 * PAGE, limit_bytes=limit)


def hold(memory, sizes, lists=None):
    """``sizes``: pages of each list, or of all that may be in ``lists``."""
    lists = list(sizes) if lists is None else lists
    return memory.hold(lists, [sizes[i] for i in lists], lambda i: codes(i, sizes[i]), lambda: False)


def content(found, n_pages):
    parts = [part.block[part.slot : part.slot + n] for n, part in found.cut(0, n_pages)]
    return torch.cat(parts).numpy().reshape(-1, 8)[: 8 * n_pages - 1]


def check(memory, sizes, pinned):
    memory.check_invariants()
    for list_id, n_pages in dict(sizes).items():
        found = memory.find(list_id)
        assert (found is not None) == (list_id in pinned)
        if found is not None:
            assert (content(found, n_pages) == list_id).all()


def test_lists_lie_side_by_side_each_in_one_run_where_there_is_one():
    sizes = dict(enumerate([1, 2, 1, 6, 3]))
    memory = make()
    report = hold(memory, sizes)
    assert (report.pinned, report.left_out, report.reason) == ((0, 1, 2, 3, 4), (), "")
    assert memory.nbytes == report.nbytes == 4 * 4 * PAGE
    assert [len(memory.find(i).runs) for i in sizes] == [1, 1, 1, 2, 1]
    check(memory, sizes, report.pinned)
    assert hold(memory, sizes).nbytes == 0
    memory.clear()
    assert (memory.find(0), memory.nbytes) == (None, 0)


@pytest.mark.parametrize("page_locked", [False, True])
def test_the_limit_holds_with_what_torch_rounds_up_and_smaller_lists_fill_what_is_left(monkeypatch, page_locked):
    taken, empty = [], torch.empty

    def plain(shape, *, pin_memory, **options):
        taken.append(1 << (shape[0] * shape[1] - 1).bit_length())
        assert pin_memory == page_locked
        return empty(shape, **options)

    monkeypatch.setattr(torch, "empty", plain)
    sizes = dict(enumerate([3, 9, 2, 1, 1, 2, 1]))
    memory = make(7, page_locked=page_locked)
    report = hold(memory, sizes)
    # Blocks of four pages, two and one: powers of two, the largest that the limit still has.
    assert (report.pinned, report.left_out) == ((0, 2, 3, 4), (1, 5, 6))
    assert sum(taken) == memory.nbytes == 7 * PAGE
    check(memory, sizes, report.pinned)


def test_a_limit_below_a_page_pins_nothing():
    memory = PinnedMemory(GEOMETRY, page_locked=False, limit_bytes=PAGE - 1)
    report = hold(memory, {0: 1, 1: 1})
    assert (report.pinned, report.left_out, memory.nbytes) == ((), (0, 1), 0)


def test_pinning_ends_when_nobody_wants_it_any_more():
    memory = make()
    report = memory.hold([0, 1], [1, 1], lambda i: codes(i, 1), lambda: memory.find(0) is not None)
    assert (report.pinned, report.reason) == ((0,), "it was cancelled")


def test_a_change_that_is_given_up_before_its_blocks_are_there_drops_nothing():
    memory, sizes = make(), dict.fromkeys(range(12), 2)
    hold(memory, sizes, [0, 1])
    asked = iter([False, False, True, True])
    report = memory.hold(range(2, 12), [2] * 10, lambda i: codes(i, 2), lambda: next(asked))
    assert (report.pinned, report.reason, report.nbytes) == ((), "it was cancelled", 2 * 4 * PAGE)
    check(memory, sizes, (0, 1))


def test_other_lists_take_the_place_of_those_that_are_not_wanted_and_the_rest_stays():
    memory = make(8)
    sizes = {0: 2, 1: 2, 2: 2, 3: 2, 4: 3, 5: 1, 6: 4}
    assert hold(memory, sizes, [0, 1, 2, 3]).pinned == (0, 1, 2, 3)
    stays, copied = memory.find(1), []
    report = memory.hold(
        [4, 1, 6, 5, 2], [3, 2, 4, 1, 2], lambda i: copied.append(i) or codes(i, sizes[i]), lambda: False
    )
    assert (report.pinned, report.left_out, report.late, report.nbytes) == ((4, 1, 5, 2), (6,), (), 0)
    assert (memory.find(1), copied) == (stays, [4, 5])
    check(memory, sizes, report.pinned)
    assert len(memory.find(4).runs) == 2, "free pages that do not touch are of use"


def test_what_a_copy_reads_is_written_again_only_afterwards():
    memory, old, new = make(4), {0: 2, 1: 2}, {2: 3, 3: 1}
    hold(memory, old)
    found = memory.find(0)
    reads = [part for _, part in found.cut(0, 2)]
    report = hold(memory, new)
    assert (report.pinned, report.late) == ((3,), (2,))
    assert memory.find(0) is None
    del found
    # The copy is on its way, with its pages alone.
    assert hold(memory, new).late == (2,)
    assert (reads[0].block[reads[0].slot : reads[0].slot + 2].reshape(-1, 8)[:15] == 0).all()
    memory.check_invariants()
    reads.clear()
    assert hold(memory, new).pinned == (2, 3)
    check(memory, {**old, **new}, new)


def test_a_host_that_refuses_keeps_the_hottest_in_what_it_gave(monkeypatch):
    memory, sizes = make(), {0: 2, 1: 2, 2: 2, 3: 2}
    hold(memory, sizes, [2, 3])

    def refuse(*_args, **_options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    for _ in range(2):
        report = hold(memory, sizes, [0, 1, 2, 3])
        assert (report.pinned, report.left_out) == ((0, 1), (2, 3))
        assert "refused page-locked memory after 256 bytes: CUDA error: out of memory" in report.reason
    check(memory, sizes, (0, 1))


@given(
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=10), min_size=1, max_size=8),
    limit_pages=st.integers(1, 12),
)
def test_any_order_of_changes_and_readers(rounds, limit_pages):
    """Lists of one page to five; a reader of any of them lasts until the next change but one."""
    memory, readers = make(limit_pages), [[], []]
    sizes = {i: 1 + i % 5 for i in range(16)}
    for lists in rounds:
        wanted = list(dict.fromkeys(i for i, _ in lists))
        report = hold(memory, sizes, wanted)
        assert sorted((*report.pinned, *report.left_out, *report.late)) == sorted(wanted)
        assert memory.nbytes <= limit_pages * PAGE
        check(memory, sizes, report.pinned)
        for list_id, found in readers[0] + readers[1]:
            assert (content(found, sizes[list_id]) == list_id).all(), "it changed under a reader"
            del found
        readers = [readers[1], [(i, memory.find(i)) for i, read in lists if read and memory.find(i)]]
    readers.clear()
    hold(memory, {})
    assert memory._blocks.n_free == memory._blocks.n_pages, "pages are lost"


def test_movers_read_whole_lists_while_these_are_exchanged():
    """Three movers look lists up and read them twice, later; two threads exchange what is there."""
    memory, sizes = make(24), {i: 1 + i % 6 for i in range(20)}
    changing, torn, errors, n_read = threading.Event(), [], [], [0]

    def exchange(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                report = hold(memory, sizes, rng.permutation(20)[:9].tolist())
                assert memory.nbytes <= 24 * PAGE
                assert len(report.pinned) + len(report.late) > 0
                memory.check_invariants()
        except BaseException as error:
            errors.append(error)
            raise

    def move(seed):
        rng = np.random.default_rng(seed)
        while changing.is_set():
            held = [(i, found) for i in rng.permutation(20)[:4].tolist() if (found := memory.find(i)) is not None]
            for list_id, found in held * 2:
                n_read[0] += 1
                if not (content(found, sizes[list_id]) == list_id).all():
                    torn.append(list_id)

    changing.set()
    movers = [threading.Thread(target=move, args=(seed,)) for seed in range(3)]
    writers = [threading.Thread(target=exchange, args=(seed,)) for seed in range(10, 12)]
    for thread in movers + writers:
        thread.start()
    for thread in writers:
        thread.join()
    changing.clear()
    for thread in movers:
        thread.join()
    assert (errors, torn) == ([], [])
    assert n_read[0] > 0
    hold(memory, {})
    assert memory._blocks.n_free == memory._blocks.n_pages
