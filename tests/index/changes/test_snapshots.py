"""Snapshots: an index as it was at one moment, while the other goes on."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from typer.testing import CliRunner

import hybridindex as hx
from hybridindex import filesystem
from hybridindex.api import copy_store
from hybridindex.cli.main import make_app
from hybridindex.errors import CorruptIndexError, DiskFullError, IndexExistsError, InvalidInputError
from hybridindex.index.changes.snapshots import restore, snapshot
from tests.clustered import NLIST, clustered
from tests.index.changes.truth import Truth

N = 3000
MORE = clustered(300, seed=12)


@pytest.fixture
def index(tmp_path):
    attributes = {"year": np.arange(N) % 10}
    with hx.build(
        clustered(N, seed=1), tmp_path / "i", nlist=NLIST, metric="l2", attributes=attributes, bits=1
    ) as made:
        yield made


def test_a_snapshot_is_an_index_as_it_was(index, tmp_path):
    truth = Truth(index.ivf)
    index.profile(clustered(80, seed=7), nprobe=6, max_seconds=1, devices=0)
    index.add(MORE[:100], attributes={"year": [3] * 100})
    truth.add(MORE[:100], np.arange(N, N + 100))
    index.delete(np.arange(50))
    truth.delete(np.arange(50))
    made = index.snapshot(tmp_path / "s")
    index.delete(np.arange(50, 100))
    index.add(MORE[100:])
    index.compact()
    index.compact()
    for path in (made, restore(made, tmp_path / "r", beside=copy_store).path):
        with hx.open(path) as copy, copy.router(precision="rows") as router:
            assert copy.n_live == len(truth.rows)
            assert copy.ivf.rabitq is not None
            truth.check(MORE[:5], 10, router.search(MORE[:5], 10, NLIST))
            assert (router.search(MORE[0], 5, where="year = 3").ids >= N).any()
            with copy.store() as store:
                assert store.load_profile(index_fingerprint=copy.ivf.by_codes().fingerprint) is not None
            copy.add(MORE[200:201])
    with hx.open(made) as copy:
        assert copy.n_live == len(truth.rows) + 1
    assert index.n_live == N + 300 - 100


def test_lists_are_linked_and_the_log_is_not(index, tmp_path):
    index.delete([1])
    done = snapshot(tmp_path / "i", tmp_path / "s")
    own, copy = tmp_path / "i" / "gen-000001", tmp_path / "s" / "gen-000001"
    assert (own / "lists.bin").stat().st_ino == (copy / "lists.bin").stat().st_ino
    assert (own / "changes.log").stat().st_ino != (copy / "changes.log").stat().st_ino
    assert done.linked_bytes > 10 * done.copied_bytes
    assert done.number == 1
    assert not list((tmp_path / "i").glob(".snapshot*"))


def test_where_nothing_can_be_linked_the_next_one_links_to_the_last(index, tmp_path):
    index.delete([1])

    def elsewhere(call):
        if call.name == "link" and "/i/gen-" not in call.path and "/s1/" not in call.path:
            raise OSError(errno.EXDEV, "Invalid cross-device link")

    with filesystem.watched_by(elsewhere):
        first = snapshot(tmp_path / "i", tmp_path / "s1")
        assert first.linked_bytes == 0
        index.delete([2])
        second = snapshot(tmp_path / "i", tmp_path / "s2", previous=tmp_path / "s1")
    assert second.linked_bytes > 10 * second.copied_bytes
    with hx.open(tmp_path / "s1") as one, hx.open(tmp_path / "s2") as two:
        assert (one.n_deleted, two.n_deleted) == (1, 2)


def test_where_links_are_refused_all_is_copied_whatever_becomes_of_the_generation(index, tmp_path):
    index.delete([1])

    def refused(call):
        if call.name == "link":
            raise OSError(errno.EPERM, "Operation not permitted")

    def compacted_twice(_, done, __):
        for each in (2, 3) if done == 1 else ():
            index.delete([each])
            index.compact()

    with filesystem.watched_by(refused):
        done = snapshot(tmp_path / "i", tmp_path / "s", progress=compacted_twice)
    assert not (tmp_path / "i" / "gen-000001").exists()
    assert (done.generation, done.number, done.linked_bytes) == (1, 1, 0)
    assert not list((tmp_path / "i").glob(".snapshot*"))
    with hx.restore(tmp_path / "s", tmp_path / "r") as copy:
        assert (copy.n_deleted, copy.ivf.rabitq is not None) == (1, True)
        assert copy.attributes == {"year": "int"}


def test_what_cannot_be_is_refused_and_leaves_nothing(index, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(InvalidInputError, match="holds x; expected a new directory"):
        index.snapshot(tmp_path / "full")
    with pytest.raises(IndexExistsError, match="holds an index"):
        index.snapshot(tmp_path / "i")
    with pytest.raises(InvalidInputError, match="does not exist"):
        snapshot(tmp_path / "none", tmp_path / "s")
    index.delete([1])

    def full(call):
        if call.name == "create":
            raise OSError(errno.ENOSPC, "No space left on device")

    with filesystem.watched_by(full), pytest.raises(DiskFullError, match="nothing was left behind"):
        index.snapshot(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert not list((tmp_path / "i").glob(".snapshot*"))
    made = index.snapshot(tmp_path / "s")
    lists = made / "gen-000001" / "lists.bin"
    raw = bytearray(lists.read_bytes())
    raw[100] ^= 1
    lists.unlink()
    lists.write_bytes(raw)
    with pytest.raises(CorruptIndexError, match=r"lists\.bin differs"):
        hx.restore(made, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
@pytest.mark.parametrize(
    "name", ["attributes.json", "attributes-*.arrow", "rabitq.json", "rabitq-*.bin", "lists.xxh3.npy", "changes.log"]
)
def test_a_damaged_snapshot_is_not_restored(index, tmp_path, name, harm):
    index.add(MORE[:10])
    index.delete([1, 2])
    made = index.snapshot(tmp_path / "s")
    (file,) = (made / "gen-000001").glob(name)
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 1
    file.unlink()
    if harm != "gone":
        file.write_bytes(raw if harm == "flipped" else raw[:-20])
    with pytest.raises(CorruptIndexError):
        hx.restore(made, tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("place", ["other/theirs.sqlite", "other/documents-0123456789abcdef.sqlite", "s/mine.sqlite"])
def test_a_snapshot_whose_texts_lie_elsewhere_is_not_restored(index, tmp_path, place):
    """A crafted one would copy any database of this machine."""
    made = index.snapshot(tmp_path / "s")
    (tmp_path / "other").mkdir()
    with closing(sqlite3.connect(tmp_path / place)) as db:
        db.execute("CREATE TABLE theirs (x)")
    (made / "gen-000001" / "documents.sqlite").symlink_to(tmp_path / place)
    with pytest.raises(CorruptIndexError, match=rf"documents\.sqlite leads to \S*{place}; expected a file of the snap"):
        hx.restore(made, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_a_snapshot_that_was_changed_as_an_index_is_restored_with_that(index, tmp_path, monkeypatch):
    monkeypatch.setattr("hybridindex.index.changes.snapshots._MOST_NOTED", 500)
    monkeypatch.setattr("hybridindex.index.live.store._REWRITE_TIMES", 0)
    index.delete([1])
    made = index.snapshot(tmp_path / "s")
    with hx.open(made) as copy:
        copy.add(MORE[:1])
        hx.restore(made, tmp_path / "r1").close()
        assert copy.ivf.live.rewrite(least_bytes=1)
        hx.restore(made, tmp_path / "r3").close()
        copy.compact()
    hx.restore(made, tmp_path / "r2").close()
    for name in ("r1", "r2", "r3"):
        with hx.open(tmp_path / name) as back:
            assert back.n_live == N


@pytest.mark.parametrize("made_before", [False, True])
def test_of_two_snapshots_to_one_place_one_is_there_and_the_other_is_refused(index, tmp_path, made_before):
    index.delete([1])
    for number in range(10):
        to, outcomes, barrier = tmp_path / f"s{number}", [], threading.Barrier(3)
        if made_before:
            to.mkdir()

        def take(to=to, outcomes=outcomes, barrier=barrier):
            barrier.wait()
            try:
                outcomes.append(index.snapshot(to))
            except InvalidInputError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=take) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(isinstance(each, InvalidInputError) for each in outcomes) == [False, True, True], outcomes
        with hx.open(to, verify="full") as copy:
            assert copy.n_live == N - 1


def test_snapshots_to_places_of_one_name_at_once(index, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(3) as pool:
        for number in range(6):
            made = list(pool.map(lambda name: index.snapshot(tmp_path / name / f"s{number}"), ("a", "b", "c")))  # noqa: B023
            assert all((each / "CURRENT").exists() for each in made)
    assert not list((tmp_path / "i").glob(".snapshot*"))


def test_snapshots_beside_writers_and_compactions(index, tmp_path):
    """Each has what was acknowledged before it, and nothing in part."""
    stop, acknowledged = threading.Event(), [N]

    def write():
        step = 0
        while not stop.is_set():
            index.add(MORE[:7], np.arange(10_000 + 7 * step, 10_007 + 7 * step))
            acknowledged[0] += 7
            step += 1
            if step % 10 == 0:
                index.compact()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(8):
            before = acknowledged[0]
            with hx.open(index.snapshot(tmp_path / f"s{number}"), verify="full") as copy:
                assert before <= copy.n_live <= acknowledged[0] + 7
                assert (copy.n_live - N) % 7 == 0
    finally:
        stop.set()
        writer.join(60)


def test_a_rollback_that_would_lose_changes_is_refused(index, tmp_path):
    index.delete([1])
    index.compact()
    assert hx.rollback(tmp_path / "i") == 1
    assert hx.rollback(tmp_path / "i") == 2
    with hx.open(tmp_path / "i") as again:
        again.delete([2])
    with pytest.raises(InvalidInputError, match=r"gen-000002 has 1 changes that gen-000001 does not have"):
        hx.rollback(tmp_path / "i")
    assert hx.rollback(tmp_path / "i", force=True) == 1


def test_a_snapshot_within_its_index_is_refused(index, tmp_path):
    for to in (tmp_path / "i" / "s", tmp_path / "x" / ".." / "i" / "s"):
        with pytest.raises(InvalidInputError, match="within the index"):
            index.snapshot(to)
    assert not (tmp_path / "i" / "s").exists()


def test_commands(index, tmp_path):
    index.delete([1])
    run = CliRunner()
    made = run.invoke(make_app("snapshot"), ["snapshot", str(tmp_path / "i"), str(tmp_path / "s"), "--json"])
    assert json.loads(made.stdout)["changes"] == 1
    back = run.invoke(make_app("restore"), ["restore", str(tmp_path / "s"), str(tmp_path / "r")])
    assert back.exit_code == 0
    assert "generation 1 with change 1" in " ".join(back.stdout.split())
    with hx.open(tmp_path / "r") as copy:
        assert copy.n_deleted == 1


def test_verify_tells_what_a_snapshot_has_lost(index, tmp_path):
    index.delete([1])
    made = index.snapshot(tmp_path / "s")
    run = CliRunner()
    assert run.invoke(make_app("verify"), ["verify", str(made)]).exit_code == 0
    # What this process has open would miss its log.
    harmed = tmp_path / "harmed"
    shutil.copytree(made, harmed)
    (harmed / "gen-000001" / "changes.log").unlink()
    found = run.invoke(make_app("verify"), ["verify", str(harmed), "--json"])
    assert (found.exit_code, json.loads(found.stdout)["ok"]) == (4, False)
    assert "ends with change 0; the snapshot had 1" in json.loads(found.stdout)["snapshot_problem"]
