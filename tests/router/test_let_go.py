"""What was closed is let go at once: files stay mapped, and take room on the disk, while objects name each other."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from weakref import ref

import numpy as np
import pytest

import hybridindex as hx
from hybridindex.errors import NotHeldError
from hybridindex.index.opening import open_index
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from tests.clustered import NLIST, clustered, hand_made_plan, small_index
from tests.router.slow_copies import until
from tests.router.test_router import check
from tests.stuck import WAIT_S


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


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["host", "device"])
def test_a_router_that_nobody_closed_says_so_and_ends(path, devices):
    with open_index(path) as index:
        plan = hand_made_plan(index, np.zeros(NLIST)) if devices else None
        # What the first one imports may keep frames, and what they know, until a collection.
        Router(index, plan=plan, devices=devices).close()
        before = set(threading.enumerate())
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            router = Router(index, plan=plan, devices=devices)
            session = router.session()
            session.lookahead(clustered(2)).result(WAIT_S)
            session.search(clustered(2))
            answer = router.submit(clustered(3), 5, 8)
            began = set(threading.enumerate()) - before
            del router, session
            check(index, clustered(3), 5, 8, answer.result(WAIT_S))
            until(lambda: gc.collect() >= 0 and len(warned))
        [warning] = warned
        assert issubclass(warning.category, ResourceWarning)
        assert f"{path} was not closed" in str(warning.message)
        for thread in began:
            thread.join(WAIT_S)
        assert began
        assert not any(thread.is_alive() for thread in began)


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
