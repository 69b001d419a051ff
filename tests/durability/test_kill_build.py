"""A build that is killed leaves the old generation or the new one; the next build finds nothing in its way."""

from __future__ import annotations

import signal

import pytest

from hybridindex.errors import IndexFormatError, InvalidInputError
from hybridindex.index import compress, open_index
from tests.durability.points import Point
from tests.durability.whole import restarted

GENERATION = "hybridindex.index.storage.generation"

#: (point, which index serves afterwards)
REBUILD = [
    (Point(name="vectors half assigned", target="os:pwrite", when="after", count=1), "old"),
    (Point(name="lists half written", target="os:pwrite", when="after", count=12), "old"),
    (Point(name="before the first fsync", target="os:fsync", when="before"), "old"),
    (Point(name="files synced, manifest not", target="os:fsync", when="after", count=3), "old"),
    (Point(name="before the generation gets its name", target="os:rename", when="before", having="gen-"), "old"),
    (Point(name="named, CURRENT not begun", target="os:rename", when="after", having="gen-"), "old"),
    (Point(name="CURRENT.new written", target="os:replace", when="before", having="/CURRENT"), "old"),
    (Point(name="CURRENT switched", target="os:replace", when="after", having="/CURRENT"), "new"),
    (Point(name="PREVIOUS named, CURRENT not begun", target="os:replace", when="after", having="/PREVIOUS"), "old"),
]


#: (command after a rebuild, point, which index serves afterwards)
AFTERWARDS = [
    ("gc", Point(name="nothing removed", target="shutil:rmtree", when="before", having="gen-000001"), "new"),
    ("gc", Point(name="half removed", target="os:unlink", when="after", having=".bin"), "new"),
    ("rollback", Point(name="CURRENT.new written", target="os:replace", when="before", having="/CURRENT"), "new"),
    ("rollback", Point(name="CURRENT switched", target="os:replace", when="after", having="/CURRENT"), "old"),
    ("rollback", Point(name="PREVIOUS switched", target="os:replace", when="after", having="/PREVIOUS"), "old"),
]


def build_words(files, path, which="new"):
    layout = ("--nlist", 24, "--metric", "l2", "--nprobe", 6)
    return ("build", files / f"{which}.npy", path, *layout, "--replace", "--json")


@pytest.mark.parametrize(("point", "serves"), REBUILD, ids=lambda v: v.name if isinstance(v, Point) else v)
def test_a_killed_rebuild(launcher, files, index_path, fingerprints, point, serves):
    child = launcher.start(*build_words(files, index_path), at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    old, new = fingerprints
    with restarted(index_path, devices=() if serves == "new" else ("cpu",)) as service:
        assert service.index.fingerprint == (old if serves == "old" else new)
        assert service.plan_id == (1 if serves == "old" else None)
    # Nothing is in the way of the next build, and it leaves nothing of the one that died.
    again = launcher.start(*build_words(files, index_path))
    assert again.wait() == 0, again.log
    with restarted(index_path, devices=()) as service:
        assert service.index.fingerprint == new
    left = {entry.name.split("-")[0] for entry in index_path.iterdir()}
    assert left <= {"CURRENT", "gen", ".lock", ".log.lock", "daemon.lock"} | {
        n for n in left if n.startswith("control.sqlite")
    }
    assert len([e for e in index_path.iterdir() if e.name.startswith("gen-")]) == 1


@pytest.mark.parametrize(("command", "point", "serves"), AFTERWARDS, ids=lambda v: getattr(v, "name", v))
def test_a_killed_end_of_a_replacement(launcher, files, index_path, fingerprints, command, point, serves):
    assert launcher.start(*build_words(files, index_path)).wait() == 0
    child = launcher.start(command, index_path, "--json", at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    with restarted(index_path, devices=()) as service:
        assert service.index.fingerprint == fingerprints[0 if serves == "old" else 1]
    # Who serves removes what it replaced.
    assert len([e for e in index_path.iterdir() if e.name.startswith("gen-")]) == 1


@pytest.mark.parametrize(
    "point",
    [p for p, _ in REBUILD if "PREVIOUS" not in p.name],
    ids=lambda p: p.name,
)
def test_a_killed_first_build(launcher, files, tmp_path, fingerprints, point):
    path = tmp_path / "first"
    child = launcher.start(*build_words(files, path), at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    if point.name == "CURRENT switched":
        with restarted(path, devices=()) as service:
            assert service.index.fingerprint == fingerprints[1]
    else:
        with pytest.raises((IndexFormatError, InvalidInputError)):
            open_index(path)
    again = launcher.start(*build_words(files, path))
    assert again.wait() == 0, again.log
    with restarted(path, devices=()) as service:
        assert service.index.fingerprint == fingerprints[1]


#: (point, bits of the codes that are there afterwards)
CODES = [
    (Point(name="codes half written", target="os:pwrite", when="after", count=9), 1),
    (Point(name="codes not synced", target="os:fsync", when="before"), 1),
    (Point(name="codes not named", target="os:replace", when="before", having="rabitq.bin.new"), 1),
    (Point(name="codes named, what they are is not", target="os:replace", when="after", having="rabitq.bin.new"), 1),
    (Point(name="what they are not named", target="os:replace", when="before", having="rabitq.json"), 1),
    (Point(name="the old not removed", target="os:replace", when="after", having="rabitq.json"), 2),
]


@pytest.mark.parametrize(("point", "bits"), CODES, ids=lambda v: getattr(v, "name", v))
def test_killed_codes(launcher, index_path, point, bits):
    with open_index(index_path) as index:
        compress(index, 1)
    child = launcher.start("compress", index_path, "--bits", 2, "--json", at=point)
    assert child.wait() == -signal.SIGKILL, child.log
    with open_index(index_path) as index:
        assert index.load_codes().spec.bits == bits
        compress(index, 4)
        assert index.load_codes().spec.bits == 4
        held = {file.name for file in index.integrity.folder.glob("rabitq*")}
        assert held == {"rabitq.json", index.rabitq.spec.file}
