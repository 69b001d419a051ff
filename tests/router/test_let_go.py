"""What was closed is let go at once: files stay mapped, and take room on the disk, while objects name each other."""

from __future__ import annotations

import asyncio
import gc
from weakref import ref

import pytest

import hybridindex as hx
from hybridindex.errors import NotHeldError
from hybridindex.index.opening import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from tests.clustered import clustered, small_index


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    with small_index(tmp_path_factory.mktemp("let-go") / "idx") as index:
        return index.path


@pytest.fixture
def no_collection():
    """The collector does not run."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mapped(path):
    with open("/proc/self/maps") as lines:
        return [line for line in lines if str(path) in line]


def test_an_index_that_was_closed(path, no_collection):
    index = hx.open(path)
    with index.router(devices=()) as router:
        router.search(clustered(3), 5, 4)
        kept = [ref(index), ref(index.ivf), ref(router)]
    index.close()
    del index, router
    assert [each() for each in kept] == [None] * 3
    assert not mapped(path)


async def is_refused(searching):
    try:
        await searching
    except NotHeldError:
        return True
    return False


def refused(router):
    """How many of three kinds of searches are. ``pytest.raises`` and ``asyncio.run`` would keep the errors."""
    queries, count = clustered(3), 0
    for search in (lambda: router.search(queries, 5, 8), lambda: router.submit(queries, 5, 8).result()):
        try:
            search()
        except NotHeldError:
            count += 1
    return count + asyncio.run(is_refused(router.asearch(queries, 5, 8)))


def test_a_share_whose_searches_failed(path, tmp_path, no_collection):
    """Errors know the frames of whoever raised them."""
    source = FolderSource(path)
    create_share(tmp_path / "share", source)
    index = open_index(tmp_path / "share")
    index.share.hold([0], source)
    with Router(index) as router:
        assert refused(router) == 3
        kept = [ref(index), ref(router)]
    index.close()
    del index, router
    assert [each() for each in kept] == [None] * 2
    assert not mapped(tmp_path / "share")
