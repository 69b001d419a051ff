"""Rows that came: snapshots stay as they were, and memory does not grow without end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hybridindex.index.live import added as added_module
from hybridindex.index.live.added import AddedLists, AddedRows
from hybridindex.index.storage import huge_pages
from hybridindex.index.storage.huge_pages import reserves

NLIST, SIZE = 12, 24


@pytest.fixture(params=["reserved", "counted", "refused"])
def memory(request, monkeypatch):
    """Addresses cost nothing, or as much as memory, or there are few of them."""
    monkeypatch.setattr(added_module, "_FEWEST_BYTES", 1 << 12)
    monkeypatch.setattr(added_module, "reserves", lambda: request.param != "counted")
    if request.param == "refused":
        real = added_module.empty_in_huge_pages

        def few(nbytes: int, *, reserve: bool = False):
            if reserve:
                raise MemoryError
            return real(nbytes)

        monkeypatch.setattr(added_module, "empty_in_huge_pages", few)
    return request.param


def codes_of(ids: np.ndarray) -> np.ndarray:
    """(n, SIZE) uint8, from which the id can be told."""
    return np.repeat(ids[:, None].astype("<i8").view(np.uint8), SIZE // 8, axis=0).reshape(len(ids), SIZE)


def content(rows: AddedLists) -> dict[int, tuple[int, bytes]]:
    """The list and the code of each id."""
    assert len(set(rows.ids.tolist())) == rows.count
    codes = [code.tobytes() for code in rows.codes()]
    return dict(zip(rows.ids.tolist(), zip(rows.lists.tolist(), codes, strict=True), strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_snapshots_stay_as_they_were(memory, seed):
    rng = np.random.default_rng(seed)
    rows, there = AddedRows(NLIST, SIZE), dict[int, tuple[int, bytes]]()
    kept = list[tuple[AddedLists | None, dict[int, tuple[int, bytes]]]]()
    fresh = 0
    for _ in range(120):
        n = int(rng.integers(1, 90))
        ids, lists = np.arange(fresh, fresh + n), rng.integers(0, NLIST, n)
        fresh += n
        rows.insert(lists, ids, codes_of(ids), b"")
        codes = [code.tobytes() for code in codes_of(ids)]
        there |= zip(ids.tolist(), zip(lists.tolist(), codes, strict=True), strict=True)
        gone = rng.choice(list(there), int(rng.integers(0, min(len(there), 100))), replace=False).tolist()
        if gone:
            rows.remove(gone)
            for each in gone:
                del there[each]
        kept.append((rows.snapshot(), dict(there)))
    for found, expected in kept:
        assert ({} if found is None else content(found)) == expected


def test_memory_follows_what_is_there(memory):
    rows = AddedRows(NLIST, SIZE)
    ids = np.arange(3_000)
    most = 0
    for turn in range(60):
        rows.insert(ids % NLIST, ids, codes_of(ids + turn), b"")
        most = max(most, rows.nbytes)
        rows.remove(ids.tolist())
    # Three times what is held: extents with room for as many rows again, and what is left of all when they lose some.
    assert most <= 3 * (2 + 1.125) * (SIZE + 16) * 3_000 + (1 << 16)


def test_attributes_count_as_rows_do():
    rows = AddedRows(NLIST, SIZE)
    ids = np.arange(10)
    rows.insert(ids % NLIST, ids, codes_of(ids), b"")
    before = rows.nbytes
    rows.insert(ids % NLIST, ids + 10, codes_of(ids), bytes(1 << 20))
    assert rows.nbytes >= before + (1 << 20)
    assert rows.snapshot().attributes.nbytes == 1 << 20


def test_lists_that_only_grow_are_never_copied_together(monkeypatch):
    monkeypatch.setattr(added_module, "reserves", lambda: True)
    # Where the system counts addresses it has as much memory, too.
    monkeypatch.setattr(added_module, "_RESERVED_BYTES", 32 << 20)
    rows = AddedRows(NLIST, SIZE)
    arenas = set()
    for first in range(0, 60_000, 500):
        ids = np.arange(first, first + 500)
        rows.insert(ids % NLIST, ids, codes_of(ids), b"")
        found = rows.snapshot()
        assert found is not None
        arenas.add(found.data.ctypes.data)
    assert len(arenas) == 1


def test_memory_is_asked_for_ahead():
    rows, size = AddedRows(NLIST, 1 << 12), 1 << 12
    codes = np.arange(300 * size, dtype=np.uint32).astype(np.uint8).reshape(300, size)
    assert not rows.is_short
    for first in range(0, 6_000, 300):
        ids = np.arange(first, first + 300)
        rows.insert(ids % NLIST, ids, codes, b"")
        rows.touch_ahead()
        assert not rows.is_short
    assert rows.nbytes > 6_000 * size
    rows.insert(ids % NLIST, ids + 300, codes, b"")
    found = rows.snapshot()
    assert found is not None
    assert found.count == 6_300
    for at in (0, 2_000, 6_299):
        assert found.codes()[at].tobytes() == codes[found.ids[at] % 300].tobytes()


@pytest.mark.parametrize(("said", "expected"), [("0\n", True), ("1\n", True), ("2\n", False), (None, False)])
def test_addresses_cost_nothing_unless_the_system_counts_them(said, expected, tmp_path: Path, monkeypatch):
    file = tmp_path / "overcommit_memory"
    if said is not None:
        file.write_text(said)
    monkeypatch.setattr(huge_pages, "_OVERCOMMIT", file)
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    reserves.cache_clear()
    try:
        assert reserves() is expected
    finally:
        monkeypatch.undo()
        reserves.cache_clear()
