"""What a node knows of changes: looked for on a thread of its own, said where it cannot be known."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hybridindex.api import open_index as open_whole
from hybridindex.errors import InvalidInputError, UnsupportedIndexError
from hybridindex.index import open_index
from hybridindex.index.changes import write
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from hybridindex.router import Router
from hybridindex.service.cluster.following import Following
from tests.clustered import DIM, NLIST, clustered, small_index
from tests.router.slow_copies import until


@pytest.fixture
def whole(tmp_path):
    return small_index(tmp_path / "idx").path


@pytest.fixture
def share(whole, tmp_path):
    create_share(tmp_path / "share", FolderSource(whole))
    with open_index(tmp_path / "share", changes_of=whole) as index:
        index.share.hold(range(NLIST), FolderSource(whole))
        yield index


def test_a_share_shows_what_comes_and_goes_in_its_index(whole, share):
    rows = clustered(3, seed=7)
    with open_whole(whole, write=True) as index, Router(share) as router:
        following = Following(share.live)
        try:
            index.add(rows, [9001, 9002, 9003])
            index.delete([9002])
            assert following.until(2, 10) == 2
            found = router.search(rows, 1, NLIST)
            assert found.ids[[0, 2], 0].tolist() == [9001, 9003]
            assert found.ids[1, 0] != 9002
            assert following.problem == ""
        finally:
            following.close()


def test_what_cannot_be_read_is_said_and_searches_go_on(whole, share, tmp_path):
    with open_whole(whole, write=True) as index:
        index.add(clustered(2, seed=8), [8001, 8002])
        generation, log = index.ivf.integrity.folder, index.ivf.live.file.path
    with Router(share) as router:
        # Another process, to this one's eyes: nothing of it is known here yet.
        share.live.read_now()
        log.write_bytes(b"x" * log.stat().st_size)
        following = Following(share.live)
        try:
            until(lambda: str(log) in following.problem)
            age = following.age_s
            until(lambda: following.age_s > age)
            assert following.until(99, 0.05) == 1
            assert router.search(clustered(1, seed=8), 1, NLIST).ids[0, 0] >= 0
        finally:
            following.close()
    assert generation.name == "gen-000001"


def test_no_search_waits_for_the_file(whole, share, monkeypatch):
    with Router(share) as router:
        following = Following(share.live)
        try:
            waits, goes_on = threading.Event(), threading.Event()

            def hang():
                waits.set()
                assert goes_on.wait(60)
                return 0, 0, 0

            monkeypatch.setattr(share.live.file, "state", hang)
            assert waits.wait(60)
            assert router.search(clustered(1, seed=8), 1, NLIST).ids[0, 0] >= 0
        finally:
            goes_on.set()
            following.close()


def test_changes_are_those_of_the_index_that_the_share_is_of(whole, share, tmp_path):
    other = small_index(tmp_path / "other", n=500).path
    with pytest.raises(InvalidInputError, match="is not a share of"):
        open_index(share.path, changes_of=other)
    with pytest.raises(InvalidInputError, match="is not a share of"):
        open_index(whole, changes_of=whole)
    with pytest.raises(UnsupportedIndexError, match="share"):
        write.add(share, np.zeros((1, DIM), np.float32))
