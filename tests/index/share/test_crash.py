"""A crash, a power cut or an error of the disk between any two calls leaves the old share or the new one, whole."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from hybridindex.errors import BuildError, DiskFullError, HybridIndexError
from hybridindex.filesystem import Call, watched_by
from hybridindex.index import build, open_index, verify
from hybridindex.index.share.share import create_share
from hybridindex.index.share.source import FolderSource
from tests.clustered import clustered
from tests.durability import power_cut
from tests.durability.power_cut import Recorder, write_image
from tests.faults import WRITES, FaultyDisk, of
from tests.index.share.shares import share_of

NLIST = 8
BEFORE, TAKEN, GONE = [1, 2, 6], [3, 4], [2, 6]
#: What changes the share, and the lists that it holds afterwards.
CHANGES = {
    "hold": (lambda share, source: share.hold(TAKEN, source), [1, 2, 3, 4, 6]),
    "drop": (lambda share, source: share.drop(GONE), [1]),
}
CALLS = of(*WRITES, "punch")


class Killed(BaseException):
    """Ends a change as the end of the process does: nothing of ours cleans up."""


@pytest.fixture
def source(tmp_path):
    build(clustered(400, 8), tmp_path / "whole", nlist=NLIST, codec="sq8").close()
    return FolderSource(tmp_path / "whole")


@pytest.fixture
def path(tmp_path, source) -> Path:
    create_share(tmp_path / "share", source)
    with open_index(tmp_path / "share") as index:
        share_of(index).hold(BEFORE, source)
    return tmp_path / "share"


def change(path: Path, name: str, source: FolderSource) -> None:
    with open_index(path) as index:
        CHANGES[name][0](share_of(index), source)


def held_in(path: Path, source: FolderSource) -> list[int]:
    """What a share holds that is opened now; all of it is whole."""
    verify(path)
    with open_index(path) as index:
        held = np.flatnonzero(share_of(index).held).tolist()
        assert list(share_of(index).read(held)) == list(source.read(held))
    return held


def n_calls(path: Path, name: str, source: FolderSource) -> int:
    disk = FaultyDisk(counts=CALLS)
    shutil.copytree(path, path.parent / "counted")
    with watched_by(disk):
        change(path.parent / "counted", name, source)
    assert len(disk.calls) >= 5
    assert any(call.name == ("sync" if name == "hold" else "punch") for call in disk.calls)
    return len(disk.calls)


@pytest.mark.parametrize("name", CHANGES)
def test_the_process_ends_before_any_call(path, source, name):
    seen = set()
    for allowed in range(n_calls(path, name, source) + 1):
        copy = path.parent / f"copy-{allowed}"
        shutil.copytree(path, copy)
        left = allowed

        def kill(call: Call) -> None:
            nonlocal left
            if CALLS(call):
                left -= 1
                if left < 0:
                    raise Killed

        try:
            with watched_by(kill):
                change(copy, name, source)
        except Killed:
            pass
        found = held_in(copy, source)
        assert found in (BEFORE, CHANGES[name][1])
        seen.add(tuple(found))
        change(copy, name, source)
        assert held_in(copy, source) == CHANGES[name][1]
    assert len(seen) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("name", CHANGES)
def test_the_disk_fails_from_any_call_on(path, source, name, number):
    for allowed in range(n_calls(path, name, source)):
        copy = path.parent / f"copy-{allowed}"
        shutil.copytree(path, copy)
        with open_index(copy) as index:
            share = share_of(index)
            with (
                watched_by(FaultyDisk(counts=CALLS, allowed=allowed, number=number)),
                pytest.raises(BuildError, match=str(copy)) as caught,
            ):
                CHANGES[name][0](share, source)
            assert isinstance(caught.value, DiskFullError) == (number == errno.ENOSPC)
            held = np.flatnonzero(share.held).tolist()
            assert held in (BEFORE, CHANGES[name][1])
            # What it holds is what it gives, and it goes on when the disk does.
            assert list(share.read(held)) == list(source.read(held))
            assert held_in(copy, source) in (BEFORE, CHANGES[name][1])
            CHANGES[name][0](share, source)
            assert np.flatnonzero(share.held).tolist() == CHANGES[name][1]
        assert held_in(copy, source) == CHANGES[name][1]


@pytest.mark.parametrize("name", CHANGES)
def test_the_power_fails_before_any_call(path, source, name, monkeypatch):
    # A list is written into a file that has its length: a power cut does not cut it.
    monkeypatch.setattr(power_cut, "IMAGES", [image for image in power_cut.IMAGES if "torn" not in image])
    with open_index(path) as index:
        recorder = Recorder(path, but=(".lock",))
        with watched_by(recorder):
            CHANGES[name][0](share_of(index), source)
        recorder.end()
    seen = set()
    for number, image in enumerate(recorder.cuts):
        copy = path.parent / f"image-{number}"
        write_image(image, copy)
        found = held_in(copy, source)
        assert found in (BEFORE, CHANGES[name][1]), recorder.cuts[image]
        seen.add(tuple(found))
    assert len(seen) == 2
    write_image(recorder.acknowledged, path.parent / "acknowledged")
    assert held_in(path.parent / "acknowledged", source) == CHANGES[name][1]


@pytest.mark.parametrize("number", [None, errno.ENOSPC, errno.EIO])
def test_a_share_is_made_whole_or_not_at_all(tmp_path, source, number):
    disk = FaultyDisk(counts=of(*WRITES))
    with watched_by(disk):
        create_share(tmp_path / "counted", source)
    for allowed in range(len(disk.calls)):
        path = tmp_path / f"share-{allowed}"
        with watched_by(FaultyDisk(counts=of(*WRITES), allowed=allowed, number=number, sticks=number is not None)):
            try:
                create_share(path, source)
            except HybridIndexError:
                assert number is not None
        if number is None or (path / "CURRENT").exists():
            assert held_in(path, source) == []
        elif path.exists():
            assert not any(name.startswith("gen-") for name in os.listdir(path))
