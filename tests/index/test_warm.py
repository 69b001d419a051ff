"""Reading lists into memory: what is asked for is there afterwards, what is not is said."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.index.storage.manifest import LISTS_FILE
from hybridindex.index.warm import available_bytes, warm_lists
from hybridindex.tiers.host.native_scanner import HostNativeScanner
from tests.cold import PAGE, forget, in_memory


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An index of some MiB."""
    path = tmp_path_factory.mktemp("warm") / "idx"
    vectors = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)
    with hx.build(vectors, path, nlist=50, metric="l2"):
        return path


def lists_file(path):
    return next(path.glob(f"gen-*/{LISTS_FILE}"))


@pytest.fixture
def cold(built):
    """The index with none of its lists in memory."""
    gc.collect()  # maps of the test before
    forget(lists_file(built))
    with hx.open(built, verify="quick") as index:
        assert not in_memory(index.ivf.mapped_lists()).any()
        yield index


def test_a_router_has_the_lists_in_memory_when_it_is_ready(cold):
    with cold.router() as router:
        assert in_memory(cold.ivf.mapped_lists()).all()
        assert router.warmed.nbytes == router.warmed.total_bytes == len(cold.ivf.mapped_lists())
        assert sorted(router.warmed.lists) == list(range(cold.nlist))


def test_a_router_reads_nothing_ahead_when_it_is_told_so(cold, caplog):
    with cold.router(warm_bytes=0) as router:
        assert router.warmed.nbytes == len(router.warmed.lists) == 0
        assert not in_memory(cold.ivf.mapped_lists()).any()
    assert "memory" not in caplog.text


def test_a_router_prepares_scans_of_what_is_in_memory_and_reads_nothing_else(built, monkeypatch):
    prepared = []
    monkeypatch.setattr(HostNativeScanner, "prepare", lambda _, lists: prepared.append(sorted(lists)))
    with hx.open(built) as index:
        everything = len(index.ivf.mapped_lists())
        for limit in (everything, everything // 2, 0):
            with index.router(warm_bytes=limit) as router:
                assert prepared.pop() == sorted(router.warmed.lists)
                assert (len(router.warmed.lists) == index.nlist) == (limit == everything)


def test_a_limit_keeps_the_first_lists_of_the_order_and_the_log_says_what_is_left(cold, caplog):
    size, capacity, offset = cold.ivf.extents().T
    nbytes = capacity * (cold.ivf.code_size + 8)
    order = np.argsort(-size, kind="stable")
    limit = int(nbytes[order[:5]].sum()) + 1
    warmed = warm_lists(cold.ivf, limit, order)
    assert warmed.nbytes == limit - 1
    assert warmed.lists.tolist() == order[:5].tolist()
    assert f"{limit - 1} of the {warmed.total_bytes} bytes" in caplog.text
    there = in_memory(cold.ivf.mapped_lists())
    for one in order[:5]:
        assert there[offset[one] // PAGE : (offset[one] + nbytes[one]) // PAGE].all()


def test_without_an_order_lists_come_as_they_lie_in_the_file(cold):
    data = cold.ivf.mapped_lists()
    warmed = warm_lists(cold.ivf, len(data) // 2)
    assert 0.4 * len(data) < warmed.nbytes <= len(data) // 2
    assert in_memory(data)[: warmed.nbytes // PAGE].all()


def test_a_file_that_cannot_be_read_is_a_warning(cold, tmp_path, caplog):
    with cold.save(tmp_path / "copy") as copy:
        os.truncate(lists_file(tmp_path / "copy"), 0)
        warmed = warm_lists(copy.ivf, available_bytes())
        assert warmed.nbytes == len(warmed.lists) == 0
    assert "cannot be read into memory" in caplog.text


def test_what_is_available_is_a_part_of_the_memory():
    assert 0 < available_bytes() <= os.sysconf("SC_PHYS_PAGES") * PAGE
